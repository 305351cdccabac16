// attend: attention of a few query rows over the quantised cache, and the combination of its partial sums.
//
// Keys fall into tiles (tile_shift_of) by their absolute position; tile j belongs to group j mod 132. A block works for one
// group, one K/V head and up to 8 * NT columns, a column being one query head of one row: it takes the group's tiles
// in ascending order and leaves sum, maximum and weight per column. `attend_combine` folds the groups in ascending
// order, eleven at a time, then the twelve results. Where there are many sequences, a block works for eleven groups, one
// after the other, and leaves their fold. So which instruction adds what, and when, depends on a key's position alone: a
// row of many, a row alone, a captured and a batched one give the same bits. A key that a row may not see weighs
// exactly 0, and rows that nobody may see are never read.
//
// Scores: the codes of K are exact in f16; a query is split into two f16 (22 bits). The sum over a block of 32 elements is
// scaled by the block's d in f32. Weights are rounded to f16 before they are summed, so that the weights that
// multiply V are those that divide. V is decoded in f32 and rounded to f16: values beyond 65504 become infinite.
#include "attend.cuh"

// score (columns, MOST_KEYS) = what each key of the tile is to each column, as a power of two; minus infinity unseen.
// start: the tile's first key.
template <int NT>
static __device__ void scores(const Shared& s, const Work& work, int dim, int stride, long long start) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int query_stride = dim + PAD, row = 16 * warp + g, blocks = dim / 32;
    const bool has_keys = 16 * warp < work.tile_keys();  // else its part of a tile counts as unseen
    float total[NT][4] = {};
    for (int block = 0; has_keys && block < blocks; block++) {
        float sum[NT][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int k = block * 32 + half * 16 + 2 * t;
            const uint16_t* upper = s.tile + row * stride + k;
            const uint16_t* lower = upper + 8 * stride;
            const uint32_t a[4] = {*(const uint32_t*)upper, *(const uint32_t*)lower, *(const uint32_t*)(upper + 8),
                                   *(const uint32_t*)(lower + 8)};
#pragma unroll
            for (int part = 0; part < 2; part++) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const uint16_t* column = s.query + (part * 8 * NT + 8 * n + g) * query_stride + k;
                    const uint32_t b[2] = {*(const uint32_t*)column, *(const uint32_t*)(column + 8)};
                    memra_mma(sum[n], a, b);
                }
            }
        }
        const float d[2] = {s.d[row * blocks + block], s.d[(row + 8) * blocks + block]};
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) total[n][i] = __fmaf_rn(sum[n][i], d[i / 2], total[n][i]);
        }
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = 8 * n + 2 * t + (i & 1), key = row + 8 * (i / 2);
            const bool seen = column < work.columns && has_keys && work.sees(column, start + key);
            s.score[column * MOST_KEYS + key] = seen ? __fmul_rn(total[n][i], s.factor[column]) : minus_infinity();
        }
    }
}

// Weights of a tile, and what the sums before it are worth now. A warp takes every fourth column; lane l keys l, l + 32.
template <int NT>
static __device__ void softmax(const Shared& s, float most[2 * NT], float sum[2 * NT]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) {
        const int column = warp + 4 * i;
        const float a = s.score[column * MOST_KEYS + lane], b = s.score[column * MOST_KEYS + lane + 32];
        const float now = memra_max(most[i], memra_warp_max(memra_max(a, b)));
        const float base = now == minus_infinity() ? 0.0f : now;
        const float worth = exp2_of(__fsub_rn(most[i], base));
        const uint16_t p = memra_to_f16(exp2_of(__fsub_rn(a, base))), r = memra_to_f16(exp2_of(__fsub_rn(b, base)));
        s.weight[column * (MOST_KEYS + PAD) + lane] = p;
        s.weight[column * (MOST_KEYS + PAD) + lane + 32] = r;
        const float added = memra_warp_sum(__fadd_rn(memra_from_f16(p), memra_from_f16(r)));
        sum[i] = __fmaf_rn(sum[i], worth, added);
        most[i] = now;
        if (lane == 0) s.rescale[column] = worth;
    }
}

// out (dims of this warp, columns) = out * rescale + V^T weights.
template <int MT, int NT>
static __device__ void weigh(const Shared& s, const Work& work, int dim, int stride, long long start, float out[MT][NT][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float worth[2] = {s.rescale[8 * n + 2 * t], s.rescale[8 * n + 2 * t + 1]};
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) out[m][n][i] = __fmul_rn(out[m][n][i], worth[i & 1]);
        }
    }
    const bool odd = *s.odd != 0;
