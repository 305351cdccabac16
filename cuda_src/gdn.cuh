// gdn.cuh: the arithmetic of a linear-attention layer: convolution, gates, and one row of the gated delta rule.
//
// conv.cu, gdn_prep.cu and gdn_scan.cu run it step by step, recur_step.cu in one launch, with the same bits.
//
// In the delta rule eight lanes share a column of a state: lane a of them holds rows 32 r + 4 a .. + 3 as s[r]. Its
// four sums over r are those of lanes 4 a .. 4 a + 3 of a warp that owns one column, lane l rows l, l + 32, ..; and
// memra_column_sum adds them in the order of that warp, 16, 8, 4, 2 and 1 lanes apart.
#pragma once

#include "device.cuh"

#define MEMRA_TAPS 8  // of the longest convolution

// SiLU of one sum of the convolution. window and weight end with the newest input; taps below `skip` do not exist.
template <int TAPS>
__device__ inline float memra_convolve(const float (&window)[TAPS], const float (&weight)[TAPS], int skip) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TAPS; i++) sum = i >= skip ? __fmaf_rn(window[i], weight[i], sum) : sum;
    return __fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum)));
}

// The ring of one channel after `rows` inputs behind it, x[0], x[conv_dim], ..: its last `pad` inputs.
__device__ inline void memra_roll(float* ring, const float* x, long long rows, int conv_dim, int pad) {
    float next[MEMRA_TAPS - 1] = {};
#pragma unroll
    for (int j = 0; j < MEMRA_TAPS - 1; j++) {
        if (j < pad) next[j] = rows + j < pad ? memra_read(ring + rows + j) : x[(rows - pad + j) * conv_dim];
    }
#pragma unroll
    for (int j = 0; j < MEMRA_TAPS - 1; j++) {
        if (j < pad) ring[j] = next[j];
    }
}

__device__ inline float memra_sigmoid(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }
__device__ inline float memra_softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// What brings a head of n elements to length 1; the whole warp calls it.
__device__ inline float memra_inverse_length(const float* x, int n, float eps) {
    float sum = 0.0f;
    for (int i = (int)threadIdx.x & 31; i < n; i += 32) sum = __fmaf_rn(x[i], x[i], sum);
    return rsqrtf(__fadd_rn(memra_warp_sum(sum), eps));
}

__device__ inline float4 memra_fma4(float4 a, float4 b, float4 c) {
    return make_float4(__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y), __fmaf_rn(a.z, b.z, c.z),
                       __fmaf_rn(a.w, b.w, c.w));
}

// The sum of the eight lanes that share a column; every one of them gets the same bits. lane: 0 .. 7 among them.
__device__ inline float memra_column_sum(float4 sum, int lane) {
    const bool upper = lane & 4, odd = lane & 2;
    // 16 and 8 apart: lanes exchange what the other keeps, so that each ends with one of the four sums.
    float even = upper ? sum.z : sum.x, other = upper ? sum.w : sum.y;
    even = __fadd_rn(even, __shfl_xor_sync(MEMRA_ALL_LANES, upper ? sum.x : sum.z, 4));
    other = __fadd_rn(other, __shfl_xor_sync(MEMRA_ALL_LANES, upper ? sum.y : sum.w, 4));
    float total = odd ? other : even;
    total = __fadd_rn(total, __shfl_xor_sync(MEMRA_ALL_LANES, odd ? even : other, 2));
    total = __fadd_rn(total, __shfl_xor_sync(MEMRA_ALL_LANES, total, 1));  // 4 apart
    total = __fadd_rn(total, __shfl_xor_sync(MEMRA_ALL_LANES, total, 4));  // 2 apart
    return __fadd_rn(total, __shfl_xor_sync(MEMRA_ALL_LANES, total, 2));   // 1 apart
}

// One row of the delta rule on a column: kv = S k; dl = beta (v - g kv); S = g S + dl k^T. Returns the lane's part of
// S q.
// key(r), query(r): elements 32 r + 4 lane .. + 3 of k and of q.
template <int R, class Key, class Query>  // R: state_size / 32
__device__ inline float4 memra_delta_row(float4 (&s)[R], Key key, Query query, float g, float beta, float v, int lane) {
    float4 kv = make_float4(0.0f, 0.0f, 0.0f, 0.0f), sum = kv;
#pragma unroll
    for (int r = 0; r < R; r++) kv = memra_fma4(s[r], key(r), kv);
    const float dl = __fmul_rn(beta, __fmaf_rn(-g, memra_column_sum(kv, lane), v));
    const float4 decay = make_float4(g, g, g, g);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const float4 k = key(r);
        const float4 update =
            make_float4(__fmul_rn(k.x, dl), __fmul_rn(k.y, dl), __fmul_rn(k.z, dl), __fmul_rn(k.w, dl));
        s[r] = memra_fma4(decay, s[r], update);
        sum = memra_fma4(s[r], query(r), sum);
    }
    return sum;
}
