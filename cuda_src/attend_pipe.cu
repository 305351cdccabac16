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
#include "attend_pipe.cuh"

#if !MEMRA_PTX || __CUDA_ARCH__ >= 900

#define RAISE_AT 15.0f  // a weight stays below 2^15, which f16 holds,
#define HEADROOM 5.0f   // and the largest so far is at most 2^5, so that f16 keeps what weighs 2^-29 of it

// What a block does for one chunk of columns of one sequence.
struct Task {
    const float* q;
    const uint8_t *k, *v;
    float* part;
    memra_health* health;
    Work work;
    Walk walk;
    bool reports;
};

// The queries of all K/V heads as fragments. A warp takes every eighth column; lane l makes those of 1/32 of its elements.
template <int NT>
static __device__ void quantise_queries(const Block& b, const Task& task, int n_head_kv, int dim, bool fp8, float scale,
                                        int layer) {
    const int lane = threadIdx.x & 31;
    for (int c = threadIdx.x / 32; c < n_head_kv * 8 * NT; c += TEAM_WARPS) {
        const int head = c / (8 * NT), column = c % (8 * NT), of_all = task.work.first_column + column;
        const bool used = column < task.work.columns;
        const int row = of_all / task.work.gqa, n_head = n_head_kv * task.work.gqa;
        const float* x = task.q + ((long long)row * n_head + head * task.work.gqa + of_all % task.work.gqa) * dim;
        float most = 0.0f;
        bool bad = false;
        for (int i = 2 * lane; used && i < dim; i += 64) {
            const float2 two = *(const float2*)(x + i);
            most = memra_max(most, memra_max(fabsf(two.x), fabsf(two.y)));
            bad |= !memra_finite(two.x) || !memra_finite(two.y);
        }
        bad = __any_sync(MEMRA_ALL_LANES, bad);
        if (bad && lane == 0 && task.reports) {
            memra_report(task.health, MEMRA_FAULT_NONFINITE, layer, task.work.pos + row, 1);
        }
        most = memra_warp_max(most);
        // 2^13 / 2^exponent(most), within what an f32 holds.
        int exponent = (int)(__float_as_uint(most) >> 23 & 255u) - 127;
        exponent = exponent < -100 ? -100 : exponent > 127 ? 127 : exponent;  // 128: not finite
        const float up = __uint_as_float((unsigned)(127 + 13 - exponent) << 23);
        const float down = __uint_as_float((unsigned)(127 - 13 + exponent) << 23);
        const float largest = __fmul_rn(most, up);
        const float steps = !fp8 && largest > 0.0f ? __fdiv_rn(32512.0f, largest) : 1.0f;
        // Register r, byte or f16 of a fragment: see q8_element and score_fp8.
        uint4* to = (uint4*)(b.query + (head * NT + column / 8) * b.query_bytes);
        const int fragments = b.query_bytes / 128;  // words of 4 that this column has, 4 lanes each
        for (int f = lane; f < fragments; f += 32) {
            const int t = f % 4, piece = f / 4;     // a block of 32, or 16 elements of fp8
            uint32_t high[2] = {}, low[2] = {};
            for (int reg = 0; reg < 2; reg++) {
                if (fp8) {
                    const int at = piece / 4 * 64 + 16 * t + 4 * (piece % 4) + 2 * reg;
                    for (int i = 0; used && i < 2; i++) {
                        const float value = __fmul_rn(x[at + i], up);
                        const uint16_t h = memra_to_f16(value);
                        high[reg] |= (uint32_t)h << 16 * i;
                        low[reg] |= (uint32_t)memra_to_f16(__fsub_rn(value, memra_from_f16(h))) << 16 * i;
                    }
                } else {
                    for (int i = 0; used && i < 4; i++) {
                        const float value = __fmul_rn(x[32 * piece + q8_element(piece & 1, reg, t, i)], up);
                        const int code = __float2int_rn(__fmul_rn(value, steps)), h = (code + 128) >> 8;
                        high[reg] |= (uint32_t)(h & 255) << 8 * i;
                        low[reg] |= (uint32_t)(code & 255) << 8 * i;
                    }
                }
            }
            to[32 * piece + 4 * (column % 8) + t] = make_uint4(high[0], high[1], low[0], low[1]);
        }
        const float factor = __fdiv_rn(__fmul_rn(__fmul_rn(scale, 1.4426950408889634f), down), steps);
        if (lane == 0) b.factor[c] = bad ? __uint_as_float(0x7FFFFFFFu) : factor;
    }
}

