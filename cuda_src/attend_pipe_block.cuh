// attend_pipe_block.cuh: the text of all entries attend_pipe_*: attend for GPUs that copy in bulk (sm_90).
//
// A block works on one piece of the keys of a sequence, then on one of the next sequence: a group, or where a launch has many
// sequences a fold, eleven neighbouring groups one after the other. Where few groups of one sequence have keys, several
// blocks work on each, for 8 columns apiece. Four warps bring stages of K and V, rows of all K/V heads as they lie in memory,
// into two rings, and do not stop where a piece ends; eight warps compute, a team of them for each K/V head. A warp scores
// 16 keys of a stage (or SLABS times 16) for all columns of its head, hands their weights to its team, and sums up its own
// dims of V over the keys of the stage before, so that the two kinds of work overlap.
//
// The first stage of a group is scored against no reference: the team agrees on one when the values of the stage before,
// the last of its group, have been summed up. There those sums go on top of the fold's, which stay in registers until
// the piece ends. What a fold does with a group is what attend_combine does with it, fold_sum(), so that no bit depends on
// which of them did it. An entry has one kind of pieces, PIECES, since a launch for one sequence would pay for what folds
// need, from its registers to its way to the first stage. Entries with more than 8 columns, whose sums take all registers,
// have groups only.
//
// Scores: each 64 elements of a query count by a power of two, after the largest of them. Of q8_0, products of bytes: an
// element is 256 * high + low, 14 or 15 bits below that largest one, and the sum over a block is an integer that d scales.
// Of fp8, products of f16: an element is two of them. The reference that weights stand against is a whole number and moves
// only where a score passes it by 15, for that column alone; elsewhere the sums are multiplied by 1. Weights and V are
// rounded to f16: values beyond 65504 become infinite.
//
// An entry is made for one number of K/V heads, head dim and pair of formats (FIXED: the compiler folds every stride and
// offset, and unrolls the loops over a stage), or for any.
#pragma once

#include "attend_pipe_query.cuh"
#include "attend_pipe_score.cuh"
#include "attend_pipe_task.cuh"
#include "attend_pipe_weigh.cuh"

#if !MEMRA_PTX || __CUDA_ARCH__ == 900

#define BRING_REGISTERS 40     // of a thread that brings K and V, and
#define COMPUTE_REGISTERS 232  // of one that computes; 168 each before they split

