// recur_step: conv_update, gdn_prep and gdn_scan of a linear-attention layer in one launch, with the bits of the three.
//
// A block serves one key head of one sequence: the q and k channels of that head, and `columns` columns of the states of
// the value heads that read it. ROWS rows at a time it convolves into shared memory, brings q and k to length 1, and
// takes its columns through the rows in registers. Where several blocks share a key head, each convolves its q and k
// channels, and the last that has read their rings rolls them: nobody waits.
#include "gdn.cuh"

#define THREADS 256
#define WARPS 8
#define ROWS 8        // that a block works on at a time
#define TICKETS 4096  // key heads that may be shared by blocks

// How many blocks have read the rings of a key head; 0 again behind the last. Launches of one module must not overlap.
static __device__ unsigned tickets[TICKETS];

struct Step {
    const float *x, *w, *alpha, *beta_raw, *dt_bias, *a, *state_in;
    float *ring, *state_out, *out, *tape;
    const int* pos_d;
    long long slot;
    int rows, d_conv, num_k, num_v, columns, layer;
    float eps, scale;
    memra_health* health;
    int key_head, key_of_all;  // among those of all sequences
    int sharers;               // blocks that share the key head;
    bool is_first, rolls;      // .. this is the first of them; the rings are to be rolled
    int begin, end;            // its columns: those of value head key_head, then of key_head + num_k, ..
    float* stage;              // shared (ROWS, 2 state_size + columns): q, k, v
    float *g_log, *beta;       // shared (heads of `columns`, ROWS)
    float* kept;               // shared (2 state_size, d_conv - 1): the new rings of a key head with several blocks
};

// `count` inputs that are not finite. Not inlined: it is rare, and what is not fetched costs no time.
static __device__ __noinline__ void report(memra_health* health, int layer, const int* pos_d, long long slot, int count) {
    memra_report(health, MEMRA_FAULT_NONFINITE, layer, memra_slot(pos_d, 0) + slot, (unsigned)count);
}

struct Channel {  // what a thread convolves; the window ends with the newest input
    float window[MEMRA_TAPS], weight[MEMRA_TAPS], newest;
};

template <int R>  // state_size / 32
struct Block {
    static constexpr int SIZE = R * 32, KEYS = 2 * SIZE;  // KEYS: the q and the k channels of a key head

    __device__ static inline int value_head(const Step& p, int column) { return p.key_head + column / SIZE * p.num_k; }
    __device__ static inline int conv_dim(const Step& p) { return (2 * p.num_k + p.num_v) * SIZE; }
    __device__ static inline int stride(const Step& p) { return KEYS + p.columns; }

    // The channel of element u of the stage, whose columns begin at `first`.
    __device__ static inline int channel(const Step& p, int u, int first) {
        if (u < KEYS) return (u / SIZE * p.num_k + p.key_head) * SIZE + u % SIZE;
        return (2 * p.num_k + value_head(p, first + u - KEYS)) * SIZE + (first + u - KEYS) % SIZE;
    }

    // Where a column's element of a row stands in an operand or an output (rows, num_v, SIZE).
    __device__ static inline long long vector(const Step& p, int row, int column) {
        return ((long long)row * p.num_v + value_head(p, column)) * SIZE + column % SIZE;
    }

    __device__ static inline void load(const Step& p, Channel& ch, int u, int first, int start) {
        const int c = channel(p, u, first), skip = MEMRA_TAPS - p.d_conv;
        const float *ring = p.ring + (long long)c * (p.d_conv - 1), *x = row_of_x(p, start) + c;
        ch.newest = x[0];
        const bool whole = p.d_conv == 4 && ((unsigned long long)p.w & 15) == 0;
        if (whole) {  // by far the most common
            const float4 w = *(const float4*)(p.w + 4LL * c);
            ch.weight[0] = ch.weight[1] = ch.weight[2] = ch.weight[3] = 0.0f;
            ch.weight[4] = w.x, ch.weight[5] = w.y, ch.weight[6] = w.z, ch.weight[7] = w.w;
        }
#pragma unroll
        for (int i = 0; i < MEMRA_TAPS; i++) {
            if (!whole) ch.weight[i] = i < skip ? 0.0f : p.w[(long long)c * p.d_conv + i - skip];
            if (i == MEMRA_TAPS - 1) continue;  // the newest; the others stand one place on, for the first row to move them
            ch.window[i + 1] = i < skip ? 0.0f : start ? x[(long long)(i - MEMRA_TAPS + 1) * conv_dim(p)] : memra_read(ring + i - skip);
        }
    }

