// device.cuh: what every kernel needs, and the only file that knows which compiler reads it.
//
// NVRTC and nvcc compile for a GPU; g++ with MEMRA_CPU compiles the same kernels for a CPU, over a
// header cuda_cpu.h that stands for the CUDA language. No CUDA header is included: the conversions
// that C++ lacks are PTX for a GPU, integer arithmetic with the same bytes elsewhere. No function
// contracts a product and a sum by itself: where one rounding is meant, __fmaf_rn stands.
#pragma once

#include "memra_driver.h"

#if defined(MEMRA_CPU)
#include "cuda_cpu.h"
#define MEMRA_EXPORT(kernel) MEMRA_CPU_EXPORT(kernel)  // a launcher under a C name
#else
#define MEMRA_EXPORT(kernel)
#define MEMRA_DYN_SHARED(T, name) extern __shared__ __align__(16) T name[]
#endif

#if defined(__CUDA_ARCH__)
#define MEMRA_PTX 1
#else
#define MEMRA_PTX 0
#endif

#define MEMRA_ALL_LANES 0xFFFFFFFFu

__device__ inline bool memra_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }

// In each kernel, in front of its first look at global memory: a launch may begin while the kernel in front of it in its
// stream comes to its end (programmatic dependent launch), and waits here until all that one wrote can be seen. Every thread
// calls it, also of blocks without work: a kernel that has ended tells the next one that those before it have, too.
__device__ inline void memra_begin() {
#if MEMRA_PTX && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel behind this one may be started when all blocks have called this or ended: it waits for their end.
__device__ inline void memra_let_begin() {
#if MEMRA_PTX && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Minimum and maximum as on a GPU: a NaN loses against a number, -0 lies below +0.
__device__ inline float memra_min(float a, float b) {
#if MEMRA_PTX
    return fminf(a, b);
#else
    if (a != a) return b;
    if (b != b) return a;
    return a < b ? a : b < a ? b : __uint_as_float(__float_as_uint(a) | __float_as_uint(b));
#endif
}

__device__ inline float memra_max(float a, float b) {
#if MEMRA_PTX
    return fmaxf(a, b);
#else
    if (a != a) return b;
    if (b != b) return a;
    return a < b ? b : b < a ? a : __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
#endif
}

// The same, but a NaN wins.
__device__ inline float memra_min_nan(float a, float b) {
#if MEMRA_PTX
    float x;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
#else
    return a != a ? a : b != b ? b : memra_min(a, b);
#endif
}

__device__ inline float memra_max_nan(float a, float b) {
#if MEMRA_PTX
    float x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
#else
    return a != a ? a : b != b ? b : memra_max(a, b);
#endif
}

// A number whose low byte is that of x rounded to an integer, half to even; |x| below 2^21.
__device__ inline uint32_t memra_rounded(float x) { return __float_as_uint(__fadd_rn(x, 0x1.8p23f)); }

// The same of x cut off; x in 0 .. 255, else anything.
__device__ inline uint32_t memra_cut(float x) {
#if MEMRA_PTX
    return __float_as_uint(__fadd_rz(x, 0x1p23f));
#else
    return x >= 0.0f && x < 256.0f ? (uint32_t)x : 0;
#endif
}

// 1/x, rounded once, where x and 1/x are normal numbers.
__device__ inline float memra_reciprocal(float x) {
#if MEMRA_PTX
    float guess;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
    return __fmaf_rn(guess, __fmaf_rn(-x, guess, 1.0f), guess);
#else
    return 1.0f / x;
#endif
}

// Byte i of the result is byte (select >> 4 * i & 7) of a, 0 .. 3, and b, 4 .. 7.
__device__ inline uint32_t memra_bytes(uint32_t a, uint32_t b, uint32_t select) {
#if MEMRA_PTX
    return __byte_perm(a, b, select);
#else
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t found = 0;
    for (int i = 0; i < 4; i++) found |= (uint32_t)(both >> 8 * (select >> 4 * i & 7u) & 255u) << 8 * i;
    return found;
#endif
}

// f32 -> f16 bits, half to even, overflow to infinity, every NaN to 0x7FFF.
__device__ inline uint16_t memra_to_f16(float x) {
#if MEMRA_PTX
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
#else
    const uint32_t bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7FFFu;
    if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);  // from 65520 on
    if (magnitude < 0x38800000u) {                                     // below 2^-14: steps of 2^-24
        // Adding 2^-1 leaves the mantissa in steps of 2^-24, rounded half to even.
        return (uint16_t)(sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3F000000u));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13));
