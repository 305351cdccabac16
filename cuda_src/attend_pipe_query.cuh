// attend_pipe_query.cuh: what a block has to do for some columns of one sequence, and their queries as fragments.
#pragma once

#include "attend_pipe_kv.cuh"

// What a block does for one chunk of columns of one sequence.
struct Task {
    const uint8_t *k, *v;
    memra_health* health;
    View view;
    Walk walk;
    int seq, tokens;  // tokens: that the planes hold
    bool reports;  // whether this block tells of queries that are not finite
};

#define BAD_FACTOR 0x7FC00001u  // a NaN that stands for a query that is not finite

// The eight elements of a query that lane `at` of its fragments holds, as four pairs: where each begins. Two registers of
// q8_element, or twice four neighbours that score_fp8 takes in two steps.
static __device__ __forceinline__ int query_pair(bool fp8, unsigned at, int pair) {
    const int t = at % 4, block = at / 4;
    if (fp8) return block / 2 * 64 + 16 * t + 8 * (block & 1) + 2 * pair;
    return 32 * block + q8_element(block & 1, pair / 2, t, 2 * (pair & 1));
}

// Those of the caller's array, which need not be aligned for more than a float.
static __device__ __forceinline__ void load_pairs(const float* query, bool fp8, unsigned at, float2 x[4]) {
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        const float* from = query + query_pair(fp8, at, pair);
        x[pair] = make_float2(from[0], from[1]);
    }
}

// The largest of their magnitudes as bits, which a NaN passes, and `most`.
static __device__ __forceinline__ unsigned largest_of(const float2 x[4], unsigned most) {
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        const unsigned u = __float_as_uint(x[pair].x) & 0x7FFFFFFFu, v = __float_as_uint(x[pair].y) & 0x7FFFFFFFu;
        const unsigned uv = u > v ? u : v;
        most = most > uv ? most : uv;
    }
    return most;
}

// What lane `at` of the fragments is, of elements that `up` makes integers, or f16; `to` is fragment 0 of lane `at` % 32.
static __device__ __forceinline__ void store_pairs(const float2 x[4], bool fp8, float up, uint4* to) {
    uint32_t high[4], low[4];  // a pair each
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        if (fp8) {
            const float u = __fmul_rn(x[pair].x, up), v = __fmul_rn(x[pair].y, up);
            high[pair] = memra_pack_f16(u, v);
            low[pair] = memra_pack_f16(__fsub_rn(u, memra_from_f16((uint16_t)high[pair])),
                                       __fsub_rn(v, memra_from_f16((uint16_t)(high[pair] >> 16))));
        } else {  // 1.5 * 2^23 rounds to an integer, which the lowest bits then are
            const uint32_t m = __float_as_uint(__fmaf_rn(x[pair].x, up, 12582912.0f));
            const uint32_t n = __float_as_uint(__fmaf_rn(x[pair].y, up, 12582912.0f));
            high[pair] = __byte_perm(m + 128, n + 128, 0x0051);
            low[pair] = __byte_perm(m, n, 0x0040);
        }
    }
    if (fp8) {
        to[0] = make_uint4(high[0], high[1], low[0], low[1]);
        to[32] = make_uint4(high[2], high[3], low[2], low[3]);
    } else {
        const uint32_t halves = 0x5410;
        to[0] = make_uint4(__byte_perm(high[0], high[1], halves), __byte_perm(high[2], high[3], halves),
                           __byte_perm(low[0], low[1], halves), __byte_perm(low[2], low[3], halves));
    }
}

// The queries of a team's K/V head as fragments. A warp takes every team_warps-th column, COLUMNS at once, and lane l parts
// l and l + 32 of each. Columns that nobody needs have a factor of 0, whatever stands in their fragments.
template <int WORDS, int NT>
static __device__ __forceinline__ void quantise_queries(const Block& b, uint8_t* bytes, const float* q, const View& view,
                                                        float scale) {
    constexpr int COLUMNS = WORDS * NT < 2 ? 2 : 4;
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x / 32, parts = b.head_dim_k / 8;
    const int head = warp >> b.team_shift, member = warp & (b.team_warps() - 1);
    const bool fp8 = b.k_format == MEMRA_FP8;
    const float scaled = __fmul_rn(scale, fp8 ? 1.4426950408889634f : 1.4540548f);
    float* const factors = (float*)(bytes + b.factor) + head * 8 * NT;
    uint8_t* const fragments = bytes + b.query + head * NT * b.query_bytes;
    if (member == 0 && lane < 8 * NT && (int)lane >= view.columns) factors[lane] = 0.0f;
#pragma unroll 1
    for (int first = member; first < view.columns; first += COLUMNS * b.team_warps()) {
        float2 x[COLUMNS][4], y[COLUMNS][4];  // of parts l and l + 32
        unsigned most[COLUMNS];
        const float* query[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            int column = first + i * b.team_warps();
            if (column >= view.columns) column = first;
            const int row = view.row(column);
            const unsigned of_all = (row * b.n_head_kv + head) * view.gqa + view.first_column + column - row * view.gqa;
            query[i] = q + of_all * (unsigned)b.head_dim_k;
            load_pairs(query[i], fp8, lane < parts ? lane : 0, x[i]);
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            most[i] = largest_of(x[i], 0);
            if (parts > 32) {
                load_pairs(query[i], fp8, lane + 32 < parts ? lane + 32 : lane, y[i]);
                most[i] = largest_of(y[i], most[i]);
            }
            most[i] = memra_warp_max_u32(most[i]);
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const int column = first + i * b.team_warps();
            // 2^bits / 2^exponent(largest), within what an f32 holds. Integers end at 32512, so that high is at most 127.
            const int bits = fp8 ? 13 : 14;
            int exponent = (int)(most[i] >> 23) - 127;
            exponent = exponent < -100 ? -100 : exponent > 127 ? 127 : exponent;  // 128: not finite
            const float power = __uint_as_float((unsigned)(127 + bits - exponent) << 23);
            const float up = fp8 ? power : __fmul_rn(power, 32512.0f / 32768.0f);
            const float factor = __fmul_rn(scaled, __uint_as_float((unsigned)(127 - bits + exponent) << 23));
            if (column >= view.columns) break;
            if (lane == 0) factors[column] = most[i] >= 0x7F800000u ? __uint_as_float(BAD_FACTOR) : factor;
            uint4* to = (uint4*)(fragments + column / 8 * b.query_bytes) + 4 * (column % 8) + lane % 4;
            if (lane < parts) store_pairs(x[i], fp8, up, to + (fp8 ? 64 : 32) * (lane / 4));
            if (lane + 32 < parts) store_pairs(y[i], fp8, up, to + (fp8 ? 64 : 32) * (lane / 4 + 8));
        }
    }
}

// Tells of the team's queries that are not finite.
template <int NT>
static __device__ __forceinline__ void report_queries(const Block& b, uint8_t* bytes, const Task& task, int layer) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, head = warp >> b.team_shift;
    if ((warp & (b.team_warps() - 1)) != 0 || lane >= 8 * NT) return;
    if (__float_as_uint(((const float*)(bytes + b.factor))[head * 8 * NT + lane]) != BAD_FACTOR) return;
    memra_report(task.health, MEMRA_FAULT_NONFINITE, layer, task.view.last(lane), 1);
}
