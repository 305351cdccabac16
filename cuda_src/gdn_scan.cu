// gdn_scan: the gated delta rule, row after row, on the state of a linear-attention layer.
//
// Per row and head, with S (state_size columns, state_size rows) and g = exp(g_log):
//   kv = S k;  dl = beta (v - g kv);  S = g S + dl k^T;  out = scale S q
// A warp owns one column of S, lane l its rows l, l + 32, ..., in registers from the first row to the
// last: state_in may be state_out, and T rows in one launch give the bits of T launches.
#include "device.cuh"

template <int R>  // state_size / 32
static __device__ void scan(const float* q, const float* k, const float* v, const float* g_log, const float* beta,
                            const float* state_in, float* state_out, float* out, float* tape, int rows, int taken,
                            int num_v, float scale, const memra_seq* seqs, int n_seqs) {
    const int size = R * 32, column_blocks = size / (int)blockDim.y;
    const int lane = threadIdx.x;
    const int column = (int)(blockIdx.x % column_blocks * blockDim.y + threadIdx.y);
    const int head = (int)(blockIdx.x / column_blocks % num_v), seq = (int)(blockIdx.x / column_blocks / num_v);
    if (seq >= n_seqs) return;
    if (seqs) state_in = state_out = (float*)seqs[seq].ssm_state;
    const long long gates = (long long)rows * num_v, vectors = gates * size;  // elements of one operand, one sequence
    const long long base = ((long long)head * size + column) * size + lane;
    float s[R];
#pragma unroll
    for (int r = 0; r < R; r++) s[r] = state_in[base + r * 32];

    for (int t = 0; t < taken; t++) {
        const long long gate = seq * gates + (long long)t * num_v + head, at = gate * size;
        float key[R], query[R];
#pragma unroll
        for (int r = 0; r < R; r++) {
            key[r] = k[at + r * 32 + lane];
            query[r] = q[at + r * 32 + lane];
        }
        if (tape) {
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (column != r) continue;  // the warps of the first R columns share q and k
                tape[at + r * 32 + lane] = query[r];
                tape[vectors + at + r * 32 + lane] = key[r];
            }
            if (lane == 0) tape[2 * vectors + at + column] = v[at + column];
            if (lane == 0 && column == 0) {
                tape[3 * vectors + gate] = g_log[gate];
                tape[3 * vectors + gates + gate] = beta[gate];
            }
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

// q, k, v, out (n_seqs, rows, num_v, state_size); g_log, beta (n_seqs, rows, num_v); out may be null. state_size is 32,
// 64, 128 or 256. accept_d not null: only that many rows are taken, and a count outside 0 .. rows writes nothing.
// tape not null: q, k, v, g_log, beta of this launch are copied there, one behind the other.
extern "C" __global__ void __launch_bounds__(128) gdn_scan(
        const float* q, const float* k, const float* v, const float* g_log, const float* beta,
        const float* state_in, float* state_out, float* out, float* tape, const int* accept_d, int rows, int num_v,
        int state_size, float scale, const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {
    const int taken = accept_d ? *accept_d : rows;
    if (taken < 0 || taken > rows) {
        if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) memra_report(health, MEMRA_FAULT_BAD_ACCEPT, layer, 0, 1);
        return;
    }
#define SCAN(R) scan<R>(q, k, v, g_log, beta, state_in, state_out, out, tape, rows, taken, num_v, scale, seqs, n_seqs)
    if (state_size == 32) SCAN(1);
    if (state_size == 64) SCAN(2);
    if (state_size == 128) SCAN(4);
    if (state_size == 256) SCAN(8);
}
MEMRA_EXPORT(gdn_scan)
