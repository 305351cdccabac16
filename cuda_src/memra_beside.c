/* memra_beside.c: parked logits, taps and the error record: beside.py in C. */
#include "memra_internal.h"

#include <inttypes.h>
#include <stdio.h>

/* ---- Buffers that exist from first use on ---- */

enum { HOST = -1 };

typedef struct owned_buffer {
    memra_owned owned;  /* the first field: one address */
    uint64_t handle;    /* of the device; 0: host memory behind the node */
} owned_buffer;

static int release(memra_owned *owned) {
    owned_buffer *buffer = (owned_buffer *)owned;
    memra_device *device = memra_device_find(buffer->handle);
    memra_failure first = {0};
    memra_device_give_back(device, owned->slice.ptr, &first);
    free(buffer);
    return memra_kept(&first);
}

static void link_owned(memra_cache *cache, memra_owned *owned) {
    owned->release = release;
    owned->next = cache->owned;
    cache->owned = owned;
}

/* f32 [len] on device d in `slice`, allocated now unless what stands there is large enough. */
static int buffer(memra_cache *cache, memra_slice *slice, const char *name, int32_t d, int64_t len) {
    memra_device *device = memra_device_at(cache, d);
    if (slice->ptr && slice->len >= len && slice->device == device->ordinal) return MEMRA_OK;
    if (device->recording != NULL)
        return memra_fail(
            MEMRA_ERR_STATE, "%s need %" PRId64
            " elements, and nothing is allocated while a capture is open; do it once before", name, len);
    owned_buffer *made = calloc(1, sizeof *made);
    if (made == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for %s", name);
    made->handle = device->handle;
    made->owned.slice = (memra_slice){0, len, MEMRA_F32, device->ordinal};
    const int status = memra_alloc(device, 4 * (uint64_t)len, &made->owned.slice.ptr);
    if (status != MEMRA_OK) {
        free(made);
        return status;
    }
    link_owned(cache, &made->owned); /* what it replaces stays: a graph may hold its address */
    *slice = made->owned.slice;
    return MEMRA_OK;
}

/* ---- Logits ---- */

int memra_park_logits(memra_cache *cache, uint64_t row) {
    memra_range source;
    MEMRA_TRY(memra_check_cache(cache, "park_logits"));
    MEMRA_TRY(memra_check_state(cache, "park_logits", MEMRA_IN(MEMRA_READY)));
    MEMRA_TRY(memra_check_recording(cache, "park_logits"));
    MEMRA_TRY(memra_check_length(cache, "pos", cache->pos));
    if (cache->n_vocab < 1)
        return memra_fail(MEMRA_ERR_CONFIG, "park_logits needs n_vocab, which this model description lacks");
    MEMRA_TRY(memra_range_of("row", row, 1, cache->n_vocab, 4, &source));
    const int32_t d = memra_last_device(cache);
    MEMRA_TRY(buffer(cache, &cache->logits, "logits", d, cache->n_vocab));
    if (row != cache->logits.ptr)
        MEMRA_TRY(memra_copy_bytes(memra_device_at(cache, d), cache->logits.ptr, row, source.n_bytes));
    cache->last_logits_dev.slice = cache->logits;
    cache->last_logits_dev.slice.len = cache->n_vocab;
    memra_keep_logits(cache, cache->pos + cache->step_rows);
    if (memra_recording(cache) != NULL) memra_move_of(memra_recording(cache), cache)->parks = true;
    return MEMRA_OK;
}

int memra_take_logits(memra_cache *cache, uint64_t *row) {
    if (row == NULL) return memra_fail(MEMRA_ERR_ARRAY, "take_logits: row is NULL");
    *row = 0;
    MEMRA_TRY(memra_check_cache(cache, "take_logits"));
    MEMRA_TRY(memra_check_state(cache, "take_logits", MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_PENDING_REPLAY)));
    if (cache->last_logits_dev.present) *row = cache->last_logits_dev.slice.ptr;
    return MEMRA_OK;
}

/* ---- Taps ---- */

