// attend_pipe_score.cuh: the scores of a warp's keys, what they weigh, and the references that weights stand against.
#pragma once

#include "attend_pipe_kv.cuh"

#define RAISE_AT 15.0f  // a weight is at most 2^15, which f16 holds,
#define HEADROOM 5.0f   // and 2^5 at most where a reference has been set, so that f16 keeps what weighs 2^-29 of that

// What a warp needs to score its keys of each stage: rows g and g + 8 of a fragment are keys own_key and own_key + 2.
struct Scorer {
    int at, own_key;       // byte within a stage, key within a stage, of the warp's first slab
    const uint4* query;    // of this lane
    const float* factor;   // of columns 2t, 2t + 1; behind it those of pairs
    int all_from, all_to;  // keys that all columns see
    __device__ QueryPair query_pair(const Block& b, int pair, int n) const {
        const uint4* const blocks = query + n * (b.query_bytes / 16) + 64 * pair;
        return {{blocks[0], blocks[32]}, *(const float2*)(factor + (1 + pair) * b.columns + 8 * n)};
    }
};

// score += what 16 keys are to NT fragments of columns, those of a head; held: of the query, where a lane keeps it.
template <int NT, bool HOLDS, bool FIXED>
static __device__ __forceinline__ void score_slab(const Block& b, const uint8_t* upper, const uint8_t* lower,
                                                  const Scorer& s, const QueryPair* held, float score[NT][4]) {
    const int pairs = b.head_dim_k / 64, stride = b.query_bytes / 16;  // of blocks, of the next 8 columns
    if (b.k_format == MEMRA_FP8) {
#pragma unroll(HOLDS ? 2 : 1)
        for (int i = 0; i < pairs; i++) {
            const float* const factor = s.factor + (1 + i) * b.columns;
            score_fp8<NT>(upper + 64 * i, lower + 64 * i, s.query + 128 * i, stride, factor, score);
        }
    } else if (HOLDS) {
#pragma unroll
        for (int i = 0; i < pairs; i++) {
            const auto query = [&](int) { return held[i]; };
            score_q8<NT>(upper + 68 * i, lower + 68 * i, query, score);
        }
    } else {
#pragma unroll(FIXED || NT <= 2 ? 4 : 1)
        for (int i = 0; i < pairs; i++) {
            const auto query = [&](int n) { return s.query_pair(b, i, n); };
            score_q8<NT>(upper + 68 * i, lower + 68 * i, query, score);
        }
    }
}

// score = what the warp's keys are to the columns, as powers of two; minus infinity unseen. few: 8 columns at most.
template <int NT, int SLABS, bool FIXED>
static __device__ __forceinline__ void score_stage(const Block& b, const uint8_t* stage, const Scorer& s, const View& view,
                                                   bool few, const QueryPair* held, int first_token,
                                                   float score[SLABS][NT][4]) {
    constexpr bool HOLDS = FIXED && NT == 1;
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        const uint8_t *upper = stage + s.at + 4 * slab * b.k.token_bytes, *lower = upper + 2 * b.k.token_bytes;
#pragma unroll
        for (int n = 0; n < NT; n++) score[slab][n][0] = score[slab][n][1] = score[slab][n][2] = score[slab][n][3] = 0.0f;
        if (NT > 1 && few) {
            score_slab<1, HOLDS, FIXED>(b, upper, lower, s, held, score[slab]);
        } else {
            score_slab<NT, HOLDS, FIXED>(b, upper, lower, s, held, score[slab]);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const float2 factor = *(const float2*)(s.factor + 8 * n);
#pragma unroll
            for (int i = 0; i < 4; i++) score[slab][n][i] = __fmul_rn(score[slab][n][i], i & 1 ? factor.y : factor.x);
        }
    }
    const int t = threadIdx.x & 3;
    if (first_token >= s.all_from && first_token + b.tokens - 1 <= s.all_to) return;
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        const int key = first_token + s.own_key + 4 * slab;
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int from = view.first(8 * n + 2 * t + i), to = view.last(8 * n + 2 * t + i);
                if (key < from || key > to) score[slab][n][i] = minus_infinity();
                if (key + 2 < from || key + 2 > to) score[slab][n][i + 2] = minus_infinity();
            }
        }
    }
}

// Weights of this warp's keys, as fragments for the team. Whether a score has passed its reference.
template <int NT, int SLABS>
static __device__ __forceinline__ bool hand_over(const float score[SLABS][NT][4], const float reference[NT][2], uint2* to) {
    bool raise = false;
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const float* x = score[slab][n];
            float p[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float base = reference[n][i] == minus_infinity() ? 0.0f : reference[n][i];
                p[i] = exp2_of(__fsub_rn(x[i], base));
                p[i + 2] = exp2_of(__fsub_rn(x[i + 2], base));
                raise |= memra_max(x[i], x[i + 2]) > __fadd_rn(reference[n][i], RAISE_AT);
            }
            to[(slab * NT + n) * 32 + (threadIdx.x & 31)] = make_uint2(memra_transpose(memra_pack_f16(p[0], p[1])),
                                                                       memra_transpose(memra_pack_f16(p[2], p[3])));
        }
    }
    return raise;
}

// The team agrees on the next references: `most` of each warp, a barrier, then raised() for what is to be multiplied.
template <int NT, int SLABS>
static __device__ __forceinline__ void publish_most(const float score[SLABS][NT][4], float* most) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float two[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            two[0] = memra_max(two[0], memra_max(score[slab][n][0], score[slab][n][2]));
            two[1] = memra_max(two[1], memra_max(score[slab][n][1], score[slab][n][3]));
        }
#pragma unroll
        for (int apart = 4; apart < 32; apart <<= 1) {
            two[0] = memra_max(two[0], __shfl_xor_sync(MEMRA_ALL_LANES, two[0], apart));
            two[1] = memra_max(two[1], __shfl_xor_sync(MEMRA_ALL_LANES, two[1], apart));
        }
        if (lane < 4) *(float2*)(most + 8 * n + 2 * lane) = make_float2(two[0], two[1]);
    }
}

// What was published for columns 8n + 2t and 8n + 2t + 1.
template <int NT>
static __device__ __forceinline__ float2 largest_of(const float* most, int scorers, int n) {
    float2 largest = make_float2(minus_infinity(), minus_infinity());
    for (int i = 0; i < scorers; i++) {
        const float2 two = *(const float2*)(most + (i * NT + n) * 8 + 2 * (threadIdx.x & 3));
        largest = make_float2(memra_max(largest.x, two.x), memra_max(largest.y, two.y));
    }
    return largest;
}

// That of a group whose largest score is `most`: minus infinity where none is larger.
static __device__ float first_reference(float most) {
    return most > minus_infinity() ? __fsub_rn(ceilf(most), HEADROOM) : minus_infinity();
}

// Moves a reference where the largest score has passed it; what the sums are worth then, 1 where it has not.
static __device__ float raised(float& reference, float most) {
    if (!(most > __fadd_rn(reference, RAISE_AT))) return 1.0f;
    const float now = __fsub_rn(ceilf(most), HEADROOM), worth = exp2_of(__fsub_rn(reference, now));
    reference = now;
    return worth;
}