// Sums over V of one stage: out (dims of this warp, columns) += V^T weights.
template <class V, int WORDS, int NT>
static __device__ void weigh_stage(const Block& b, const uint8_t* rows, const uint2* weight, float out[4 * WORDS][NT][4]) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int slab = 0; slab < b.tokens / 16; slab++) {
        uint32_t w[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint2 two = weight[(slab * NT + n) * 32 + lane];
            w[n][0] = two.x;
            w[n][1] = two.y;
        }
        V values;
        values.load(rows + 4 * slab * b.v.token_bytes, b.v.token_bytes, lane / 4);
#pragma unroll
        for (int i = 0; i < 4 * WORDS; i++) {
            uint32_t a[4];
            values.fragment(i / 4, i % 4, a);
#pragma unroll
            for (int n = 0; n < NT; n++) memra_mma(out[i][n], a, w[n]);
        }
    }
}

// Whether a row of V that some columns see and some do not holds an infinity or a NaN among this warp's dims: a weight
// of 0 would not silence it.
static __device__ bool any_odd(const Block& b, const Work& work, const uint8_t* head_rows, int format, int first_token,
                               int first_dim, int dims) {
    bool odd = false;
    for (int i = 0; i < b.tokens; i++) {
        if (work.all_see(first_token + i) || work.none_sees(first_token + i)) continue;
        const int quarter = b.tokens / QUARTERS;
        const uint8_t* row = head_rows + b.v.quarter(i / quarter) + i % quarter * b.v.token_bytes;
        for (int d = threadIdx.x & 31; d < dims; d += 32) odd |= (v_element(row, format, first_dim + d) & 0x7C00u) == 0x7C00u;
    }
    return __any_sync(MEMRA_ALL_LANES, odd);
}

// weigh_stage where there is such a row: one row of queries at a time, with the keys that it does not see left out, keeps
// its own columns of the result.
template <int WORDS, int NT>
static __device__ void weigh_odd_stage(const Block& b, const Work& work, const uint8_t* head_rows, int format,
                                       int first_token, int lane_dim, int step, int apart, const uint2* weight,
                                       float out[4 * WORDS][NT][4]) {
    const int lane = threadIdx.x & 31, t = lane % 4;
#pragma unroll 1
    for (int slab = 0; slab < b.tokens / 16; slab++) {
        const long long key = first_token + t * (b.tokens / QUARTERS) + 4 * slab;  // of the lane's four
        const uint8_t* row = head_rows + b.v.quarter(t) + 4 * slab * b.v.token_bytes;
#pragma unroll 1
        for (int first = 0; first < work.columns;) {
            const int of_row = (work.first_column + first) / work.gqa;
            int end = (of_row + 1) * work.gqa - work.first_column;
            end = end < work.columns ? end : work.columns;
#pragma unroll
            for (int i = 0; i < 4 * WORDS; i++) {
                uint32_t a[4] = {};
#pragma unroll 1
                for (int x = 0; x < 8; x++) {  // the fragment's elements, see above VQ5
                    const int which = (x & 1) + (x / 4) * 2, dim = lane_dim + i / 4 * step + i % 4 + (x / 2 & 1) * apart;
                    if (!work.sees(first, key + which)) continue;
                    a[x / 2] |= v_element(row + which * b.v.token_bytes, format, dim) << 16 * (x & 1);
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const uint2 two = weight[(slab * NT + n) * 32 + lane];
                    const uint32_t w[2] = {two.x, two.y};
                    float kept[4] = {out[i][n][0], out[i][n][1], out[i][n][2], out[i][n][3]};
                    memra_mma(kept, a, w);
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        const int column = 8 * n + 2 * t + (r & 1);
                        if (column >= first && column < end) out[i][n][r] = kept[r];
                    }
                }
            }
            first = end;
        }
    }
}

