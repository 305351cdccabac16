// attend_pipe: attend for GPUs that copy in bulk (sm_90), where the geometry fits; the order of its sums is attend's.
//
// One block per group (and the next sequence's same group when it is done). A warp brings stages of K and V, rows of all
// K/V heads as they lie in memory, into two rings; eight warps compute, a team of them for each K/V head. A warp scores
// 16 keys of a stage for all columns of its head, hands their weights to its team, and sums up its own dims of V over
// the keys of the stage before, so that the two kinds of work overlap.
//
// Scores: of q8_0, products of bytes; a query is 256 * high + low, 15 bits below its largest element, and the sum over a
// block is an integer that d scales. Of fp8, products of f16, a query is two f16. The reference that weights stand
// against is a whole number and moves only where a score passes it by 15, for that column alone; elsewhere the sums
// are multiplied by 1. Weights and V are rounded to f16: values beyond 65504 become infinite.
#include "attend_pipe_query.cuh"
#include "attend_pipe_weigh.cuh"

#if !MEMRA_PTX || __CUDA_ARCH__ == 900

#define RAISE_AT 15.0f  // a weight stays below 2^15, which f16 holds,
#define HEADROOM 5.0f   // and the largest so far is at most 2^5, so that f16 keeps what weighs 2^-29 of it

// What a warp needs to score its 16 keys of each stage: rows g and g + 8 of a fragment are keys own_key and own_key + 2.
struct Scorer {
    int at, own_key;     // byte within a stage, key within a stage
    int pairs;           // of blocks
    const uint4* query;  // of this lane
    const float* factor; // of columns 2t, 2t + 1
    int all_from, all_to;  // keys that all columns see
};

// score = what the warp's keys are to the columns, as powers of two; minus infinity unseen.
template <int NT>
static __device__ void score_stage(const Block& b, const Scorer& s, const View& view, bool fp8, int stage, int first_token,
                                   float score[NT][4]) {
    const int t = threadIdx.x & 3;
    const uint8_t *upper = b.k.ring + stage * b.k.stage_bytes + s.at, *lower = upper + 2 * b.k.token_bytes;
#pragma unroll
    for (int n = 0; n < NT; n++) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
    if (fp8) {
#pragma unroll 1
        for (int i = 0; i < s.pairs; i++) {
            score_fp8<NT>(upper + 64 * i, lower + 64 * i, s.query + 128 * i, b.query_bytes / 16, score);
        }
    } else {
#pragma unroll(NT > 2 ? 1 : 4)
        for (int i = 0; i < s.pairs; i++) {
            score_q8<NT>(upper + 68 * i, lower + 68 * i, s.query + 64 * i, b.query_bytes / 16, score);
        }
    }
    const bool edge = first_token < s.all_from || first_token + b.tokens - 1 > s.all_to;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 factor = *(const float2*)(s.factor + 8 * n);
        score[n][0] = __fmul_rn(score[n][0], factor.x);
        score[n][1] = __fmul_rn(score[n][1], factor.y);
        score[n][2] = __fmul_rn(score[n][2], factor.x);
        score[n][3] = __fmul_rn(score[n][3], factor.y);
    }
    if (!edge) return;
    const int key = first_token + s.own_key;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int from = view.first(8 * n + 2 * t + i), to = view.last(8 * n + 2 * t + i);
            if (key < from || key > to) score[n][i] = minus_infinity();
            if (key + 2 < from || key + 2 > to) score[n][i + 2] = minus_infinity();
        }
    }
}

// Weights of this warp's 16 keys, as fragments for the team. Whether a score has passed its reference.
template <int NT>
static __device__ bool hand_over(const float score[NT][4], const float reference[NT][2], uint2* to) {
    bool raise = false;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float p[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float base = reference[n][i] == minus_infinity() ? 0.0f : reference[n][i];
            p[i] = exp2_of(__fsub_rn(score[n][i], base));
            p[i + 2] = exp2_of(__fsub_rn(score[n][i + 2], base));
            raise |= memra_max(score[n][i], score[n][i + 2]) > __fadd_rn(reference[n][i], RAISE_AT);
        }
        to[n * 32 + (threadIdx.x & 31)] = make_uint2(memra_transpose(memra_pack_f16(p[0], p[1])),
                                                     memra_transpose(memra_pack_f16(p[2], p[3])));
    }
    return raise;
}