    // Element u of the stage in `count` rows; the whole warp calls it.
    __device__ static inline void convolve(const Step& p, Channel& ch, int u, int first, int start, int count) {
        const float* x = row_of_x(p, start) + channel(p, u, first);
        unsigned bad_in = 0, bad_out = 0;  // bit t: row t is not finite
#pragma unroll 1
        for (int t = 0; t < count; t++) {
#pragma unroll
            for (int i = 0; i < MEMRA_TAPS - 1; i++) ch.window[i] = ch.window[i + 1];
            ch.window[MEMRA_TAPS - 1] = ch.newest;
            bad_in |= (memra_finite(ch.newest) ? 0u : 1u) << t;
            if (t + 1 < count) ch.newest = x[(long long)(t + 1) * conv_dim(p)];
            const float y = memra_convolve(ch.window, ch.weight, MEMRA_TAPS - p.d_conv);
            stage(p, t)[u] = y;
            bad_out |= (memra_finite(y) ? 0u : 1u) << t;
        }
        if (start + count == p.rows && p.rolls) {  // what stands in the window now is the new ring
            const bool is_shared = u < KEYS && p.sharers > 1;
            float* ring = is_shared ? p.kept + u * (p.d_conv - 1) : p.ring + (long long)channel(p, u, first) * (p.d_conv - 1);
#pragma unroll
            for (int i = 0; i < MEMRA_TAPS - 1; i++) {
                if (i < MEMRA_TAPS - p.d_conv) continue;
                if (is_shared) {
                    ring[i - MEMRA_TAPS + p.d_conv] = ch.window[i + 1];
                } else {
                    memra_write(ring + i - MEMRA_TAPS + p.d_conv, ch.window[i + 1]);
                }
            }
        }
        if (!__any_sync(MEMRA_ALL_LANES, (bad_in | bad_out) != 0) || (u < KEYS && !p.is_first)) return;
        if (u < KEYS && p.key_head >= p.num_v) bad_out = 0;  // no value head reads it
#pragma unroll 1
        for (int t = 0; t < count; t++) {  // a run of 32 channels counts once before and once behind the convolution
            const int n = __any_sync(MEMRA_ALL_LANES, bad_in >> t & 1u) + __any_sync(MEMRA_ALL_LANES, bad_out >> t & 1u);
            if (n && threadIdx.x % 32 == 0) report(p.health, p.layer, p.pos_d, p.slot + start + t, n);
        }
    }

    __device__ static inline const float* row_of_x(const Step& p, int row) { return p.x + (long long)row * conv_dim(p); }
    __device__ static inline float* stage(const Step& p, int t) { return p.stage + t * stride(p); }

