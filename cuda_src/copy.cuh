// copy.cuh: bytes from one place to another, by some thread blocks together.
//
// Source and destination that stand alike within 16 (or 4) bytes move in units of 16 (or 4), with single bytes before
// the first whole unit and after the last.
#pragma once
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

// By block `part` of `parts`; the two do not overlap.
static __device__ void copy_bytes(
        uint8_t* dst, const uint8_t* src, unsigned long long bytes, unsigned part, unsigned parts) {
    const unsigned apart = (unsigned)((unsigned long long)dst ^ (unsigned long long)src);
    if (apart % 16 == 0) {
        copy<Unit16>(dst, src, bytes, part, parts);
    } else if (apart % 4 == 0) {
        copy<uint32_t>(dst, src, bytes, part, parts);
    } else {
        copy<uint8_t>(dst, src, bytes, part, parts);
    }
}
