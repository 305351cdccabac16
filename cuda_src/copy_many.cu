// copy_many: n copies of any size and alignment in one launch; copy_rows: rows that lie apart. No overlap.
//
// Every entry gets the same number of blocks.
#include "copy.cuh"

extern "C" __global__ void __launch_bounds__(256) copy_many(
        const memra_copy* table, int n, memra_health* health, int layer) {
    memra_begin();
    const unsigned parts = gridDim.x / (unsigned)n, entry = blockIdx.x / parts, part = blockIdx.x % parts;
    if (entry >= (unsigned)n) return;
    const memra_copy job = table[entry];
    copy_bytes((uint8_t*)job.dst, (const uint8_t*)job.src, job.bytes, part, parts);
}
MEMRA_EXPORT(copy_many)

// dst row r, at dst_stride * r, = src row r, at src_stride * r: (rows, columns) f32. A block copies 1024 columns of a row.
extern "C" __global__ void __launch_bounds__(256) copy_rows(
        const float* src, float* dst, long long src_stride, long long dst_stride, int rows, int columns,
        memra_health* health, int layer) {
    memra_begin();
    const int runs = (columns + 1023) / 1024;
    const long long row = blockIdx.x / runs;
    if (row >= rows) return;
    const int begin = (int)(blockIdx.x % runs) * 1024, end = begin + 1024 < columns ? begin + 1024 : columns;
    for (int c = begin + (int)threadIdx.x; c < end; c += (int)blockDim.x) {
        dst[row * dst_stride + c] = src[row * src_stride + c];
    }
}
MEMRA_EXPORT(copy_rows)
