// gdn_prep: operands of the gated delta rule from the convolution's output and the gate projections.
//
// conv_out (rows, conv_dim) holds q (num_k heads), k (num_k heads), v (num_v heads) of state_size each.
// Value head h takes key head h mod num_k. A block makes one value head of one row: warp 0 q, warp 1 k
// (both scaled to length 1), warp 2 v, warp 3 the gates.
#include "gdn.cuh"

// q, k, v (n_seqs, rows, num_v, state_size); alpha, beta_raw, g_log, beta (n_seqs, rows, num_v); dt_bias, a (num_v).
extern "C" __global__ void __launch_bounds__(128) gdn_prep(
        const float* conv_out, const float* alpha, const float* beta_raw, const float* dt_bias, const float* a,
        float* q, float* k, float* v, float* g_log, float* beta, const int* pos_d, long long slot,
        int rows, int num_k, int num_v, int state_size, float eps, const memra_seq* seqs, int n_seqs,
        memra_health* health, int layer) {
    memra_begin();
    const int lane = threadIdx.x, warp = threadIdx.y;
    const long long head = blockIdx.x;  // (sequence, row, value head)
    const long long row = head / num_v, seq = row / rows;
    const int vh = (int)(head - row * num_v), kh = vh % num_k;
    if (seq >= n_seqs) return;
    if (seqs) {
        pos_d = (const int*)seqs[seq].pos_d;
        health = (memra_health*)seqs[seq].health;
    }
    // Asked for where something is wrong alone: whoever waits for a position asks for nothing else meanwhile.
    const auto report = [&](unsigned bad) {
        const long long at = memra_slot(pos_d, slot) + row - seq * rows;
        memra_report(health, MEMRA_FAULT_NONFINITE, layer, at, bad);
    };

    if (warp == 3) {
        if (lane != 0) return;
        const float step = alpha[head], raw = beta_raw[head];
        g_log[head] = __fmul_rn(a[vh], memra_softplus(__fadd_rn(step, dt_bias[vh])));
        beta[head] = memra_sigmoid(raw);
        const bool bad_step = !memra_finite(step) || !memra_finite(dt_bias[vh]) || !memra_finite(a[vh]);
        const unsigned bad = (bad_step ? 1u : 0u) + (memra_finite(raw) ? 0u : 1u);
        if (bad) report(bad);
        return;
    }
    const int key_dim = num_k * state_size;
    const long long conv_dim = 2LL * key_dim + (long long)num_v * state_size;
    const int offset = warp == 2 ? 2 * key_dim + vh * state_size : warp * key_dim + kh * state_size;
    const float* x = conv_out + row * conv_dim + offset;
    float* out = (warp == 0 ? q : warp == 1 ? k : v) + head * state_size;

    const float scale = warp == 2 ? 1.0f : memra_inverse_length(x, state_size, eps);
    const bool counted = warp == 2 || vh < num_k;  // a shared key head counts once
    unsigned bad = 0;  // runs of 32 that are not finite
    for (int i = lane; i < state_size; i += 32) {
        out[i] = warp == 2 ? x[i] : __fmul_rn(x[i], scale);
        bad += __any_sync(MEMRA_ALL_LANES, counted && !memra_finite(x[i])) ? 1u : 0u;
    }
    if (bad && lane == 0) report(bad);
}
MEMRA_EXPORT(gdn_prep)
