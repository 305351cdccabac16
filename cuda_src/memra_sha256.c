/* memra_sha256.c: SHA-256 (FIPS 180-4). */
#include "memra_internal.h"

#include <stdio.h>
#if defined __x86_64__ && defined __GNUC__
#include <cpuid.h>
#include <immintrin.h>
#endif

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98,
    0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8,
    0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
    0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2};

static uint32_t rotated(uint32_t x, int n) { return x >> n | x << (32 - n); }

static uint32_t big_endian(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

/* Round i, which leaves a in the place of h and e in the place of d: the next round names its variables one further. */
#define ROUND(a, b, c, d, e, f, g, h, i, word)                                                                         \
    do {                                                                                                               \
        const uint32_t t1 = (h) + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((g) ^ ((e) & ((f) ^ (g)))) +    \
                            round_constants[i] + (word);                                                               \
        (d) += t1;                                                                                                     \
        (h) = t1 + (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + (((a) & (b)) | ((c) & ((a) | (b))));            \
    } while (0)

/* Word i of the message schedule, of which 16 are kept. */
#define FIRST(i) (w[i] = big_endian(block + 4 * (i)))
#define LATER(i)                                                                                                       \
    (w[i] += (rotated(w[(i + 14) & 15], 17) ^ rotated(w[(i + 14) & 15], 19) ^ w[(i + 14) & 15] >> 10) +                \
             w[(i + 9) & 15] + (rotated(w[(i + 1) & 15], 7) ^ rotated(w[(i + 1) & 15], 18) ^ w[(i + 1) & 15] >> 3))

#define EIGHT_ROUNDS(from, i, WORD)                                                                                    \
    do {                                                                                                               \
        ROUND(a, b, c, d, e, f, g, h, (from) + (i), WORD(i));                                                          \
        ROUND(h, a, b, c, d, e, f, g, (from) + (i) + 1, WORD((i) + 1));                                                \
        ROUND(g, h, a, b, c, d, e, f, (from) + (i) + 2, WORD((i) + 2));                                                \
        ROUND(f, g, h, a, b, c, d, e, (from) + (i) + 3, WORD((i) + 3));                                                \
        ROUND(e, f, g, h, a, b, c, d, (from) + (i) + 4, WORD((i) + 4));                                                \
        ROUND(d, e, f, g, h, a, b, c, (from) + (i) + 5, WORD((i) + 5));                                                \
        ROUND(c, d, e, f, g, h, a, b, (from) + (i) + 6, WORD((i) + 6));                                                \
        ROUND(b, c, d, e, f, g, h, a, (from) + (i) + 7, WORD((i) + 7));                                                \
    } while (0)

static void absorb_plain(uint32_t state[8], const uint8_t *block, size_t n_blocks) {
    for (; n_blocks; n_blocks--, block += 64) {
        uint32_t w[16];
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        EIGHT_ROUNDS(0, 0, FIRST);
        EIGHT_ROUNDS(0, 8, FIRST);
        for (int from = 16; from < 64; from += 16) {
            EIGHT_ROUNDS(from, 0, LATER);
            EIGHT_ROUNDS(from, 8, LATER);
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#if defined __x86_64__ && defined __GNUC__
/* The same by the instructions that x86-64 processors have for it: two registers hold ABEF and CDGH. */
__attribute__((target("sha,sse4.1")))
static void absorb_sha(uint32_t state[8], const uint8_t *block, size_t n_blocks) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(badc, efgh, 8), cdgh = _mm_blend_epi16(efgh, badc, 0xF0);
    for (; n_blocks; n_blocks--, block += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(block + 16 * i)), swap);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) { /* four rounds each */
            const __m128i now = w[i & 3];
            const __m128i sum = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)(round_constants + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
            if (i >= 12) continue;
            const __m128i last = w[(i + 3) & 3], apart = _mm_alignr_epi8(last, w[(i + 2) & 3], 4);
            w[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) & 3]), apart), last);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static bool has_sha(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1; /* all that have it have SSE4.1 */
}
#else
static void absorb_sha(uint32_t state[8], const uint8_t *block, size_t n) { absorb_plain(state, block, n); }
static bool has_sha(void) { return false; }
#endif

static void absorb(memra_sha256 *sha, const uint8_t *block, size_t n_blocks) {
    (sha->by_instructions ? absorb_sha : absorb_plain)(sha->h, block, n_blocks);
}

void memra_sha256_begin(memra_sha256 *sha) {
    *sha = (memra_sha256){.h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab,
                          0x5be0cd19},
                    .by_instructions = has_sha()};
}

void memra_sha256_update(memra_sha256 *sha, const void *data, size_t n) {
    const uint8_t *at = data;
    while (n) {
        const size_t used = sha->n_bytes % 64;
        size_t take = n < 64 - used ? n : 64 - used;
        if (used == 0 && n >= 64) { /* whole blocks, where they lie */
            take = n / 64 * 64;
            absorb(sha, at, take / 64);
        } else {
            memcpy(sha->block + used, at, take);
            if (used + take == 64) absorb(sha, sha->block, 1);
        }
        sha->n_bytes += take;
        at += take;
        n -= take;
    }
}

void memra_sha256_finish(memra_sha256 *sha, char hex[65]) {
    const uint64_t n_bits = 8 * sha->n_bytes;
    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(n_bits >> (56 - 8 * i));
    memra_sha256_update(sha, "\x80", 1);
    while (sha->n_bytes % 64 != 56) memra_sha256_update(sha, "", 1);
    memra_sha256_update(sha, length, 8);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", sha->h[i]);
}
