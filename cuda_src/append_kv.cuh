// append_kv.cuh: how the blocks of append_kv are encoded, to the bytes of formats.py.
//
// A few lanes encode a block together, on the assumption that its numbers are ordinary; encode_any takes any block.
#pragma once

#include "device.cuh"

// What is wrong with a block, as bits. UNUSUAL: its numbers are not ordinary, and what stands for it is wrong.
enum { NONFINITE = 1, OVERFLOW = 2, SATURATED = 4, UNUSUAL = 8 };

// The step between codes and what a difference is multiplied by to be one.
struct Step {
    float d, inv;  // 1/d; 0 where d is 0, and where d is so small that 1/d overflows
};

static __device__ __noinline__ Step step_of_any(float range, float codes) {
    Step s;
    s.d = __fdiv_rn(range, codes);
    s.inv = __fdiv_rn(1.0f, s.d);
    if (!memra_finite(s.inv) && s.inv == s.inv) s.inv = 0.0f;
    return s;
}

// d = range / codes, rounded once, for codes 127, 31 and -8.
static __device__ inline Step step_of(float range, float codes) {
    if (!(fabsf(range) > 0x1p-100f && fabsf(range) < 0x1p100f)) return step_of_any(range, codes);
    // The remainder of the first guess is exact, and corrects it to the rounded quotient.
    const float reciprocal = 1.0f / codes, guess = __fmul_rn(range, reciprocal);
    Step s;
    s.d = __fmaf_rn(__fmaf_rn(-codes, guess, range), reciprocal, guess);
    s.inv = memra_reciprocal(s.d);
    return s;
}

static __device__ inline int overflow(uint16_t half) { return (half & 0x7FFFu) == 0x7C00u ? OVERFLOW : 0; }

// The low bytes of four numbers, the first the lowest.
static __device__ inline uint32_t packed(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return memra_bytes(memra_bytes(a, b, 0x0040), memra_bytes(c, d, 0x0040), 0x5410);
}

// Four bytes to where two-byte alignment is all there is.
static __device__ inline void put(uint8_t* to, uint32_t bytes) {
    ((uint16_t*)to)[0] = (uint16_t)bytes;
    ((uint16_t*)to)[1] = (uint16_t)(bytes >> 16);
}

// A block in the hands of LANES lanes. Lane a of them has its quads, four elements each, a, LANES + a, 2 LANES + a, ..
template <int LANES>
struct Block {
    static constexpr int QUADS = MEMRA_BLOCK / 4 / LANES;
    float4 x[QUADS];
    int lane;

    template <class Code>  // a number whose low byte is the code of an element
    __device__ inline uint32_t codes(int i, Code code) const {
        return packed(code(x[i].x), code(x[i].y), code(x[i].z), code(x[i].w));
    }

    __device__ inline int quad(int i) const { return LANES * i + lane; }

    // Over all elements; NaN where one is. Every lane gets the same bits.
    __device__ inline float highest() const {
        float high = x[0].x;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float pair = memra_max_nan(x[i].x, x[i].y), other = memra_max_nan(x[i].z, x[i].w);
            high = memra_max_nan(high, memra_max_nan(pair, other));
        }
        for (int apart = 1; apart < LANES; apart *= 2) {
            high = memra_max_nan(high, __shfl_xor_sync(MEMRA_ALL_LANES, high, apart));
        }
        return high;
    }

    __device__ inline float lowest() const {
        float low = x[0].x;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float pair = memra_min_nan(x[i].x, x[i].y), other = memra_min_nan(x[i].z, x[i].w);
            low = memra_min_nan(low, memra_min_nan(pair, other));
        }
        for (int apart = 1; apart < LANES; apart *= 2) {
            low = memra_min_nan(low, __shfl_xor_sync(MEMRA_ALL_LANES, low, apart));
        }
        return low;
    }

    __device__ inline float largest_magnitude() const {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float pair = memra_max_nan(fabsf(x[i].x), fabsf(x[i].y));
            most = memra_max_nan(most, memra_max_nan(pair, memra_max_nan(fabsf(x[i].z), fabsf(x[i].w))));
        }
        for (int apart = 1; apart < LANES; apart *= 2) {
            most = memra_max_nan(most, __shfl_xor_sync(MEMRA_ALL_LANES, most, apart));
        }
        return most;
    }

    // Each of these encodes the block, and says what is wrong with it.

    __device__ inline int to_q8_0(memra_q8_0* block) const {
        const float most = largest_magnitude();
        const Step s = step_of(most, 127.0f);
        const uint16_t half = memra_to_f16(s.d);
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const uint32_t q = codes(i, [&](float e) { return memra_rounded(__fmul_rn(e, s.inv)); });
            put((uint8_t*)block->q + 4 * quad(i), q);
        }
        if (lane == 0) block->d = half;
        return memra_finite(most) ? overflow(half) : UNUSUAL;
    }

    __device__ inline int to_q5_1(memra_q5_1* block) const {
        const float low = lowest(), range = __fsub_rn(highest(), low);
        const Step s = step_of(range, 31.0f);
        const uint16_t half = memra_to_f16(s.d), half_low = memra_to_f16(low);
        uint32_t q[QUADS], top = 0;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            q[i] = codes(i, [&](float e) { return memra_rounded(__fmul_rn(__fsub_rn(e, low), s.inv)); });
        }