#endif
}

__device__ inline float memra_from_f16(uint16_t half) {
#if MEMRA_PTX
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
#else
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
    if (magnitude >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
    return __uint_as_float(sign | __float_as_uint(__fmul_rn(__uint_as_float(magnitude << 13), 0x1p112f)));  // exact
#endif
}

// f32 -> bf16 bits, half to even, every NaN to 0x7FFF.
__device__ inline uint16_t memra_to_bf16(float x) {
    const uint32_t bits = __float_as_uint(x);
    return x != x ? (uint16_t)0x7FFFu : (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// f32 -> e4m3 bits, half to even; finite or infinite beyond 448 saturates; every NaN to 0x7F.
__device__ inline uint8_t memra_to_e4m3(float x) {
#if MEMRA_PTX && __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return (uint8_t)pair;
#else
    const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7Fu;
    if (magnitude >= 0x43E00000u) return (uint8_t)(sign | 0x7Eu);  // from 448 on
    if (magnitude < 0x3C800000u) {                                  // below 2^-6: steps of 2^-9
        // Adding 2^14 leaves the mantissa in steps of 2^-9, rounded half to even.
        return (uint8_t)(sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) - 0x46800000u));
    }
    return (uint8_t)(sign | ((magnitude - 0x3C000000u + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20));
#endif
}

// Four of them, the first in the low byte.
__device__ inline uint32_t memra_to_e4m3x4(float4 x) {
#if MEMRA_PTX && __CUDA_ARCH__ >= 890
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x.y), "f"(x.x));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x.w), "f"(x.z));
    return low | (uint32_t)high << 16;
#else
    return memra_to_e4m3(x.x) | (uint32_t)memra_to_e4m3(x.y) << 8 | (uint32_t)memra_to_e4m3(x.z) << 16 |
           (uint32_t)memra_to_e4m3(x.w) << 24;
#endif
}

__device__ inline float memra_from_e4m3(uint8_t code) {
    const uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7Fu;
    if (magnitude == 0x7Fu) return __uint_as_float(0x7FFFFFFFu);
    return __uint_as_float(sign | __float_as_uint(__fmul_rn(__uint_as_float(magnitude << 20), 0x1p120f)));  // exact
}

// Asks for the memory at an address, which is read soon.
__device__ inline void memra_prefetch(const void* at) {
#if MEMRA_PTX
    asm volatile("prefetch.global.L2 [%0];" : : "l"(at));
#else
    (void)at;
#endif
}

// The same for n_bytes, both multiples of 16, where one instruction does it. Called, not inlined: who asks in a loop that
// takes all registers would spill more.
static __device__ __noinline__ void memra_prefetch_many(const void* at, int n_bytes) {
#if MEMRA_PTX && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(at), "r"(n_bytes));
#else
    (void)at, (void)n_bytes;
#endif
}

// Brings 16 bytes of global memory into shared memory, both at multiples of 16; memra_arrived() waits for all that this
// thread asked for.
__device__ inline void memra_bring16(void* shared, const void* from) {
#if MEMRA_PTX
    asm volatile("{ .reg .u64 to; cvta.to.shared.u64 to, %0; cp.async.cg.shared.global [to], [%1], 16; }"
                 : : "l"(shared), "l"(from) : "memory");
#else
    *(float4*)shared = *(const float4*)from;
#endif
}

