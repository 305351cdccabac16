// The CUDA built-ins that kernels use, on the host. Included by cuda_cpu.h.
#pragma once

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---------------------------------------------------------------- meeting

inline void __syncthreads() { cpu::sync_block(); }
inline void __syncwarp(unsigned mask = ~0u) { cpu::meet("__syncwarp", mask, 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline unsigned __activemask() { return ~0u; }

namespace cpu {
// `from` is the lane asked for, already inside its segment of `width` lanes.
template <class T>
T shuffle(const char* intrinsic, unsigned mask, T value, unsigned from) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    uint64_t raw = 0;
    memcpy(&raw, &value, sizeof value);
    const uint64_t* values = meet(intrinsic, mask, raw);
    if (from < B.warps[self->warp].lanes && !(mask >> from & 1))
        fault_here("%s: lane %u reads lane %u, which is not in mask %08x", intrinsic, self->lane, from, mask);
    T out;
    memcpy(&out, &values[from], sizeof out);
    return out;
}
inline unsigned segment(int width) { return self->lane & ~(unsigned(width) - 1); }
} // namespace cpu

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return cpu::shuffle("__shfl_sync", mask, value, cpu::segment(width) + (unsigned(from) & unsigned(width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const unsigned lane = cpu::self->lane, from = lane ^ unsigned(lanes);
    return cpu::shuffle("__shfl_xor_sync", mask, value, from < cpu::segment(width) + unsigned(width) ? from : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const unsigned lane = cpu::self->lane, from = lane + by;
    return cpu::shuffle("__shfl_down_sync", mask, value, from < cpu::segment(width) + unsigned(width) ? from : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const unsigned lane = cpu::self->lane;
    return cpu::shuffle("__shfl_up_sync", mask, value, lane >= cpu::segment(width) + by ? lane - by : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const uint64_t* values = cpu::meet("__ballot_sync", mask, predicate != 0);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < cpu::B.warps[cpu::self->warp].lanes; lane++)
        if (mask >> lane & 1) bits |= unsigned(values[lane]) << lane;
    return bits;
}
// Registers x[0 .. n-1] of every lane of the warp.
inline void memra_cpu_exchange(const uint32_t* x, int n, uint32_t (*all)[32]) {
    for (int i = 0; i < n; i += 2) {
        const uint64_t pair = x[i] | uint64_t(i + 1 < n ? x[i + 1] : 0) << 32;
        const uint64_t* values = cpu::meet("a matrix instruction", ~0u, pair);
        for (int lane = 0; lane < 32; lane++) {
            all[i][lane] = uint32_t(values[lane]);
            if (i + 1 < n) all[i + 1][lane] = uint32_t(values[lane] >> 32);
        }
    }
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// ---------------------------------------------------------------- atomics: one thread runs at a time

template <class T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
    const T old = *at;
    *at = T(old + value);
    return old;
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
    const unsigned old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> value) {
    const T old = *at;
    *at = std::max(old, value);
    return old;
}
template <class T>
T atomicMin(T* at, std::type_identity_t<T> value) {
    const T old = *at;
    *at = std::min(old, value);
    return old;
}
template <class T>
T atomicOr(T* at, std::type_identity_t<T> value) {
    const T old = *at;
    *at = old | value;
    return old;
}
template <class T>
T atomicExch(T* at, std::type_identity_t<T> value) {
    return std::exchange(*at, value);
}
template <class T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    const T old = *at;
    if (old == expected) *at = value;
    return old;
}

// ---------------------------------------------------------------- arithmetic

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float a) { return float(1.0 / sqrt(double(a))); }
inline float __expf(float a) { return expf(a); }

template <class To, class From>
inline To memra_cpu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float a) { return memra_cpu_bits<unsigned>(a); }
inline int __float_as_int(float a) { return memra_cpu_bits<int>(a); }
inline float __uint_as_float(unsigned a) { return memra_cpu_bits<float>(a); }
inline float __int_as_float(int a) { return memra_cpu_bits<float>(a); }

// float to integer saturates; NaN gives 0 in 32 bits and the lowest number in 64.
inline int __float2int_rn(float a) {
    if (std::isnan(a)) return 0;
    const float r = nearbyintf(a);
    return r >= 0x1p31f ? INT_MAX : r < -0x1p31f ? INT_MIN : int(r);
}
inline int __float2int_rz(float a) {
    if (std::isnan(a)) return 0;
    return a >= 0x1p31f ? INT_MAX : a < -0x1p31f ? INT_MIN : int(a);
}
inline unsigned __float2uint_rn(float a) {
    if (std::isnan(a)) return 0;
    const float r = nearbyintf(a);
    return r >= 0x1p32f ? UINT_MAX : r <= 0 ? 0 : unsigned(r);
}
inline long long __float2ll_rn(float a) {
    if (std::isnan(a)) return LLONG_MIN;
    const float r = nearbyintf(a);
    return r >= 0x1p63f ? LLONG_MAX : r < -0x1p63f ? LLONG_MIN : (long long)r;
}
inline float __int2float_rn(int a) { return float(a); }
inline float __uint2float_rn(unsigned a) { return float(a); }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = low | uint64_t(high) << 32;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __clz(int a) { return a ? __builtin_clz(unsigned(a)) : 32; }
template <class T>
T __ldg(const T* at) {
    return *at;
}
using std::max;
using std::min;