#pragma unroll
    for (int k = 0; k < MOST_KEYS; k += 16) {
        if (k >= work.tile_keys()) break;
        uint32_t b[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint16_t* column = s.weight + (8 * n + g) * (MOST_KEYS + PAD) + k + 2 * t;
            b[n][0] = *(const uint32_t*)column;
            b[n][1] = *(const uint32_t*)(column + 8);
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const int from = (warp + 4 * m) * 16;
            if (from >= dim) continue;
            uint32_t a[4];
            memra_load_transposed(a, s.tile, stride, k, from);
            if (!odd) {
#pragma unroll
                for (int n = 0; n < NT; n++) memra_mma(out[m][n], a, b[n]);
                continue;
            }
            // A row that not every column sees holds an infinity or a NaN, which 0 would not silence: one row of
            // queries at a time, with the keys that it does not see left out, keeps its own columns of the result.
            for (int first = 0; first < work.columns;) {
                const int row = (work.first_column + first) / work.gqa;
                int end = (row + 1) * work.gqa - work.first_column;
                end = end < work.columns ? end : work.columns;
                uint32_t seen[4];
                for (int i = 0; i < 4; i++) {
                    const long long key = start + k + 2 * t + 8 * (i / 2);
                    seen[i] = a[i] & ((work.sees(first, key) ? 0xFFFFu : 0u) | (work.sees(first, key + 1) ? 0xFFFF0000u : 0u));
                }
                for (int n = 0; n < NT; n++) {
                    float kept[4] = {out[m][n][0], out[m][n][1], out[m][n][2], out[m][n][3]};
                    memra_mma(kept, seen, b[n]);
                    for (int i = 0; i < 4; i++) {
                        const int column = 8 * n + 2 * t + (i & 1);
                        if (column >= first && column < end) out[m][n][i] = kept[i];
                    }
                }
                first = end;
            }
        }
    }
}

// A group's sums on top of those of the fold's groups before; they begin anew.
template <int MT, int NT>
static __device__ void fold(const Shared& s, float out[MT][NT][4], float most[2 * NT], float sum[2 * NT],
                            float all_out[MT][NT][4], float all_most[2 * NT], float all_sum[2 * NT]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) {
        const Worth worth = fold_reference(all_most[i], most[i]);
        all_sum[i] = fold_sum(all_sum[i], sum[i], worth);
        most[i] = minus_infinity();
        sum[i] = 0.0f;
        if (lane == 0) {
            s.rescale[warp + 4 * i] = worth.before;
            s.own[warp + 4 * i] = worth.own;
        }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = 8 * n + 2 * t + (i & 1);
            const Worth worth = {s.rescale[column], s.own[column]};
#pragma unroll
            for (int m = 0; m < MT; m++) {
                all_out[m][n][i] = fold_sum(all_out[m][n][i], out[m][n][i], worth);
                out[m][n][i] = 0.0f;
            }
        }
    }
}

