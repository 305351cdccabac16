// set_counters, restore, commit_counters, advance_batch: the device counters of a cache, in stream order.
#include "copy.cuh"

#define RESTORE_BYTES 16384LL  // four units of 16 bytes for each of 256 threads

// Thread i: counters[i] = a where bit i of (a_hi:a_lo) is set, else b where bit i of (b_hi:b_lo) is set; i < 128.
static __device__ void set_counter(
        int i, int* counters, int a, int b, long long a_lo, long long a_hi, long long b_lo, long long b_hi) {
    const int bit = i & 63;
    const unsigned long long in_a = (unsigned long long)(i < 64 ? a_lo : a_hi) >> bit & 1;
    const unsigned long long in_b = (unsigned long long)(i < 64 ? b_lo : b_hi) >> bit & 1;
    if (in_a) {
        counters[i] = a;
    } else if (in_b) {
        counters[i] = b;
    }
}

// The values ride in the launch.
extern "C" __global__ void __launch_bounds__(128) set_counters(
        int* counters, int a, int b, long long a_lo, long long a_hi, long long b_lo, long long b_hi,
        memra_health* health, int layer) {
    memra_begin();
    set_counter(threadIdx.x, counters, a, b, a_lo, a_hi, b_lo, b_hi);
}
MEMRA_EXPORT(set_counters)

// Two copies of any size and alignment, which do not overlap, and the counters as set_counters sets them. Where no mask
// has a bit they may be null: so a snapshot is taken. A thread block copies RESTORE_BYTES of one of the two.
extern "C" __global__ void __launch_bounds__(256) restore(
        const uint8_t* src, uint8_t* dst, long long bytes, const uint8_t* src2, uint8_t* dst2, long long bytes2,
        int* counters, int a, int b, long long a_lo, long long a_hi, long long b_lo, long long b_hi,
        memra_health* health, int layer) {
    memra_begin();
    const long long first = (bytes + RESTORE_BYTES - 1) / RESTORE_BYTES;  // blocks of the first copy
    const bool is_first = blockIdx.x < first;
    const long long at = (is_first ? blockIdx.x : blockIdx.x - first) * RESTORE_BYTES;
    const long long left = (is_first ? bytes : bytes2) - at;
    if (blockIdx.x == 0 && threadIdx.x < 128) set_counter(threadIdx.x, counters, a, b, a_lo, a_hi, b_lo, b_hi);
    if (left <= 0) return;
    copy_bytes(
        (is_first ? dst : dst2) + at, (is_first ? src : src2) + at, left < RESTORE_BYTES ? left : RESTORE_BYTES, 0, 1);
}
MEMRA_EXPORT(restore)

// Ends a step of `rows` rows of which `accept` stand (accept_d, where not null, holds the count): counters[i] = pos + accept
// where bit i of (mask_hi:mask_lo) is set, i < 128; then, if move_pos, pos += accept.
// A count outside 0 .. rows is reported, and counts as 0: an append may have moved the counters already.
extern "C" __global__ void __launch_bounds__(128) commit_counters(
        int* counters, int* pos_d, const int* accept_d, int accept, int rows, long long mask_lo, long long mask_hi,
        int move_pos, memra_health* health, int layer) {
    memra_begin();
    const int i = threadIdx.x, asked = accept_d ? *accept_d : accept, pos = *pos_d;
    const bool bad = asked < 0 || asked > rows;
    const int end = bad ? pos : pos + asked;
    if (bad && i == 0 && move_pos) memra_report(health, MEMRA_FAULT_BAD_ACCEPT, layer, pos, 1);
    if ((unsigned long long)(i < 64 ? mask_lo : mask_hi) >> (i & 63) & 1) counters[i] = end;
    __syncthreads();  // everybody has read pos
    if (i == 0 && move_pos) *pos_d = end;
}
MEMRA_EXPORT(commit_counters)

// pos += n for every sequence of a batch.
extern "C" __global__ void __launch_bounds__(128) advance_batch(
        const memra_seq* seqs, int n_seqs, int n, memra_health* health, int layer) {
    memra_begin();
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n_seqs) *(int*)seqs[i].pos_d += n;
}
MEMRA_EXPORT(advance_batch)
