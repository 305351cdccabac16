// recur_step.cuh: what a block of recur_step.cu does, for one state_size and one d_conv.
//
// ROWS rows at a time it convolves into shared memory (the stage), brings q and k to length 1, and takes its columns of
// the states through the rows in registers.
#pragma once

#include "gdn.cuh"

#define THREADS 256
#define WARPS 8
#define ROWS 8        // that a block works on at a time
#define TICKETS 4096  // key heads that may be shared by blocks

static __device__ unsigned tickets[TICKETS];  // Step.ticket; so launches of one module must not overlap

struct Step {
    const float *x, *w, *alpha, *beta_raw, *dt_bias, *a, *state_in;
    float *ring, *state_out, *out, *tape;
    const int* pos_d;
    long long slot;
    int rows, d_conv, num_k, num_v, columns, blocks, layer;
    float eps, scale;
    const memra_seq* seqs;
    memra_health* health;
    // Those above are the kernel's arguments; what follows is a block's own.
    float* stage;           // shared (ROWS, 2 state_size + columns): q, k, v
    int key_head, sharers;  // blocks that share the key head;
    bool is_first, rolls;   // .. this is the first of them; the rings are to be rolled
    int begin, end;         // its columns: those of value head key_head, then of key_head + num_k, ..
    unsigned* ticket;       // how many of the sharers have read the rings; 0 again behind the last
    float *decay, *beta;    // shared (heads of `columns`, ROWS): exp(g_log), beta
    float* kept;            // shared (2 state_size, d_conv - 1): the new rings of a key head that is shared
};

// `count` inputs of a row that are not finite. Not inlined: it is rare, and what is not fetched costs no time.
static __device__ __noinline__ void report(const memra_seq* seqs, memra_health* health, int layer, const int* pos_d,
                                           long long slot, int row, int count) {
    if (seqs) health = (memra_health*)seqs[blockIdx.z].health, pos_d = (const int*)seqs[blockIdx.z].pos_d;
    memra_report(health, MEMRA_FAULT_NONFINITE, layer, memra_slot(pos_d, slot) + row, (unsigned)count);
}

template <int R, int TAPS>  // R: state_size / 32. TAPS: d_conv, or MEMRA_TAPS for any
struct Block {
    static constexpr int SIZE = R * 32, KEYS = 2 * SIZE;  // KEYS: the q and the k channels of a key head
    static constexpr int AHEAD = R < 8 ? 2 : 1;           // groups of four columns that a warp has asked for at a time

    // Whether the thread has a channel of q or k.
    __device__ static inline bool has_key() { return KEYS >= THREADS || threadIdx.x < KEYS; }

    struct Channel {  // what a thread convolves, one after the other where it has two; the window ends with the newest input
        float window[TAPS], weight[TAPS], newest;
    };

    __device__ static inline int value_head(const Step& p, unsigned column) {
        return p.key_head + (int)(column / SIZE) * p.num_k;
    }
    __device__ static inline int conv_dim(const Step& p) { return (2 * p.num_k + p.num_v) * SIZE; }
    __device__ static inline int stride(const Step& p) { return KEYS + p.columns; }
    __device__ static inline int d_conv(const Step& p) { return TAPS < MEMRA_TAPS ? TAPS : p.d_conv; }

    // The channel of element u of the stage, whose columns begin at `first`.
    __device__ static inline int channel(const Step& p, unsigned u, unsigned first) {
        const unsigned column = first + u - KEYS;
        const int head = u < KEYS ? (int)(u / SIZE) * p.num_k + p.key_head : 2 * p.num_k + value_head(p, column);
        return head * SIZE + (int)((u < KEYS ? u : column) % SIZE);
    }