    // Copies to the tape what begins in columns first .. last - 1: x, then q, k, v, g_log and beta of all rows.
    __device__ static inline void keep(const Step& p, int first, int last, int start, int count, bool with_keys) {
        const int n = KEYS + last - first, dim = conv_dim(p);
        const long long gates = (long long)p.rows * p.num_v, vectors = gates * SIZE;
        float* const operands = p.tape + (long long)p.rows * dim;
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < n * count; i += THREADS) {
            const int u = i % n, t = i / n, row = start + t, column = first + u - KEYS;
            const long long at = (long long)row * dim + channel(p, u, first);
            if (u >= KEYS || (with_keys && p.is_first)) p.tape[at] = p.x[at];
            if (u >= KEYS) operands[2 * vectors + vector(p, row, column)] = stage(p, t)[u];
            if (u < KEYS || column % SIZE) continue;
            const int h = column / SIZE - first / SIZE;
            const long long gate = (long long)row * p.num_v + value_head(p, column);
            operands[3 * vectors + gate] = p.g_log[h * ROWS + t];
            operands[3 * vectors + gates + gate] = p.beta[h * ROWS + t];
#pragma unroll 1
            for (int e = 0; e < SIZE; e++) {
                operands[vector(p, row, column) + e] = stage(p, t)[e];
                operands[vectors + vector(p, row, column) + e] = stage(p, t)[SIZE + e];
            }
        }
    }

    __device__ static inline float* part(const Step& p, float* state, int column) {
        return state + vector(p, 0, column) * SIZE + 4 * (threadIdx.x & 7);
    }

    __device__ static inline void load(const Step& p, float4 (&s)[R], const float* state, int column) {
#pragma unroll
        for (int r = 0; r < R; r++) s[r] = memra_read4(part(p, (float*)state, column) + r * 32);
    }

    // A column through `count` rows.
    __device__ static inline void scan(const Step& p, float4 (&s)[R], int column, int first, int start, int count) {
        const int lane = (int)threadIdx.x & 7, h = (column - first) / SIZE;
#pragma unroll 1
        for (int t = 0; t < count; t++) {
            const float* row = stage(p, t);
            auto query = [&](int r) { return *(const float4*)(row + r * 32 + 4 * lane); };
            auto key = [&](int r) { return *(const float4*)(row + SIZE + r * 32 + 4 * lane); };
            const float g = expf(p.g_log[h * ROWS + t]);
            const float4 sum = memra_delta_row<R>(s, key, query, g, p.beta[h * ROWS + t], row[KEYS + column - first], lane);
            const float total = memra_column_sum(sum, lane);
            if (lane == 0) p.out[vector(p, start + t, column)] = __fmul_rn(total, p.scale);
        }
#pragma unroll
        for (int r = 0; r < R; r++) memra_write4(part(p, p.state_out, column) + r * 32, s[r]);
    }

    // Columns first .. last - 1 through rows start .. start + count - 1; with_keys: q and k are not in the stage yet.
    __device__ static inline void pass(
            const Step& p, int first, int last, int start, int count, bool with_keys, unsigned& ticket) {
        const int tid = (int)threadIdx.x, warp = tid / 32, groups = (last - first) / 4;  // of four columns
        const float* source = start ? p.state_out : p.state_in;
        auto column_of = [&](int group) { return first + 4 * group + tid % 32 / 8; };
        const int gate = THREADS - 1 - tid, column = first + gate / ROWS * SIZE, row = start + gate % ROWS;
        const bool has_gate = column < last && gate % ROWS < count;
        const int head = value_head(p, column);
        const float step = has_gate ? p.alpha[(long long)row * p.num_v + head] : 0.0f;
        const float raw = has_gate ? p.beta_raw[(long long)row * p.num_v + head] : 0.0f;
        const float bias = has_gate ? p.dt_bias[head] : 0.0f, factor = has_gate ? p.a[head] : 0.0f;

        float4 s[R], next[R];  // a warp has asked for two groups at a time
        const int end = KEYS + last - first, begin = tid + (with_keys ? 0 : KEYS);
#pragma unroll 1
        for (int t = 1; t < count; t++) {
            if (begin < end) memra_prefetch(row_of_x(p, start + t) + channel(p, begin, first));
        }
#pragma unroll 1
        for (int u = begin; u - tid < end; u += 2 * THREADS) {
            Channel ch, other;  // asked for before the states, which would keep them waiting
            if (u < end) load(p, ch, u, first, start);
            if (u + THREADS < end) load(p, other, u + THREADS, first, start);
            if (u == begin && warp < groups) load(p, s, source, column_of(warp));
            if (u == begin && warp + WARPS < groups) load(p, next, source, column_of(warp + WARPS));
            if (u < end) convolve(p, ch, u, first, start, count);
            if (u + THREADS < end) convolve(p, other, u + THREADS, first, start, count);
        }
        if (has_gate) {
            p.g_log[gate] = __fmul_rn(factor, memra_softplus(__fadd_rn(step, bias)));
            p.beta[gate] = memra_sigmoid(raw);
            const bool bad_step = !memra_finite(step) || !memra_finite(bias) || !memra_finite(factor);
            const int bad = (bad_step ? 1 : 0) + (memra_finite(raw) ? 0 : 1);
            if (bad && column % SIZE == 0) report(p.health, p.layer, p.pos_d, p.slot + row, bad);  // once a head
        }
        __syncthreads();
        if (with_keys) {
            // What was read from the rings has been used, so that no block can change it any more.
            if (start == 0 && p.sharers > 1 && tid == 0) ticket = atomicInc(&tickets[p.key_of_all], (unsigned)p.sharers - 1);
#pragma unroll 1
            for (int i = warp; i < 2 * count; i += WARPS) {
                float* x = stage(p, i / 2) + i % 2 * SIZE;
                const float scale = memra_inverse_length(x, SIZE, p.eps);
#pragma unroll
                for (int r = 0; r < R; r++) x[r * 32 + tid % 32] = __fmul_rn(x[r * 32 + tid % 32], scale);
            }
            __syncthreads();
        }
        if (p.tape) keep(p, first, last, start, count, with_keys);
#pragma unroll 1
        for (int group = warp; group < groups; group += 2 * WARPS) {
            scan(p, s, column_of(group), first, start, count);
            if (group + 2 * WARPS < groups) load(p, s, source, column_of(group + 2 * WARPS));
            if (group + WARPS >= groups) break;
            scan(p, next, column_of(group + WARPS), first, start, count);
            if (group + 3 * WARPS < groups) load(p, next, source, column_of(group + 3 * WARPS));
        }
    }

    __device__ static inline void run(const Step& p, int* is_last) {
        unsigned ticket = 0;
#pragma unroll 1
        for (int start = 0; start < p.rows; start += ROWS) {
            const int count = min(p.rows - start, ROWS);
#pragma unroll 1
            for (int first = p.begin; first == p.begin || first < p.end; first += p.columns) {
                if (start || first > p.begin) __syncthreads();  // all are done with the stage
                pass(p, first, min(first + p.columns, p.end), start, count, first == p.begin, ticket);
            }
        }
        if (p.sharers == 1) return;
        if (threadIdx.x == 0) *is_last = ticket == (unsigned)p.sharers - 1;
        __syncthreads();
        if (!*is_last) return;
#pragma unroll 1
        for (int u = (int)threadIdx.x; u < KEYS; u += THREADS) {
            const int c = channel(p, u, p.begin), pad = p.d_conv - 1;
#pragma unroll 1
            for (int j = 0; j < pad; j++) memra_write(p.ring + (long long)c * pad + j, p.kept[u * pad + j]);
        }
    }
};