// A warp's way through the stages of a task, and what it leaves in part.
template <int WORDS, int NT, int SLABS, bool FIXED, int PIECES>
static __device__ __forceinline__ void compute(const Block& b, uint8_t* bytes, const Launch<PIECES>& launch, const Task& task,
                                               const View& view, typename Launch<PIECES>::Stages next, Turn& k_turn,
                                               Turn& v_turn) {
    constexpr int HELD = FIXED && NT == 1 ? 4 : 1;  // pairs of a query that a lane keeps
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int team_warps = b.team_warps(), threads = 32 * team_warps;
    const int head = warp >> b.team_shift, member = warp & (team_warps - 1), team = 1 + head;
    const int slabs = b.slabs(), quarter = b.tokens / QUARTERS, first_dim = member * 64 * WORDS;
    const int own_slab = SLABS * member, scorers = slabs / SLABS;
    const bool scores = member < scorers, sums = first_dim < b.head_dim_v;
    const int any_from = view.first(0), all_from = view.first(view.columns - 1);
    const int all_to = view.last(0), any_to = view.last(view.columns - 1);

    Scorer scorer;
    scorer.own_key = (g >> 1) * quarter + 4 * own_slab + (g & 1);
    scorer.at = b.k.quarter(g >> 1) + (4 * own_slab + (g & 1)) * b.k.token_bytes + head * b.k.head_bytes;
    scorer.query = (const uint4*)(bytes + b.query + head * NT * b.query_bytes) + lane;
    scorer.factor = (const float*)(bytes + b.factor) + head * (1 + b.head_dim_k / 64) * 8 * NT + 2 * t;
    scorer.all_from = all_from;
    scorer.all_to = all_to;
    QueryPair held[HELD];
    if (HELD > 1 && b.k_format != MEMRA_FP8) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            if (i < b.head_dim_k / 64) held[i] = scorer.query_pair(b, i, 0);
        }
    }
    const int v_at = b.v.quarter(t) + head * b.v.head_bytes + first_dim / 32 * block_bytes_of(b.v_format);
    const bool v_fp8 = b.v_format == MEMRA_FP8;
    const Dims own = v_fp8 ? dims_of<VFp8<WORDS>>(first_dim, g) : dims_of<VQ5<WORDS>>(first_dim, g);
    const uint32_t base = f16_1024(launch.rows);
    const bool few = view.columns <= 8;  // so that one fragment has them
    // Two sets of weights, of which one is written while the other is read.
    uint2* const weights = (uint2*)(bytes + b.weight) + head * slabs * NT * 32;
    const int other = b.n_head_kv * slabs * NT * 32;
    float* const most = (float*)(bytes + b.most) + head * team_warps * 8 * NT;
    float* const weight_sums = (float*)(bytes + b.sum) + head * team_warps * 8 * NT;

    Sums<WORDS, NT> group, all;  // of the group that the warp is in, and, where it folds, of those before
    float sum[NT] = {}, score[SLABS][NT][4];  // sum: of column 8n + g, over the lane's keys
    group.clear();
    all.clear();
    int weighed_token = 0;  // of the stage whose scores are known, and whose values come next
    bool scored_one = false;
    for (int set = other;; set = other - set) {
        // The scores of the next stage. Of a group's first one the team agrees on a reference, before they weigh anything.
        const bool more = next.more(), starts = more && (PIECES == FOLDS ? next.starts : !scored_one);
        const int scored = k_turn.stage, scored_token = (int)next.token;
        uint2* const own_weights = weights + (other - set) + own_slab * NT * 32;
        bool raise = false;
        if (more) {
            memra_pipe_wait(b.k.full_pipe(bytes, scored), k_turn.parity);
            if (scores) {
                score_stage<NT, SLABS, FIXED>(b, b.k.stage(bytes, scored), scorer, view, few, held, scored_token, score);
                if (starts) {
                    publish_most<NT, SLABS>(score, most + member * 8 * NT);
                } else {
                    raise = hand_over<NT, SLABS>(score, group.reference, own_weights);
                }
            }
            memra_pipe_arrive(b.k.empty_pipe(bytes, scored));  // every lane for what it has read itself
            k_turn.next(b.k.stages);
            next.next(b);
        }
        // The values of the stage before.
        if (scored_one) {
            memra_pipe_wait(b.v.full_pipe(bytes, v_turn.stage), v_turn.parity);
            uint8_t* head_rows = b.v.stage(bytes, v_turn.stage) + head * b.v.head_bytes;
            const int start = weighed_token, stop = start + b.tokens - 1;
            if (start < any_from || stop > any_to) {  // rows that nobody sees become 0, whatever stands there
                const int blocks = b.head_dim_v / 32;
                for (int x = 32 * member + lane; x < b.tokens * blocks; x += threads) {
                    const int i = x / blocks, c = i / quarter;
                    if (start + i >= any_from && start + i <= any_to) continue;
                    silence(head_rows + b.v.quarter(c) + (i - c * quarter) * b.v.token_bytes, b.v_format, x - i * blocks);
                }
                memra_pipe_fence();
                memra_team_sync(team, threads);
            }
            if (scores) add_weights<NT, SLABS>(weights + set + own_slab * NT * 32, sum);
#pragma unroll
            for (int n = 0; n < NT; n++) {  // over the lanes that have some of a column; who needs it adds the team's up
                const float two = __fadd_rn(sum[n], __shfl_xor_sync(MEMRA_ALL_LANES, sum[n], 1));
                const float four = __fadd_rn(two, __shfl_xor_sync(MEMRA_ALL_LANES, two, 2));
                if (t == 0) weight_sums[(member * NT + n) * 8 + g] = four;
            }
            if (sums) {
                const int dims = FIXED || b.head_dim_v - first_dim > 64 * WORDS ? 64 * WORDS : b.head_dim_v - first_dim;
                const uint8_t* own_rows = b.v.stage(bytes, v_turn.stage) + v_at;
                bool done = false;
                if (any_to > all_to && (start < all_from || stop > all_to)) {  // of more than one row
                    const Split split = {view, b.v, head_rows, weights + set, b.tokens, b.v_format, b.head_dim_v, start,
                                         first_dim, dims, own};
                    done = any_odd(split);
                    if (done) {
                        float kept[4 * WORDS][NT][4];
                        copy_sums<WORDS, NT>(group.value, kept);
                        weigh_odd_stage<WORDS, NT>(split, kept);
                        copy_sums<WORDS, NT>(kept, group.value);
                    }
                }
                if (!done && b.v_format == MEMRA_Q5_1) {
                    weigh_stage<VQ5<WORDS>, WORDS, NT, FIXED>(b, own_rows, dims, weights + set, few, base, group.value);
                } else if (!done && b.v_format == MEMRA_Q4_0) {
                    weigh_stage<VQ4<WORDS>, WORDS, NT, FIXED>(b, own_rows, dims, weights + set, few, base, group.value);
                } else if (!done) {
                    weigh_stage<VFp8<WORDS>, WORDS, NT, FIXED>(b, own_rows, dims, weights + set, few, base, group.value);
                }
            }
            memra_pipe_arrive(b.v.empty_pipe(bytes, v_turn.stage));
            v_turn.next(b.v.stages);
        }
        if (PIECES == GROUPS && !more) break;
        raise = memra_team_any(team, threads, raise);
        if (!more) break;
        if (starts) {
            // The sums of the group before, if there is one, go to the fold's; then the reference and the weights of this one.
            // No branch parts these, so that one's latencies are filled by the others.
            if (PIECES == FOLDS) {
                sum_weights<NT>(weight_sums, scorers, scored_one, group.weight);
                all.fold(group);
                group.clear();
                sum[0] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const float2 largest = largest_of<NT>(most, scorers, n);
                group.reference[n][0] = first_reference(largest.x);
                group.reference[n][1] = first_reference(largest.y);
            }
            if (scores) hand_over<NT, SLABS>(score, group.reference, own_weights);
            memra_team_sync(team, threads);
        } else if (raise) {  // a score has passed its reference: the team agrees on the next one
            if (scores) publish_most<NT, SLABS>(score, most + member * 8 * NT);
            memra_team_sync(team, threads);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const float2 largest = largest_of<NT>(most, scorers, n);
                const float worth[2] = {raised(group.reference[n][0], largest.x), raised(group.reference[n][1], largest.y)};
                // The sum of weights of column g: the factors of columns 2i, 2i + 1 are in lane i.
                const float even = __shfl_sync(MEMRA_ALL_LANES, worth[0], g / 2);
                const float odd = __shfl_sync(MEMRA_ALL_LANES, worth[1], g / 2);
                sum[n] = __fmul_rn(sum[n], g & 1 ? odd : even);
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int d = 0; d < 4 * WORDS; d++) group.value[d][n][i] = __fmul_rn(group.value[d][n][i], worth[i & 1]);
                }
            }
            if (scores) hand_over<NT, SLABS>(score, group.reference, own_weights);
            memra_team_sync(team, threads);
        }
        scored_one = true;
        weighed_token = scored_token;
    }

    if (launch.leaves_places(b, view)) memra_let_begin();
    if (PIECES == FOLDS) {
        if (!sums) return;  // of V
        sum_weights<NT>(weight_sums, scorers, true, group.weight);
        all.fold(group);
        group = all;
    }
    float* to[NT][2];  // where the lane's sums go
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int column = 8 * n + 2 * t + i, row = view.row(column);
            const int of_head = view.first_column + column - row * view.gqa;
            to[n][i] = launch.sums(b, task, row, head * view.gqa + of_head);
            const bool writes = sums && column < view.columns;
            store_sums<WORDS, NT, FIXED>(group.value, n, i, own, v_fp8, writes, to[n][i], b.head_dim_v);
        }
    }
    if (PIECES == GROUPS) {  // what the team's warps have left is waited for behind what needs nothing of it
        memra_team_sync(team, threads);
        if (member == 0) sum_weights<NT>(weight_sums, scorers, true, group.weight);
    }
    if (member != 0 || g != 0) return;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (8 * n + 2 * t + i >= view.columns) continue;
            *(float2*)(to[n][i] + b.head_dim_v) = make_float2(group.reference[n][i], group.weight[n][i]);
        }
    }
}

