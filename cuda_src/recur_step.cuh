// recur_step.cuh: what a block of recur_step.cu does, for one state_size and one d_conv.
//
// ROWS rows at a time it convolves into shared memory (the stage), brings q and k to length 1, and takes its columns of
// the states through the rows in registers.
#pragma once

#include "gdn.cuh"

#define THREADS 256
#define WARPS 8
#define ROWS 8  // that a block works on at a time

struct Step {
    const float *x, *w, *alpha, *beta_raw, *dt_bias, *a, *state_in;
    float *ring, *state_out, *out, *tape;
    const int* pos_d;
    long long slot;
    int rows, d_conv, num_k, num_v, columns, layer;
    float eps, scale;
    memra_health* health;
    int key_head, sharers;  // blocks that share the key head;
    bool is_first, rolls;   // .. this is the first of them; the rings are to be rolled
    int begin, end;         // its columns: those of value head key_head, then of key_head + num_k, ..
    unsigned* ticket;       // how many of the sharers have read the rings; 0 again behind the last
    float* stage;           // shared (ROWS, 2 state_size + columns): q, k, v
    float *decay, *beta;    // shared (heads of `columns`, ROWS): exp(g_log), beta
    float* kept;            // shared (2 state_size, d_conv - 1): the new rings of a key head that is shared
};

// `count` inputs that are not finite. Not inlined: it is rare, and what is not fetched costs no time.
static __device__ __noinline__ void report(memra_health* health, int layer, const int* pos_d, long long slot,
                                           int count) {
    memra_report(health, MEMRA_FAULT_NONFINITE, layer, memra_slot(pos_d, 0) + slot, (unsigned)count);
}

template <int R, int TAPS>  // R: state_size / 32. TAPS: d_conv, or MEMRA_TAPS for any
struct Block {
    static constexpr int SIZE = R * 32, KEYS = 2 * SIZE;  // KEYS: the q and the k channels of a key head
    static constexpr int AHEAD = R < 8 ? 2 : 1;           // groups of four columns that a warp has asked for at a time

    struct Channel {  // what a thread convolves; the window ends with the newest input
        float window[TAPS], weight[TAPS], newest;
    };

    __device__ static inline int value_head(const Step& p, int column) { return p.key_head + column / SIZE * p.num_k; }
    __device__ static inline int conv_dim(const Step& p) { return (2 * p.num_k + p.num_v) * SIZE; }
    __device__ static inline int stride(const Step& p) { return KEYS + p.columns; }
    __device__ static inline int d_conv(const Step& p) { return TAPS < MEMRA_TAPS ? TAPS : p.d_conv; }

    // The channel of element u of the stage, whose columns begin at `first`.
    __device__ static inline int channel(const Step& p, int u, int first) {
        const int column = first + u - KEYS;
        return u < KEYS ? (u / SIZE * p.num_k + p.key_head) * SIZE + u % SIZE
                        : (2 * p.num_k + value_head(p, column)) * SIZE + column % SIZE;
    }

    // Where a column's element of a row stands in an operand or an output (rows, num_v, SIZE).
    __device__ static inline long long vector(const Step& p, int row, int column) {
        return ((long long)row * p.num_v + value_head(p, column)) * SIZE + column % SIZE;
    }

    __device__ static inline void load(const Step& p, Channel& ch, int c, int start) {
        const int skip = TAPS - d_conv(p);
        const float *ring = p.ring + (long long)c * (d_conv(p) - 1), *w = p.w + (long long)c * d_conv(p);
        const float* x = row_of_x(p, start) + c;
#pragma unroll
        for (int i = 0; i < TAPS; i++) {
            ch.weight[i] = i < skip ? 0.0f : w[i - skip];
            if (i == TAPS - 1) continue;  // the newest; the others stand one place on, for the first row to move them
            ch.window[i + 1] = i < skip ? 0.0f
                               : start  ? x[(long long)(i - TAPS + 1) * conv_dim(p)]
                                        : memra_read(ring + i - skip);
        }
        ch.newest = x[0];
    }

