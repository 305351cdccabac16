// append_kv: quantises rows of K and V into the cache, at slots slot .. slot+rows-1, and sets len_d.
//
// The rows of a plane are one run of blocks of 32 elements. A thread block takes tile i of K's run, in its even warps,
// and tile i of V's. A few lanes encode a block together, on the assumption that its numbers are ordinary; where they
// are not, one lane does it again, element by element. The bytes of a warp meet in shared memory, from where they leave
// in pieces of 16. They are as formats.py has them, special values included. A row outside the cache writes nothing.
// Warps share nothing, so that none waits for another.
#include "append_kv.cuh"

enum {
    WARPS = 4,            // of a thread block
    MANY = 1 << 15,       // blocks of elements from which on two lanes share one: else four, for more warps
    PIECE = 16,           // bytes of the widest load and store
    APART = 10,           // pieces from one block of elements to the next in shared memory: lanes read from other banks
    PIECES = 16 * APART,  // of a warp: more than its encoded blocks take, wherever in a piece they begin
};

static __device__ inline int block_bytes(int format) {
    return format == MEMRA_Q8_0 ? 34 : format == MEMRA_Q5_1 ? 24 : format == MEMRA_Q4_0 ? 18 : 32;
}

static __device__ __noinline__ void report(int wrong, memra_health* health, int layer, long long slot) {
    if (wrong & NONFINITE) memra_report(health, MEMRA_FAULT_NONFINITE, layer, slot, 1);
    if (wrong == OVERFLOW) memra_report(health, MEMRA_FAULT_SCALE_OVERFLOW, layer, slot, 1);
    if (wrong & SATURATED) memra_report(health, MEMRA_FAULT_FP8_SATURATED, layer, slot, 1);
}

struct Append {
    const float *k_rows, *v_rows;
    uint8_t *k, *v;
    int* len_d;
    const int* pos_d;
    long long slot, max_ctx, k_tok_bytes, v_tok_bytes;
    int rows, len, kv_dim_k, kv_dim_v, k_format, v_format, layer;
    memra_health* health;
};

