// attend_pipe_weigh.cuh: a warp's sums over V, and what a stage adds to them.
#pragma once

#include "attend_pipe_kv.cuh"

// Sums of a group, or of a fold, for the dims of V of a warp: of lane (g, t) columns 8n + 2t, 8n + 2t + 1.
template <int WORDS, int NT>
struct Sums {
    float value[4 * WORDS][NT][4], weight[NT][2], reference[NT][2];
    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int d = 0; d < 4 * WORDS; d++) value[d][n][i] = 0.0f;
            }
            weight[n][0] = weight[n][1] = 0.0f;
            reference[n][0] = reference[n][1] = minus_infinity();
        }
    }
    __device__ void fold(const Sums& group) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const Worth worth = fold_reference(reference[n][i], group.reference[n][i]);
                weight[n][i] = fold_sum(weight[n][i], group.weight[n][i], worth);
#pragma unroll
                for (int d = 0; d < 4 * WORDS; d++) {
                    value[d][n][i] = fold_sum(value[d][n][i], group.value[d][n][i], worth);
                    value[d][n][i + 2] = fold_sum(value[d][n][i + 2], group.value[d][n][i + 2], worth);
                }
            }
        }
    }
};

// The dims of V that a lane of row g sums up: 4 from first + step * w on, and 4 that lie `apart` further, see above VQ5.
struct Dims {
    int first, step, apart;
    int between;  // from those of an even row to those of the next one
};

template <class V>
static __device__ __forceinline__ Dims dims_of(int first_dim, int g) {
    return {first_dim + V::first_dim(g), V::step, V::apart, V::first_dim(1)};
}

// A lane's sums of column 8n + 2t + i to where the column's begin, those of dims below `dims`. Where a lane has 8 neighbouring
// dims, two parts of 16 bytes, lanes of rows g and g + 1 exchange one, so that a store of the warp fills whole sectors of
// memory: then the first part is of the even row's dims and the second of the odd one's, to the left where the lane's row is
// even. Where it has 4, the rows' follow each other.
template <int WORDS, int NT, bool FIXED>
static __device__ __forceinline__ void store_sums(const float value[4 * WORDS][NT][4], int n, int i, const Dims& own, bool fp8,
                                                  bool writes, float* to, int dims) {
    const int odd = (int)(threadIdx.x / 4 & 1);
#pragma unroll
    for (int p = 0; p < 2 * WORDS; p += 2) {
        float part[2][4];
        int dim[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int w = fp8 ? (p + j) / 2 : (p + j) % WORDS, half = fp8 ? (p + j) % 2 : (p + j) / WORDS;
#pragma unroll
            for (int k = 0; k < 4; k++) part[j][k] = value[4 * w + k][n][i + 2 * half];
            dim[j] = own.first + w * own.step + half * own.apart;
        }
        if (fp8 || WORDS > 1) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float got = __shfl_xor_sync(MEMRA_ALL_LANES, odd ? part[0][k] : part[1][k], 4);
                part[0][k] = odd ? got : part[0][k];
                part[1][k] = odd ? part[1][k] : got;
            }
            dim[0] += odd ? 4 - own.between : 0;
            dim[1] = dim[0] + own.between;
        }
        if (!writes) continue;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (FIXED || dim[j] < dims) memra_put4(to + dim[j], part[j][0], part[j][1], part[j][2], part[j][3]);
        }
    }
}

// The weights of this warp's keys of a stage, as they were handed over: sum[n] is of column g, over the lane's keys.
template <int NT, int SLABS>
static __device__ __forceinline__ void add_weights(const uint2* weight, float sum[NT]) {
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint2 two = weight[(slab * NT + n) * 32 + (threadIdx.x & 31)];
            const float x = __fadd_rn(memra_from_f16((uint16_t)two.x), memra_from_f16((uint16_t)(two.x >> 16)));
            const float y = __fadd_rn(memra_from_f16((uint16_t)two.y), memra_from_f16((uint16_t)(two.y >> 16)));
            sum[n] = __fadd_rn(sum[n], __fadd_rn(x, y));
        }
    }
}

// Of columns 8n + 2t and 8n + 2t + 1, over the warps of a team; `sums` (warps, NT, 8) is what each has left, if any.
template <int NT>
static __device__ __forceinline__ void sum_weights(const float* sums, int warps, bool any, float weight[NT][2]) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float2 all = make_float2(0.0f, 0.0f);
        for (int i = 0; i < warps; i++) {
            const float2 two = *(const float2*)(sums + (i * NT + n) * 8 + 2 * (threadIdx.x & 3));
            all = make_float2(__fadd_rn(all.x, two.x), __fadd_rn(all.y, two.y));
        }
        weight[n][0] = any ? all.x : 0.0f;
        weight[n][1] = any ? all.y : 0.0f;
    }
}

template <int WORDS, int NT>
static __device__ __forceinline__ void copy_sums(const float from[4 * WORDS][NT][4], float to[4 * WORDS][NT][4]) {
#pragma unroll
    for (int i = 0; i < 4 * WORDS; i++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int x = 0; x < 4; x++) to[i][n][x] = from[i][n][x];
        }
    }
}