// The quarter c of the next stage of a plane, of the rows that the plane has.
static __device__ __forceinline__ void bring(const Plane& plane, uint8_t* bytes, Turn& turn, const uint8_t* from, int c,
                                             int first_token, int tokens, int rows) {
    if (!turn.fresh) memra_pipe_wait(plane.empty_pipe(bytes, turn.stage), turn.parity ^ 1);
    const int quarter = tokens / QUARTERS, left = rows - first_token - c * quarter;
    const int n_bytes = (left < 0 ? 0 : left < quarter ? left : quarter) * plane.token_bytes;
    memra_pipe* full = plane.full_pipe(bytes, turn.stage);
    memra_pipe_expect(full, n_bytes);
    if (n_bytes > 0) {
        memra_pipe_copy(plane.stage(bytes, turn.stage) + plane.quarter(c),
                        from + (long long)(first_token + c * quarter) * plane.token_bytes, n_bytes, full);
    }
    turn.next(plane.stages);
}

// A team's queries for a task become fragments; `some` are those that the warp has loaded.
template <int NT, int COLUMNS, int PIECES>
static __device__ __forceinline__ void prepare(const Block& b, uint8_t* bytes, const Launch<PIECES>& launch, const Task& task,
                                               const View& view, Queries<COLUMNS>& some, float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, head = warp >> b.team_shift, pairs = b.head_dim_k / 64;
    const int member = warp & (b.team_warps() - 1), width = COLUMNS * b.team_warps();
    float* const factors = (float*)(bytes + b.factor) + head * (1 + pairs) * 8 * NT + lane;
    some.store(b, bytes, view, member, scale);
    for (int c = member + width; c < 8 * NT && c < view.columns; c += width) {
        some.load(b, launch.queries(b, task.seq), view, c);
        some.store(b, bytes, view, c, scale);
    }
    // Columns that nobody needs weigh nothing, whatever stands in their fragments.
    if (member == 0 && lane < 8 * NT && lane >= view.columns) {
        for (int i = 0; i < 1 + pairs; i++) factors[i * 8 * NT] = 0.0f;
    }
    memra_team_sync(1 + head, 32 * b.team_warps());
    if (member == 0 && lane < 8 * NT && __float_as_uint(*factors) == BAD_FACTOR && launch.reports(b, task, view)) {
        launch.report(MEMRA_FAULT_NONFINITE, task.seq, view.last(lane));
    }
}

