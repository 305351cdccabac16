// attend_pipe_weigh.cuh: what a stage adds to a warp's sums over V.
#pragma once

#include "attend_pipe_kv.cuh"

// Sums over V of one stage: out (dims of this warp, columns) += V^T weights; and of the weights themselves. dims: of the
// head, from this warp's first on.
template <class V, int WORDS, int NT>
static __device__ void weigh_stage(const Block& b, const uint8_t* rows, int dims, const uint2* weight,
                                   uint32_t base, float out[4 * WORDS][NT][4], float sum[NT][4]) {
    // A row of fragments behind the head's dims is made of row 0, and nobody uses it: what follows in memory is another
    // team's to write.
    const int lane = threadIdx.x & 31, g = V::first_dim(lane / 4) < dims ? lane / 4 : 0;
#pragma unroll 1
    for (int slab = 0; slab < b.tokens / 16; slab++) {
        uint32_t w[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint2 two = weight[(slab * NT + n) * 32 + lane];
            w[n][0] = two.x;
            w[n][1] = two.y;
        }
        V values;
        values.load(rows + 4 * slab * b.v.token_bytes, b.v.token_bytes, g, dims);
#pragma unroll
        for (int i = 0; i < 4 * WORDS; i++) {
            uint32_t a[4];
            values.fragment(i / 4, i % 4, base, a);
#pragma unroll
            for (int n = 0; n < NT; n++) memra_mma(out[i][n], a, w[n]);
        }
        const uint32_t ones[4] = {0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u};
#pragma unroll
        for (int n = 0; n < NT; n++) memra_mma(sum[n], ones, w[n]);
    }
}

// Whether a row of V that some columns see and some do not holds an infinity or a NaN among this warp's dims: a weight
// of 0 would not silence it.
static __device__ bool any_odd(const Block& b, const View& view, const uint8_t* head_rows, int format, int first_token,
                               int first_dim, int dims) {
    bool odd = false;
    for (int i = 0; i < b.tokens; i++) {
        const int key = first_token + i;
        if (key >= view.first(view.columns - 1) && key <= view.last(0)) continue;  // all see it
        if (key < view.first(0) || key > view.last(view.columns - 1)) continue;    // nobody does
        const int quarter = b.tokens / QUARTERS;
        const uint8_t* row = head_rows + b.v.quarter(i / quarter) + i % quarter * b.v.token_bytes;
        for (int d = threadIdx.x & 31; d < dims; d += 32) odd |= (v_element(row, format, first_dim + d) & 0x7C00u) == 0x7C00u;
    }
    return __any_sync(MEMRA_ALL_LANES, odd);
}

// weigh_stage where there is such a row: one row of queries at a time, with the keys that it does not see left out, keeps
// its own columns of the result.
template <int WORDS, int NT>
static __device__ void weigh_odd_stage(const Block& b, const View& view, const uint8_t* head_rows, int format,
                                       int first_token, int head_dim, int lane_dim, int step, int apart,
                                       const uint2* weight, float out[4 * WORDS][NT][4], float sum[NT][4]) {
    const int lane = threadIdx.x & 31, t = lane % 4;
#pragma unroll 1
    for (int slab = 0; slab < b.tokens / 16; slab++) {
        const int key = first_token + t * (b.tokens / QUARTERS) + 4 * slab;  // of the lane's four
        const uint8_t* row = head_rows + b.v.quarter(t) + 4 * slab * b.v.token_bytes;
#pragma unroll 1
        for (int first = 0; first < view.columns;) {
            int end = (view.row(first) + 1) * view.gqa - view.first_column;
            end = end < view.columns ? end : view.columns;
#pragma unroll
            for (int i = 0; i < 4 * WORDS; i++) {
                uint32_t a[4] = {};
#pragma unroll 1
                for (int x = 0; x < 8; x++) {  // the fragment's elements, see above VQ5
                    const int which = (x & 1) + (x / 4) * 2, dim = lane_dim + i / 4 * step + i % 4 + (x / 2 & 1) * apart;
                    if (dim >= head_dim || !view.sees(first, key + which)) continue;
                    a[x / 2] |= v_element(row + which * b.v.token_bytes, format, dim) << 16 * (x & 1);
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const uint2 two = weight[(slab * NT + n) * 32 + lane];
                    const uint32_t w[2] = {two.x, two.y};
                    float kept[4] = {out[i][n][0], out[i][n][1], out[i][n][2], out[i][n][3]};
                    memra_mma(kept, a, w);
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        const int column = 8 * n + 2 * t + (r & 1);
                        if (column >= first && column < end) out[i][n][r] = kept[r];
                    }
                }
            }
            first = end;
        }
        const uint32_t ones[4] = {0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u};
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint2 two = weight[(slab * NT + n) * 32 + lane];
            const uint32_t w[2] = {two.x, two.y};
            memra_mma(sum[n], ones, w);
        }
    }
}
