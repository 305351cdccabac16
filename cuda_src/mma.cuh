// mma.cuh: the tensor-core instruction that attend uses, and the f16 pairs that feed it.
//
// One instruction serves every GPU from sm_80 on: m16n8k16, f16 inputs, f32 sums. Elsewhere the warp exchanges its
// fragments and multiplies in f32, so the same kernel text runs, with sums in another order.
//
// Fragments, for lane l with g = l / 4 and t = l % 4 (each register is two f16, the lower index in the low half):
//   A (16 rows, 16 k)  a0: row g, k 2t..; a1: row g + 8, k 2t..; a2: row g, k 2t + 8..; a3: row g + 8, k 2t + 8..
//   B (16 k, 8 columns) b0: k 2t.., column g; b1: k 2t + 8.., column g
//   C (16 rows, 8 columns) c0, c1: row g, columns 2t, 2t + 1; c2, c3: row g + 8, the same
#pragma once

#include "device.cuh"

// Two f32 as f16, rounded half to even; `low` in the low half.
__device__ inline uint32_t memra_pack_f16(float low, float high) {
#if MEMRA_PTX
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return (uint32_t)memra_to_f16(high) << 16 | memra_to_f16(low);
#endif
}

// c += a b.
__device__ inline void memra_mma(float c[4], const uint32_t a[4], const uint32_t b[2]) {
#if MEMRA_PTX
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    const int lane = (int)(threadIdx.x & 31), g = lane / 4, t = lane % 4;
    for (int k = 0; k < 8; k++) {  // pairs of k: 2k, 2k + 1
        const int half = k / 4, from = k % 4;
        const uint32_t upper = __shfl_sync(MEMRA_ALL_LANES, a[2 * half], g * 4 + from);
        const uint32_t lower = __shfl_sync(MEMRA_ALL_LANES, a[2 * half + 1], g * 4 + from);
        const uint32_t left = __shfl_sync(MEMRA_ALL_LANES, b[half], 2 * t * 4 + from);
        const uint32_t right = __shfl_sync(MEMRA_ALL_LANES, b[half], (2 * t + 1) * 4 + from);
        for (int shift = 0; shift < 32; shift += 16) {
            const float x = memra_from_f16((uint16_t)(upper >> shift)), y = memra_from_f16((uint16_t)(lower >> shift));
            const float l = memra_from_f16((uint16_t)(left >> shift)), r = memra_from_f16((uint16_t)(right >> shift));
            c[0] = __fmaf_rn(x, l, c[0]);
            c[1] = __fmaf_rn(x, r, c[1]);
            c[2] = __fmaf_rn(y, l, c[2]);
            c[3] = __fmaf_rn(y, r, c[3]);
        }
    }
#endif
}

// A fragment of the transpose of a matrix in shared memory: rows are its columns m0 .. m0+15, k its rows k0 .. k0+15.
// `stride` is its row length in f16, a multiple of 8; m0 too.
__device__ inline void memra_load_transposed(uint32_t a[4], const uint16_t* matrix, int stride, int k0, int m0) {
    const int lane = (int)(threadIdx.x & 31);
#if MEMRA_PTX
    // Four 8x8 tiles, each transposed on its way: (k, m) = (0, 0), (0, 8), (8, 0), (8, 8).
    const uint16_t* row = matrix + (k0 + (lane & 7) + (lane & 16) / 2) * stride + m0 + (lane & 8);
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at)
                 : "memory");
#else
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        const uint16_t* at = matrix + (k0 + 2 * t + (i / 2) * 8) * stride + m0 + g + (i % 2) * 8;
        a[i] = (uint32_t)at[stride] << 16 | at[0];
    }
#endif
}