// The team agrees on the next references: `most` of each warp, a barrier, then raised() for what is to be multiplied.
template <int NT>
static __device__ void publish_most(const float score[NT][4], float* most) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float two[2] = {memra_max(score[n][0], score[n][2]), memra_max(score[n][1], score[n][3])};
#pragma unroll
        for (int apart = 4; apart < 32; apart <<= 1) {
            two[0] = memra_max(two[0], __shfl_xor_sync(MEMRA_ALL_LANES, two[0], apart));
            two[1] = memra_max(two[1], __shfl_xor_sync(MEMRA_ALL_LANES, two[1], apart));
        }
        if (lane < 4) *(float2*)(most + 8 * n + 2 * lane) = make_float2(two[0], two[1]);
    }
}

// Moves a reference where the largest score has passed it; what the sums are worth then, 1 where it has not.
static __device__ float raised(float& reference, float most) {
    if (!(most > __fadd_rn(reference, RAISE_AT))) return 1.0f;
    const float now = __fsub_rn(ceilf(most), HEADROOM), worth = exp2_of(__fsub_rn(reference, now));
    reference = now;
    return worth;
}

// A warp's way through the stages of a task, and what it leaves in part.
template <int WORDS, int NT>
static __device__ void compute(const Block& b, const Task& task, Turn& k_turn, Turn& v_turn, int head_dim_k, int head_dim_v,
                               int n_head_kv, int k_format, int v_format, int group) {
    // Many columns need the registers that scores would take while V is summed: their keys stay until the references
    // are settled, and are scored again if they must move.
    constexpr bool KEEP_SCORES = NT <= 2;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int team_warps = 1 << b.team_shift, threads = 32 * team_warps;
    const int head = warp >> b.team_shift, member = warp & (team_warps - 1), team = 1 + head;
    const int slabs = b.tokens / 16, quarter = b.tokens / QUARTERS, first_dim = member * 64 * WORDS;
    const bool scores = member < slabs, sums = first_dim < head_dim_v, fp8 = k_format == MEMRA_FP8;
    const View& view = task.view;
    const int any_from = view.first(0), all_from = view.first(view.columns - 1);
    const int all_to = view.last(0), any_to = view.last(view.columns - 1);

    Scorer scorer;
    scorer.own_key = (g >> 1) * quarter + 4 * member + (g & 1);
    scorer.at = b.k.quarter(g >> 1) + (4 * member + (g & 1)) * b.k.token_bytes + head * b.k.head_bytes;
    scorer.pairs = head_dim_k / 64;
    scorer.query = (const uint4*)(b.query + head * NT * b.query_bytes) + lane;
    scorer.factor = b.factor + head * 8 * NT + 2 * t;
    scorer.all_from = all_from;
    scorer.all_to = all_to;
    const int v_at = b.v.quarter(t) + head * b.v.head_bytes + first_dim / 32 * block_bytes_of(v_format);
    const int lane_dim = first_dim + (v_format == MEMRA_FP8 ? VFp8<WORDS>::first_dim(g) : VQ5<WORDS>::first_dim(g));
    const int step = v_format == MEMRA_FP8 ? VFp8<WORDS>::step : VQ5<WORDS>::step;
    const int apart = v_format == MEMRA_FP8 ? VFp8<WORDS>::apart : VQ5<WORDS>::apart;
    const uint32_t base = f16_1024();
    uint2* const weights[2] = {b.weight + head * slabs * NT * 32, b.weight + (n_head_kv + head) * slabs * NT * 32};
    float* const most = b.most + head * team_warps * 8 * NT;

    float out[4 * WORDS][NT][4] = {}, sum[NT][4] = {}, reference[NT][2], score[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++) reference[n][0] = reference[n][1] = minus_infinity();

    Walk next = task.walk, behind = task.walk;  // of K, and of V one stage later
    bool first = true;
    for (int parity = 1; first || behind.more(); parity ^= 1) {
        // The scores of the next stage.
        const bool more = next.more();
        const int scored = k_turn.stage, scored_token = next.first_token(b.tokens);
        bool raise = first;
        if (more) {
            memra_pipe_wait(b.k.full + scored, k_turn.parity);
            if (scores) {
                score_stage<NT>(b, scorer, view, fp8, scored, scored_token, score);
                if (!first) raise = hand_over<NT>(score, reference, weights[parity ^ 1] + member * NT * 32);
            }
            if (KEEP_SCORES) {
                __syncwarp();
                if (lane == 0) memra_pipe_arrive(b.k.empty + scored);
            }
            k_turn.next(b.k.stages);
            next.next();
        }
        // The values of the stage before.
        if (!first) {
            memra_pipe_wait(b.v.full + v_turn.stage, v_turn.parity);
            uint8_t* stage = b.v.ring + v_turn.stage * b.v.stage_bytes;
            const int start = behind.first_token(b.tokens), stop = start + b.tokens - 1;
            if (start < any_from || stop > any_to) {  // rows that nobody sees become 0, whatever stands there
                for (int i = member; i < b.tokens; i += team_warps) {
                    if (start + i >= any_from && start + i <= any_to) continue;
                    const int c = i / quarter;
                    uint8_t* row = stage + b.v.quarter(c) + (i - c * quarter) * b.v.token_bytes + head * b.v.head_bytes;
                    for (int j = 2 * lane; j < b.v.head_bytes; j += 64) *(uint16_t*)(row + j) = 0;
                }
                memra_pipe_fence();
                memra_team_sync(team, threads);
            }
            if (sums) {
                const bool split = view.columns > view.gqa && (start < all_from || stop > all_to);
                const uint8_t* head_rows = stage + head * b.v.head_bytes;
                const int dims = head_dim_v - first_dim < 64 * WORDS ? head_dim_v - first_dim : 64 * WORDS;
                if (split && any_odd(b, view, head_rows, v_format, start, first_dim, dims)) {
                    weigh_odd_stage<WORDS, NT>(b, view, head_rows, v_format, start, head_dim_v, lane_dim, step, apart,
                                               weights[parity], out, sum);
                } else if (v_format == MEMRA_Q5_1) {
                    weigh_stage<VQ5<WORDS>, WORDS, NT>(b, stage + v_at, dims, weights[parity], base, out, sum);
                } else if (v_format == MEMRA_Q4_0) {
                    weigh_stage<VQ4<WORDS>, WORDS, NT>(b, stage + v_at, dims, weights[parity], base, out, sum);
                } else {
                    weigh_stage<VFp8<WORDS>, WORDS, NT>(b, stage + v_at, dims, weights[parity], base, out, sum);
                }
            }
            __syncwarp();
            if (lane == 0) memra_pipe_arrive(b.v.empty + v_turn.stage);
            v_turn.next(b.v.stages);
            behind.next();
            raise = memra_team_any(team, threads, raise);
        }
        // Where a score has passed its reference, the team agrees on the next one.
        if (more && raise) {
            if (scores) {
                if (!KEEP_SCORES && !first) score_stage<NT>(b, scorer, view, fp8, scored, scored_token, score);
                publish_most<NT>(score, most + member * 8 * NT);
            }
            memra_team_sync(team, threads);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float2 all = make_float2(minus_infinity(), minus_infinity());
                for (int other = 0; other < slabs; other++) {
                    const float2 two = *(const float2*)(most + (other * NT + n) * 8 + 2 * t);
                    all = make_float2(memra_max(all.x, two.x), memra_max(all.y, two.y));
                }
                const float worth[2] = {raised(reference[n][0], all.x), raised(reference[n][1], all.y)};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum[n][i] = __fmul_rn(sum[n][i], worth[i & 1]);
#pragma unroll
                    for (int d = 0; d < 4 * WORDS; d++) out[d][n][i] = __fmul_rn(out[d][n][i], worth[i & 1]);
                }
            }
            if (scores) hand_over<NT>(score, reference, weights[parity ^ 1] + member * NT * 32);
            memra_team_sync(team, threads);
        }
        if (!KEEP_SCORES && more) {
            __syncwarp();
            if (lane == 0) memra_pipe_arrive(b.k.empty + scored);
        }
        first = false;
    }

    if (!sums) return;
    const int entry = head_dim_v + TAIL;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int column = 8 * n + 2 * t + i, row = view.row(column);
            if (column >= view.columns) continue;
            const int of_all = (row * n_head_kv + head) * view.gqa + view.first_column + column - row * view.gqa;
            float* to = task.part + ((long long)of_all * GROUPS + group) * entry;
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                const int d = lane_dim + w * step;
                if (d >= head_dim_v) continue;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int x = i + 2 * half;
                    *(float4*)(to + d + half * apart) = make_float4(out[4 * w][n][x], out[4 * w + 1][n][x],
                                                                    out[4 * w + 2][n][x], out[4 * w + 3][n][x]);
                }
            }
            if (member == 0 && g == 0) *(float2*)(to + head_dim_v) = make_float2(reference[n][i], sum[n][i]);
        }
    }
}

