/* memra_digest.c: the digest of a cache: digest.py in C. */
#include "memra_internal.h"

static void little_endian(memra_sha256 *sha, uint64_t value, int n_bytes) {
    uint8_t bytes[8];
    for (int i = 0; i < n_bytes; i++) bytes[i] = (uint8_t)(value >> 8 * i);
    memra_sha256_update(sha, bytes, (size_t)n_bytes);
}

#define CHUNK_BYTES (4u << 20)

static int plane(memra_sha256 *sha, memra_device *device, uint64_t ptr, uint64_t n_bytes, void *chunk) {
    for (uint64_t at = 0; at < n_bytes; at += CHUNK_BYTES) {
        const uint64_t n = n_bytes - at < CHUNK_BYTES ? n_bytes - at : CHUNK_BYTES;
        MEMRA_TRY(memra_download(device, chunk, ptr + at, n));
        memra_sha256_update(sha, chunk, n);
    }
    return MEMRA_OK;
}

static int attention(memra_sha256 *sha, const memra_cache *cache, const memra_kv_layer *layer, void *chunk) {
    static const char *const names[] = {"q8_0", "q5_1", "q4_0", "fp8"};
    memra_device *device = memra_device_at(cache, layer->device_index);
    const int32_t formats[2] = {layer->k_format, layer->v_format};
    int32_t len_d = 0;
    little_endian(sha, 1, 1);
    for (int i = 0; i < 2; i++) {
        if (formats[i] < 0 || formats[i] > MEMRA_FP8)
            return memra_fail(MEMRA_ERR_STATE, "digest: format %d is none of enum memra_format", (int)formats[i]);
        little_endian(sha, strlen(names[formats[i]]), 4);
        memra_sha256_update(sha, names[formats[i]], strlen(names[formats[i]]));
    }
    MEMRA_TRY(memra_download(device, &len_d, layer->len_d.ptr, sizeof len_d));
    little_endian(sha, (uint64_t)layer->len, 8);
    little_endian(sha, (uint64_t)(int64_t)len_d, 8);
    MEMRA_TRY(plane(sha, device, layer->k.ptr, (uint64_t)layer->len * (uint64_t)layer->k_tok_bytes, chunk));
    return plane(sha, device, layer->v.ptr, (uint64_t)layer->len * (uint64_t)layer->v_tok_bytes, chunk);
}

static int recurrent(memra_sha256 *sha, const memra_cache *cache, int32_t il, void *chunk) {
    memra_recur_layer *layer = NULL;
    MEMRA_TRY(memra_recur_of(cache, il, &layer));
    memra_device *device = memra_device_at(cache, layer->device_index);
    little_endian(sha, 2, 1);
    MEMRA_TRY(plane(sha, device, layer->conv_state.ptr, 4 * (uint64_t)layer->conv_state.len, chunk));
    return plane(sha, device, layer->ssm_state.ptr, 4 * (uint64_t)layer->ssm_state.len, chunk);
}

int memra_digest(memra_cache *cache, char hex[65]) {
    memra_sha256 sha;
    if (hex == NULL) return memra_fail(MEMRA_ERR_ARRAY, "digest: hex is NULL");
    hex[0] = 0;
    MEMRA_TRY(memra_check_cache(cache, "digest"));
    MEMRA_TRY(memra_check_not_recording(cache, "digest"));
    MEMRA_TRY(memra_check_state(cache, "digest", MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_PENDING_REPLAY)));
    MEMRA_TRY(memra_check_lengths(cache));
    void *chunk = malloc(CHUNK_BYTES);
    if (chunk == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for a digest");
    memra_sha256_begin(&sha);
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
    memra_sha256_finish(&sha, hex);
    memra_health health;
    MEMRA_TRY(memra_strict_health(cache, &health));
    return memra_check_strict(&health);
}
