// Kernels for tests of the shim itself, most of them wrong on purpose.
#include "device.cuh"

extern "C" __global__ void add_one(float* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1.0f;
}
MEMRA_EXPORT(add_one)

// The sum of 32 * warps numbers, once through shared memory, once through shuffles of every kind.
extern "C" __global__ void sums(const float* x, float* out, unsigned* ballots) {
    __shared__ float part[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float sum = x[threadIdx.x];
    for (int by = 16; by > 0; by >>= 1) sum += __shfl_down_sync(0xFFFFFFFFu, sum, by);
    if (lane == 0) part[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0;
        for (int w = 0; w < (int)blockDim.x / 32; w++) total += part[w];
        out[0] = total;
    }
    float butterfly = x[threadIdx.x];
    for (int apart = 4; apart > 0; apart >>= 1) butterfly += __shfl_xor_sync(0xFFFFFFFFu, butterfly, apart, 8);
    out[1 + threadIdx.x] = __shfl_sync(0xFFFFFFFFu, butterfly, 0, 8);
    const unsigned odd = __ballot_sync(0xFFFFFFFFu, lane & 1);
    if (lane < 16) atomicOr(&ballots[0], __ballot_sync(0x0000FFFFu, lane < 3));
    __syncwarp();
    if (lane == 0) atomicAdd(&ballots[1], odd);
}
MEMRA_EXPORT(sums)

extern "C" __global__ void deadlock(int* out) {
    if (threadIdx.x < 16) __syncthreads();
    else __ballot_sync(0xFFFFFFFFu, 1);
    out[threadIdx.x] = 1;
}
MEMRA_EXPORT(deadlock)

extern "C" __global__ void full_mask_in_half_a_warp(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, (int)threadIdx.x, 1);
}
MEMRA_EXPORT(full_mask_in_half_a_warp)

extern "C" __global__ void lane_outside_its_mask(int* out) {
    out[threadIdx.x] = __any_sync(0x0000FFFFu, 1);
}
MEMRA_EXPORT(lane_outside_its_mask)

extern "C" __global__ void reads_outside_its_mask(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000FFFFu, (int)threadIdx.x, 20);
}
MEMRA_EXPORT(reads_outside_its_mask)

extern "C" __global__ void different_intrinsics_meet(int* out) {
    if (threadIdx.x & 1) out[threadIdx.x] = __any_sync(0xFFFFFFFFu, 1);
    else out[threadIdx.x] = __shfl_sync(0xFFFFFFFFu, 1, 0);
}
MEMRA_EXPORT(different_intrinsics_meet)

// Thread i reads what thread i + 1 wrote, without a barrier between.
extern "C" __global__ void missing_barrier(uint32_t* out) {
    __shared__ uint32_t value[256];
    value[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = value[(threadIdx.x + 1) % blockDim.x];
}
MEMRA_EXPORT(missing_barrier)

extern "C" __global__ void dynamic_shared(uint32_t* out) {
    MEMRA_DYN_SHARED(uint32_t, value);
    out[threadIdx.x] = value[threadIdx.x];
    __syncthreads();
    value[threadIdx.x] = threadIdx.x;
}
MEMRA_EXPORT(dynamic_shared)

extern "C" __global__ void writes_at(uint8_t* x, long long at) { x[at] = 1; }
MEMRA_EXPORT(writes_at)

extern "C" __global__ void reads_word_at(const uint8_t* x, uint32_t* out, int at) { *out = *(const uint32_t*)(x + at); }
MEMRA_EXPORT(reads_word_at)

extern "C" __global__ void past_a_shared_array(int* out, int at) {
    __shared__ int values[32];
    values[threadIdx.x] = 0;
    __syncthreads();
    out[threadIdx.x] = values[at];
}
MEMRA_EXPORT(past_a_shared_array)

extern "C" __global__ void parameters(char a, long long b, int c, float d, const void* e) {}
MEMRA_EXPORT(parameters)