static __device__ float weight_of(float score, float reference) {
    return exp2_of(__fsub_rn(score, reference == minus_infinity() ? 0.0f : reference));
}

// Weights of this warp's 16 keys, as fragments for the team; adds them to sum.
template <int NT>
static __device__ void hand_over(const float score[NT][4], const float reference[NT][2], uint2* to, float own[NT][2]) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) p[i] = weight_of(score[n][i], reference[n][i & 1]);
        to[n * 32 + (threadIdx.x & 31)] = make_uint2(memra_transpose(memra_pack_f16(p[0], p[1])),
                                                     memra_transpose(memra_pack_f16(p[2], p[3])));
        own[n][0] = __fadd_rn(p[0], p[2]);
        own[n][1] = __fadd_rn(p[1], p[3]);
    }
}

// A warp's way through the stages of a task, and what it leaves in part.
template <int WORDS, int NT>
static __device__ void compute(const Block& b, Task& task, Turn& k_turn, Turn& v_turn, int head_dim_k, int head_dim_v,
                               int n_head_kv, int k_format, int v_format, int group) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int head = warp / b.team_warps, member = warp % b.team_warps, team = 1 + head, threads = 32 * b.team_warps;
    const int slabs = b.tokens / 16, quarter = b.tokens / QUARTERS, first_dim = member * 64 * WORDS;
    const bool scores = member < slabs, sums = first_dim < head_dim_v;
    const Work& work = task.work;
    const bool fp8 = k_format == MEMRA_FP8;

    // Keys of score row g, and 2 further of row g + 8: see QUARTERS.
    const int own_key = (g >> 1) * quarter + 4 * member + (g & 1);
    const int k_at = b.k.quarter(g >> 1) + (4 * member + (g & 1)) * b.k.token_bytes + head * b.k.head_bytes;
    const int v_dims = v_format == MEMRA_Q5_1   ? VQ5<WORDS>::head_dim_bytes(first_dim)
                       : v_format == MEMRA_Q4_0 ? VQ4<WORDS>::head_dim_bytes(first_dim)
                                                : VFp8<WORDS>::head_dim_bytes(first_dim);
    const int v_at = b.v.quarter(t) + head * b.v.head_bytes + v_dims;
    const int lane_dim = first_dim + (v_format == MEMRA_FP8 ? VFp8<WORDS>::first_dim(g) : VQ5<WORDS>::first_dim(g));
    const int step = v_format == MEMRA_FP8 ? VFp8<WORDS>::step : VQ5<WORDS>::step;
    const int apart = v_format == MEMRA_FP8 ? VFp8<WORDS>::apart : VQ5<WORDS>::apart;
    const uint4* query = (const uint4*)(b.query + head * NT * b.query_bytes) + lane;
    const int pair_bytes = fp8 ? 64 : 2 * (int)sizeof(memra_q8_0), pair_query = fp8 ? 128 : 64;

    float out[4 * WORDS][NT][4] = {}, reference[NT][2], sum[NT][2] = {}, score[NT][4], added[NT][2] = {};
    float factor[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            reference[n][i] = minus_infinity();
            factor[n][i] = b.factor[head * 8 * NT + 8 * n + 2 * t + i];
        }
    }

    Walk next = task.walk;  // of K; task.walk follows with V
    const long long all_from = first_key(work.last_key(work.columns - 1), work.window), all_to = work.last_key(0);
    const long long any_from = first_key(work.last_key(0), work.window), any_to = work.last_key(work.columns - 1);
    bool first = true;
    for (int parity = 0; first || task.walk.more(); parity ^= 1) {
        // The scores of the next stage.
        const bool more = next.more();
        bool raise = false;
        uint2* const weights = b.weight + (((parity ^ 1) * n_head_kv + head) * slabs + member) * NT * 32;
        if (more) {
            memra_pipe_wait(b.k.full + k_turn.stage, k_turn.parity);
            if (scores) {
#pragma unroll
                for (int n = 0; n < NT; n++) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
                const uint8_t* upper = b.k.ring + k_turn.stage * b.k.stage_bytes + k_at;
                const uint8_t* lower = upper + 2 * b.k.token_bytes;
                if (fp8) {
#pragma unroll 2
                    for (int i = 0; i < head_dim_k / 64; i++) {
                        score_fp8<NT>(upper + i * pair_bytes, lower + i * pair_bytes, query + i * pair_query,
                                      b.query_bytes / 16, score);
                    }
                } else {
#pragma unroll 4
                    for (int i = 0; i < head_dim_k / 64; i++) {
                        score_q8<NT>(upper + i * pair_bytes, lower + i * pair_bytes, query + i * pair_query,
                                     b.query_bytes / 16, score);
                    }
                }
            }
            __syncwarp();
            if (lane == 0) memra_pipe_arrive(b.k.empty + k_turn.stage);
            k_turn.next(b.k.stages);
            if (scores) {
                const int start = next.first_token(b.tokens);
                const bool edge = start < all_from || start + b.tokens - 1 > all_to;
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        score[n][i] = __fmul_rn(score[n][i], factor[n][i & 1]);
                        if (edge && !work.sees(8 * n + 2 * t + (i & 1), start + own_key + i / 2 * 2)) {
                            score[n][i] = minus_infinity();
                        }
                        raise |= score[n][i] > __fadd_rn(reference[n][i & 1], RAISE_AT);
                    }
                }
                if (!first) hand_over<NT>(score, reference, weights, added);
            }
            next.next();
        }
        // The values of the stage before.
        if (!first) {
            memra_pipe_wait(b.v.full + v_turn.stage, v_turn.parity);
            uint8_t* stage = b.v.ring + v_turn.stage * b.v.stage_bytes;
            const int start = task.walk.first_token(b.tokens), stop = start + b.tokens - 1;
            const bool cut = start < any_from || stop > any_to;
            if (cut) {  // rows that nobody sees become 0, whatever stands there
                for (int i = member; i < b.tokens; i += b.team_warps) {
                    if (start + i >= any_from && start + i <= any_to) continue;
                    uint16_t* row = (uint16_t*)(stage + b.v.quarter(i / quarter) + i % quarter * b.v.token_bytes + head * b.v.head_bytes);
                    for (int j = lane; j < b.v.head_bytes / 2; j += 32) row[j] = 0;
                }
                memra_pipe_fence();
                memra_team_sync(team, threads);
            }
            if (sums) {
                const bool split = work.columns > work.gqa && (start < all_from || stop > all_to);
                const uint8_t* head_rows = stage + head * b.v.head_bytes;
                const uint2* weight = b.weight + (parity * n_head_kv + head) * slabs * NT * 32;
                const int dims = head_dim_v - first_dim < 64 * WORDS ? head_dim_v - first_dim : 64 * WORDS;
                if (split && any_odd(b, work, head_rows, v_format, start, first_dim, dims)) {
                    weigh_odd_stage<WORDS, NT>(b, work, head_rows, v_format, start, lane_dim, step, apart, weight, out);
                } else if (v_format == MEMRA_Q5_1) {
                    weigh_stage<VQ5<WORDS>, WORDS, NT>(b, stage + v_at, weight, out);
                } else if (v_format == MEMRA_Q4_0) {
                    weigh_stage<VQ4<WORDS>, WORDS, NT>(b, stage + v_at, weight, out);
                } else {
                    weigh_stage<VFp8<WORDS>, WORDS, NT>(b, stage + v_at, weight, out);
                }
            }
            __syncwarp();
            if (lane == 0) memra_pipe_arrive(b.v.empty + v_turn.stage);
            v_turn.next(b.v.stages);
            task.walk.next();
            raise = memra_team_any(team, threads, raise);
        } else {
            raise = true;
            first = false;
        }
        // Where a score passed its reference, the team agrees on the next one.
        if (more && raise) {
            if (scores) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float most = memra_max(score[n][i], score[n][i + 2]);
                        for (int apart = 4; apart < 32; apart <<= 1) {
                            most = memra_max(most, __shfl_xor_sync(MEMRA_ALL_LANES, most, apart));
                        }
                        if (g == 0) b.most[(head * b.team_warps + member) * b.columns + 8 * n + 2 * t + i] = most;
                    }
                }
            }
            memra_team_sync(team, threads);
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float most = minus_infinity();
                    for (int other = 0; other < slabs && other < b.team_warps; other++) {
                        most = memra_max(most, b.most[(head * b.team_warps + other) * b.columns + 8 * n + 2 * t + i]);
                    }
                    if (!(most > __fadd_rn(reference[n][i], RAISE_AT))) continue;
                    const float now = __fsub_rn(ceilf(most), HEADROOM), worth = exp2_of(__fsub_rn(reference[n][i], now));
                    reference[n][i] = now;
                    sum[n][i] = __fmul_rn(sum[n][i], worth);