#pragma unroll
        for (int i = 0; i < QUADS; i += 2) {  // bit 4 of the bytes of two quads, side by side by one product
            const uint32_t bits = ((q[i] >> 4 & 0x01010101u) | (q[i + 1] & 0x10101010u)) * 0x01020408u >> 24;
            top |= ((bits & 15u) | (bits >> 4) << 4 * LANES) << 4 * quad(i);
        }
        for (int apart = 1; apart < LANES; apart *= 2) top |= __shfl_xor_sync(MEMRA_ALL_LANES, top, apart);
#pragma unroll
        for (int i = 0; i < QUADS / 2; i++) {
            ((uint32_t*)block->qs)[quad(i)] = (q[i] & 0x0F0F0F0Fu) | (q[i + QUADS / 2] & 0x0F0F0F0Fu) << 4;
        }
        if (lane == 0) {
            block->d = half;
            block->m = half_low;
            block->qh = top;
        }
        return memra_finite(range) ? overflow(half) | overflow(half_low) : UNUSUAL;
    }

    __device__ inline int to_q4_0(memra_q4_0* block) const {
        const float low = lowest(), high = highest(), farthest = high > -low ? high : low;
        const Step s = step_of(farthest, -8.0f);
        const uint16_t half = memra_to_f16(s.d);
        uint32_t q[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const uint32_t cut = codes(i, [&](float e) { return memra_cut(__fmaf_rn(e, s.inv, 8.5f)); });
            q[i] = cut - (cut >> 4 & 0x01010101u);  // 16 becomes 15
        }
#pragma unroll
        for (int i = 0; i < QUADS / 2; i++) put(block->qs + 4 * quad(i), q[i] | q[i + QUADS / 2] << 4);
        if (lane == 0) block->d = half;
        // Of two elements as far from 0 the first decides the sign of d.
        return memra_finite(farthest) && high != -low && s.inv != 0.0f ? overflow(half) : UNUSUAL;
    }

    __device__ inline int to_fp8(memra_fp8* block) const {
#pragma unroll
        for (int i = 0; i < QUADS; i++) ((uint32_t*)block->q)[quad(i)] = memra_to_e4m3x4(x[i]);
        return largest_magnitude() <= 464.0f ? 0 : UNUSUAL;  // farther from 448 than half a step
    }

    __device__ inline int encode(uint8_t* to, int format) const {
        if (format == MEMRA_Q8_0) return to_q8_0((memra_q8_0*)to);
        if (format == MEMRA_Q5_1) return to_q5_1((memra_q5_1*)to);
        if (format == MEMRA_Q4_0) return to_q4_0((memra_q4_0*)to);
        return to_fp8((memra_fp8*)to);
    }
};

// Any block, element by element; says what is wrong with it.
static __device__ __noinline__ int encode_any(uint8_t* to, int format, const float* x) {
    float low = x[0], high = x[0], most = fabsf(x[0]);
    int wrong = 0, first = 0;
#pragma unroll 1
    for (int i = 0; i < MEMRA_BLOCK; i++) {
        low = memra_min(low, x[i]), high = memra_max(high, x[i]), most = memra_max(most, fabsf(x[i]));
        if (!memra_finite(x[i])) wrong |= NONFINITE;
        if (memra_finite(x[i]) && fabsf(x[i]) > 464.0f && format == MEMRA_FP8) wrong |= SATURATED;
    }
#pragma unroll 1
    for (int i = MEMRA_BLOCK - 1; i >= 0; i--) first = fabsf(x[i]) == most ? i : first;
    const float range = format == MEMRA_Q8_0 ? most : format == MEMRA_Q5_1 ? __fsub_rn(high, low) : x[first];
    const Step s = step_of_any(range, format == MEMRA_Q8_0 ? 127.0f : format == MEMRA_Q5_1 ? 31.0f : -8.0f);
    const bool overflowed = s.inv == 0.0f && s.d != 0.0f && memra_finite(s.d);
    const uint16_t half = memra_to_f16(s.d), half_low = memra_to_f16(low);
    uint32_t top = 0;
#pragma unroll 1
    for (int i = 0; i < MEMRA_BLOCK; i++) {  // a NaN becomes code 0
        const int cut = __float2int_rz(__fmaf_rn(x[i], s.inv, 8.5f));
        const int five = __float2int_rn(__fmul_rn(__fsub_rn(x[i], low), s.inv)), four = overflowed ? 8 : min(cut, 15);
        uint8_t* const nibble = (format == MEMRA_Q5_1 ? ((memra_q5_1*)to)->qs : ((memra_q4_0*)to)->qs) + i % 16;
        if (format == MEMRA_Q8_0) ((memra_q8_0*)to)->q[i] = (int8_t)__float2int_rn(__fmul_rn(x[i], s.inv));
        if (format == MEMRA_FP8) ((memra_fp8*)to)->q[i] = memra_to_e4m3(x[i]);
        if (format != MEMRA_Q5_1 && format != MEMRA_Q4_0) continue;
        const int code = format == MEMRA_Q5_1 ? five : four;
        *nibble = (uint8_t)(i < 16 ? code & 15 : *nibble | code << 4);
        top |= (uint32_t)(code >> 4 & 1) << i;
    }
    if (format == MEMRA_FP8) return wrong;
    *(uint16_t*)to = half;  // where all of them have d
    if (format != MEMRA_Q5_1) return wrong | overflow(half);
    ((memra_q5_1*)to)->m = half_low;
    ((memra_q5_1*)to)->qh = top;
    return wrong | overflow(half) | overflow(half_low);
}