// q (n_seqs, rows, n_head, head_dim_k). part (n_seqs, rows, n_head, pieces, head_dim_v + TAIL): sum, maximum, weight of a
// piece, which is one of GROUPS groups or FOLDS folds. Blocks: piece, then K/V head, then chunk of columns, then sequence.
template <int MT, int NT>
static __device__ void attend(const float* q, const uint8_t* k, const uint8_t* v, const int* pos_d, long long slot,
                              int rows, long long max_ctx, int n_head, int n_head_kv, int head_dim_k, int head_dim_v,
                              long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format, float scale,
                              int window, float* part, int pieces, const memra_seq* seqs, int n_seqs, memra_health* health,
                              int layer) {
    const int width = 8 * NT, gqa = n_head / n_head_kv, chunks = (rows * gqa + width - 1) / width;
    const int piece = (int)(blockIdx.x % pieces), head = (int)(blockIdx.x / pieces % n_head_kv);
    const int chunk = (int)(blockIdx.x / pieces / n_head_kv % chunks), seq = (int)(blockIdx.x / pieces / n_head_kv / chunks);
    if (seq >= n_seqs) return;
    if (seqs) {
        k = (const uint8_t*)seqs[seq].k;
        v = (const uint8_t*)seqs[seq].v;
        pos_d = (const int*)seqs[seq].pos_d;
        health = (memra_health*)seqs[seq].health;
        max_ctx = seqs[seq].max_ctx;
    }
    Work work;
    work.pos = memra_slot(pos_d, slot);
    work.rows = rows;
    work.gqa = gqa;
    work.window = window;
    work.tile_shift = tile_shift_of(n_head_kv);
    work.first_column = chunk * width;
    work.columns = rows * gqa - work.first_column < width ? rows * gqa - work.first_column : width;
    if (work.pos < 0 || work.pos + rows > max_ctx) {
        if (piece + head + chunk == 0 && threadIdx.x == 0) memra_report(health, MEMRA_FAULT_SLOT_RANGE, layer, work.pos, 1);
        return;
    }
    const long long first_tile = first_key(work.last_key(0), window) >> work.tile_shift;
    const long long last_tile = work.last_key(work.columns - 1) >> work.tile_shift;
    // The piece's first group is so many behind that of the first tile, or the latter is among the piece's.
    const int groups = GROUPS / pieces, behind = (int)((piece * groups - first_tile) % GROUPS + GROUPS) % GROUPS;
    const bool reports = behind == 0 || behind > GROUPS - groups;  // one piece does
    if (!reports && first_tile + behind > last_tile) return;

    MEMRA_DYN_SHARED(uint8_t, bytes);
    const Shared s = carve(bytes, work.tile_keys(), width, head_dim_k, head_dim_v);
    const int stride = (head_dim_k > head_dim_v ? head_dim_k : head_dim_v) + PAD;
    load_query(s, work, q + (long long)seq * rows * n_head * head_dim_k, n_head, head, head_dim_k, scale, width,
               reports ? health : nullptr, layer);
    float out[MT][NT][4] = {}, most[2 * NT], sum[2 * NT] = {};
    float all_out[MT][NT][4] = {}, all_most[2 * NT], all_sum[2 * NT] = {};
    for (int i = 0; i < 2 * NT; i++) most[i] = all_most[i] = minus_infinity();
    for (int group = 0; group < groups; group++) {
        const long long begin = first_tile + (behind + group) % GROUPS;
        if (begin > last_tile) continue;
        for (long long tile = begin; tile <= last_tile; tile += GROUPS) {
            const long long start = tile << work.tile_shift;
            load_tile(s, work, k, k_tok_bytes, k_format, head, head_dim_k, stride, start, false);
            __syncthreads();
            scores<NT>(s, work, head_dim_k, stride, start);
            __syncthreads();
            softmax<NT>(s, most, sum);
            load_tile(s, work, v, v_tok_bytes, v_format, head, head_dim_v, stride, start, true);
            __syncthreads();
            weigh<MT, NT>(s, work, head_dim_v, stride, start, out);
            __syncthreads();
        }
        fold<MT, NT>(s, out, most, sum, all_out, all_most, all_sum);
    }

    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int entry = head_dim_v + TAIL;
    part += (long long)seq * rows * n_head * pieces * entry;
    for (int n = 0; n < NT; n++) {
        for (int i = 0; i < 4; i++) {
            const int column = 8 * n + 2 * t + (i & 1);
            if (column >= work.columns) continue;
            const int row = (work.first_column + column) / gqa, of_head = head * gqa + (work.first_column + column) % gqa;
            float* to = part + (((long long)row * n_head + of_head) * pieces + piece) * entry;
            for (int m = 0; m < MT; m++) {
                const int d = (warp + 4 * m) * 16 + g + 8 * (i / 2);
                if (d < head_dim_v) to[d] = all_out[m][n][i];
            }
        }
    }
    for (int i = 0; i < 2 * NT; i++) {
        const int column = warp + 4 * i;
        if (lane != 0 || column >= work.columns) continue;
        const int row = (work.first_column + column) / gqa, of_head = head * gqa + (work.first_column + column) % gqa;
        float* to = part + (((long long)row * n_head + of_head) * pieces + piece) * entry;
        to[head_dim_v] = all_most[i];
        to[head_dim_v + 1] = all_sum[i];
    }
}

// One entry per width of V and number of columns; wide ones take 32 columns, the others 8.
#define ATTEND(name, MT, NT)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                            \
            const float* q, const uint8_t* k, const uint8_t* v, const int* pos_d, long long slot, int rows,                \
            long long max_ctx, int n_head, int n_head_kv, int head_dim_k, int head_dim_v, long long k_tok_bytes,           \
            long long v_tok_bytes, int k_format, int v_format, float scale, int window, float* part, int pieces,           \
            const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {                                          \
        memra_begin();                                                                                                     \
        attend<MT, NT>(q, k, v, pos_d, slot, rows, max_ctx, n_head, n_head_kv, head_dim_k, head_dim_v, k_tok_bytes,        \
                       v_tok_bytes, k_format, v_format, scale, window, part, pieces, seqs, n_seqs, health, layer);         \
    }                                                                                                                      \
    MEMRA_EXPORT(name)
ATTEND(attend_64, 1, 1)
ATTEND(attend_64_wide, 1, 4)
ATTEND(attend_128, 2, 1)
ATTEND(attend_128_wide, 2, 4)
ATTEND(attend_192, 3, 1)
ATTEND(attend_192_wide, 3, 4)
ATTEND(attend_256, 4, 1)
ATTEND(attend_256_wide, 4, 4)
ATTEND(attend_512, 8, 1)