    // Where a column's element of a row stands in an operand or an output (rows, num_v, SIZE).
    __device__ static inline long long vector(const Step& p, int row, unsigned column) {
        return ((long long)row * p.num_v + value_head(p, column)) * SIZE + (int)(column % SIZE);
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
            if (n && threadIdx.x % 32 == 0) report(p.seqs, p.health, p.layer, p.pos_d, p.slot, start + t, n);
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

    // Columns first .. last - 1 through rows start .. start + count - 1. with_keys: q and k are not in the stage yet; the
    // thread's channel of them, the first of two where state_size is 256, has been asked for.
    __device__ static inline void pass(const Step& p, int first, int last, int start, int count, bool with_keys,
                                       Channel& key, unsigned& ticket) {
        const unsigned tid = threadIdx.x;
        const int warp = tid / 32, groups = (unsigned)(last - first) / 4;  // of four columns
        const float* source = start ? p.state_out : p.state_in;
        auto column_of = [&](int group) { return first + 4 * group + (int)(tid % 32 / 8); };
        // Columns are convolved from the third warp on: of one row, the first two have q and k to bring to length 1.
        const int begin = KEYS + (int)((tid + THREADS - 64) % THREADS), end = KEYS + last - first;
        // A gate is one row of one value head: the last threads have one each, if has_gate; of others these say nothing.
        const unsigned gate = THREADS - 1 - tid;
        const int column = first + (int)(gate / ROWS) * SIZE, row = start + (int)(gate % ROWS);
        const bool has_gate = column < last && row < start + count;
        const int head = value_head(p, column);
        float step = 0.0f, raw = 0.0f, bias = 0.0f, factor = 0.0f;
        Channel value;  // asked for before the states, which would keep it waiting
        if (begin < end) load(p, value, channel(p, begin, first), start);
        if (has_gate) {
            step = p.alpha[(long long)row * p.num_v + head], raw = p.beta_raw[(long long)row * p.num_v + head];
            bias = p.dt_bias[head], factor = p.a[head];
        }
#pragma unroll 1
        for (int t = 1; t < count; t++) {
            if (with_keys && has_key()) memra_prefetch(row_of_x(p, start + t) + channel(p, tid, first));
            if (begin < end) memra_prefetch(row_of_x(p, start + t) + channel(p, begin, first));
        }
        float4 s[AHEAD][R];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (warp + i * WARPS < groups) load(p, s[i], source, column_of(warp + i * WARPS));
        }
        ask(p, source, first + TURN, last);  // while nothing else is on its way from memory
        if (with_keys) {
#pragma unroll 1
            for (unsigned u = tid; u < KEYS; u += THREADS) {
                const int c = channel(p, u, first);
                if (u > tid) load(p, key, c, start);
                convolve(p, key, u, c, start, count);
            }
            __syncthreads();
            memra_let_begin();  // the next kernel's blocks are in place, and know where to read, when the last of these ends
            // What was read from the rings has been used, so that no block can change it any more.
            if (start == 0 && p.sharers > 1 && tid == 0) ticket = atomicInc(p.ticket, (unsigned)p.sharers - 1);
#pragma unroll 1
            for (int i = warp; i < 2 * count; i += WARPS) {
                float* x = stage(p, i / 2) + i % 2 * SIZE;
                const float scale = memra_inverse_length(x, SIZE, p.eps);
#pragma unroll
                for (int r = 0; r < R; r++) x[r * 32 + tid % 32] = __fmul_rn(x[r * 32 + tid % 32], scale);
            }
        }
#pragma unroll 1
        for (int u = begin; u < end; u += THREADS) {
            const int c = channel(p, u, first);
            if (u > begin) load(p, value, c, start);
            convolve(p, value, u, c, start, count);
        }
        if (has_gate) {
            const float g_log = __fmul_rn(factor, memra_softplus(__fadd_rn(step, bias)));
            p.decay[gate] = expf(g_log);
            p.beta[gate] = memra_sigmoid(raw);
            if (column % SIZE == 0) {  // once a head
                const bool bad_step = !memra_finite(step) || !memra_finite(bias) || !memra_finite(factor);
                const int bad = (bad_step ? 1 : 0) + (memra_finite(raw) ? 0 : 1);
                if (bad) report(p.seqs, p.health, p.layer, p.pos_d, p.slot, row, bad);
                if (p.tape) {
                    const long long gates = (long long)p.rows * p.num_v;
                    float* const at = p.tape + (long long)p.rows * (conv_dim(p) + 3 * p.num_v * SIZE);
                    at[(long long)row * p.num_v + head] = g_log;
                    at[gates + (long long)row * p.num_v + head] = p.beta[gate];
                }
            }
        }
        __syncthreads();
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

    // The block's part of the work; p as the kernel was given it.
    __device__ static inline void run(Step p, int* is_last) {
        const unsigned tid = threadIdx.x;
        const int part = blockIdx.x, seq = blockIdx.z;
        const long long row = (long long)seq * p.rows;
        p.key_head = blockIdx.y;
        if (p.seqs) {
            memra_begin();  // here, too: a table may be what the kernel in front writes
            p.ring = (float*)p.seqs[seq].conv_state;
            p.state_in = p.state_out = (float*)p.seqs[seq].ssm_state;
            __syncwarp();  // keeps this a branch: as predicated loads it makes those below wait, with a table or without
        }
        p.x += row * conv_dim(p);
        Channel key;  // asked for before the block looks for its share: what follows fills the time until it is there
        memra_begin();
        if (has_key()) load(p, key, channel(p, tid, 0), 0);
        p.rolls = !p.tape && p.d_conv > 1;
        p.is_first = part == 0;
        const unsigned head = blockIdx.z * (unsigned)p.num_k + blockIdx.y;  // among those of all sequences
        p.ticket = tickets + (head < TICKETS ? head : 0);
        p.sharers = head < TICKETS ? p.blocks : 1;
        if (part >= p.sharers) return;
        p.begin = p.end = part * p.columns;  // a block may have no columns, where num_k does not divide num_v
        const int most = p.sharers > 1 ? p.begin + p.columns : 0x7FFFFFFF;
        const int width = p.blocks > 1 ? min(p.columns, SIZE) : SIZE;
        while (p.end < most && p.key_head + p.end / SIZE * p.num_k < p.num_v) p.end += width;
        if (!p.rolls) p.sharers = 1;
        p.alpha += row * p.num_v;
        p.beta_raw += row * p.num_v;
        p.out += row * p.num_v * SIZE;
        p.decay = p.stage + min(p.rows, ROWS) * (2 * SIZE + p.columns);
        p.beta = p.decay + max(1, p.columns / SIZE) * ROWS;
        p.kept = p.beta + max(1, p.columns / SIZE) * ROWS;
        unsigned ticket = 0;
#pragma unroll 1
        for (int start = 0; start < p.rows; start += ROWS) {
            const int count = min(p.rows - start, ROWS);
            if (start && has_key()) load(p, key, channel(p, tid, 0), start);
#pragma unroll 1
            for (int first = p.begin; first == p.begin || first < p.end; first += p.columns) {
                if (start || first > p.begin) __syncthreads();  // all are done with the stage
                pass(p, first, min(first + p.columns, p.end), start, count, first == p.begin, key, ticket);
            }
        }
        if (p.sharers == 1) return;
        if (tid == 0) *is_last = ticket == (unsigned)p.sharers - 1;
        __syncthreads();
        if (!*is_last) return;
#pragma unroll 1
        for (unsigned u = tid; u < KEYS; u += THREADS) {
            const int c = channel(p, u, p.begin), pad = d_conv(p) - 1;
#pragma unroll 1
            for (int j = 0; j < pad; j++) memra_write(p.ring + (long long)c * pad + j, p.kept[u * pad + j]);
        }
    }
};