static int check_taps(const memra_cache *cache, const int32_t *ids, int32_t n, int64_t t, int64_t hidden) {
    if (n < 1 || ids == NULL) return memra_fail(MEMRA_ERR_CONFIG, "taps: at least one layer, and each once");
    if (n > cache->n_layer)
        return memra_fail(
            MEMRA_ERR_CONFIG, "taps of %" PRId32 " layers; the model has %" PRId64 ", and each is named once", n,
            cache->n_layer);
    for (int32_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= cache->n_layer)
            return memra_fail(
                MEMRA_ERR_CONFIG, "tap of layer %" PRId32 "; layers are 0 .. %" PRId64, ids[i], cache->n_layer - 1);
        for (int32_t j = 0; j < i; j++)
            if (ids[i] == ids[j])
                return memra_fail(MEMRA_ERR_CONFIG, "taps name layer %" PRId32 " twice; each once", ids[i]);
    }
    if (t < 1 || hidden < 1)
        return memra_fail(
            MEMRA_ERR_CONFIG, "taps of %" PRId64 " rows of %" PRId64 "; at least 1 each", t, hidden);
    for (int32_t i = 1; i < n; i++)
        if (cache->kv[ids[i]].device_index != cache->kv[ids[0]].device_index)
            return memra_fail(
                MEMRA_ERR_DEVICE, "tap layer %" PRId32 " lives on another device; tap layers share one device", ids[i]);
    return MEMRA_OK;
}

/* Room for a list of n layers, behind its node: one that is there already, so that arming again and again takes no
 * more. */
static owned_buffer *list_of(memra_cache *cache, int32_t n) {
    for (memra_owned *each = cache->owned; each != NULL; each = each->next)
        if (each->release == release && each->slice.device == HOST && each->slice.len >= n) return (owned_buffer *)each;
    owned_buffer *made = calloc(1, sizeof *made + (size_t)n * sizeof(int32_t));
    if (made == NULL) return NULL;
    made->owned.slice = (memra_slice){0, n, MEMRA_I32, HOST};
    link_owned(cache, &made->owned);
    return made;
}

int memra_arm_taps(memra_cache *cache, const int32_t *layer_ids, int32_t n, int64_t t, int64_t hidden) {
    int64_t len = 0;
    MEMRA_TRY(memra_check_cache(cache, "arm_taps"));
    MEMRA_TRY(memra_check_not_recording(cache, "arm_taps"));
    MEMRA_TRY(memra_check_state(cache, "arm_taps", MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_PENDING_REPLAY)));
    MEMRA_TRY(check_taps(cache, layer_ids, n, t, hidden));
    if (__builtin_mul_overflow(t, (int64_t)n, &len) || __builtin_mul_overflow(len, hidden, &len) || len > INT64_MAX / 4)
        return memra_fail(MEMRA_ERR_CONFIG, "taps of %" PRId64 " rows of %" PRId64 ": too many elements", t, hidden);
    owned_buffer *ids = list_of(cache, n);
    if (ids == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the taps");
    const int32_t d = cache->kv[layer_ids[0]].device_index;
    const int status = buffer(cache, &cache->taps, "taps", d, len);
    if (status != MEMRA_OK) return status;
    memcpy(ids + 1, layer_ids, (size_t)n * sizeof *layer_ids);
    memra_tap_sink *sink = &cache->dflash_taps;
    *sink = (memra_tap_sink){1, (uint32_t)n, (int32_t *)(ids + 1), cache->taps, hidden, t};
    sink->buf.len = len;
    return MEMRA_OK;
}

int memra_disarm_taps(memra_cache *cache) {
    MEMRA_TRY(memra_check_cache(cache, "disarm_taps"));
    cache->dflash_taps.present = 0;
    return MEMRA_OK;
}

static int not_tapped(const memra_tap_sink *sink, int32_t il) {
    char ids[256] = "";
    for (uint32_t i = 0, at = 0; i < sink->n_taps && at + 16 < sizeof ids; i++)
        at += (uint32_t)snprintf(ids + at, sizeof ids - at, "%s%" PRId32, i ? ", " : "", sink->layer_ids[i]);
    return memra_fail(MEMRA_ERR_CONFIG, "layer %" PRId32 " is not tapped; [%s] are", il, ids);
}

int memra_tap_write(memra_cache *cache, int32_t il, int64_t rows, uint64_t residual) {
    memra_range source;
    MEMRA_TRY(memra_check_cache(cache, "tap_write"));
    const memra_tap_sink *sink = &cache->dflash_taps;
    MEMRA_TRY(memra_check_rows(rows));
    MEMRA_TRY(memra_range_of("residual", residual, rows, sink->present ? sink->hidden : 1, 4, &source));
    MEMRA_TRY(memra_check_readable(cache, "tap_write"));
    if (!sink->present) return memra_fail(MEMRA_ERR_STATE, "tap_write: no taps are armed; call arm_taps first");
    uint32_t slot = 0;
    while (slot < sink->n_taps && sink->layer_ids[slot] != il) slot++;
    if (slot == sink->n_taps) return not_tapped(sink, il);
    if (rows > sink->t)
        return memra_fail(
            MEMRA_ERR_CAPACITY, "%" PRId64 " rows to tap; the sink was armed for %" PRId64, rows, sink->t);
    int64_t wanted = 0;
    if (__builtin_mul_overflow(sink->t, (int64_t)sink->n_taps, &wanted) ||
        __builtin_mul_overflow(wanted, sink->hidden, &wanted) || wanted > sink->buf.len || sink->hidden < 1)
        return memra_fail(
            MEMRA_ERR_STATE, "tap_write: the fields of the armed sink were changed; assign or arm it again");
    const memra_range taps = {"taps", sink->buf.ptr, 4 * (uint64_t)sink->buf.len};
    MEMRA_TRY(memra_check_ranges(&taps, 1, &source, 1));
    if (memra_recording(cache) != NULL) MEMRA_TRY(memra_graph_note_taps(memra_recording(cache), cache));
    if (rows == 0) return MEMRA_OK;
    const int32_t d = cache->kv[il].device_index;
    return memra_launch_copy_rows(
        memra_device_at(cache, d), residual, sink->buf.ptr + 4 * (uint64_t)slot * (uint64_t)sink->hidden, sink->hidden,
        (int64_t)sink->n_taps * sink->hidden, (int32_t)rows, (int32_t)sink->hidden, cache->devices[d].health.ptr, il);
}

