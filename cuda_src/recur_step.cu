// recur_step: conv_update, gdn_prep and gdn_scan of a linear-attention layer in one launch, with the bits of the three.
//
// A block serves one key head of one sequence: the q and k channels of that head, and `columns` columns of the states
// of the value heads that read it. Where several blocks share a key head, each convolves its q and k channels, and the
// last that has read their rings rolls them: nobody waits. What a block does one after the other is what a small launch
// takes, so it asks for memory first, then finds its share of the work, and lets the kernel behind come in the middle.
#include "recur_step.cuh"

// Any d_conv. Not inlined, so that it takes no registers from the common case, 4.
template <int R>
static __device__ __noinline__ void run_any(const Step& p, int* is_last) {
    Block<R, MEMRA_TAPS>::run(p, is_last);
}

template <int R>
static __device__ inline void recur_step(const Step& p, int* is_last) {
    if (p.d_conv == 4) {
        Block<R, 4>::run(p, is_last);
    } else {
        const Step copy = p;  // its address is taken, and p is to stay in registers
        run_any<R>(copy, is_last);
    }
}

// x (n_seqs, rows, conv_dim), conv_dim = (2 num_k + num_v) state_size; w (conv_dim, d_conv); alpha, beta_raw (n_seqs,
// rows, num_v); dt_bias, a (num_v); out (n_seqs, rows, num_v, state_size); the states lie at multiples of 16 bytes.
// `blocks` blocks share a key head and have `columns` columns each, at most 512, which divides state_size into multiples
// of 32 or is a multiple of it; one block takes all columns, `columns` at a time. No result depends on the two.
// tape not null: x and what conv_update and gdn_prep make of it are copied there for a commit, and the ring stays.
#define RECUR_STEP(name, R)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 2) name(                                                         \
            const float* x, const float* w, const float* alpha, const float* beta_raw, const float* dt_bias,           \
            const float* a, float* conv_state, const float* state_in, float* state_out, float* out, float* tape,       \
            const int* pos_d, long long slot, int rows, int d_conv, int num_k, int num_v, int state_size, int columns, \
            int blocks, float eps, float scale, const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {  \
        MEMRA_DYN_SHARED(float, shared);                                                                               \
        __shared__ int is_last;                                                                                        \
        const Step p = {x, w, alpha, beta_raw, dt_bias, a, state_in, conv_state, state_out, out, tape, pos_d, slot,    \
                        rows, d_conv, num_k, num_v, columns, blocks, layer, eps, scale, seqs, health, shared};         \
        if (state_size == R * 32 && (int)blockIdx.z < n_seqs && rows > 0) recur_step<R>(p, &is_last);                  \
        memra_begin();  /* blocks without work, too */                                                                 \
    }                                                                                                                  \
    MEMRA_EXPORT(name)

RECUR_STEP(recur_step_32, 1)
RECUR_STEP(recur_step_64, 2)
RECUR_STEP(recur_step_128, 4)
RECUR_STEP(recur_step_256, 8)