// x (n_seqs, rows, conv_dim), conv_dim = (2 num_k + num_v) state_size; w (conv_dim, d_conv); alpha, beta_raw (n_seqs,
// rows, num_v); dt_bias, a (num_v); out (n_seqs, rows, num_v, state_size); the states lie at multiples of 16 bytes.
// `blocks` blocks share a key head and have `columns` columns each, at most 512, which divides state_size into multiples
// of 32 or is a multiple of it; one block takes all columns, `columns` at a time. No result depends on the two.
// tape not null: x and what conv_update and gdn_prep make of it are copied there for a commit, and the ring stays.
template <int R>
static __device__ inline void recur_step(Step p, float* shared, int* is_last, int blocks, const memra_seq* seqs, int n_seqs) {
    const int part = (int)(blockIdx.x % (unsigned)blocks), key = (int)(blockIdx.x / (unsigned)blocks);
    const int seq = n_seqs == 1 ? 0 : key / p.num_k;
    if (seq >= n_seqs) return;
    if (seqs) {
        p.ring = (float*)seqs[seq].conv_state;
        p.state_in = p.state_out = (float*)seqs[seq].ssm_state;
        p.pos_d = (const int*)seqs[seq].pos_d;
        p.health = (memra_health*)seqs[seq].health;
    }
    p.key_of_all = key;
    p.key_head = key - seq * p.num_k;
    p.slot = p.pos_d ? 0 : p.slot;
    const int tiled = p.num_v / p.num_k, more = p.num_v - tiled * p.num_k;
    p.end = (tiled + (p.key_head < more ? 1 : 0)) * R * 32;
    if (blocks > 1 && key < TICKETS) {
        p.sharers = more ? max(1, min(blocks, (p.end + p.columns - 1) / p.columns)) : blocks;
        p.begin = part * p.columns;
        p.end = min(p.end, p.begin + p.columns);
    } else {
        p.sharers = 1;
        p.begin = 0;
    }
    if (part >= p.sharers) return;
    p.is_first = part == 0;
    p.rolls = !p.tape && p.d_conv > 1;
    if (!p.rolls) p.sharers = 1;
    const long long row = (long long)seq * p.rows;
    p.x += row * Block<R>::conv_dim(p);
    p.alpha += row * p.num_v;
    p.beta_raw += row * p.num_v;
    p.out += row * p.num_v * Block<R>::SIZE;
    p.stage = shared;
    p.g_log = shared + min(p.rows, ROWS) * Block<R>::stride(p);
    p.beta = p.g_log + max(1, p.columns / (R * 32)) * ROWS;
    p.kept = p.beta + max(1, p.columns / (R * 32)) * ROWS;
    Block<R>::run(p, is_last);
}

#define RECUR_STEP(name, R)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 2) name(                                                         \
            const float* x, const float* w, const float* alpha, const float* beta_raw, const float* dt_bias,           \
            const float* a, float* conv_state, const float* state_in, float* state_out, float* out, float* tape,       \
            const int* pos_d, long long slot, int rows, int d_conv, int num_k, int num_v, int state_size, int columns, \
            int blocks, float eps, float scale, const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {  \
        MEMRA_DYN_SHARED(float, shared);                                                                               \
        __shared__ int is_last;                                                                                        \
        if (state_size != R * 32) return;                                                                              \
        Step p = {x, w, alpha, beta_raw, dt_bias, a, state_in, conv_state, state_out, out, tape, pos_d, slot, rows,    \
                  d_conv, num_k, num_v, columns, layer, eps, scale, health};                                           \
        recur_step<R>(p, shared, &is_last, blocks, seqs, n_seqs);                                                      \
    }                                                                                                                  \
    MEMRA_EXPORT(name)

RECUR_STEP(recur_step_32, 1)
RECUR_STEP(recur_step_64, 2)
RECUR_STEP(recur_step_128, 4)
RECUR_STEP(recur_step_256, 8)