#pragma unroll
                    for (int d = 0; d < 4 * WORDS; d++) {
                        out[d][n][i] = __fmul_rn(out[d][n][i], worth);
                        out[d][n][i + 2] = __fmul_rn(out[d][n][i + 2], worth);
                    }
                }
            }
            if (scores) hand_over<NT>(score, reference, weights, added);
            memra_team_sync(team, threads);
        }
        if (more && scores) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                sum[n][0] = __fadd_rn(sum[n][0], added[n][0]);
                sum[n][1] = __fadd_rn(sum[n][1], added[n][1]);
            }
        }
    }

    // The team's sums of weights, then what the group is to each column.
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int apart = 4; apart < 32; apart <<= 1) {
                sum[n][i] = __fadd_rn(sum[n][i], __shfl_xor_sync(MEMRA_ALL_LANES, sum[n][i], apart));
            }
            if (g == 0) b.sum[(head * b.team_warps + member) * b.columns + 8 * n + 2 * t + i] = sum[n][i];
        }
    }
    memra_team_sync(team, threads);
    const int entry = head_dim_v + 2, n_head = n_head_kv * work.gqa;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int column = 8 * n + 2 * t + i, of_all = work.first_column + column;
            if (column >= work.columns) continue;
            float* to = task.part + (((long long)(of_all / work.gqa) * n_head + head * work.gqa + of_all % work.gqa) * GROUPS + group) * entry;
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                const int d = lane_dim + w * step;
                if (d >= head_dim_v) continue;
                *(float2*)(to + d) = make_float2(out[4 * w][n][i], out[4 * w + 1][n][i]);
                *(float2*)(to + d + 2) = make_float2(out[4 * w + 2][n][i], out[4 * w + 3][n][i]);
                *(float2*)(to + d + apart) = make_float2(out[4 * w][n][i + 2], out[4 * w + 1][n][i + 2]);
                *(float2*)(to + d + apart + 2) = make_float2(out[4 * w + 2][n][i + 2], out[4 * w + 3][n][i + 2]);
            }
            if (member == 0 && g == 0) {
                float total = 0.0f;
                for (int other = 0; other < b.team_warps; other++) {
                    total = __fadd_rn(total, b.sum[(head * b.team_warps + other) * b.columns + column]);
                }
                to[head_dim_v] = reference[n][i];
                to[head_dim_v + 1] = total;
            }
        }
    }
}

