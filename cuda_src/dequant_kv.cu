// dequant_kv: rows start .. start+rows-1 of K and V as f32 or bf16, for an attention that reads plain rows.
//
// A warp decodes one block, lane j its element j; eight warps a block. Only the rows asked for are read.
#include "device.cuh"

static __device__ float decode(const uint8_t* bytes, int index, int format, int lane) {
    const int byte = lane & 15, shift = lane < 16 ? 0 : 4;
    if (format == MEMRA_Q8_0) {
        const memra_q8_0* block = (const memra_q8_0*)bytes + index;
        return __fmul_rn(memra_from_f16(block->d), (float)block->q[lane]);
    }
    if (format == MEMRA_Q5_1) {
        const memra_q5_1* block = (const memra_q5_1*)bytes + index;
        const unsigned q = (block->qs[byte] >> shift & 15u) | (block->qh >> lane & 1u) << 4;
        return __fmaf_rn(memra_from_f16(block->d), (float)q, memra_from_f16(block->m));
    }
    if (format == MEMRA_Q4_0) {
        const memra_q4_0* block = (const memra_q4_0*)bytes + index;
        return __fmul_rn(memra_from_f16(block->d), (float)((block->qs[byte] >> shift & 15) - 8));
    }
    return memra_from_e4m3(((const memra_fp8*)bytes + index)->q[lane]);
}

// k_out (rows, kv_dim_k), v_out (rows, kv_dim_v): float, or with out_bf16 the bits of bf16.
extern "C" __global__ void __launch_bounds__(256) dequant_kv(
        const uint8_t* k, const uint8_t* v, long long start, long long rows, long long max_ctx,
        int kv_dim_k, int kv_dim_v, long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format,
        void* k_out, void* v_out, int out_bf16, memra_health* health, int layer) {
    memra_begin();
    if (start < 0 || start + rows > max_ctx) {
        if (blockIdx.x == 0 && threadIdx.x == 0) memra_report(health, MEMRA_FAULT_SLOT_RANGE, layer, start, 1);
        return;
    }
    const int lane = threadIdx.x & 31;
    const int blocks_k = kv_dim_k / MEMRA_BLOCK, blocks = blocks_k + kv_dim_v / MEMRA_BLOCK;
    const long long index = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const long long row = index / blocks;
    if (row >= rows) return;
    const bool is_k = index - row * blocks < blocks_k;
    const int block = (int)(index - row * blocks) - (is_k ? 0 : blocks_k);
    const uint8_t* bytes = is_k ? k + (start + row) * k_tok_bytes : v + (start + row) * v_tok_bytes;
    const float x = decode(bytes, block, is_k ? k_format : v_format, lane);
    void* out = is_k ? k_out : v_out;
    const long long at = row * (is_k ? kv_dim_k : kv_dim_v) + block * MEMRA_BLOCK + lane;
    if (out_bf16) {
        ((uint16_t*)out)[at] = memra_to_bf16(x);
    } else {
        ((float*)out)[at] = x;
    }
}
MEMRA_EXPORT(dequant_kv)
