// attend_pipe_query.cuh: what a block has to do for some columns of one sequence, and their queries as fragments.
#pragma once

#include "attend_pipe_kv.cuh"

// What a block does for one chunk of columns of one sequence.
struct Task {
    const float* q;
    float* part;
    memra_health* health;
    View view;
    Walk walk;
    bool reports;
};

// The eight elements of a query that lane `at` of its fragments holds, as four pairs: where each begins. Two registers of
// q8_element, or twice four neighbours that score_fp8 takes in two steps.
static __device__ int query_pair(bool fp8, int at, int pair) {
    const int t = at % 4, block = at / 4;
    if (fp8) return block / 2 * 64 + 16 * t + 8 * (block & 1) + 2 * pair;
    return 32 * block + q8_element(block & 1, pair / 2, t, 2 * (pair & 1));
}

// Two floats of the caller's array, which need not be aligned for more than one.
static __device__ float2 pair_at(const float* at) { return make_float2(at[0], at[1]); }

// The queries of all K/V heads as fragments. A warp takes every eighth column, COLUMNS at once, and lane l a part of each.
template <int NT>
static __device__ void quantise_queries(const Block& b, const Task& task, int n_head_kv, int dim, bool fp8, float scale,
                                        int layer) {
    constexpr int COLUMNS = NT < 2 ? 2 : 4;
    const View& view = task.view;
    const int lane = threadIdx.x & 31, parts = dim / 8;
#pragma unroll 1
    for (int first = threadIdx.x / 32; first < n_head_kv * 8 * NT; first += COLUMNS * TEAM_WARPS) {
        float2 x[COLUMNS][4];
        unsigned most[COLUMNS] = {};  // largest magnitude as bits, which a NaN passes
        const float* query[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {  // columns that nobody needs are made of the first one
            const int c = first + i * TEAM_WARPS, head = c / (8 * NT), column = c % (8 * NT), row = view.row(column);
            const int at = (row * n_head_kv + head) * view.gqa + view.first_column + column - row * view.gqa;
            query[i] = task.q + (head < n_head_kv && column < view.columns ? at * dim : 0);
        }
#pragma unroll 1
        for (int at = parts > 32 ? lane + 32 : lane; at >= 0; at -= 32) {  // ends with the part that is worked on first
            int offset[4];
#pragma unroll
            for (int pair = 0; pair < 4; pair++) offset[pair] = query_pair(fp8, at < parts ? at : 0, pair);
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
#pragma unroll
                for (int pair = 0; pair < 4; pair++) x[i][pair] = pair_at(query[i] + offset[pair]);
            }
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
#pragma unroll
                for (int pair = 0; pair < 4; pair++) {
                    const unsigned u = __float_as_uint(x[i][pair].x) & 0x7FFFFFFFu;
                    const unsigned v = __float_as_uint(x[i][pair].y) & 0x7FFFFFFFu, uv = u > v ? u : v;
                    most[i] = most[i] > uv ? most[i] : uv;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const int c = first + i * TEAM_WARPS, head = c / (8 * NT), column = c % (8 * NT);
            if (head >= n_head_kv) break;
            const unsigned largest = memra_warp_max_u32(most[i]);
            const bool bad = largest >= 0x7F800000u;
            if (bad && lane == 0 && task.reports && column < view.columns) {
                memra_report(task.health, MEMRA_FAULT_NONFINITE, layer, view.last(column), 1);
            }
            // 2^bits / 2^exponent(largest), within what an f32 holds. Integers end at 32512, so that high is at most 127.
            const int bits = fp8 ? 13 : 14;
            int exponent = (int)(largest >> 23) - 127;
            exponent = exponent < -100 ? -100 : exponent > 127 ? 127 : exponent;  // 128: not finite
            const float power = __uint_as_float((unsigned)(127 + bits - exponent) << 23);
            const float up = fp8 ? power : __fmul_rn(power, 32512.0f / 32768.0f);
            const float down = __uint_as_float((unsigned)(127 - bits + exponent) << 23);
            const float factor = __fmul_rn(__fmul_rn(scale, fp8 ? 1.4426950408889634f : 1.4540548f), down);
            if (lane == 0) b.factor[c] = bad ? __uint_as_float(0x7FFFFFFFu) : factor;
            uint4* to = (uint4*)(b.query + (head * NT + column / 8) * b.query_bytes) + 4 * (column % 8) + lane % 4;
#pragma unroll 1
            for (int at = lane; at < parts; at += 32) {
                uint32_t high[4], low[4];  // a pair each
#pragma unroll
                for (int pair = 0; pair < 4; pair++) {
                    if (at >= 32) x[i][pair] = pair_at(query[i] + query_pair(fp8, at, pair));
                    if (fp8) {
                        const float u = __fmul_rn(x[i][pair].x, up), v = __fmul_rn(x[i][pair].y, up);
                        high[pair] = memra_pack_f16(u, v);
                        low[pair] = memra_pack_f16(__fsub_rn(u, memra_from_f16((uint16_t)high[pair])),
                                                   __fsub_rn(v, memra_from_f16((uint16_t)(high[pair] >> 16))));
                    } else {  // 1.5 * 2^23 rounds to an integer, which the lowest bits then are
                        const uint32_t m = __float_as_uint(__fmaf_rn(x[i][pair].x, up, 12582912.0f));
                        const uint32_t n = __float_as_uint(__fmaf_rn(x[i][pair].y, up, 12582912.0f));
                        high[pair] = __byte_perm(m + 128, n + 128, 0x0051);
                        low[pair] = __byte_perm(m, n, 0x0040);
                    }
                }
                if (fp8) {
                    to[64 * (at / 4)] = make_uint4(high[0], high[1], low[0], low[1]);
                    to[64 * (at / 4) + 32] = make_uint4(high[2], high[3], low[2], low[3]);
                } else {
                    const uint32_t halves = 0x5410;
                    to[32 * (at / 4)] =
                        make_uint4(__byte_perm(high[0], high[1], halves), __byte_perm(high[2], high[3], halves),
                                   __byte_perm(low[0], low[1], halves), __byte_perm(low[2], low[3], halves));
                }
            }
        }
    }
}