__device__ inline void memra_arrived() {
#if MEMRA_PTX
    asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}

// f32 of global memory. Of an address out of a table the compiler would not know that it is one of global memory.
__device__ inline float memra_read(const float* at) {
#if MEMRA_PTX
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
    return x;
#else
    return *at;
#endif
}

// Four of them, at a multiple of 16 bytes, of memory that nobody reads again soon.
__device__ inline float4 memra_read4(const float* at) {
#if MEMRA_PTX
    float4 x;
    asm volatile("ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(at) : "memory");
    return x;
#else
    return *(const float4*)at;
#endif
}

__device__ inline void memra_write(float* at, float x) {
#if MEMRA_PTX
    asm volatile("st.global.f32 [%0], %1;" : : "l"(at), "f"(x) : "memory");
#else
    *at = x;
#endif
}

__device__ inline void memra_write4(float* at, float4 x) {
#if MEMRA_PTX
    asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};"
                 : : "l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
#else
    *(float4*)at = x;
#endif
}

// Four f32 to a multiple of 16 bytes, by one instruction: what the compiler makes of an assignment may be four.
__device__ inline void memra_put4(float* at, float x, float y, float z, float w) {
#if MEMRA_PTX
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" : : "l"(at), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
#else
    *(float4*)at = make_float4(x, y, z, w);
#endif
}

// Warp reductions by butterfly, 16, 8, 4, 2, 1 apart: every lane gets the same bits.
__device__ inline float memra_warp_sum(float x) {
    for (int apart = 16; apart > 0; apart >>= 1) x = __fadd_rn(x, __shfl_xor_sync(MEMRA_ALL_LANES, x, apart));
    return x;
}

__device__ inline float memra_warp_min(float x) {
    for (int apart = 16; apart > 0; apart >>= 1) x = memra_min(x, __shfl_xor_sync(MEMRA_ALL_LANES, x, apart));
    return x;
}

__device__ inline float memra_warp_max(float x) {
    for (int apart = 16; apart > 0; apart >>= 1) x = memra_max(x, __shfl_xor_sync(MEMRA_ALL_LANES, x, apart));
    return x;
}

// The largest of the warp's integers.
__device__ inline unsigned memra_warp_max_u32(unsigned x) {
#if MEMRA_PTX
    asm("redux.sync.max.u32 %0, %0, 0xFFFFFFFF;" : "+r"(x));
#else
    for (int apart = 16; apart > 0; apart >>= 1) {
        const unsigned other = __shfl_xor_sync(MEMRA_ALL_LANES, x, apart);
        x = other > x ? other : x;
    }
#endif
    return x;
}

// The lowest lane of a ballot; 0 for an empty one.
__device__ inline int memra_lowest_lane(unsigned ballot) { return ballot ? __ffs((int)ballot) - 1 : 0; }

// The position that a launch starts at: the device's counter where there is one.
__device__ inline long long memra_slot(const int* pos_d, long long slot) { return pos_d ? *pos_d : slot; }

// Adds `count` faults of `kind`, seen at position `slot`, to the error record (may be null). One thread calls it.
__device__ inline void memra_report(memra_health* health, int kind, int layer, long long slot, unsigned count) {
    if (!health) return;
    const unsigned long long key = (unsigned long long)(slot < 0 ? 0 : slot) << 16 | (unsigned)layer;
    atomicAdd((unsigned long long*)&health->count[kind], (unsigned long long)count);
    atomicMax((unsigned long long*)&health->first[kind], ~key);
    atomicOr(&health->flags, 1u << kind);
}

// Reports one fault if `bad` in any lane. The whole warp calls it.
__device__ inline void memra_report_any(bool bad, memra_health* health, int kind, int layer, long long slot) {
    if (__any_sync(MEMRA_ALL_LANES, bad) && (threadIdx.x & 31) == 0) memra_report(health, kind, layer, slot, 1);
}
