// recur_step: conv_update, gdn_prep and gdn_scan of a linear-attention layer in one launch, with the bits of the three.
//
// A block serves one key head of one sequence: the q and k channels of that head, and `columns` columns of the states
// of the value heads that read it. Where several blocks share a key head, each convolves its q and k channels, and the
// last that has read their rings rolls them: nobody waits.
#include "recur_step.cuh"

#define TICKETS 4096  // key heads that may be shared by blocks

static __device__ unsigned tickets[TICKETS];  // Step.ticket; so launches of one module must not overlap

// Any d_conv. Not inlined, so that it takes no registers from the common case, 4.
template <int R>
static __device__ __noinline__ void run_any(const Step& p, int* is_last) {
    Block<R, MEMRA_TAPS>::run(p, is_last);
}

template <int R>
static __device__ inline void recur_step(Step p, float* shared, int* is_last, int blocks, const memra_seq* seqs) {
    const int part = blockIdx.x, seq = blockIdx.z, SIZE = R * 32;
    p.key_head = blockIdx.y;
    const long long key = (long long)seq * p.num_k + p.key_head;
    p.ticket = tickets + (key < TICKETS ? key : 0);
    if (seqs) {
        p.ring = (float*)seqs[seq].conv_state;
        p.state_in = p.state_out = (float*)seqs[seq].ssm_state;
        p.pos_d = (const int*)seqs[seq].pos_d;
        p.health = (memra_health*)seqs[seq].health;
    }
    if (p.pos_d) p.slot = 0;  // it is added where a fault is reported
    p.rolls = !p.tape && p.d_conv > 1;
    p.is_first = part == 0;
    p.sharers = key < TICKETS ? blocks : 1;
    if (part >= p.sharers) return;
    p.begin = p.end = part * p.columns;  // a block may have no columns, where num_k does not divide num_v
    const int most = p.sharers > 1 ? p.begin + p.columns : 0x7FFFFFFF;
    const int width = blocks > 1 ? min(p.columns, SIZE) : SIZE;
    while (p.end < most && p.key_head + p.end / SIZE * p.num_k < p.num_v) p.end += width;
    if (!p.rolls) p.sharers = 1;
    const long long row = (long long)seq * p.rows;
    p.x += row * (2 * p.num_k + p.num_v) * SIZE;
    p.alpha += row * p.num_v;
    p.beta_raw += row * p.num_v;
    p.out += row * p.num_v * SIZE;
    p.stage = shared;
    p.decay = shared + min(p.rows, ROWS) * (2 * SIZE + p.columns);
    p.beta = p.decay + max(1, p.columns / SIZE) * ROWS;
    p.kept = p.beta + max(1, p.columns / SIZE) * ROWS;
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
        memra_begin();                                                                                                 \
        if (state_size != R * 32) return;                                                                              \
        Step p = {x, w, alpha, beta_raw, dt_bias, a, state_in, conv_state, state_out, out, tape, pos_d, slot, rows,    \
                  d_conv, num_k, num_v, columns, layer, eps, scale, health};                                           \
        if ((int)blockIdx.z < n_seqs) recur_step<R>(p, shared, &is_last, blocks, seqs);                                \
    }                                                                                                                  \
    MEMRA_EXPORT(name)

RECUR_STEP(recur_step_32, 1)
RECUR_STEP(recur_step_64, 2)
RECUR_STEP(recur_step_128, 4)
RECUR_STEP(recur_step_256, 8)