// Brings one stage of a plane: rows first_token .. of those the plane has.
static __device__ void bring(const Plane& plane, const Turn& turn, const uint8_t* bytes, int first_token, int tokens, int rows) {
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
    const Block b = plan_block(bytes, NT, n_head_kv, head_dim_k, k_tok_bytes, v_tok_bytes, k_format);
    const int warp = threadIdx.x / 32, gqa = n_head / n_head_kv, chunks = (rows * gqa + 8 * NT - 1) / (8 * NT);
    const int teams = n_head_kv * b.team_warps;  // warps that compute
    if (threadIdx.x == 32 * TEAM_WARPS) {
        for (int i = 0; i < b.k.stages; i++) {
            memra_pipe_init(b.k.full + i, 1);
            memra_pipe_init(b.k.empty + i, teams);
        }
        for (int i = 0; i < b.v.stages; i++) {
            memra_pipe_init(b.v.full + i, 1);
            memra_pipe_init(b.v.empty + i, teams);
        }
        memra_pipe_init_done();
    }
    __syncthreads();
    memra_let_dependents_start();

    Turn k_turn = {0, 0}, v_turn = {0, 0};
    for (int i = 0; i < n_seqs * chunks; i++) {
        const int seq = i / chunks, chunk = i % chunks, group = (int)((blockIdx.x + 53u * i) % GROUPS);
        if (seqs) {
            k = (const uint8_t*)seqs[seq].k;
            v = (const uint8_t*)seqs[seq].v;
            pos_d = (const int*)seqs[seq].pos_d;
            health = (memra_health*)seqs[seq].health;
            max_ctx = seqs[seq].max_ctx;
        }
        Task task;
        task.work.pos = memra_slot(pos_d, slot);
        if (task.work.pos < 0 || task.work.pos + rows > max_ctx) {
            if (group + chunk == 0 && threadIdx.x == 0) {
                memra_report(health, MEMRA_FAULT_SLOT_RANGE, layer, task.work.pos, 1);
            }
            continue;
        }
        task.work.rows = rows;
        task.work.gqa = gqa;
        task.work.window = window;
        task.work.first_column = chunk * 8 * NT;
        task.work.columns = rows * gqa - task.work.first_column < 8 * NT ? rows * gqa - task.work.first_column : 8 * NT;
        const int from = (int)first_key(task.work.last_key(0), window);
        task.walk = walk_of(group, from, (int)task.work.last_key(task.work.columns - 1), b.tokens);
        if (!task.walk.more()) continue;
        if (warp >= TEAM_WARPS) {
            if (threadIdx.x % 32 != 0) continue;
            for (; task.walk.more(); task.walk.next()) {
                const int first_token = task.walk.first_token(b.tokens);
                memra_pipe_wait(b.k.empty + k_turn.stage, k_turn.parity ^ 1);
                bring(b.k, k_turn, k, first_token, b.tokens, (int)max_ctx);
                k_turn.next(b.k.stages);
                memra_pipe_wait(b.v.empty + v_turn.stage, v_turn.parity ^ 1);
                bring(b.v, v_turn, v, first_token, b.tokens, (int)max_ctx);
                v_turn.next(b.v.stages);
            }
            continue;
        }
        task.q = q + (long long)seq * rows * n_head * head_dim_k;
        task.k = k;
        task.v = v;
        task.part = part + (long long)seq * rows * n_head * GROUPS * (head_dim_v + 2);
        task.health = health;
        task.reports = task.walk.tile == from / TILE;
        quantise_queries<NT>(b, task, n_head_kv, head_dim_k, k_format == MEMRA_FP8, scale, layer);
        memra_team_sync(15, 32 * TEAM_WARPS);
        if (warp < teams) {
            compute<WORDS, NT>(b, task, k_turn, v_turn, head_dim_k, head_dim_v, n_head_kv, k_format, v_format, group);
        }
        if (i + 1 < n_seqs * chunks) memra_team_sync(15, 32 * TEAM_WARPS);  // before the queries give way
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
    extern "C" __global__ void __maxnreg__(PIPE_REGISTERS) name(                                                   \
            const float* q, const uint8_t* k, const uint8_t* v, const int* pos_d, long long slot, int rows,                \
            long long max_ctx, int n_head, int n_head_kv, int head_dim_k, int head_dim_v, long long k_tok_bytes,           \
            long long v_tok_bytes, int k_format, int v_format, float scale, int window, float* part,                       \
            const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {                                          \
        BODY(WORDS, NT);                                                                                                  \
    }                                                                                                                      \
    MEMRA_EXPORT(name)
ATTEND(attend_pipe_64_8, 1, 1)
ATTEND(attend_pipe_64_16, 1, 2)
ATTEND(attend_pipe_64_24, 1, 3)
ATTEND(attend_pipe_64_32, 1, 4)
ATTEND(attend_pipe_128_8, 2, 1)
ATTEND(attend_pipe_128_16, 2, 2)
ATTEND(attend_pipe_128_24, 2, 3)
ATTEND(attend_pipe_128_32, 2, 4)
ATTEND(attend_pipe_256_8, 4, 1)
ATTEND(attend_pipe_256_16, 4, 2)