// Brings one stage of a plane: rows first_token .. of those the plane has.
static __device__ void bring(const Plane& plane, const Turn& turn, const uint8_t* bytes, int first_token, int tokens,
                             int rows) {
    const int quarter = tokens / QUARTERS, here = rows - first_token < tokens ? rows - first_token : tokens;
    memra_pipe_expect(plane.full + turn.stage, here * plane.token_bytes);
    for (int c = 0; c < QUARTERS; c++) {
        const int n = here - c * quarter < quarter ? here - c * quarter : quarter;
        if (n <= 0) break;
        memra_pipe_copy(plane.ring + turn.stage * plane.stage_bytes + plane.quarter(c),
                        bytes + (long long)(first_token + c * quarter) * plane.token_bytes, n * plane.token_bytes,
                        plane.full + turn.stage);
    }
}

template <int WORDS, int NT>
static __device__ void attend(const float* q, const uint8_t* k, const uint8_t* v, const int* pos_d, long long slot,
                              int rows, long long max_ctx, int n_head, int n_head_kv, int head_dim_k, int head_dim_v,
                              long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format, float scale,
                              int window, float* part, const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {
    MEMRA_DYN_SHARED(uint8_t, bytes);
    const long long own_pos = seqs ? 0 : memra_slot(pos_d, slot);  // what all else waits for
    const int warp = threadIdx.x / 32, gqa = n_head / n_head_kv, columns = rows * gqa;
    Block b;
    plan_block(b, bytes, NT, n_head_kv, head_dim_k, head_dim_v, k_tok_bytes, v_tok_bytes, k_format, v_format);
    const int computing = n_head_kv << b.team_shift;  // warps
    if (threadIdx.x == 32 * TEAM_WARPS) {
        for (int i = 0; i < b.k.stages; i++) {
            memra_pipe_init(b.k.full + i, 1);
            memra_pipe_init(b.k.empty + i, computing);
        }
        for (int i = 0; i < b.v.stages; i++) {
            memra_pipe_init(b.v.full + i, 1);
            memra_pipe_init(b.v.empty + i, computing);
        }
        memra_pipe_init_done();
    }
    __syncthreads();

    Turn k_turn = {0, 0}, v_turn = {0, 0};
    unsigned number = blockIdx.x;  // its remainder is the group: another one of each task, so that short ones spread
    for (int seq = 0; seq < n_seqs; seq++) {
        for (int first_column = 0; first_column < columns; first_column += 8 * NT, number += 53) {
            const int group = (int)(number % GROUPS);
            if (seqs) {
                k = (const uint8_t*)seqs[seq].k;
                v = (const uint8_t*)seqs[seq].v;
                pos_d = (const int*)seqs[seq].pos_d;
                health = (memra_health*)seqs[seq].health;
                max_ctx = seqs[seq].max_ctx;
            }
            const long long pos = seqs ? memra_slot(pos_d, slot) : own_pos;
            if (pos < 0 || pos + rows > max_ctx) {
                const bool reports = group + first_column == 0 && threadIdx.x == 0;
                if (reports) memra_report(health, MEMRA_FAULT_SLOT_RANGE, layer, pos, 1);
                continue;
            }
            Task task;
            task.view.pos = (int)pos;
            task.view.window = window;
            task.view.gqa = gqa;
            task.view.reciprocal = (0x7FFFFFFFu + (unsigned)gqa) / (unsigned)gqa;
            task.view.first_column = first_column;
            task.view.columns = columns - first_column < 8 * NT ? columns - first_column : 8 * NT;
            task.walk = walk_of(group, task.view.first(0), task.view.last(task.view.columns - 1), b.tokens);
            if (!task.walk.more()) continue;
            task.q = q + (long long)seq * rows * n_head * head_dim_k;
            task.part = part + (long long)seq * rows * n_head * GROUPS * (head_dim_v + TAIL);
            task.health = health;
            task.reports = task.walk.tile == task.view.first(0) / TILE;
            if (warp >= TEAM_WARPS) {
                if (threadIdx.x % 32 == 0) {
                    for (Walk walk = task.walk; walk.more(); walk.next()) {
                        const int first_token = walk.first_token(b.tokens);
                        memra_pipe_wait(b.k.empty + k_turn.stage, k_turn.parity ^ 1);
                        bring(b.k, k_turn, k, first_token, b.tokens, (int)max_ctx);
                        k_turn.next(b.k.stages);
                        memra_pipe_wait(b.v.empty + v_turn.stage, v_turn.parity ^ 1);
                        bring(b.v, v_turn, v, first_token, b.tokens, (int)max_ctx);
                        v_turn.next(b.v.stages);
                    }
                }
                continue;
            }
            memra_team_sync(15, 32 * TEAM_WARPS);  // the queries before are done with
            quantise_queries<NT>(b, task, n_head_kv, head_dim_k, k_format == MEMRA_FP8, scale, layer);
            memra_team_sync(15, 32 * TEAM_WARPS);
            if (warp < computing) {
                compute<WORDS, NT>(b, task, k_turn, v_turn, head_dim_k, head_dim_v, n_head_kv, k_format, v_format, group);
            }
        }
    }
}

#define BODY(WORDS, NT)                                                                                                  \
    attend<WORDS, NT>(q, k, v, pos_d, slot, rows, max_ctx, n_head, n_head_kv, head_dim_k, head_dim_v, k_tok_bytes,        \
                      v_tok_bytes, k_format, v_format, scale, window, part, seqs, n_seqs, health, layer)
#else
#define BODY(WORDS, NT) ((void)0)  // a GPU that never runs these
#endif

// One entry per dims of V that a warp sums up and number of columns.
#define ATTEND(name, WORDS, NT)                                                                                           \
    extern "C" __global__ void __launch_bounds__(PIPE_THREADS, 1) name(                                                   \
            const float* q, const uint8_t* k, const uint8_t* v, const int* pos_d, long long slot, int rows,                \
            long long max_ctx, int n_head, int n_head_kv, int head_dim_k, int head_dim_v, long long k_tok_bytes,           \
            long long v_tok_bytes, int k_format, int v_format, float scale, int window, float* part,                       \
            const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {                                          \
        BODY(WORDS, NT);                                                                                                  \
    }                                                                                                                      \
    MEMRA_EXPORT(name)
ATTEND(attend_pipe_64_8, 1, 1)
ATTEND(attend_pipe_64_16, 1, 2)
ATTEND(attend_pipe_64_32, 1, 4)
ATTEND(attend_pipe_128_8, 2, 1)
ATTEND(attend_pipe_128_16, 2, 2)
ATTEND(attend_pipe_128_24, 2, 3)
ATTEND(attend_pipe_256_8, 4, 1)
