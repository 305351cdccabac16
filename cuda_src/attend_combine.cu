// attend_combine: folds the groups of attend into the output.
//
// Groups in ascending order, FOLD of them into one, then those FOLDS results in ascending order.
// Whether a group has a key for a row follows from positions alone; one that has none is left out.
#include "attend.cuh"

// A running sum's maximum and weight. Folding a part into it says what the old sum and the part are worth now.
struct Sum {
    float most, weight;
    __device__ float2 fold(float part_most, float part_weight) {
        const float now = memra_max(most, part_most), base = now == minus_infinity() ? 0.0f : now;
        const float2 worth = {exp2_of(__fsub_rn(most, base)), exp2_of(__fsub_rn(part_most, base))};
        weight = __fmaf_rn(weight, worth.x, __fmul_rn(part_weight, worth.y));
        most = now;
        return worth;
    }
};

// part (n_seqs, rows, n_head, GROUPS, head_dim_v + 2); out (n_seqs, rows, n_head, head_dim_v). A block makes one head of
// one row: what the sums are worth first, then the values, whose loads so do not wait for each other.
extern "C" __global__ void __launch_bounds__(512) attend_combine(
        const float* part, float* out, const int* pos_d, long long slot, int rows, long long max_ctx, int n_head,
        int head_dim_v, int window, const memra_seq* seqs, int n_seqs, memra_health* health, int layer) {
    __shared__ float2 worth[GROUPS], worth_of_fold[FOLDS];  // of a group without a key y is below 0
    __shared__ float total_weight;
    const long long entry = blockIdx.x;  // (sequence, row, head)
    const long long seq = entry / ((long long)rows * n_head);
    if (seq >= n_seqs) return;
    if (seqs) {
        pos_d = (const int*)seqs[seq].pos_d;
        max_ctx = seqs[seq].max_ctx;
    }
    const long long pos = memra_slot(pos_d, slot);
    if (pos < 0 || pos + rows > max_ctx) return;  // attend has reported it
    const long long last = pos + entry / n_head % rows;
    const long long first_tile = first_key(last, window) / TILE, tiles = last / TILE - first_tile + 1;
    const int stride = head_dim_v + 2;
    part += entry * GROUPS * stride;
    out += entry * head_dim_v;

    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        Sum sum = {minus_infinity(), 0.0f};
        bool any = false;
        for (int i = 0; i < FOLD && lane < FOLDS; i++) {
            const int group = lane * FOLD + i;
            const bool has = ((group - first_tile) % GROUPS + GROUPS) % GROUPS < tiles;
            any |= has;
            worth[group] = make_float2(1.0f, -1.0f);
            if (has) worth[group] = sum.fold(part[group * stride + head_dim_v], part[group * stride + head_dim_v + 1]);
        }
        Sum total = {minus_infinity(), 0.0f};
        for (int fold = 0; fold < FOLDS; fold++) {
            const float most = __shfl_sync(MEMRA_ALL_LANES, sum.most, fold);
            const float weight = __shfl_sync(MEMRA_ALL_LANES, sum.weight, fold);
            const bool has = __shfl_sync(MEMRA_ALL_LANES, (int)any, fold) != 0;
            const float2 of_fold = has ? total.fold(most, weight) : make_float2(1.0f, 0.0f);
            if (lane == 0) worth_of_fold[fold] = of_fold;
        }
        if (lane == 0) total_weight = total.weight;
    }
    __syncthreads();
    for (int d = threadIdx.x; d < head_dim_v; d += blockDim.x) {
        float result = 0.0f;
        for (int fold = 0; fold < FOLDS; fold++) {
            const float2* of = worth + fold * FOLD;
            float x[FOLD], value = 0.0f;
            // A group without a key is not read: what stands there may be anything. One whose keys weigh nothing is,
            // so that a NaN among its values shows.
#pragma unroll
            for (int i = 0; i < FOLD; i++) x[i] = of[i].y < 0.0f ? 0.0f : part[(fold * FOLD + i) * stride + d];
#pragma unroll
            for (int i = 0; i < FOLD; i++) value = __fmaf_rn(value, of[i].x, __fmul_rn(x[i], of[i].y));
            const float2 w = worth_of_fold[fold];
            result = __fmaf_rn(result, w.x, __fmul_rn(value, w.y));
        }
        out[d] = __fdiv_rn(result, total_weight);
    }
}
MEMRA_EXPORT(attend_combine)