template <int WORDS, int NT, int SLABS, bool FIXED, int PIECES>
static __device__ __forceinline__ void attend(const Block& b, const Launch<PIECES>& launch, float scale) {
    MEMRA_DYN_SHARED(uint8_t, bytes);
    constexpr bool AHEAD = PIECES == FOLDS && WORDS == 1;  // a task's queries, while the one before is worked on
    constexpr bool K_AHEAD = PIECES == GROUPS;  // a stage of K comes before the V of the one before, as it is needed
    constexpr int COLUMNS = FIXED ? 2 * WORDS * NT : 2;  // of queries that a warp has on their way
    const int warp = threadIdx.x / 32, member = warp & (b.team_warps() - 1);
    const int computing = b.n_head_kv << b.team_shift;  // warps
    if (threadIdx.x == 32 * TEAM_WARPS) {
        for (int i = 0; i < b.k.stages; i++) {
            memra_pipe_init(b.k.full_pipe(bytes, i), QUARTERS);
            memra_pipe_init(b.k.empty_pipe(bytes, i), 32 * computing);
        }
        for (int i = 0; i < b.v.stages; i++) {
            memra_pipe_init(b.v.full_pipe(bytes, i), QUARTERS);
            memra_pipe_init(b.v.empty_pipe(bytes, i), 32 * computing);
        }
        memra_pipe_init_done();
    }
    __syncthreads();
    memra_begin();
    Tasks<PIECES, 8 * NT> tasks(launch);  // asks for positions, what all else waits for

    Turn k_turn = {0, 0, true}, v_turn = k_turn;
    if (warp >= TEAM_WARPS) {
        memra_give_registers<BRING_REGISTERS>();
        uint8_t* const ring = memra_settled_shared(bytes);
        while (tasks.next(b, launch)) {
            if (threadIdx.x % 32 != 0) continue;
            const Task& task = tasks.task;
            const uint8_t *const k = launch.k_of(task.seq), *const v = launch.v_of(task.seq);
            const int tokens = (int)launch.tokens_of(task.seq), c = warp - TEAM_WARPS;
            int first_of_v = -1;
            for (auto walk = tasks.walk; walk.more(); walk.next(b)) {
                bring(b.k, ring, k_turn, k, c, (int)walk.token, b.tokens, tokens);
                if (!K_AHEAD) first_of_v = (int)walk.token;
                if (first_of_v >= 0) bring(b.v, ring, v_turn, v, c, first_of_v, b.tokens, tokens);
                first_of_v = (int)walk.token;
            }
            if (K_AHEAD) bring(b.v, ring, v_turn, v, c, first_of_v, b.tokens, tokens);
        }
    } else {
        memra_take_registers<COMPUTE_REGISTERS>();
        if (warp >= computing) return;
        // The first queries are asked for before the position is known.
        const Task guess = {launch.first_seq(), 0, 0, 0};
        Queries<COLUMNS> some;
        if (PIECES == GROUPS || guess.seq < launch.n_seqs) {
            some.load(b, launch.queries(b, guess.seq), launch.view(guess, 8 * NT), member);
        }
        const auto guessed = [&] { return tasks.task.seq == guess.seq && tasks.view.first_column == 0; };
        if constexpr (AHEAD) {
            Task task;
            View view;
            typename Launch<PIECES>::Stages walk;
            for (bool busy = false;; busy = true) {
                const bool more = tasks.next(b, launch);
                if (more && (busy || !guessed())) some.load(b, launch.queries(b, tasks.task.seq), tasks.view, member);
                if (busy) compute<WORDS, NT, SLABS, FIXED>(b, bytes, launch, task, view, walk, k_turn, v_turn);
                if (!more) break;
                task = tasks.task;
                view = tasks.view;
                walk = tasks.walk;
                prepare<NT>(b, bytes, launch, task, view, some, scale);
            }
        } else {
            for (bool busy = false; tasks.next(b, launch); busy = true) {
                if (busy || !guessed()) some.load(b, launch.queries(b, tasks.task.seq), tasks.view, member);
                prepare<NT>(b, bytes, launch, tasks.task, tasks.view, some, scale);
                some = Queries<COLUMNS>();  // which take no registers from here on
                compute<WORDS, NT, SLABS, FIXED>(b, bytes, launch, tasks.task, tasks.view, tasks.walk, k_turn, v_turn);
            }
        }
    }
}

