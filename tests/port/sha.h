/* SHA-256 (FIPS 180-4), byte by byte. Its 64 constants, fractions of the cube roots of primes, are found each time. */
static struct {
    uint32_t h[8], w[64], k[64];
    uint64_t n;
} sha_at;

static void sha_begin(void) {
    static const uint32_t FIRST[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                      0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
    memcpy(sha_at.h, FIRST, sizeof FIRST), sha_at.n = 0;
    for (int prime = 2, i = 0, d; i < 64; prime++) {
        for (d = 2; d * d <= prime && prime % d; d++) {}
        if (d * d > prime) sha_at.k[i++] = (uint32_t)((cbrtl(prime) - floorl(cbrtl(prime))) * 4294967296.0L);
    }
}

static uint32_t sha_turn(uint32_t x, int a, int b, int c) {
    return (x >> a | x << (32 - a)) ^ (x >> b | x << (32 - b)) ^ (c < 0 ? x >> -c : x >> c | x << (32 - c));
}

static void sha_byte(uint8_t byte) {
    uint32_t v[8], *w = sha_at.w, at = (uint32_t)(sha_at.n++ % 64);
    w[at / 4] = w[at / 4] << 8 | byte;
    if (at < 63) return;
    memcpy(v, sha_at.h, sizeof v);
    for (int i = 0; i < 64; i++) {
        if (i > 15) w[i] = w[i - 16] + sha_turn(w[i - 15], 7, 18, -3) + w[i - 7] + sha_turn(w[i - 2], 17, 19, -10);
        uint32_t t = v[7] + sha_turn(v[4], 6, 11, 25) + ((v[4] & v[5]) ^ (~v[4] & v[6])) + sha_at.k[i] + w[i];
        uint32_t u = sha_turn(v[0], 2, 13, 22) + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 28), v[4] += t, v[0] = t + u;
    }
    for (int i = 0; i < 8; i++) sha_at.h[i] += v[i];
}

static void sha(const void *data, size_t n) {
    for (const uint8_t *each = data; n--; each++) sha_byte(*each);
}

static void sha_end(uint8_t out[32]) {
    uint64_t bits = sha_at.n * 8;
    for (sha_byte(0x80); sha_at.n % 64 != 56;) sha_byte(0);
    for (int i = 56; i >= 0; i -= 8) sha_byte((uint8_t)(bits >> i));
    for (int i = 0; i < 32; i++) out[i] = (uint8_t)(sha_at.h[i / 4] >> (24 - i % 4 * 8));
}
