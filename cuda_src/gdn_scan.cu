// gdn_scan: the gated delta rule, row after row, on the state of a linear-attention layer.
//
// Per row and head, with S (state_size columns, state_size rows) and g = exp(g_log):
//   kv = S k;  dl = beta (v - g kv);  S = g S + dl k^T;  out = scale S q
// A warp holds its columns of S in registers from the first row to the last: state_in may be state_out, and T rows in
// one launch give the bits of T launches. It asks for them before anything else: all that follows waits for them. Where
// they lie is found before the kernel in front has ended, and the one behind may come as soon as a warp's states and a row of
// operands have been asked for; of a state of 256 the first half, and v and the gates.
#include "gdn.cuh"

#define COLUMNS 8  // of a head's state, per warp; a block has 1, 2 or 4 warps

struct Scan {
    const float *q, *k, *v, *g_log, *beta, *state_in;
    float *state_out, *out, *tape;
    const int* accept_d;
    int rows, num_v, layer;
    float scale;
    memra_health* health;
};

static __device__ inline float4 load4(const float* at, bool aligned) {
    return aligned ? *(const float4*)at : make_float4(at[0], at[1], at[2], at[3]);
}

static __device__ inline void store4(float* at, float4 x) {
    at[0] = x.x, at[1] = x.y, at[2] = x.z, at[3] = x.w;
}

// Columns first .. first + 4 G - 1 of a head. The states lie at multiples of 16 bytes, the operands anywhere.
template <int R, int G>  // state_size / 32; groups of four columns, eight lanes to a column
static __device__ inline void scan_columns(const Scan& p, long long seq, int head, int first) {
    const int size = R * 32, lane = (int)threadIdx.x & 7, column = first + ((int)threadIdx.x >> 3);
    const long long gates = (long long)p.rows * p.num_v, vectors = gates * size;  // of one operand, one sequence
    const long long state = ((long long)head * size + column) * size + 4 * lane;
    const bool aligned = (((unsigned long long)p.q | (unsigned long long)p.k) & 15) == 0;
    float4 s[G][R];
    memra_begin();
#pragma unroll
    for (int i = 0; i < G; i++) {
#pragma unroll
        for (int r = 0; r < R; r++) s[i][r] = memra_read4(p.state_in + state + i * 4 * size + r * 32);
    }
    const int taken = p.accept_d ? *p.accept_d : p.rows;
    if (taken < 0 || taken > p.rows) {
        const bool is_first = (head | first | (int)threadIdx.x) == 0 && seq == 0;
        if (is_first) memra_report(p.health, MEMRA_FAULT_BAD_ACCEPT, p.layer, 0, 1);
        return;
    }
    // One row of operands; a state of 256 leaves no registers for k and q, which are then read where they are used.
    constexpr int HELD = R < 8 ? R : 1;
    float4 held_key[HELD], held_query[HELD];
    float g_log = 0.0f, beta = 0.0f, v[G] = {};
    auto row_of = [&](int t) { return seq * gates + (long long)t * p.num_v + head; };
    auto read = [&](const float* x, int t, int r) { return load4(x + row_of(t) * size + r * 32 + 4 * lane, aligned); };
    auto fetch = [&](int t) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (R < 8) held_key[r % HELD] = read(p.k, t, r), held_query[r % HELD] = read(p.q, t, r);
        }
        g_log = p.g_log[row_of(t)];
        beta = p.beta[row_of(t)];
#pragma unroll
        for (int i = 0; i < G; i++) v[i] = p.v[row_of(t) * size + column + 4 * i];
    };
    if (taken > 0) fetch(0);
    memra_let_begin();
    // The first rows at least are on their way.
    for (int t = 1 + (int)threadIdx.y; t < taken && t < 16; t += (int)blockDim.y) {
        if (lane == 0) memra_prefetch(p.v + row_of(t) * size + column);
        if (threadIdx.x < R) memra_prefetch(p.k + row_of(t) * size + 32 * threadIdx.x);
        if (threadIdx.x < R) memra_prefetch(p.q + row_of(t) * size + 32 * threadIdx.x);
        if (threadIdx.x < 2) memra_prefetch((threadIdx.x ? p.beta : p.g_log) + row_of(t));
    }

#pragma unroll 1
    for (int t = 0; t < taken; t++) {
        const long long gate = row_of(t), at = gate * size;
        auto key = [&](int r) { return R < 8 ? held_key[r % HELD] : read(p.k, t, r); };
        auto query = [&](int r) { return R < 8 ? held_query[r % HELD] : read(p.q, t, r); };
        if (p.tape) {
            if (column < 2) {  // lanes of the first two columns keep what all columns share
#pragma unroll
                for (int r = 0; r < R; r++) {
                    store4(p.tape + column * vectors + at + r * 32 + 4 * lane, column ? key(r) : query(r));
                }
                if (lane == 0) p.tape[3 * vectors + column * gates + gate] = column ? beta : g_log;
            }
#pragma unroll
            for (int i = 0; i < G; i++) {
                if (lane == 0) p.tape[2 * vectors + at + column + 4 * i] = v[i];
            }
        }
        const float g = expf(g_log);
        float4 sum[G];
#pragma unroll
        for (int i = 0; i < G; i++) sum[i] = memra_delta_row<R>(s[i], key, query, g, beta, v[i], lane);
        if (t + 1 < taken) fetch(t + 1);  // while the sums go round
        if (p.out) {
#pragma unroll
            for (int i = 0; i < G; i++) {
                const float total = memra_column_sum(sum[i], lane);
                if (lane == 0) p.out[at + column + 4 * i] = __fmul_rn(total, p.scale);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < G; i++) {
#pragma unroll
        for (int r = 0; r < R; r++) memra_write4(p.state_out + state + i * 4 * size + r * 32, s[i][r]);
    }
}

template <int R, int G>
static __device__ inline void scan(const Scan& p) {
    const int first = (int)(blockIdx.x * blockDim.y + threadIdx.y) * COLUMNS;
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 4 * G) scan_columns<R, G>(p, blockIdx.z, blockIdx.y, first + i);
}

// q, k, v, out (n_seqs, rows, num_v, state_size); g_log, beta (n_seqs, rows, num_v); out may be null. state_size is 32,
// 64, 128 or 256. accept_d not null: only that many rows are taken, and a count outside 0 .. rows writes nothing.
// tape not null: q, k, v, g_log, beta of this launch are copied there, one behind the other.
extern "C" __global__ void __launch_bounds__(128, 5) gdn_scan(
        const float* q, const float* k, const float* v, const float* g_log, const float* beta,
        const float* state_in, float* state_out, float* out, float* tape, const int* accept_d, int rows, int num_v,
        int state_size, float scale, const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {
    Scan p = {q, k, v, g_log, beta, state_in, state_out, out, tape, accept_d, rows, num_v, layer, scale, health};
    if ((int)blockIdx.z < n_seqs) {
        if (seqs) {
            memra_begin();
            p.state_in = p.state_out = (float*)seqs[blockIdx.z].ssm_state;
        }
        if (state_size == 32) scan<1, 2>(p);
        if (state_size == 64) scan<2, 2>(p);
        if (state_size == 128) scan<4, 2>(p);
        if (state_size == 256) scan<8, 1>(p);
    }
    memra_begin();  // blocks without work, too
}
MEMRA_EXPORT(gdn_scan)