/* ---- The error record ---- */

int memra_health_read(memra_cache *cache, memra_health *health) {
    if (health == NULL) return memra_fail(MEMRA_ERR_ARRAY, "health: health is NULL");
    memset(health, 0, sizeof *health);
    MEMRA_TRY(memra_check_cache(cache, "health"));
    for (int32_t d = 0; d < cache->n_devices; d++)
        MEMRA_TRY(memra_check_no_capture(memra_device_at(cache, d), "health"));
    for (int32_t d = 0; d < cache->n_devices; d++) {
        memra_health one;
        MEMRA_TRY(memra_download(memra_device_at(cache, d), &one, cache->devices[d].health.ptr, sizeof one));
        health->flags |= one.flags;
        for (int32_t kind = 0; kind < MEMRA_FAULT_KINDS; kind++) {
            health->count[kind] += one.count[kind];
            if (one.first[kind] > health->first[kind]) health->first[kind] = one.first[kind]; /* the lowest position */
        }
    }
    return MEMRA_OK;
}

/* Of several devices all or none: what could not be cleared on all of them is put back. */
int memra_clear_health(memra_cache *cache) {
    MEMRA_TRY(memra_check_cache(cache, "clear_health"));
    MEMRA_TRY(memra_check_not_recording(cache, "clear_health"));
    const int32_t n = cache->n_devices;
    memra_health *found = n > 1 ? malloc((size_t)n * sizeof *found) : NULL;
    if (n > 1 && found == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "clear_health: no host memory");
    int status = MEMRA_OK;
    for (int32_t d = 0; d < n && found != NULL && status == MEMRA_OK; d++)
        status = memra_download(memra_device_at(cache, d), &found[d], cache->devices[d].health.ptr, sizeof *found);
    int32_t cleared = 0;
    while (status == MEMRA_OK && cleared < n) {
        status = memra_clear(memra_device_at(cache, cleared), cache->devices[cleared].health.ptr, sizeof(memra_health));
        cleared += status == MEMRA_OK;
    }
    memra_failure first = {0};
    memra_keep_any(&first, status);
    for (int32_t d = 0; d < cleared && cleared < n; d++)
        if (memra_upload(memra_device_at(cache, d), cache->devices[d].health.ptr, &found[d], sizeof *found) != MEMRA_OK)
            snprintf(first.sentence + strlen(first.sentence), sizeof first.sentence - strlen(first.sentence),
                     "; the record of device %d was cleared and could not be put back", d);
    free(found);
    return memra_kept(&first);
}

int memra_strict_health(memra_cache *cache, memra_health *health) {
    memset(health, 0, sizeof *health);
    return cache->strict ? memra_health_read(cache, health) : MEMRA_OK;
}

int memra_check_strict(const memra_health *health) {
    static const char *const names[MEMRA_FAULT_KINDS] = {
        "NONFINITE", "SCALE_OVERFLOW", "FP8_SATURATED", "SLOT_RANGE", "BAD_ACCEPT"};
    char told[512] = "";
    size_t used = 0;
    for (int32_t kind = 0; kind < MEMRA_FAULT_KINDS; kind++)
        if (health->count[kind]) {
            const uint64_t key = UINT64_MAX - health->first[kind];
            used += (size_t)snprintf(
                told + used, sizeof told - used, "%s x%" PRIu64 ", first at layer %" PRIu64 ", position %" PRIu64 "; ",
                names[kind], health->count[kind], key & 0xffff, key >> 16);
        }
    return used ? memra_fail(MEMRA_ERR_HEALTH, "%sclear_health() goes on", told) : MEMRA_OK;
}
