// append_kv: quantises rows of K and V into the cache, at slots slot .. slot+rows-1, and sets len_d.
//
// The rows of a plane are one run of blocks of 32 elements. A thread block takes tile i of K's run, in its first half,
// and tile i of V's: four lanes encode a block into shared memory, from where the bytes of the tile leave in pieces of
// 16. The bytes are those of formats.py, special values included. A row outside the cache writes nothing at all.
#include "device.cuh"

enum {
    LANES = 4,                      // that encode a block: lane a has elements 4a .. 4a+3 and 16+4a .. 16+4a+3
    EACH = MEMRA_BLOCK / LANES,     // elements of a lane
    HALF = 64,                      // threads of a plane
    AT_ONCE = HALF / LANES,         // blocks that they encode at once
    TURNS = 2,                      // and how often they do
    TILE = TURNS * AT_ONCE,         // blocks of a plane that a thread block encodes,
    MANY = 1 << 15,                 // or a turn's, so that all multiprocessors have some, where a launch has fewer
    PIECE = 16,                     // bytes of the widest store
    PIECES = TILE * 34 / PIECE + 1  // that hold the largest tile, wherever in a piece it begins
};

// What is wrong with an input, as bits.
enum { NONFINITE = 1, OVERFLOW = 2, SATURATED = 4 };

// A reduction over the lanes of a block: every lane gets the same bits.
#define OVER_BLOCK(combine, x)                                                                    \
    for (int apart = 1; apart < LANES; apart *= 2) x = combine(x, __shfl_xor_sync(MEMRA_ALL_LANES, x, apart))

// The step between codes and what a difference is multiplied by to be one.
struct Step {
    float d, inv;  // 1/d; 0 where d is 0, and where d is so small that 1/d overflows
};

// d = range / codes, rounded once, for codes 127, 31 and -8.
static __device__ Step step_of(float range, float codes) {
    Step s;
    if (fabsf(range) > 0x1p-100f && fabsf(range) < 0x1p100f) {
        // The remainder of the first guess is exact, and corrects it to the rounded quotient.
        const float reciprocal = 1.0f / codes, guess = __fmul_rn(range, reciprocal);
        s.d = __fmaf_rn(__fmaf_rn(-codes, guess, range), reciprocal, guess);
        s.inv = memra_reciprocal(s.d);
    } else {
        s.d = __fdiv_rn(range, codes);
        s.inv = __fdiv_rn(1.0f, s.d);
        if (!memra_finite(s.inv) && s.inv == s.inv) s.inv = 0.0f;
    }
    return s;
}

static __device__ int overflow(uint16_t half) { return (half & 0x7FFFu) == 0x7C00u ? OVERFLOW : 0; }

static __device__ float largest_magnitude(const float* x) {
    float amax = fabsf(x[0]);
    for (int i = 1; i < EACH; i++) amax = memra_max(amax, fabsf(x[i]));
    OVER_BLOCK(memra_max, amax);
    return amax;
}

// The low bytes of four codes, the first the lowest.
static __device__ uint32_t packed(const int* q) {
    return memra_bytes(memra_bytes(q[0], q[1], 0x0040), memra_bytes(q[2], q[3], 0x0040), 0x5410);
}

// Bit 4 of four bytes, side by side.
static __device__ uint32_t fourth_bits(uint32_t bytes) {
    return (bytes >> 4 & 0x01010101u) * 0x01020408u >> 24 & 15u;
}

// Four bytes to where two-byte alignment is all there is.
static __device__ void put(uint8_t* to, uint32_t bytes) {
    ((uint16_t*)to)[0] = (uint16_t)bytes;
    ((uint16_t*)to)[1] = (uint16_t)(bytes >> 16);
}

// Each encodes this lane's elements, and says whether f16 d or m became infinite or an element saturated. A code is in
// range wherever 1/d is finite; where it is not, the product is 0 or NaN, and a NaN becomes code 0.
static __device__ int encode_q8_0(memra_q8_0* block, const float* x, int lane) {
    const Step s = step_of(largest_magnitude(x), 127.0f);
    const uint16_t half = memra_to_f16(s.d);
    int q[EACH];
    for (int i = 0; i < EACH; i++) q[i] = __float2int_rn(__fmul_rn(x[i], s.inv));
    put((uint8_t*)block->q + 4 * lane, packed(q));
    put((uint8_t*)block->q + 4 * lane + 16, packed(q + 4));
    if (lane == 0) block->d = half;
    return overflow(half);
}

