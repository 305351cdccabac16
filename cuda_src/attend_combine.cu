// attend_combine: makes the output of the partial sums that attend and attend_pipe left.
//
// Groups are folded in ascending order, FOLD of them into one (fold_sum() in attend.cuh), unless attend has done so: a block
// of it that has a fold's groups one after the other leaves their fold, of the same bits. The FOLDS results are brought to the
// largest of their references and summed in ascending order. Whether a group has a key for a row follows from positions
// alone; one that has none adds nothing.
#include "attend.cuh"

#define DIMS 64  // of one head of one row, that a warp works on: a lane has two of them

// Which groups have keys for a row.
struct Groups {
    int tiles, after;  // tiles with keys; groups from the first one's to the end
    __device__ bool has(int group) const { return (group + after) % GROUPS < tiles; }
    __device__ bool has_fold(int fold) const { return has(fold * FOLD) || (fold * FOLD + after) % GROUPS > GROUPS - FOLD; }
};

// Two dims of the groups of a fold, as one sum; in every lane its reference and weight.
static __device__ float2 fold_groups(const float* from, int stride, int head_dim_v, int dim, int fold, const Groups& groups,
                                     float2& own) {
    const int lane = threadIdx.x & 31;
    const bool has_own = lane < FOLD && groups.has(fold * FOLD + lane);
    const unsigned present = __ballot_sync(MEMRA_ALL_LANES, has_own);
    // A group without a key is not read: what stands there may be anything. One whose keys weigh nothing is, so that a
    // NaN among its values shows.
    float2 x[FOLD];
#pragma unroll
    for (int i = 0; i < FOLD; i++) {
        const bool reads = (present >> i & 1u) && dim < head_dim_v;
        x[i] = reads ? *(const float2*)(from + i * stride + dim) : make_float2(0.0f, 0.0f);
    }
    own = make_float2(minus_infinity(), 0.0f);  // reference and weight of the lane's group
    if (has_own) own = *(const float2*)(from + lane * stride + head_dim_v);
    float all = own.x;  // the largest of the lanes up to this one
#pragma unroll
    for (int apart = 1; apart < FOLD; apart *= 2) {
        const float other = __shfl_up_sync(MEMRA_ALL_LANES, all, apart);
        if (lane >= apart) all = memra_max(all, other);
    }
    float before = __shfl_up_sync(MEMRA_ALL_LANES, all, 1);
    if (lane == 0) before = minus_infinity();
    const Worth worth = fold_reference(before, own.x);
    float2 value = make_float2(0.0f, 0.0f);
    float weight = 0.0f;
#pragma unroll
    for (int i = 0; i < FOLD; i++) {
        const Worth w = {__shfl_sync(MEMRA_ALL_LANES, worth.before, i), __shfl_sync(MEMRA_ALL_LANES, worth.own, i)};
        const float group_weight = __shfl_sync(MEMRA_ALL_LANES, own.y, i);
        value = make_float2(fold_sum(value.x, x[i].x, w), fold_sum(value.y, x[i].y, w));
        weight = fold_sum(weight, group_weight, w);
    }
    own = make_float2(__shfl_sync(MEMRA_ALL_LANES, all, FOLD - 1), weight);
    return value;
}

// part (n_seqs, rows, n_head, pieces, head_dim_v + TAIL), pieces of GROUPS or FOLDS; out (n_seqs, rows, n_head, head_dim_v).
extern "C" __global__ void __launch_bounds__(384) attend_combine(
        const float* part, float* out, const int* pos_d, long long slot, int rows, long long max_ctx, int n_head,
        int n_head_kv, int head_dim_v, int window, int pieces, const memra_seq* seqs, int n_seqs, memra_health* health,
        int layer) {
    __shared__ float2 own_of[FOLDS];
    __shared__ float2 value_of[FOLDS][DIMS / 2];
    const bool folds = pieces == GROUPS;  // each warp a fold of the block's dims; else each warp other dims
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const unsigned chunks = (unsigned)(head_dim_v + DIMS - 1) / DIMS, chunk = folds ? blockIdx.x : blockIdx.x * FOLDS + warp;
    const unsigned entry = chunk / chunks;  // (sequence, row, head)
    const unsigned row = entry / (unsigned)n_head;  // of all sequences
    const unsigned seq = row / (unsigned)rows;
    const int dim = (int)(chunk - entry * chunks) * DIMS + 2 * lane, stride = head_dim_v + TAIL;
    memra_begin();
    memra_let_begin();
    long long pos = seqs ? 0 : memra_slot(pos_d, slot);
    if (seqs && seq < (unsigned)n_seqs) {
        pos = memra_slot((const int*)seqs[seq].pos_d, slot);
        max_ctx = seqs[seq].max_ctx;
    }
    if (seq >= (unsigned)n_seqs || pos < 0 || pos + rows > max_ctx) return;  // attend has reported it
    const int last = (int)(pos + (row - seq * rows)), tile_shift = tile_shift_of(n_head_kv);
    const int first_tile = (int)first_key(last, window) >> tile_shift;
    const Groups groups = {(last >> tile_shift) - first_tile + 1, GROUPS - first_tile % GROUPS};

    const float* from = part + (long long)entry * pieces * stride;
    float2 own = make_float2(minus_infinity(), 0.0f);  // reference and weight of the lane's fold
    float2 x[FOLDS];
    if (folds) {
        const float2 value = fold_groups(from + warp * FOLD * stride, stride, head_dim_v, dim, warp, groups, own);
        value_of[warp][lane] = value;
        if (lane == 0) own_of[warp] = own;
        __syncthreads();
        if (warp != 0) return;
        own = own_of[lane < FOLDS ? lane : 0];
        if (lane >= FOLDS) own.x = minus_infinity();
#pragma unroll
        for (int i = 0; i < FOLDS; i++) x[i] = value_of[i][lane];
    } else {
        const bool has_own = lane < FOLDS && groups.has_fold(lane);
        const unsigned present = __ballot_sync(MEMRA_ALL_LANES, has_own);
        if (has_own) own = *(const float2*)(from + lane * stride + head_dim_v);
#pragma unroll
        for (int i = 0; i < FOLDS; i++) {
            const bool reads = (present >> i & 1u) && dim < head_dim_v;
            x[i] = reads ? *(const float2*)(from + i * stride + dim) : make_float2(0.0f, 0.0f);
        }
    }
    const float most = memra_warp_max(own.x);
    const float worth = exp2_of(__fsub_rn(own.x, most == minus_infinity() ? 0.0f : most));
    float2 value = make_float2(0.0f, 0.0f);
    float weight = 0.0f;
#pragma unroll
    for (int i = 0; i < FOLDS; i++) {
        const float w = __shfl_sync(MEMRA_ALL_LANES, worth, i);
        const float fold_weight = __shfl_sync(MEMRA_ALL_LANES, own.y, i);
        value = make_float2(__fmaf_rn(x[i].x, w, value.x), __fmaf_rn(x[i].y, w, value.y));
        weight = __fmaf_rn(fold_weight, w, weight);
    }
    if (dim >= head_dim_v) return;
    out += (long long)entry * head_dim_v + dim;  // may be aligned for single floats only
    out[0] = __fdiv_rn(value.x, weight);
    out[1] = __fdiv_rn(value.y, weight);
}
MEMRA_EXPORT(attend_combine)