    // Element u of the stage, channel c, in `count` rows; the whole warp calls it.
    __device__ static inline void convolve(const Step& p, Channel& ch, int u, int c, int start, int count) {
        const float* x = row_of_x(p, start) + c;
        unsigned bad_in = 0, bad_out = 0;  // bit t: row t is not finite
#pragma unroll 1
        for (int t = 0; t < count; t++) {
#pragma unroll
            for (int i = 0; i < TAPS - 1; i++) ch.window[i] = ch.window[i + 1];
            ch.window[TAPS - 1] = ch.newest;
            bad_in |= (memra_finite(ch.newest) ? 0u : 1u) << t;
            if (t + 1 < count) ch.newest = x[(long long)(t + 1) * conv_dim(p)];
            const float y = memra_convolve(ch.window, ch.weight, TAPS - d_conv(p));
            stage(p, t)[u] = y;
            bad_out |= (memra_finite(y) ? 0u : 1u) << t;
        }
        if (start + count == p.rows && p.rolls) {  // what stands in the window now is the new ring
            const int pad = d_conv(p) - 1;
            float *ring = p.ring + (long long)c * pad, *kept = p.kept + u * pad;
#pragma unroll
            for (int i = 0; i < TAPS - 1; i++) {
                if (i < TAPS - 1 - pad) continue;
                if (u < KEYS && p.sharers > 1) {
                    kept[i - TAPS + 1 + pad] = ch.window[i + 1];
                } else {
                    memra_write(ring + i - TAPS + 1 + pad, ch.window[i + 1]);
                }
            }
        }
        if (!__any_sync(MEMRA_ALL_LANES, (bad_in | bad_out) != 0) || (u < KEYS && !p.is_first)) return;
        if (u < KEYS && p.key_head >= p.num_v) bad_out = 0;  // no value head reads it
#pragma unroll 1
        for (int t = 0; t < count; t++) {  // a run of 32 channels counts once before and once behind the convolution
            const int in = __any_sync(MEMRA_ALL_LANES, bad_in >> t & 1u);
            const int n = in + __any_sync(MEMRA_ALL_LANES, bad_out >> t & 1u);
            if (n && threadIdx.x % 32 == 0) report(p.health, p.layer, p.pos_d, p.slot + start + t, n);
        }
    }

    __device__ static inline float* stage(const Step& p, int t) { return p.stage + t * stride(p); }
    __device__ static inline const float* row_of_x(const Step& p, int row) {
        return p.x + (long long)row * conv_dim(p);
    }