static __device__ int encode_q5_1(memra_q5_1* block, const float* x, int lane) {
    float low = x[0], high = x[0];
    for (int i = 1; i < EACH; i++) low = memra_min(low, x[i]), high = memra_max(high, x[i]);
    OVER_BLOCK(memra_min, low);
    OVER_BLOCK(memra_max, high);
    const Step s = step_of(__fsub_rn(high, low), 31.0f);
    const uint16_t half = memra_to_f16(s.d), half_low = memra_to_f16(low);
    int q[EACH];
    for (int i = 0; i < EACH; i++) q[i] = __float2int_rn(__fmul_rn(__fsub_rn(x[i], low), s.inv));
    const uint32_t near = packed(q), far = packed(q + 4);
    put(block->qs + 4 * lane, (near & 0x0F0F0F0Fu) | (far & 0x0F0F0F0Fu) << 4);
    uint32_t top = (fourth_bits(near) | fourth_bits(far) << 16) << 4 * lane;
    for (int apart = 1; apart < LANES; apart *= 2) top |= __shfl_xor_sync(MEMRA_ALL_LANES, top, apart);
    if (lane == 0) {
        block->d = half;
        block->m = half_low;
        block->qh = top;
    }
    return overflow(half) | overflow(half_low);
}

static __device__ int encode_q4_0(memra_q4_0* block, const float* x, int lane) {
    const float amax = largest_magnitude(x);
    int first = MEMRA_BLOCK;  // the first element of that magnitude
    for (int i = EACH - 1; i >= 0; i--)
        if (fabsf(x[i]) == amax) first = i < 4 ? 4 * lane + i : 4 * lane + i + 12;
    for (int apart = 1; apart < LANES; apart *= 2) {
        const int other = __shfl_xor_sync(MEMRA_ALL_LANES, first, apart);
        first = other < first ? other : first;
    }
    first %= MEMRA_BLOCK;  // all are NaN: any will do
    float candidate = x[0];
    for (int i = 1; i < EACH; i++)
        if (i == first / 16 * 4 + first % 4) candidate = x[i];
    const int owner = (int)(threadIdx.x & 31) - lane + first % 16 / 4;
    const Step s = step_of(__shfl_sync(MEMRA_ALL_LANES, candidate, owner), -8.0f);
    const uint16_t half = memra_to_f16(s.d);
    const bool overflowed = s.inv == 0.0f && s.d != 0.0f && memra_finite(s.d);
    int q[EACH];
    for (int i = 0; i < EACH; i++) {
        const int code = __float2int_rz(__fmaf_rn(x[i], s.inv, 8.5f));
        q[i] = overflowed ? 8 : code > 15 ? 15 : code;
    }
    put(block->qs + 4 * lane, packed(q) | packed(q + 4) << 4);
    if (lane == 0) block->d = half;
    return overflow(half);
}

static __device__ int encode_fp8(memra_fp8* block, const float* x, int lane) {
    int q[EACH], wrong = 0;
    for (int i = 0; i < EACH; i++) {
        q[i] = memra_to_e4m3(x[i]);
        if (memra_finite(x[i]) && fabsf(x[i]) > 464.0f) wrong = SATURATED;  // farther from 448 than half a step
    }
    ((uint32_t*)block->q)[lane] = packed(q);
    ((uint32_t*)block->q)[lane + 4] = packed(q + 4);
    return wrong;
}

static __device__ int encode(uint8_t* block, int format, const float* x, int lane) {
    if (format == MEMRA_Q8_0) return encode_q8_0((memra_q8_0*)block, x, lane);
    if (format == MEMRA_Q5_1) return encode_q5_1((memra_q5_1*)block, x, lane);
    if (format == MEMRA_Q4_0) return encode_q4_0((memra_q4_0*)block, x, lane);
    return encode_fp8((memra_fp8*)block, x, lane);
}

static __device__ int block_bytes(int format) {
    return format == MEMRA_Q8_0 ? 34 : format == MEMRA_Q5_1 ? 24 : format == MEMRA_Q4_0 ? 18 : 32;
}

// This lane's elements of its first `turns` blocks; `from` is the first of them.
static __device__ void load(const float* from, int turns, float (*x)[EACH]) {
    if ((uint64_t)from % sizeof(float4) == 0) {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++, from += AT_ONCE * MEMRA_BLOCK) {
            if (turn >= turns) break;
            const float4 a = *(const float4*)from, b = *(const float4*)(from + 16);
            x[turn][0] = a.x, x[turn][1] = a.y, x[turn][2] = a.z, x[turn][3] = a.w;
            x[turn][4] = b.x, x[turn][5] = b.y, x[turn][6] = b.z, x[turn][7] = b.w;
        }
    } else {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++, from += AT_ONCE * MEMRA_BLOCK) {
            if (turn >= turns) break;
            for (int i = 0; i < EACH; i++) x[turn][i] = from[i < 4 ? i : i + 12];
        }
    }
}

