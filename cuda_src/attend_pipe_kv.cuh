// attend_pipe_kv.cuh: K and V as they lie in a stage, as fragments of tensor-core instructions; one part a format.
#pragma once

#include "attend_pipe.cuh"

// ---------------------------------------------------------------- K

// Two blocks are a pair: 64 elements of K, and of a query. What a lane needs of a pair of the queries of 8 columns: its parts of
// both blocks' fragments, 256 high + low, and what the pair counts in columns 2t and 2t + 1.
struct QueryPair {
    uint4 block[2];
    float2 factor;
};

// score += the sums over a pair, for columns 2t and 2t + 1, by what it counts there.
static __device__ __forceinline__ void add_pair(const float sum[4], float2 factor, float score[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) score[i] = __fmaf_rn(sum[i], i & 1 ? factor.y : factor.x, score[i]);
}

// Two blocks of q8_0 are 17 aligned words: the even one's codes lie across them, and its two last are in the word of the
// odd one's d. So lane column t holds elements 4t - 2 .. and 14 + 4t .. of the even block (column 0 the two first and the
// two last instead of the former), and 4t .. and 16 + 4t .. of the odd one.

// score += a pair of q8_0 times the queries; query(n) is a QueryPair.
template <int NT, class Query>
static __device__ __forceinline__ void score_q8(const uint8_t* upper, const uint8_t* lower, const Query& query,
                                                float score[NT][4]) {
    const int t = threadIdx.x & 3;
    const uint32_t *x = (const uint32_t*)upper, *y = (const uint32_t*)lower;
    const uint32_t mixed = t == 0 ? 0x5432u : 0x3210u, x0 = x[0], y0 = y[0], x8 = x[8], y8 = y[8];
    const uint32_t even[4] = {__byte_perm(x[t], x8, mixed), __byte_perm(y[t], y8, mixed), x[4 + t], y[4 + t]};
    const uint32_t odd[4] = {x[9 + t], y[9 + t], x[13 + t], y[13 + t]};
    const float d[4] = {memra_from_f16((uint16_t)x0), memra_from_f16((uint16_t)y0), memra_from_f16((uint16_t)(x8 >> 16)),
                        memra_from_f16((uint16_t)(y8 >> 16))};
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const QueryPair q = query(n);
        float sum[4] = {};
#pragma unroll
        for (int block = 0; block < 2; block++) {
            int high[4], low[4];
            memra_mma_bytes<int8_t>(high, block ? odd : even, q.block[block].x, q.block[block].y);
            memra_mma_bytes<uint8_t>(low, block ? odd : even, q.block[block].z, q.block[block].w);
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = __fmaf_rn((float)(high[i] * 256 + low[i]), d[2 * block + i / 2], sum[i]);
        }
        add_pair(sum, q.factor, score[n]);
    }
}

// score += a pair of e4m3 times the queries, high and low part. To the next 8 columns: query_stride, and 8 factors.
template <int NT>
static __device__ void score_fp8(const uint8_t* upper, const uint8_t* lower, const uint4* query, int query_stride,
                                 const float* factor, float score[NT][4]) {
    float sum[NT][4] = {};
    const int t = threadIdx.x & 3;
    const uint4 x = ((const uint4*)upper)[t], y = ((const uint4*)lower)[t];
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const uint32_t a[4] = {memra_e4m3_pair(xs[step]), memra_e4m3_pair(ys[step]), memra_e4m3_pair(xs[step] >> 16),
                               memra_e4m3_pair(ys[step] >> 16)};
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint4 q = query[n * query_stride + 32 * step];
            const uint32_t high[2] = {q.x, q.y}, low[2] = {q.z, q.w};
            memra_mma(sum[n], a, high);
            memra_mma(sum[n], a, low);
        }
    }
#pragma unroll
    for (int n = 0; n < NT; n++) add_pair(sum[n], *(const float2*)(factor + 8 * n), score[n]);
}

// ---------------------------------------------------------------- V
//
// A lane decodes four keys (fragment columns 2t, 2t + 1, 2t + 8, 2t + 9) of the dims that row g stands for: WORDS times
// 4 dims, and 4 more that lie `apart` further. Fragment (w, j): dims first + step * w + j, and + apart.
// load: `row` is where the warp's dims begin; its lanes read no further than the `dims` of the head that lie from there on.

