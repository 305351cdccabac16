/* memra_digest.c: SHA-256 (FIPS 180-4), and the digest of a cache: digest.py in C. */
#include "memra_internal.h"

#include <stdio.h>

typedef struct sha256 {
    uint32_t h[8];
    uint64_t n_bytes;
    uint8_t block[64];
} sha256;

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

static void absorb(sha256 *sha, const uint8_t *block) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
               block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        const uint32_t a = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3;
        const uint32_t b = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + a + w[i - 7] + b;
    }
    memcpy(s, sha->h, sizeof s);
    for (int i = 0; i < 64; i++) {
        const uint32_t sum1 = rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25);
        const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
        const uint32_t t1 = s[7] + sum1 + choice + round_constants[i] + w[i];
        const uint32_t sum0 = rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22);
        const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + sum0 + majority;
    }
    for (int i = 0; i < 8; i++) sha->h[i] += s[i];
}

static void begin(sha256 *sha) {
    *sha = (sha256){.h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab,
                          0x5be0cd19}};
}

static void update(sha256 *sha, const void *data, size_t n) {
    const uint8_t *at = data;
    while (n) {
        const size_t used = sha->n_bytes % 64, take = n < 64 - used ? n : 64 - used;
        memcpy(sha->block + used, at, take);
        sha->n_bytes += take;
        at += take;
        n -= take;
        if (sha->n_bytes % 64 == 0) absorb(sha, sha->block);
    }
}

static void little_endian(sha256 *sha, uint64_t value, int n_bytes) {
    uint8_t bytes[8];
    for (int i = 0; i < n_bytes; i++) bytes[i] = (uint8_t)(value >> 8 * i);
    update(sha, bytes, (size_t)n_bytes);
}

static void finish(sha256 *sha, char hex[65]) {
    const uint64_t n_bits = 8 * sha->n_bytes;
    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(n_bits >> (56 - 8 * i));
    update(sha, "\x80", 1);
    while (sha->n_bytes % 64 != 56) update(sha, "", 1);
    update(sha, length, 8);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", sha->h[i]);
}

/* ---- The cache ---- */

#define CHUNK_BYTES (4u << 20)

static int plane(sha256 *sha, memra_device *device, uint64_t ptr, uint64_t n_bytes, void *chunk) {
    for (uint64_t at = 0; at < n_bytes; at += CHUNK_BYTES) {
        const uint64_t n = n_bytes - at < CHUNK_BYTES ? n_bytes - at : CHUNK_BYTES;
        MEMRA_TRY(memra_download(device, chunk, ptr + at, n));
        update(sha, chunk, n);
    }
    return MEMRA_OK;
}

static int attention(sha256 *sha, const memra_cache *cache, const memra_kv_layer *layer, void *chunk) {
    static const char *const names[] = {"q8_0", "q5_1", "q4_0", "fp8"};
    memra_device *device = memra_device_at(cache, layer->device_index);
    const int32_t formats[2] = {layer->k_format, layer->v_format};
    int32_t len_d = 0;
    little_endian(sha, 1, 1);
    for (int i = 0; i < 2; i++) {
        if (formats[i] < 0 || formats[i] > MEMRA_FP8)
            return memra_fail(MEMRA_ERR_STATE, "digest: format %d is none of enum memra_format", (int)formats[i]);
        little_endian(sha, strlen(names[formats[i]]), 4);
        update(sha, names[formats[i]], strlen(names[formats[i]]));
    }
    MEMRA_TRY(memra_download(device, &len_d, layer->len_d.ptr, sizeof len_d));
    little_endian(sha, (uint64_t)layer->len, 8);
    little_endian(sha, (uint64_t)(int64_t)len_d, 8);
    MEMRA_TRY(plane(sha, device, layer->k.ptr, (uint64_t)layer->len * (uint64_t)layer->k_tok_bytes, chunk));
    return plane(sha, device, layer->v.ptr, (uint64_t)layer->len * (uint64_t)layer->v_tok_bytes, chunk);
}

static int recurrent(sha256 *sha, const memra_cache *cache, int32_t il, void *chunk) {
    memra_recur_layer *layer = NULL;
    MEMRA_TRY(memra_recur_of(cache, il, &layer));
    memra_device *device = memra_device_at(cache, layer->device_index);
    little_endian(sha, 2, 1);
    MEMRA_TRY(plane(sha, device, layer->conv_state.ptr, 4 * (uint64_t)layer->conv_state.len, chunk));
    return plane(sha, device, layer->ssm_state.ptr, 4 * (uint64_t)layer->ssm_state.len, chunk);
}

int memra_digest(memra_cache *cache, char hex[65]) {
    sha256 sha;
    if (hex == NULL) return memra_fail(MEMRA_ERR_ARRAY, "digest: hex is NULL");
    hex[0] = 0;
    MEMRA_TRY(memra_check_cache(cache, "digest"));
    MEMRA_TRY(memra_check_not_recording(cache, "digest"));
    MEMRA_TRY(memra_check_state(cache, "digest", MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_PENDING_REPLAY)));
    MEMRA_TRY(memra_check_lengths(cache));
    void *chunk = malloc(CHUNK_BYTES);
    if (chunk == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for a digest");
    begin(&sha);
    int status = MEMRA_OK;
    for (int64_t il = 0; il < cache->n_layer && status == MEMRA_OK; il++) {
        if (cache->kv[il].present)
            status = attention(&sha, cache, &cache->kv[il], chunk);
        else if (cache->recur[il].present)
            status = recurrent(&sha, cache, (int32_t)il, chunk);
        else
            little_endian(&sha, 0, 1);
    }
    free(chunk);
    MEMRA_TRY(status);
    little_endian(&sha, (uint64_t)cache->pos, 8);
    finish(&sha, hex);
    memra_health health;
    MEMRA_TRY(memra_strict_health(cache, &health));
    return memra_check_strict(&health);
}