    // The tape is x, then q, k, v, g_log and beta of all rows. Here but for the gates: what begins in columns
    // first .. last - 1, and with with_keys x of the key head.
    __device__ static inline void keep(const Step& p, int first, int last, int start, int count, bool with_keys) {
        const int tid = (int)threadIdx.x;
        const long long vectors = (long long)p.rows * p.num_v * SIZE;
        float* const operands = p.tape + (long long)p.rows * conv_dim(p);
#pragma unroll 1
        for (int t = 0; t < count; t++) {
            const int row = start + t;
#pragma unroll 1
            for (int u = tid + (with_keys && p.is_first ? 0 : KEYS); u < KEYS + last - first; u += THREADS) {
                const long long at = (long long)row * conv_dim(p) + channel(p, u, first);
                p.tape[at] = p.x[at];
                if (u >= KEYS) operands[2 * vectors + vector(p, row, first + u - KEYS)] = stage(p, t)[u];
            }
#pragma unroll 1
            for (int column = (first + SIZE - 1) / SIZE * SIZE; column < last; column += SIZE) {
#pragma unroll 1
                for (int e = tid; e < KEYS; e += THREADS) {
                    operands[e / SIZE * vectors + vector(p, row, column) + e % SIZE] = stage(p, t)[e];
                }
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

    static constexpr int TURN = AHEAD * WARPS * 4;  // columns that the block's warps have loaded at a time

    // Asks for the states of a turn that begins at `column`, of one head. Thread 0 does it for all.
    __device__ static inline void ask(const Step& p, const float* source, int column, int last) {
        if (threadIdx.x != 0 || column >= last) return;
        memra_prefetch_many(source + vector(p, 0, column) * SIZE, 4 * SIZE * min(TURN, SIZE - column % SIZE));
    }

    // A column through `count` rows.
    __device__ static inline void scan(const Step& p, float4 (&s)[R], int column, int first, int start, int count) {
        const int lane = (int)threadIdx.x & 7, h = (column - first) / SIZE;
#pragma unroll 1
        for (int t = 0; t < count; t++) {
            const float* row = stage(p, t);
            auto query = [&](int r) { return *(const float4*)(row + r * 32 + 4 * lane); };
            auto key = [&](int r) { return *(const float4*)(row + SIZE + r * 32 + 4 * lane); };
            const float4 sum = memra_delta_row<R>(
                s, key, query, p.decay[h * ROWS + t], p.beta[h * ROWS + t], row[KEYS + column - first], lane);
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
        const int end = KEYS + last - first, begin = tid + (with_keys ? 0 : KEYS);
        const float* source = start ? p.state_out : p.state_in;
        auto column_of = [&](int group) { return first + 4 * group + tid % 32 / 8; };
        const int gate = THREADS - 1 - tid, column = first + gate / ROWS * SIZE, row = start + gate % ROWS;
        const bool has_gate = column < last && gate % ROWS < count;
        const int head = value_head(p, column);
        float step = 0.0f, raw = 0.0f, bias = 0.0f, factor = 0.0f;
        float4 s[AHEAD][R];
#pragma unroll 1
        for (int u = begin; u - tid < end; u += 2 * THREADS) {
            Channel ch, other;  // asked for before the states, which would keep them waiting
            const int c = channel(p, u, first), d = channel(p, u + THREADS, first);
            if (u < end) load(p, ch, c, start);
            if (u + THREADS < end) load(p, other, d, start);
            if (u == begin) {
                if (has_gate) {
                    step = p.alpha[(long long)row * p.num_v + head], raw = p.beta_raw[(long long)row * p.num_v + head];
                    bias = p.dt_bias[head], factor = p.a[head];
                }
#pragma unroll 1
                for (int t = 1; t < count; t++) memra_prefetch(row_of_x(p, start + t) + c);
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    if (warp + i * WARPS < groups) load(p, s[i], source, column_of(warp + i * WARPS));
                }
                ask(p, source, first + TURN, last);  // while nothing else is on its way from memory
            }
            if (u < end) convolve(p, ch, u, c, start, count);
            if (u + THREADS < end) convolve(p, other, u + THREADS, d, start, count);
        }
        if (has_gate) {
            const float g_log = __fmul_rn(factor, memra_softplus(__fadd_rn(step, bias)));
            p.decay[gate] = expf(g_log);
            p.beta[gate] = memra_sigmoid(raw);
            if (column % SIZE == 0) {  // once a head
                const bool bad_step = !memra_finite(step) || !memra_finite(bias) || !memra_finite(factor);
                const int bad = (bad_step ? 1 : 0) + (memra_finite(raw) ? 0 : 1);
                if (bad) report(p.health, p.layer, p.pos_d, p.slot + row, bad);
                if (p.tape) {
                    const long long gates = (long long)p.rows * p.num_v;
                    float* const at = p.tape + (long long)p.rows * (conv_dim(p) + 3 * p.num_v * SIZE);
                    at[(long long)row * p.num_v + head] = g_log;
                    at[gates + (long long)row * p.num_v + head] = p.beta[gate];
                }
            }
        }
        __syncthreads();
        if (with_keys) {
            // What was read from the rings has been used, so that no block can change it any more.
            if (start == 0 && p.sharers > 1 && tid == 0) ticket = atomicInc(p.ticket, (unsigned)p.sharers - 1);
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
        for (int base = warp; base < groups; base += AHEAD * WARPS) {
            if (last - first > 4 * TURN) ask(p, source, first + 4 * base + 2 * TURN, last);  // fewer are as fast without
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int group = base + i * WARPS, later = group + AHEAD * WARPS;
                if (group >= groups) break;
                scan(p, s[i], column_of(group), first, start, count);
                if (later < groups) load(p, s[i], source, column_of(later));
            }
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
            const int c = channel(p, u, p.begin), pad = d_conv(p) - 1;
#pragma unroll 1
            for (int j = 0; j < pad; j++) memra_write(p.ring + (long long)c * pad + j, p.kept[u * pad + j]);
        }
    }
};