// pieces is PIECES: whoever launches asks for the entry that has them.
#define ATTEND_ON(block, WORDS, NT, SLABS, FIXED, PIECES)                                                                  \
    const int gqa = n_head / block.n_head_kv;                                                                              \
    const Launch<PIECES> launch = {q, k, v, pos_d, slot, max_ctx, rows, n_head, gqa, reciprocal_of(rows, gqa), window,      \
                                   layer, n_seqs, part, seqs, health};                                                     \
    attend<WORDS, NT, SLABS, FIXED>(block, launch, scale)
#define BODY(WORDS, NT, PIECES)                                                                                            \
    const Block block = block_of(NT, 1, n_head_kv, head_dim_k, head_dim_v, k_tok_bytes, v_tok_bytes, k_format, v_format);   \
    ATTEND_ON(block, WORDS, NT, 1, false, PIECES)
#define FIXED_BODY(N_HEAD_KV, HEAD_DIM, K_FORMAT, V_FORMAT, WORDS, NT, SLABS, PIECES)                                      \
    constexpr Block block = block_of(NT, SLABS, N_HEAD_KV, HEAD_DIM, HEAD_DIM,                                             \
                                     N_HEAD_KV * HEAD_DIM / 32 * block_bytes_of(K_FORMAT),                                 \
                                     N_HEAD_KV * HEAD_DIM / 32 * block_bytes_of(V_FORMAT), K_FORMAT, V_FORMAT);            \
    static_assert(block.k.stages > 1 && block.v.stages > 1, "too few stages");                                             \
    ATTEND_ON(block, WORDS, NT, SLABS, true, PIECES)
#else  // a GPU that never runs these
#define BODY(WORDS, NT, PIECES) ((void)0)
#define FIXED_BODY(N_HEAD_KV, HEAD_DIM, K_FORMAT, V_FORMAT, WORDS, NT, SLABS, PIECES) ((void)0)
#endif

#define ATTEND_ENTRY(name, body)                                                                                           \
    extern "C" __global__ void __launch_bounds__(PIPE_THREADS, 1) name(                                                    \
            const float* q, const uint8_t* k, const uint8_t* v, const int* pos_d, long long slot, int rows,                 \
            long long max_ctx, int n_head, int n_head_kv, int head_dim_k, int head_dim_v, long long k_tok_bytes,            \
            long long v_tok_bytes, int k_format, int v_format, float scale, int window, float* part,                        \
            int pieces, const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {                               \
        body;                                                                                                              \
    }                                                                                                                      \
    MEMRA_EXPORT(name)
