/* memra_formats.h: the K/V block formats, 32 consecutive elements of one token per block.
 *
 * Plain C11, also C++17 and NVRTC. Little-endian; blocks follow each other without a gap, so a
 * memra_q8_0 is only 2-aligned. f16 and e4m3 values stand here as their bits. How they are made, of NaN, infinities
 * and what overflows too: sections 4 and 14 of SPEC.md, which stands in memra_driver/vectors and in every kit.
 */
#ifndef MEMRA_FORMATS_H
#define MEMRA_FORMATS_H

#if defined(__CUDACC_RTC__) /* has no <stdint.h> */
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#ifdef __cplusplus
#define MEMRA_ASSERT(condition, text) static_assert(condition, text)
#else
#define MEMRA_ASSERT(condition, text) _Static_assert(condition, text)
#endif
#define MEMRA_SIZE(type, n) MEMRA_ASSERT(sizeof(type) == (n), #type " has another size")

#define MEMRA_BLOCK 32 /* elements per block, in every format */

enum memra_format { MEMRA_Q8_0 = 0, MEMRA_Q5_1 = 1, MEMRA_Q4_0 = 2, MEMRA_FP8 = 3 };

/* K. Element j = d * q[j]. */
typedef struct memra_q8_0 {
    uint16_t d;    /* f16: the largest magnitude / 127 */
    int8_t q[32];  /* -127 .. 127 */
} memra_q8_0;
MEMRA_SIZE(memra_q8_0, 34);

/* V. Element j = fma(d, q_j, m), q_j of five bits, 0 .. 31. */
typedef struct memra_q5_1 {
    uint16_t d;      /* f16: (maximum - minimum) / 31 */
    uint16_t m;      /* f16: minimum */
    uint32_t qh;     /* bit j: bit 4 of q_j */
    uint8_t qs[16];  /* byte i: bits 0-3 of q_i, then bits 0-3 of q_(i+16) */
} memra_q5_1;
MEMRA_SIZE(memra_q5_1, 24);

/* V. Element j = d * (q_j - 8), q_j of four bits, 0 .. 15. */
typedef struct memra_q4_0 {
    uint16_t d;      /* f16, signed: the element of largest magnitude / -8 */
    uint8_t qs[16];  /* byte i: q_i, then q_(i+16) */
} memra_q4_0;
MEMRA_SIZE(memra_q4_0, 18);

/* K or V. */
typedef struct memra_fp8 {
    uint8_t q[32];  /* e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7F is NaN */
} memra_fp8;
MEMRA_SIZE(memra_fp8, 32);

#endif