// The thread block takes tile `index` of either plane.
template <int LANES>
static __device__ inline void append(Append p, const memra_seq* seqs, unsigned index, uint4 (*stages)[PIECES]) {
    constexpr unsigned EACH = 32 / LANES, TILE = EACH * WARPS / 2;  // blocks of a warp, of a plane
    const unsigned warp = threadIdx.x / 32, group = threadIdx.x % 32 / LANES;
    const bool is_v = warp % 2;
    const unsigned blocks = (unsigned)(is_v ? p.kv_dim_v : p.kv_dim_k) / MEMRA_BLOCK;
    const int format = is_v ? p.v_format : p.k_format, size = block_bytes(format);
    const long long run = (long long)p.rows * blocks, tok_bytes = is_v ? p.v_tok_bytes : p.k_tok_bytes;
    const float* x_rows = is_v ? p.v_rows : p.k_rows;
    if (seqs) {
        const unsigned widest = (unsigned)(p.kv_dim_k > p.kv_dim_v ? p.kv_dim_k : p.kv_dim_v) / MEMRA_BLOCK;
        const unsigned tiles = (unsigned)(((long long)p.rows * widest + TILE - 1) / TILE), seq = index / tiles;
        index -= seq * tiles;
        x_rows += seq * run * MEMRA_BLOCK;
        p.k = (uint8_t*)seqs[seq].k;
        p.v = (uint8_t*)seqs[seq].v;
        p.len_d = (int*)seqs[seq].len_d;
        p.pos_d = (const int*)seqs[seq].pos_d;
        p.health = (memra_health*)seqs[seq].health;
        p.max_ctx = seqs[seq].max_ctx;
    }
    const long long begin = (long long)index * TILE + warp / 2 * EACH, left = run - begin;  // blocks, of this warp
    const unsigned n = left > EACH ? EACH : left > 0 ? (unsigned)left : 0;
    const float* const from = x_rows + (begin + group) * MEMRA_BLOCK;
    const bool aligned = (uint64_t)x_rows % PIECE == 0, staged = LANES == 2 && aligned;
    uint4* const stage = stages[warp];
    Block<LANES> x = {{}, (int)threadIdx.x % LANES};
    if (staged) {  // a warp asks for whole lines
#pragma unroll
        for (unsigned i = 0; i < 8 * EACH / 32; i++) {
            const unsigned at = threadIdx.x % 32 + 32 * i;
            if (at < 8 * n) memra_bring16(stage + at / 8 * APART + at % 8, x_rows + begin * MEMRA_BLOCK + 4 * at);
        }
    } else if (group < n) {
#pragma unroll
        for (int i = 0; i < x.QUADS; i++) {
            const float* at = from + 4 * x.quad(i);
            x.x[i] = aligned ? *(const float4*)at : make_float4(at[0], at[1], at[2], at[3]);
        }
    }
    const long long first = memra_slot(p.pos_d, p.slot);
    const bool leader = index == 0 && threadIdx.x == 0;
    if (first < 0 || first + p.rows > p.max_ctx) {
        if (leader) memra_report(p.health, MEMRA_FAULT_SLOT_RANGE, p.layer, first, 1);
        memra_arrived();
        return;
    }
    if (leader) {
        const int end = (int)(first + p.rows);
        *p.len_d = p.len >= 0 ? p.len : *p.len_d > end ? *p.len_d : end;
    }
    if (staged) {
        memra_arrived();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < x.QUADS; i++) {
            if (group < n) x.x[i] = ((const float4*)stage)[group * APART + x.quad(i)];
        }
        __syncwarp();
    }
    // What the warp writes of the plane; in the stage it begins as far behind a piece as there.
    uint8_t* const to = (is_v ? p.v : p.k) + first * tok_bytes + begin * size;
    const int skew = (int)((uint64_t)to % PIECE), end = skew + (int)n * size;
    uint8_t *const bytes = (uint8_t*)stage, *const block = bytes + skew + group * size;
    int wrong = x.encode(block, format);
    if (__any_sync(MEMRA_ALL_LANES, wrong)) {
        __syncwarp();
        if (wrong && x.lane == 0 && group < n) {
            if (wrong == UNUSUAL) wrong = encode_any(block, format, from);
            if (wrong) report(wrong, p.health, p.layer, first + (begin + group) / blocks);
        }
    }
    __syncwarp();
    for (int at = (int)threadIdx.x % 32 * PIECE; at < end; at += 32 * PIECE) {
        if (at >= skew && at + PIECE <= end) {
            *(uint4*)(to - skew + at) = *(const uint4*)(bytes + at);
        } else {  // the sizes of all blocks are even
            for (int i = at < skew ? skew : at; i < at + PIECE && i < end; i += 2) {
                *(uint16_t*)(to + i - skew) = *(const uint16_t*)(bytes + i);
            }
        }
    }
}

// k_rows (n_seqs, rows, kv_dim_k), v_rows (n_seqs, rows, kv_dim_v); k, v: token t at byte t * tok_bytes, whole blocks.
// len >= 0: the length to store; -1: the larger of the old one and slot + rows.
extern "C" __global__ void __launch_bounds__(128) append_kv(
        const float* k_rows, const float* v_rows, uint8_t* k, uint8_t* v, int* len_d, const int* pos_d,
        long long slot, int rows, int len, long long max_ctx, int kv_dim_k, int kv_dim_v,
        long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format, const memra_seq* seqs, int n_seqs,
        memra_health* health, int layer) {
    memra_begin();
    __shared__ uint4 stages[WARPS][PIECES];
    const Append p = {k_rows, v_rows, k, v, len_d, pos_d, slot, max_ctx, k_tok_bytes, v_tok_bytes, rows, len, kv_dim_k,
                      kv_dim_v, k_format, v_format, layer, health};
    const unsigned widest = (unsigned)(kv_dim_k > kv_dim_v ? kv_dim_k : kv_dim_v) / MEMRA_BLOCK;
    if ((long long)n_seqs * rows * widest < MANY) {
        append<4>(p, seqs, blockIdx.x, stages);
    } else {
        append<2>(p, seqs, blockIdx.x, stages);
    }
}
MEMRA_EXPORT(append_kv)
