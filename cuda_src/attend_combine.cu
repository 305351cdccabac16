// attend_combine: folds the groups of attend and attend_pipe into the output.
//
// Every group is brought to the largest of their references, then they are summed in ascending order, FOLD of them into
// one, and those FOLDS results in ascending order. Whether a group has a key for a row follows from positions alone; one
// that has none is left out.
#include "attend.cuh"

#define DIMS 64  // that a block makes, of one head of one row; a warp makes a fold of them, a lane two dims

// part (n_seqs, rows, n_head, GROUPS, head_dim_v + TAIL); out (n_seqs, rows, n_head, head_dim_v).
extern "C" __global__ void __launch_bounds__(384) attend_combine(
        const float* part, float* out, const int* pos_d, long long slot, int rows, long long max_ctx, int n_head,
        int head_dim_v, int window, const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {
    __shared__ float most_of[FOLDS], weight_of[FOLDS];
    __shared__ float2 value_of[FOLDS][DIMS / 2];
    const long long own_pos = seqs ? 0 : memra_slot(pos_d, slot);  // what all else waits for
    const int lane = threadIdx.x & 31, fold = threadIdx.x / 32;
    const unsigned pieces = (unsigned)(head_dim_v + DIMS - 1) / DIMS, entry = blockIdx.x / pieces;  // (sequence, row, head)
    const unsigned row = entry / (unsigned)n_head;  // of all sequences
    const unsigned seq = seqs ? row / (unsigned)rows : 0;
    const int dim = (int)(blockIdx.x - entry * pieces) * DIMS + 2 * lane, stride = head_dim_v + TAIL;
    long long pos = own_pos;
    if (seqs && seq < (unsigned)n_seqs) {
        pos = memra_slot((const int*)seqs[seq].pos_d, slot);
        max_ctx = seqs[seq].max_ctx;
    }
    const bool valid = seq < (unsigned)n_seqs && pos >= 0 && pos + rows <= max_ctx;
    const int last = valid ? (int)(pos + (row - seq * rows)) : 0, first_tile = (int)first_key(last, window) / TILE;
    const int tiles = last / TILE - first_tile + 1, after = GROUPS - first_tile % GROUPS;
    if (!valid) return;  // attend has reported it

    // A group without a key is not read: what stands there may be anything. One whose keys weigh nothing is, so that a
    // NaN among its values shows.
    const float* from = part + ((long long)entry * GROUPS + fold * FOLD) * stride;
    float2 x[FOLD];
#pragma unroll
    for (int i = 0; i < FOLD; i++) {
        const bool has = (fold * FOLD + i + after) % GROUPS < tiles;
        x[i] = has && dim < head_dim_v ? *(const float2*)(from + i * stride + dim) : make_float2(0.0f, 0.0f);
    }
    float2 own = make_float2(minus_infinity(), 0.0f);  // reference and weight of the lane's group
    const bool has_own = lane < FOLD && (fold * FOLD + lane + after) % GROUPS < tiles;
    if (has_own) own = *(const float2*)(from + lane * stride + head_dim_v);
    const float most = memra_warp_max(own.x);
    if (lane == 0) most_of[fold] = most;
    __syncthreads();
    float base = minus_infinity();
    for (int i = 0; i < FOLDS; i++) base = memra_max(base, most_of[i]);
    const float worth = exp2_of(__fsub_rn(own.x, base == minus_infinity() ? 0.0f : base));
    float2 value = make_float2(0.0f, 0.0f);
    float weight = 0.0f;
#pragma unroll
    for (int i = 0; i < FOLD; i++) {
        const float w = __shfl_sync(MEMRA_ALL_LANES, worth, i);
        value.x = __fmaf_rn(x[i].x, w, value.x);
        value.y = __fmaf_rn(x[i].y, w, value.y);
        weight = __fmaf_rn(__shfl_sync(MEMRA_ALL_LANES, own.y, i), w, weight);
    }
    value_of[fold][lane] = value;
    if (lane == 0) weight_of[fold] = weight;
    __syncthreads();
    if (fold != 0 || dim >= head_dim_v) return;
    weight = 0.0f;
    value = make_float2(0.0f, 0.0f);
    for (int i = 0; i < FOLDS; i++) {
        value.x = __fadd_rn(value.x, value_of[i][lane].x);
        value.y = __fadd_rn(value.y, value_of[i][lane].y);
        weight = __fadd_rn(weight, weight_of[i]);
    }
    out += (long long)entry * head_dim_v + dim;  // may be aligned for single floats only
    out[0] = __fdiv_rn(value.x, weight);
    out[1] = __fdiv_rn(value.y, weight);
}
MEMRA_EXPORT(attend_combine)
