// copy_many: n copies of any size and alignment in one launch; copy_rows: rows that lie apart. No overlap.
//
// Every entry gets the same number of blocks. Source and destination that stand alike within 16 (or 4)
// bytes move in units of 16 (or 4), with single bytes before the first whole unit and after the last.
#include "device.cuh"

struct alignas(16) Unit16 {
    uint32_t word[4];
};

template <typename Unit>
static __device__ void copy(uint8_t* dst, const uint8_t* src, unsigned long long bytes, unsigned part, unsigned parts) {
    const unsigned long long to_unit = (0ULL - (unsigned long long)dst) & (sizeof(Unit) - 1);
    const unsigned long long head = to_unit < bytes ? to_unit : bytes;
    const unsigned long long units = (bytes - head) / sizeof(Unit), tail = (bytes - head) % sizeof(Unit);
    if (part == 0 && threadIdx.x < head) dst[threadIdx.x] = src[threadIdx.x];
    if (part == 0 && threadIdx.x < tail) dst[bytes - tail + threadIdx.x] = src[bytes - tail + threadIdx.x];

    Unit* to = (Unit*)(dst + head);
    const Unit* from = (const Unit*)(src + head);
    const unsigned long long stride = (unsigned long long)parts * blockDim.x;
    for (unsigned long long i = (unsigned long long)part * blockDim.x + threadIdx.x; i < units; i += 4 * stride) {
        Unit held[4];  // four loads on their way at once
#pragma unroll
        for (int u = 0; u < 4; u++) {
            if (i + u * stride < units) held[u] = from[i + u * stride];
        }
#pragma unroll
        for (int u = 0; u < 4; u++) {
            if (i + u * stride < units) to[i + u * stride] = held[u];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) copy_many(
        const memra_copy* table, int n, memra_health* health, int layer) {
    const unsigned parts = gridDim.x / (unsigned)n, entry = blockIdx.x / parts, part = blockIdx.x % parts;
    if (entry >= (unsigned)n) return;
    const memra_copy job = table[entry];
    uint8_t* dst = (uint8_t*)job.dst;
    const uint8_t* src = (const uint8_t*)job.src;
    const unsigned apart = (unsigned)(job.dst ^ job.src);
    if (apart % 16 == 0) {
        copy<Unit16>(dst, src, job.bytes, part, parts);
    } else if (apart % 4 == 0) {
        copy<uint32_t>(dst, src, job.bytes, part, parts);
    } else {
        copy<uint8_t>(dst, src, job.bytes, part, parts);
    }
}
MEMRA_EXPORT(copy_many)

// dst row r, at dst_stride * r, = src row r, at src_stride * r: (rows, columns) f32. A block copies 1024 columns of a row.
extern "C" __global__ void __launch_bounds__(256) copy_rows(
        const float* src, float* dst, long long src_stride, long long dst_stride, int rows, int columns,
        memra_health* health, int layer) {
    const int runs = (columns + 1023) / 1024;
    const long long row = blockIdx.x / runs;
    if (row >= rows) return;
    const int begin = (int)(blockIdx.x % runs) * 1024, end = begin + 1024 < columns ? begin + 1024 : columns;
    for (int c = begin + (int)threadIdx.x; c < end; c += (int)blockDim.x) {
        dst[row * dst_stride + c] = src[row * src_stride + c];
    }
}
MEMRA_EXPORT(copy_rows)
