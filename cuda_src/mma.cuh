// mma.cuh: the tensor-core instructions that attention uses, and the f16 pairs that feed them.
//
// Every GPU from sm_80 on has them: m16n8k16, f16 inputs, f32 sums, and m16n8k32, bytes, integer sums. Elsewhere
// the warp exchanges its fragments and multiplies by itself, so the same kernel text runs, with f32 sums in another order.
//
// Fragments, for lane l with g = l / 4 and t = l % 4 (each register is two f16, the lower index in the low half):
//   A (16 rows, 16 k)  a0: row g, k 2t..; a1: row g + 8, k 2t..; a2: row g, k 2t + 8..; a3: row g + 8, k 2t + 8..
//   B (16 k, 8 columns) b0: k 2t.., column g; b1: k 2t + 8.., column g
//   C (16 rows, 8 columns) c0, c1: row g, columns 2t, 2t + 1; c2, c3: row g + 8, the same
// Of bytes, a register is four, k 4t.. where it was 2t.., and k 4t + 16.. where it was 2t + 8..
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
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    uint32_t all_a[4][32], all_b[2][32];
    memra_cpu_exchange(a, 4, all_a);
    memra_cpu_exchange(b, 2, all_b);
    const int lane = (int)(threadIdx.x & 31), g = lane / 4, t = lane % 4;
    for (int k = 0; k < 8; k++) {  // pairs of k: 2k, 2k + 1
        const int half = k / 4, from = k % 4;
        const uint32_t upper = all_a[2 * half][g * 4 + from], lower = all_a[2 * half + 1][g * 4 + from];
        const uint32_t left = all_b[half][2 * t * 4 + from], right = all_b[half][(2 * t + 1) * 4 + from];
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

// c = a b, of signed bytes and those of type B, int8_t or uint8_t.
template <class B>
__device__ inline void memra_mma_bytes(int c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
#if MEMRA_PTX
    if constexpr ((B)-1 < 0) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
    } else {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
    }
#else
    const uint32_t b[2] = {b0, b1};
    uint32_t all_a[4][32], all_b[2][32];
    memra_cpu_exchange(a, 4, all_a);
    memra_cpu_exchange(b, 2, all_b);
    const int lane = (int)(threadIdx.x & 31), g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        const int column = 2 * t + (i & 1);
        c[i] = 0;
        for (int word = 0; word < 8; word++) {
            const uint32_t x = all_a[i / 2 + word / 4 * 2][g * 4 + word % 4], y = all_b[word / 4][column * 4 + word % 4];
            for (int shift = 0; shift < 32; shift += 8) c[i] += (int8_t)(x >> shift) * (B)(y >> shift);
        }
    }
#endif
}

// The transpose of 8 x 8 f16 that lie in the warp as the first half of a C fragment, as f16 pairs.
__device__ inline uint32_t memra_transpose(uint32_t pair) {
#if MEMRA_PTX
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
#else
    uint32_t all[1][32];
    memra_cpu_exchange(&pair, 1, all);
    const int lane = (int)(threadIdx.x & 31), g = lane / 4, t = lane % 4, shift = (g & 1) * 16;
    const uint32_t low = all[0][2 * t * 4 + g / 2] >> shift, high = all[0][(2 * t + 1) * 4 + g / 2] >> shift;
    return (low & 0xFFFFu) | high << 16;
#endif
}

// a b + c of two f16 pairs, rounded once on a GPU.
__device__ inline uint32_t memra_fma_f16(uint32_t a, uint32_t b, uint32_t c) {
#if MEMRA_PTX
    uint32_t out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
#else
    uint32_t out = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const float x = memra_from_f16((uint16_t)(a >> shift)), y = memra_from_f16((uint16_t)(b >> shift));
        out |= (uint32_t)memra_to_f16(__fmaf_rn(x, y, memra_from_f16((uint16_t)(c >> shift)))) << shift;
    }
    return out;
#endif
}

// Two e4m3 (the low 16 bits of `codes`) as two f16, exactly.
__device__ inline uint32_t memra_e4m3_pair(uint32_t codes) {
#if MEMRA_PTX && __CUDA_ARCH__ >= 890
    uint32_t out;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"((uint16_t)codes));
    return out;
#else
    return memra_pack_f16(memra_from_e4m3((uint8_t)codes), memra_from_e4m3((uint8_t)(codes >> 8)));
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