// Sums over V of one stage: out (dims of this warp, columns) += V^T weights, for USED fragments of NT. dims: of the head,
// from this warp's first on.
template <class V, int WORDS, int NT, int USED, bool FIXED>
static __device__ __forceinline__ void weigh_used(const Block& b, const uint8_t* rows, int dims, const uint2* weight,
                                                  uint32_t base, float out[4 * WORDS][NT][4]) {
    // A row of fragments behind the head's dims is made of row 0, and nobody uses it: what follows in memory is another
    // team's to write.
    const int lane = threadIdx.x & 31, g = V::first_dim(lane / 4) < dims ? lane / 4 : 0;
#pragma unroll(!FIXED ? 1 : NT == 1 ? 4 : 2)
    for (int slab = 0; slab < b.slabs(); slab++) {
        uint32_t w[USED][2];
#pragma unroll
        for (int n = 0; n < USED; n++) {
            const uint2 two = weight[(slab * NT + n) * 32 + lane];
            w[n][0] = two.x;
            w[n][1] = two.y;
        }
        V values;
        values.load(rows + 4 * slab * b.v.token_bytes, b.v.token_bytes, g, dims);
#pragma unroll
        for (int i = 0; i < 4 * WORDS; i++) {
            uint32_t a[4];
            values.fragment(i / 4, i % 4, base, a);
#pragma unroll
            for (int n = 0; n < USED; n++) memra_mma(out[i][n], a, w[n]);
        }
    }
}

// few: 8 columns at most.
template <class V, int WORDS, int NT, bool FIXED>
static __device__ __forceinline__ void weigh_stage(const Block& b, const uint8_t* rows, int dims, const uint2* weight,
                                                   bool few, uint32_t base, float out[4 * WORDS][NT][4]) {
    if (NT > 1 && few) {
        weigh_used<V, WORDS, NT, 1, FIXED>(b, rows, dims, weight, base, out);
    } else {
        weigh_used<V, WORDS, NT, NT, FIXED>(b, rows, dims, weight, base, out);
    }
}

// A stage with rows that some columns see and some do not.
struct Split {
    View view;
    Plane plane;
    const uint8_t* rows;  // of the team's head
    const uint2* weight;
    int tokens, format, head_dim, first_token;
    int first_dim, dims;            // of this warp
    Dims own;                       // of this lane
    __device__ const uint8_t* row(int i) const {
        const int quarter = tokens / QUARTERS;
        return rows + plane.quarter(i / quarter) + i % quarter * plane.token_bytes;
    }
};

// Whether such a row may hold an infinity or a NaN among this warp's dims: a weight of 0 would not silence it. A lane looks
// at a block of 32, whose numbers f16 holds where its scale and offset are below these bounds.
static __device__ __forceinline__ bool any_odd(const Split& s) {
    const int from = s.view.first(0), all_from = s.view.first(s.view.columns - 1);
    const int to = s.view.last(s.view.columns - 1), all_to = s.view.last(0);
    const int block = (int)(threadIdx.x & 31), bytes = block_bytes_of(s.format);
    bool odd = false;
    for (int key = from > s.first_token ? from : s.first_token; key <= to && key - s.first_token < s.tokens; key++) {
        if (key >= all_from && key <= all_to) {
            key = all_to;  // the last of those that all see
            continue;
        }
        if (block >= s.dims / 32) continue;
        const uint8_t* x = s.row(key - s.first_token) + (s.first_dim / 32 + block) * bytes;
        if (s.format == MEMRA_FP8) {  // no infinities; a NaN is 0x7F beside its sign
            for (int i = 0; i < 8; i++) odd |= (((const uint32_t*)x)[i] & 0x7F7F7F7Fu) + 0x01010101u & 0x80808080u;
        } else {
            odd |= (((const uint16_t*)x)[0] & 0x7FFFu) >= 0x6400u;                            // d: 1024
            odd |= s.format == MEMRA_Q5_1 && (((const uint16_t*)x)[1] & 0x7FFFu) >= 0x7800u;  // m: 32768
        }
    }
    return __any_sync(MEMRA_ALL_LANES, odd);
}

// weigh_stage where there is one: one row of queries at a time, with the keys that it does not see left out, keeps its own
// columns of the result. Called, not inlined: it is rare, and its registers would weigh on every other stage.
template <int WORDS, int NT>
static __device__ __noinline__ void weigh_odd_stage(const Split& s, float out[4 * WORDS][NT][4]) {
    const int lane = threadIdx.x & 31, t = lane % 4, quarter = s.tokens / QUARTERS;
#pragma unroll 1
    for (int slab = 0; slab < s.tokens / 16; slab++) {
        const int own = t * quarter + 4 * slab;  // of the lane's four keys
#pragma unroll 1
        for (int first = 0; first < s.view.columns;) {
            int end = (s.view.row(first) + 1) * s.view.gqa - s.view.first_column;
            end = end < s.view.columns ? end : s.view.columns;
#pragma unroll 1
            for (int i = 0; i < 4 * WORDS; i++) {
                uint32_t a[4] = {};
#pragma unroll
                for (int x = 0; x < 8; x++) {  // the fragment's elements
                    const int key = own + (x & 1) + (x / 4) * 2;
                    const int dim = s.own.first + i / 4 * s.own.step + i % 4 + (x / 2 & 1) * s.own.apart;
                    if (dim >= s.head_dim || !s.view.sees(first, s.first_token + key)) continue;
                    a[x / 2] |= v_element(s.row(key), s.format, dim) << 16 * (x & 1);
                }
#pragma unroll 1
                for (int n = 0; n < NT; n++) {
                    const uint2 two = s.weight[(slab * NT + n) * 32 + lane];
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
