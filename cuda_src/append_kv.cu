// append_kv: quantises rows of K and V into the cache, at slots slot .. slot+rows-1, and sets len_d.
//
// A warp encodes one block, lane j its element j; eight warps a block. The bytes are those of
// formats.py, special values included. A row outside the cache writes nothing at all.
#include "device.cuh"

// 1/d; 0 where d is 0, and where d is so small that 1/d overflows.
static __device__ float inverse(float d) {
    const float inv = __fdiv_rn(1.0f, d);
    return memra_finite(inv) || inv != inv ? inv : 0.0f;
}

static __device__ bool infinite(uint16_t half) { return (half & 0x7FFFu) == 0x7C00u; }

// Each returns whether f16 d or m became infinite, which is no fault where an input was infinite.
static __device__ bool encode_q8_0(memra_q8_0* block, float x, int lane) {
    const float d = __fdiv_rn(memra_warp_max(fabsf(x)), 127.0f);
    const uint16_t half = memra_to_f16(d);
    const int q = __float2int_rn(__fmul_rn(x, inverse(d)));  // NaN: 0
    block->q[lane] = (int8_t)(q < -127 ? -127 : q > 127 ? 127 : q);
    if (lane == 0) block->d = half;
    return infinite(half);
}

static __device__ bool encode_q5_1(memra_q5_1* block, float x, int lane) {
    const float low = memra_warp_min(x);
    const float d = __fdiv_rn(__fsub_rn(memra_warp_max(x), low), 31.0f);
    const uint16_t half = memra_to_f16(d), half_low = memra_to_f16(low);
    int q = __float2int_rn(__fmul_rn(__fsub_rn(x, low), inverse(d)));  // NaN: 0
    q = q < 0 ? 0 : q > 31 ? 31 : q;
    const unsigned high = __ballot_sync(MEMRA_ALL_LANES, q >> 4);
    const int other = __shfl_down_sync(MEMRA_ALL_LANES, q, 16);
    if (lane < 16) block->qs[lane] = (uint8_t)((q & 15) | (other & 15) << 4);
    if (lane == 0) {
        block->d = half;
        block->m = half_low;
        block->qh = high;
    }
    return infinite(half) || infinite(half_low);
}

static __device__ bool encode_q4_0(memra_q4_0* block, float x, int lane) {
    const float amax = memra_warp_max(fabsf(x));
    const unsigned owners = __ballot_sync(MEMRA_ALL_LANES, fabsf(x) == amax);
    const float extreme = __shfl_sync(MEMRA_ALL_LANES, x, memra_lowest_lane(owners));
    const float d = __fdiv_rn(extreme, -8.0f), inv = inverse(d);
    const uint16_t half = memra_to_f16(d);
    const bool overflowed = inv == 0.0f && d != 0.0f && memra_finite(d);
    int q = __float2int_rz(__fmaf_rn(x, inv, 8.5f));  // NaN: 0
    q = overflowed ? 8 : q > 15 ? 15 : q;
    const int other = __shfl_down_sync(MEMRA_ALL_LANES, q, 16);
    if (lane < 16) block->qs[lane] = (uint8_t)((q & 15) | (other & 15) << 4);
    if (lane == 0) block->d = half;
    return infinite(half);
}

static __device__ void encode(uint8_t* bytes, int index, int format, float x, int lane, memra_health* health, int layer,
                              long long slot) {
    const bool nonfinite = __any_sync(MEMRA_ALL_LANES, !memra_finite(x));
    bool overflow = false, saturated = false;
    if (format == MEMRA_Q8_0) {
        overflow = encode_q8_0((memra_q8_0*)bytes + index, x, lane);
    } else if (format == MEMRA_Q5_1) {
        overflow = encode_q5_1((memra_q5_1*)bytes + index, x, lane);
    } else if (format == MEMRA_Q4_0) {
        overflow = encode_q4_0((memra_q4_0*)bytes + index, x, lane);
    } else {
        ((memra_fp8*)bytes + index)->q[lane] = memra_to_e4m3(x);
        saturated = memra_finite(x) && fabsf(x) > 464.0f;  // farther from 448 than half a step
    }
    memra_report_any(nonfinite, health, MEMRA_FAULT_NONFINITE, layer, slot);
    memra_report_any(overflow && !nonfinite, health, MEMRA_FAULT_SCALE_OVERFLOW, layer, slot);
    memra_report_any(saturated, health, MEMRA_FAULT_FP8_SATURATED, layer, slot);
}

// k_rows (n_seqs, rows, kv_dim_k), v_rows (n_seqs, rows, kv_dim_v); k, v: token t at byte t * tok_bytes.
// len >= 0: the length to store; -1: the larger of the old one and slot + rows.
extern "C" __global__ void __launch_bounds__(256) append_kv(
        const float* k_rows, const float* v_rows, uint8_t* k, uint8_t* v, int* len_d, const int* pos_d,
        long long slot, int rows, int len, long long max_ctx, int kv_dim_k, int kv_dim_v,
        long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format, const memra_seq* seqs, int n_seqs,
        memra_health* health, int layer) {
    const int lane = threadIdx.x & 31;
    const int blocks_k = kv_dim_k / MEMRA_BLOCK, blocks = blocks_k + kv_dim_v / MEMRA_BLOCK;
    const long long all = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, per_seq = (long long)rows * blocks;
    const long long seq = all / per_seq, index = all - seq * per_seq;
    if (seq >= n_seqs) return;
    if (seqs) {
        k = (uint8_t*)seqs[seq].k;
        v = (uint8_t*)seqs[seq].v;
        len_d = (int*)seqs[seq].len_d;
        pos_d = (const int*)seqs[seq].pos_d;
        health = (memra_health*)seqs[seq].health;
        max_ctx = seqs[seq].max_ctx;
    }
    const long long first = memra_slot(pos_d, slot);
    const bool leader = index == 0 && lane == 0;
    if (first < 0 || first + rows > max_ctx) {
        if (leader) memra_report(health, MEMRA_FAULT_SLOT_RANGE, layer, first, 1);
        return;
    }
    if (leader) {
        const int end = (int)(first + rows);
        *len_d = len >= 0 ? len : *len_d > end ? *len_d : end;
    }
    const long long row = index / blocks, input = seq * rows + row;
    const int block = (int)(index - row * blocks);
    const long long at = first + row;
    if (block < blocks_k) {
        const float x = k_rows[input * kv_dim_k + block * MEMRA_BLOCK + lane];
        encode(k + at * k_tok_bytes, block, k_format, x, lane, health, layer, at);
    } else {
        const float x = v_rows[input * kv_dim_v + (block - blocks_k) * MEMRA_BLOCK + lane];
        encode(v + at * v_tok_bytes, block - blocks_k, v_format, x, lane, health, layer, at);
    }
}
MEMRA_EXPORT(append_kv)
