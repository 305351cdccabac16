// gdn_scan: the gated delta rule, row after row, on the state of a linear-attention layer.
//
// Per row and head, with S (state_size columns, state_size rows) and g = exp(g_log):
//   kv = S k;  dl = beta (v - g kv);  S = g S + dl k^T;  out = scale S q
// A warp owns one column of S, lane l its rows l, l + 32, ..., in registers from the first row to the
// last: state_in may be state_out, and T rows in one launch give the bits of T launches.
#include "device.cuh"

template <int R>  // state_size / 32
static __device__ void scan(const float* q, const float* k, const float* v, const float* g_log, const float* beta,
                            const float* state_in, float* state_out, float* out, int rows, int num_v, float scale) {
    const int size = R * 32, column_blocks = size / (int)blockDim.y;
    const int lane = threadIdx.x;
    const int head = (int)blockIdx.x / column_blocks;
    const int column = (int)blockIdx.x % column_blocks * (int)blockDim.y + (int)threadIdx.y;
    if (head >= num_v) return;
    const long long base = ((long long)head * size + column) * size + lane;
    float s[R];
#pragma unroll
    for (int r = 0; r < R; r++) s[r] = state_in[base + r * 32];

    for (int t = 0; t < rows; t++) {
        const long long gate = (long long)t * num_v + head, at = gate * size;
        float key[R], query[R];
#pragma unroll
        for (int r = 0; r < R; r++) {
            key[r] = k[at + r * 32 + lane];
            query[r] = q[at + r * 32 + lane];
        }
        const float g = expf(g_log[gate]);
        float kv = 0.0f;
#pragma unroll
        for (int r = 0; r < R; r++) kv = __fmaf_rn(s[r], key[r], kv);
        kv = memra_warp_sum(kv);
        const float dl = __fmul_rn(beta[gate], __fmaf_rn(-g, kv, v[at + column]));
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < R; r++) {
            s[r] = __fmaf_rn(g, s[r], __fmul_rn(key[r], dl));
            sum = __fmaf_rn(s[r], query[r], sum);
        }
        if (out) {
            sum = memra_warp_sum(sum);
            if (lane == 0) out[at + column] = __fmul_rn(sum, scale);
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) state_out[base + r * 32] = s[r];
}

// q, k, v, out (rows, num_v, state_size); g_log, beta (rows, num_v); out may be null. state_size is 32, 64, 128 or 256.
extern "C" __global__ void __launch_bounds__(128) gdn_scan(
        const float* q, const float* k, const float* v, const float* g_log, const float* beta,
        const float* state_in, float* state_out, float* out, const int* pos_d, long long slot,
        int rows, int num_v, int state_size, float scale, memra_health* health, int layer) {
    if (state_size == 32) scan<1>(q, k, v, g_log, beta, state_in, state_out, out, rows, num_v, scale);
    if (state_size == 64) scan<2>(q, k, v, g_log, beta, state_in, state_out, out, rows, num_v, scale);
    if (state_size == 128) scan<4>(q, k, v, g_log, beta, state_in, state_out, out, rows, num_v, scale);
    if (state_size == 256) scan<8>(q, k, v, g_log, beta, state_in, state_out, out, rows, num_v, scale);
}
MEMRA_EXPORT(gdn_scan)