// Reports what is wrong with each block of the warp, whose lanes have their own share of `wrong`.
static __device__ __noinline__ void report(int wrong, memra_health* health, int layer, long long slot) {
    for (int apart = 1; apart < LANES; apart *= 2) wrong |= __shfl_xor_sync(MEMRA_ALL_LANES, wrong, apart);
    if (threadIdx.x % LANES) return;
    if (wrong & NONFINITE) memra_report(health, MEMRA_FAULT_NONFINITE, layer, slot, 1);
    if (wrong == OVERFLOW) memra_report(health, MEMRA_FAULT_SCALE_OVERFLOW, layer, slot, 1);
    if (wrong & SATURATED) memra_report(health, MEMRA_FAULT_FP8_SATURATED, layer, slot, 1);
}

// k_rows (n_seqs, rows, kv_dim_k), v_rows (n_seqs, rows, kv_dim_v); k, v: token t at byte t * tok_bytes, whole blocks.
// len >= 0: the length to store; -1: the larger of the old one and slot + rows.
extern "C" __global__ void __launch_bounds__(128) append_kv(
        const float* k_rows, const float* v_rows, uint8_t* k, uint8_t* v, int* len_d, const int* pos_d,
        long long slot, int rows, int len, long long max_ctx, int kv_dim_k, int kv_dim_v,
        long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format, const memra_seq* seqs, int n_seqs,
        memra_health* health, int layer) {
    __shared__ uint4 stages[2][PIECES];
    const bool is_v = threadIdx.x >= HALF;
    const unsigned thread = threadIdx.x % HALF, lane = thread % LANES, group = thread / LANES;
    const unsigned blocks = (unsigned)(is_v ? kv_dim_v : kv_dim_k) / MEMRA_BLOCK;
    const int format = is_v ? v_format : k_format, size = block_bytes(format);
    const long long run = (long long)rows * blocks, tok_bytes = is_v ? v_tok_bytes : k_tok_bytes;
    const float* x_rows = is_v ? v_rows : k_rows;
    const long long most = (long long)rows * ((unsigned)(kv_dim_k > kv_dim_v ? kv_dim_k : kv_dim_v) / MEMRA_BLOCK);
    const unsigned tile = most * n_seqs < MANY ? AT_ONCE : TILE;
    unsigned index = blockIdx.x;
    if (seqs) {
        const unsigned tiles = (unsigned)((most + tile - 1) / tile), seq = index / tiles;
        index -= seq * tiles;
        x_rows += seq * run * MEMRA_BLOCK;
        k = (uint8_t*)seqs[seq].k;
        v = (uint8_t*)seqs[seq].v;
        len_d = (int*)seqs[seq].len_d;
        pos_d = (const int*)seqs[seq].pos_d;
        health = (memra_health*)seqs[seq].health;
        max_ctx = seqs[seq].max_ctx;
    }
    const long long begin = (long long)index * tile, left = run - begin;  // blocks
    const unsigned n = left > tile ? tile : left > 0 ? (unsigned)left : 0;
    const int turns = ((int)n - (int)group + AT_ONCE - 1) / AT_ONCE;  // of this lane
    float x[TURNS][EACH] = {};
    load(x_rows + (begin + group) * MEMRA_BLOCK + 4 * lane, turns, x);
    const long long first = memra_slot(pos_d, slot);
    const bool leader = index == 0 && threadIdx.x == 0;
    if (first < 0 || first + rows > max_ctx) {
        if (leader) memra_report(health, MEMRA_FAULT_SLOT_RANGE, layer, first, 1);
        return;
    }
    if (leader) {
        const int end = (int)(first + rows);
        *len_d = len >= 0 ? len : *len_d > end ? *len_d : end;
    }
    // The tile in the plane; in the stage it begins as far behind a piece as there.
    uint8_t* const to = (is_v ? v : k) + first * tok_bytes + begin * size;
    const int skew = (int)((uint64_t)to % PIECE), end = skew + (int)n * size;
    uint8_t* const stage = (uint8_t*)stages[is_v];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const unsigned block = group + turn * AT_ONCE;
        if (turn * AT_ONCE >= n) break;
        int wrong = encode(stage + skew + block * size, format, x[turn], lane);
        float nothing = 0.0f;  // NaN where an element is not finite
        for (int i = 0; i < EACH; i++) nothing = __fmaf_rn(x[turn][i], 0.0f, nothing);
        if (nothing != nothing) wrong |= NONFINITE;
        if (__any_sync(MEMRA_ALL_LANES, wrong)) report(wrong, health, layer, first + (begin + block) / blocks);
    }
    __syncthreads();
    for (int at = thread * PIECE; at < end; at += HALF * PIECE) {
        if (at >= skew && at + PIECE <= end) {
            *(uint4*)(to - skew + at) = *(const uint4*)(stage + at);
        } else {
            for (int i = at < skew ? skew : at; i < at + PIECE && i < end; i++) to[i - skew] = stage[i];
        }
    }
}
MEMRA_EXPORT(append_kv)