// 1024 as two f16, in a register: an instruction that masks and merges has room for one constant only. The compiler, which
// would make two of it, does not know that a launch has no negative number of rows.
static __device__ uint32_t f16_1024(int rows) { return 0x64006400u | (unsigned)rows >> 31; }

// Codes of two keys as f16 above 1024: nibbles at bit 0 or 4 of each half, and their fifth bit.
static __device__ uint32_t code_pair(uint32_t nibbles, uint32_t fifth, bool high, int bit, uint32_t base) {
    const int by = (high ? 8 : 4) - bit;
    const uint32_t top = ((by >= 0 ? fifth << by : fifth >> -by) & (high ? 0x01000100u : 0x00100010u)) | base;
    return (nibbles & (high ? 0x00F000F0u : 0x000F000Fu)) | top;
}

template <int WORDS>
struct VQ5 {
    uint32_t d[2], m[2], low[2], high[2];   // of keys 0, 1 and of keys 2, 3: f16 pairs, fifth bits
    uint32_t word[4][WORDS];
    __device__ static int first_dim(int g) { return 32 * (g * WORDS / 4) + 4 * (g * WORDS % 4); }
    static constexpr int step = 4, apart = 16;
    __device__ void load(const uint8_t* row, int stride, int g, int) {
        const int first = g * WORDS % 4;
        uint2 head[4];
#pragma unroll
        for (int key = 0; key < 4; key++) {
            const uint8_t* block = row + key * stride + 24 * (g * WORDS / 4);
            head[key] = *(const uint2*)block;
            if constexpr (WORDS == 1) {
                word[key][0] = ((const uint32_t*)block)[2 + first];
            } else {
#pragma unroll
                for (int w = 0; w < WORDS; w += 2) {
                    const uint2 two = *(const uint2*)(block + 8 + 4 * (first + w));
                    word[key][w] = two.x;
                    word[key][w + 1] = two.y;
                }
            }
        }
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint2 a = head[2 * pair], b = head[2 * pair + 1];
            d[pair] = __byte_perm(a.x, b.x, 0x5410);
            m[pair] = __byte_perm(a.x, b.x, 0x7632);
            low[pair] = __byte_perm(a.y >> 4 * first, b.y >> 4 * first, 0x5410);
            high[pair] = __byte_perm(a.y >> 4 * first, b.y >> 4 * first, 0x7632);
        }
    }
    __device__ void fragment(int w, int j, uint32_t base, uint32_t a[4]) const {
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint32_t bytes = __byte_perm(word[2 * pair][w], word[2 * pair + 1][w], j < 2 ? 0x5410 : 0x7632);
            const uint32_t nibbles = j & 1 ? bytes >> 8 : bytes;
            const uint32_t x = code_pair(nibbles, low[pair], false, 4 * w + j, base);   // 1024 + code
            const uint32_t y = code_pair(nibbles, high[pair], true, 4 * w + j, base);   // 1024 + 16 code
            // 1 x - 1024 and y / 16 - 64, the codes, times d plus m.
            a[2 * pair] = memra_fma_f16(memra_fma_f16(x, 0x3C003C00u, 0xE400E400u), d[pair], m[pair]);
            a[2 * pair + 1] = memra_fma_f16(memra_fma_f16(y, 0x2C002C00u, 0xD400D400u), d[pair], m[pair]);
        }
    }
};

