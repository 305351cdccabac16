// conv_update, conv_ring_rebuild: the causal depthwise convolution in front of a linear-attention layer.
//
// Its state is a ring of the last d_conv - 1 raw inputs per channel: conv_state (conv_dim, d_conv - 1),
// column 0 the oldest. d_conv is 1 to 8.
#include "gdn.cuh"

#define TAPS MEMRA_TAPS
#define ROWS 16  // rows of one channel that a thread walks; at least the longest ring

// x, out (n_seqs, rows, conv_dim); w (conv_dim, d_conv), w[0] times the oldest input; out has SiLU applied.
// tape not null: x is copied there and the ring stays as it is, for a commit to rebuild.
// Blocks: the channels in runs of 128, then the same for the next ROWS rows, then the next sequence. Only a thread
// of the first rows touches the ring; later ones find the inputs before theirs in x.
extern "C" __global__ void __launch_bounds__(128) conv_update(
        const float* x, const float* w, float* conv_state, float* out, float* tape, const int* pos_d,
        long long slot, int rows, int conv_dim, int d_conv, const memra_seq* seqs, int n_seqs,
        memra_health* health, int layer) {
    memra_begin();
    const int channel_blocks = (conv_dim + 127) / 128, row_blocks = (rows + ROWS - 1) / ROWS;
    const int c = (int)(blockIdx.x % channel_blocks) * 128 + (int)threadIdx.x;
    const long long start = (long long)(blockIdx.x / channel_blocks % row_blocks) * ROWS;
    const int seq = (int)(blockIdx.x / channel_blocks / row_blocks);
    if (seq >= n_seqs) return;
    if (seqs) {
        conv_state = (float*)seqs[seq].conv_state;
        pos_d = (const int*)seqs[seq].pos_d;
        health = (memra_health*)seqs[seq].health;
    }
    x += (long long)seq * rows * conv_dim;
    out += (long long)seq * rows * conv_dim;
    const int count = rows - start < ROWS ? (int)(rows - start) : ROWS;
    const int pad = d_conv - 1, skip = TAPS - d_conv;  // taps below `skip` do not exist
    float* ring = conv_state + (long long)c * pad;
    unsigned bad = 0;  // bit r: row start + r is not finite

    if (c < conv_dim) {
        float window[TAPS] = {}, weight[TAPS] = {};
#pragma unroll
        for (int i = 0; i < TAPS; i++) {
            if (i < skip) continue;
            weight[i] = w[(long long)c * d_conv + i - skip];
            if (i == TAPS - 1) continue;  // the newest; the others stand one place on, for the first row to move them
            window[i + 1] = start == 0 ? ring[i - skip] : x[(start - (TAPS - 1) + i) * conv_dim + c];
        }
        for (int r = 0; r < count; r++) {
            const float newest = x[(start + r) * conv_dim + c];
            bad |= (memra_finite(newest) ? 0u : 1u) << r;
            if (tape) tape[(start + r) * conv_dim + c] = newest;
#pragma unroll
            for (int i = 0; i < TAPS - 1; i++) window[i] = window[i + 1];
            window[TAPS - 1] = newest;
            out[(start + r) * conv_dim + c] = memra_convolve(window, weight, skip);
        }
        if (start == 0 && !tape) memra_roll(ring, x + c, rows, conv_dim, pad);
    }
    if (__any_sync(MEMRA_ALL_LANES, bad != 0)) {
        const long long first = memra_slot(pos_d, slot) + start;
#pragma unroll 1
        for (int r = 0; r < ROWS; r++) {
            memra_report_any(bad >> r & 1u, health, MEMRA_FAULT_NONFINITE, layer, first + r);
        }
    }
}
MEMRA_EXPORT(conv_update)

// The ring after the first `accept` rows of x (rows, conv_dim) on top of ring_old, which may be conv_state itself.
// Of n_layers at once: x and the rings of the next begin x_apart and ring_apart elements further. layer: of the first.
extern "C" __global__ void __launch_bounds__(128) conv_ring_rebuild(
        const float* x, const float* ring_old, float* conv_state, const int* accept_d, int accept,
        int rows, int conv_dim, int d_conv, int n_layers, long long x_apart, long long ring_apart,
        memra_health* health, int layer) {
    memra_begin();
    const int taken = accept_d ? *accept_d : accept;
    if (taken < 0 || taken > rows) {
        if (blockIdx.x == 0 && threadIdx.x == 0)
            memra_report(health, MEMRA_FAULT_BAD_ACCEPT, layer, 0, (unsigned)n_layers);
        return;
    }
    const int channel_blocks = (conv_dim + 127) / 128, which = (int)(blockIdx.x / channel_blocks), pad = d_conv - 1;
    const int c = (int)(blockIdx.x % channel_blocks) * 128 + (int)threadIdx.x;
    if (c >= conv_dim || which >= n_layers) return;
    x += which * x_apart;
    ring_old += which * ring_apart;
    conv_state += which * ring_apart;
    // Ascending, so a column is read before it is overwritten.
    for (int j = 0; j < pad; j++) {
        conv_state[(long long)c * pad + j] = taken + j < pad ? ring_old[(long long)c * pad + taken + j]
                                                             : x[(long long)(taken - pad + j) * conv_dim + c];
    }
}
MEMRA_EXPORT(conv_ring_rebuild)
