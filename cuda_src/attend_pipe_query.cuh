// attend_pipe_query.cuh: the queries of some columns of one sequence as fragments.
#pragma once

#include "attend_pipe_kv.cuh"

#define BAD_FACTOR 0x7FC00001u  // a NaN that stands for a query that is not finite

// Where element l of a block of 32 lies among a head's fragments, in bytes from lane 0 of the block's first fragment, for
// one column: the high part; the low one lies 8 bytes further. A lane has 16 bytes of a fragment, lane column t those at 16 t.
//
// Of q8_0 a block is one fragment, and an element a byte. Of an odd block the two words of a part are elements 4t .. and
// 16 + 4t .., of an even one 4t - 2 .. and 14 + 4t .., and t = 0 has 0, 1, 30, 31 for the former, as score_q8 takes them.
// Of fp8 two blocks are four fragments of 512 bytes, one for each step of score_fp8, and an element two bytes: lane column
// t has elements 16t .. of the 64, four at each step. So the odd block has t = 2 and 3 of the even one's fragments.
static __device__ __forceinline__ int place_of(bool fp8, int odd, int l) {
    if (fp8) return l / 8 % 2 * 1024 + l % 8 / 4 * 512 + l / 16 * 16 + l % 4 * 2 + odd * (32 - 1024);
    if (odd) return l % 16 / 4 * 16 + l / 16 * 4 + l % 4;
    if (l < 2 || l >= 30) return l % 28;  // t = 0: bytes 0, 1 and 2, 3
    return (l + 2) % 16 / 4 * 16 + (l + 2) / 16 * 4 + (l + 2) % 4;
}

// The queries of some columns of a team's K/V head, on their way to fragments: a warp takes every team_warps-th column from
// `first` on, COLUMNS of them, and a lane one element of each block of 32.
template <int COLUMNS>
struct Queries {
    static constexpr int HELD = 8;  // blocks; what lies behind is read twice
    const float* query[COLUMNS];
    float x[COLUMNS][HELD];

    __device__ __forceinline__ void load(const Block& b, const float* q, const View& view, int first) {
        const int lane = threadIdx.x & 31, head = (int)(threadIdx.x / 32) >> b.team_shift, blocks = b.head_dim_k / 32;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            int column = first + i * b.team_warps();
            if (column >= view.columns) column = 0;  // nobody needs this one
            const int row = view.row(column);
            const int of_all = (row * b.n_head_kv + head) * view.gqa + view.first_column + column - row * view.gqa;
            query[i] = q + (long long)of_all * b.head_dim_k + lane;
#pragma unroll
            for (int block = 0; block < HELD; block++) x[i][block] = block < blocks ? query[i][32 * block] : 0.0f;
        }
    }

    __device__ __forceinline__ void store(const Block& b, uint8_t* bytes, const View& view, int first,
                                          float scale) const {
        const int lane = threadIdx.x & 31, blocks = b.head_dim_k / 32, head = (int)(threadIdx.x / 32) >> b.team_shift;
        float* const factors = (float*)(bytes + b.factor) + head * b.columns;
        uint8_t* const fragments = bytes + b.query + head * b.columns / 8 * b.query_bytes;
        const bool fp8 = b.k_format == MEMRA_FP8;
        const int stride = fp8 ? 1024 : 512;
        const int place[2] = {place_of(fp8, 0, lane), place_of(fp8, 1, lane)};
        const float whole = fp8 ? 1.0f : 32512.0f / 16384.0f;  // of 2^14
        const float scaled = __fmul_rn(scale, (float)(1.4426950408889634 * (fp8 ? 1.0 : 16384.0 / 32512.0)));  // log2(e)
        unsigned largest[COLUMNS];  // magnitude as bits, which a NaN passes
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            largest[i] = 0;
#pragma unroll
            for (int block = 0; block < HELD; block++) largest[i] = larger(largest[i], x[i][block]);
#pragma unroll 1
            for (int block = HELD; block < blocks; block++) largest[i] = larger(largest[i], query[i][32 * block]);
            largest[i] = memra_warp_max_u32(largest[i]);
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const int column = first + i * b.team_warps();
            if (column >= view.columns) break;
            const unsigned most = largest[i];
            // What makes the largest 32512 as an integer, so that high is at most 127, or 2^14 as f16; and what undoes it:
            // both as a power of two and a part between 1 and 2, within what an f32 holds.
            int exponent = (int)(most >> 23) - 127;
            exponent = exponent < -100 ? -100 : exponent > 127 ? 127 : exponent;  // 128: not finite
            const float part = __uint_as_float(127u << 23 | (most & 0x7FFFFFu));
            const float up = __fmul_rn(__uint_as_float((unsigned)(127 + 14 - exponent) << 23), memra_divide(whole, part));
            const float factor = __fmul_rn(__fmul_rn(scaled, part), __uint_as_float((unsigned)(127 - 14 + exponent) << 23));
            if (lane == 0) factors[column] = most >= 0x7F800000u ? __uint_as_float(BAD_FACTOR) : factor;
            uint8_t* to = fragments + column / 8 * b.query_bytes + column % 8 * 64;
#pragma unroll
            for (int block = 0; block < HELD; block++) {
                if (block < blocks) put(fp8, x[i][block], up, to + block * stride + place[block % 2]);
            }
#pragma unroll 1
            for (int block = HELD; block < blocks; block++) {
                put(fp8, query[i][32 * block], up, to + block * stride + place[block % 2]);
            }
        }
    }

    static __device__ __forceinline__ unsigned larger(unsigned most, float x) {
        const unsigned bits = __float_as_uint(x) & 0x7FFFFFFFu;
        return most > bits ? most : bits;
    }
    // An element that `up` makes an integer, or f16.
    static __device__ __forceinline__ void put(bool fp8, float x, float up, uint8_t* to) {
        if (fp8) {
            const float y = __fmul_rn(x, up);
            const uint16_t high = memra_to_f16(y);
            *(uint16_t*)to = high;
            *(uint16_t*)(to + 8) = memra_to_f16(__fsub_rn(y, memra_from_f16(high)));
        } else {  // 1.5 * 2^23 rounds to an integer, which the lowest bits then are
            const uint32_t m = __float_as_uint(__fmaf_rn(x, up, 12582912.0f));
            to[0] = (uint8_t)(m + 128 >> 8);
            to[8] = (uint8_t)m;
        }
    }
};