template <int WORDS>
struct VQ4 {
    uint32_t d[2], word[4][WORDS];
    __device__ static int first_dim(int g) { return VQ5<WORDS>::first_dim(g); }
    static constexpr int step = 4, apart = 16;
    // Two blocks are 9 aligned words; the codes of the even one lie across them.
    __device__ void load(const uint8_t* row, int stride, int g, int) {
        const int block = g * WORDS / 4, first = g * WORDS % 4, odd = block & 1;
        const uint32_t whole = odd ? 0x3210u : 0x5432u;
        uint32_t head[4];
#pragma unroll
        for (int key = 0; key < 4; key++) {
            const uint32_t* pair = (const uint32_t*)(row + key * stride + 36 * (block / 2));
            head[key] = pair[odd ? 4 : 0] >> (odd ? 16 : 0);
            uint32_t x = pair[first + (odd ? 5 : 0)];
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                const uint32_t y = pair[first + w + (odd ? (first + w == 3 ? 5 : 6) : 1)];  // the odd block ends with the pair
                word[key][w] = __byte_perm(x, y, whole);
                x = y;
            }
        }
#pragma unroll
        for (int pair = 0; pair < 2; pair++) d[pair] = __byte_perm(head[2 * pair], head[2 * pair + 1], 0x5410);
    }
    __device__ void fragment(int w, int j, uint32_t base, uint32_t a[4]) const {
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint32_t bytes = __byte_perm(word[2 * pair][w], word[2 * pair + 1][w], j < 2 ? 0x5410 : 0x7632);
            const uint32_t nibbles = j & 1 ? bytes >> 8 : bytes;
            const uint32_t x = (nibbles & 0x000F000Fu) | base, y = (nibbles & 0x00F000F0u) | base;
            // x is 1024 + code, y 1024 + 16 code: x - 1032 and y / 16 - 72, the codes less 8, times d.
            a[2 * pair] = memra_fma_f16(memra_fma_f16(x, 0x3C003C00u, 0xE408E408u), d[pair], 0x80008000u);
            a[2 * pair + 1] = memra_fma_f16(memra_fma_f16(y, 0x2C002C00u, 0xD480D480u), d[pair], 0x80008000u);
        }
    }
};

template <int WORDS>
struct VFp8 {
    uint2 word[4][WORDS];
    __device__ static int first_dim(int g) { return 8 * g; }
    static constexpr int step = 64, apart = 4;
    __device__ void load(const uint8_t* row, int stride, int g, int dims) {
#pragma unroll
        for (int key = 0; key < 4; key++) {
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                word[key][w] = make_uint2(0, 0);
                if (64 * w + 8 * g < dims) word[key][w] = *(const uint2*)(row + key * stride + 64 * w + 8 * g);
            }
        }
    }
    __device__ void fragment(int w, int j, uint32_t base, uint32_t a[4]) const {
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint32_t how = j == 0 ? 0x0040u : j == 1 ? 0x0051u : j == 2 ? 0x0062u : 0x0073u;  // byte j of either key
            a[2 * pair] = memra_e4m3_pair(__byte_perm(word[2 * pair][w].x, word[2 * pair + 1][w].x, how));
            a[2 * pair + 1] = memra_e4m3_pair(__byte_perm(word[2 * pair][w].y, word[2 * pair + 1][w].y, how));
        }
    }
};

// Makes a block of a row of V be 0: without scale and offset its codes are. The row lies in a stage.
static __device__ __forceinline__ void silence(uint8_t* row, int format, int block) {
    uint8_t* x = row + block * block_bytes_of(format);
    if (format == MEMRA_FP8) {
        for (int i = 0; i < 8; i++) ((uint32_t*)x)[i] = 0;
    } else if (format == MEMRA_Q5_1) {
        *(uint32_t*)x = 0;
    } else {
        *(uint16_t*)x = 0;
    }
}

// One element of V as f16, as the fragments above have it.
static __device__ uint32_t v_element(const uint8_t* row, int format, int dim) {
    const int j = dim % 32;
    if (format == MEMRA_FP8) return memra_e4m3_pair(row[dim]) & 0xFFFFu;
    const bool five = format == MEMRA_Q5_1;
    const memra_q5_1* q5 = (const memra_q5_1*)row + dim / 32;
    const memra_q4_0* q4 = (const memra_q4_0*)row + dim / 32;
    const uint32_t nibble = (five ? q5->qs : q4->qs)[j % 16] >> (j / 16 * 4) & 15u;
    const int code = five ? (int)(nibble | (q5->qh >> j & 1u) << 4) : (int)nibble - 8;
    return memra_fma_f16(memra_to_f16((float)code), five ? q5->d : q4->d, five ? q5->m : 0x8000u) & 0xFFFFu;
}
