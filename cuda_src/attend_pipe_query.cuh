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
        const int lane = threadIdx.x & 31, pairs = b.head_dim_k / 64, head = (int)(threadIdx.x / 32) >> b.team_shift;
        float* const factors = (float*)(bytes + b.factor) + head * (1 + pairs) * b.columns;
        uint8_t* const fragments = bytes + b.query + head * b.columns / 8 * b.query_bytes;
        const bool fp8 = b.k_format == MEMRA_FP8;
        const int place[2] = {place_of(fp8, 0, lane), place_of(fp8, 1, lane)}, stride = fp8 ? 1024 : 512;
        const float scaled = __fmul_rn(scale, (float)(1.4426950408889634 * (fp8 ? 1.0 : 32768.0 / 32767.0)));  // log2(e)
        unsigned most[COLUMNS][HELD / 2], largest[COLUMNS];  // magnitudes as bits: the largest of each pair, and of all
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            largest[i] = 0;
#pragma unroll
            for (int pair = 0; pair < HELD / 2; pair++) {
                if (pair >= pairs) continue;
                most[i][pair] = memra_warp_max_u32(larger(x[i][2 * pair], x[i][2 * pair + 1]));
                largest[i] = most[i][pair] > largest[i] ? most[i][pair] : largest[i];
            }
#pragma unroll 1
            for (int pair = HELD / 2; pair < pairs; pair++) {
                const unsigned other = memra_warp_max_u32(larger(query[i][64 * pair], query[i][64 * pair + 32]));
                largest[i] = other > largest[i] ? other : largest[i];
            }
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const int column = first + i * b.team_warps();
            if (column >= view.columns) break;
            uint8_t* const to = fragments + column / 8 * b.query_bytes + column % 8 * 64;
            const unsigned top = exponent_of(largest[i]);
            const float factor = __fmul_rn(scaled, __uint_as_float(top - (14u << 23)));
            if (lane == 0) factors[column] = largest[i] >= 0xFFu << 23 ? __uint_as_float(BAD_FACTOR) : factor;
            const auto put_pair = [&](int pair, unsigned most, float even, float odd) {
                // Takes the largest to between 2^14 and 2^15; of bytes to 32767 / 32768 of that, so that none leaves the range
                // of 16 bits, for which `scaled` has the inverse.
                const unsigned exponent = exponent_of(most);
                const float up = __uint_as_float((fp8 ? 268u << 23 : (267u << 23) + 0x7FFE00u) - exponent);
                // By how much less this pair's sums count than those of the largest one: at most 1, so that sums of finite
                // numbers stay finite. Below 2^-126 they do not count.
                const int part = (127 << 23) - (int)(top - exponent);
                if (lane == 0) factors[(1 + pair) * b.columns + column] = __uint_as_float(part > 0 ? (unsigned)part : 0u);
                put(fp8, even, up, to + 2 * pair * stride + place[0]);
                put(fp8, odd, up, to + (2 * pair + 1) * stride + place[1]);
            };
#pragma unroll
            for (int pair = 0; pair < HELD / 2; pair++) {
                if (pair < pairs) put_pair(pair, most[i][pair], x[i][2 * pair], x[i][2 * pair + 1]);
            }
#pragma unroll 1
            for (int pair = HELD / 2; pair < pairs; pair++) {
                const float even = query[i][64 * pair], odd = query[i][64 * pair + 32];
                put_pair(pair, memra_warp_max_u32(larger(even, odd)), even, odd);
            }
        }
    }

private:
    // The larger magnitude, as bits, which a NaN passes.
    static __device__ __forceinline__ unsigned larger(float a, float b) {
        const unsigned x = __float_as_uint(a) & 0x7FFFFFFFu, y = __float_as_uint(b) & 0x7FFFFFFFu;
        return x > y ? x : y;
    }
    // Of a magnitude, where it stands in an f32; at least that of 2^-100, so that both factors are within what an f32 holds.
    static __device__ __forceinline__ unsigned exponent_of(unsigned bits) {
        return bits < 27u << 23 ? 27u << 23 : bits & 0xFFu << 23;
    }
    // An element that `up` makes two f16, or an integer of 16 bits.
    static __device__ __forceinline__ void put(bool fp8, float x, float up, uint8_t* to) {
        if (fp8) {
            const float y = __fmul_rn(x, up);
            const uint16_t high = memra_to_f16(y);
            *(uint16_t*)to = high;
            *(uint16_t*)(to + 8) = memra_to_f16(__fsub_rn(y, memra_from_f16(high)));
        } else {
            const uint32_t m = __float_as_uint(__fmaf_rn(x, up, 12582912.0f));  // 1.5 * 2^23: the lowest bits are the integer
            to[0] = (uint8_t)(m >> 8);
            to[8] = (uint8_t)m;
        }
    }
};
