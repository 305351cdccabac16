/* memra_snapshot.c: snapshots, and the ways back: the middle of cache.py in C. */
#include "memra_internal.h"

#include <inttypes.h>

/* A snapshot that the library made: `snapshot` is its first field, so that the two are one address. */
typedef struct own {
    memra_snapshot snapshot;
    memra_cache *cache;
    uint64_t *allocations;  /* and the devices that they are of */
    uint64_t *handles;
    int32_t n_allocations;
} own;

/* Returns the first failure of the driver, `status` being one that came before. */
static int free_own(own *made, int status) {
    memra_failure first = {0};
    memra_keep_any(&first, status);
    for (int32_t i = 0; i < made->n_allocations; i++) {
        memra_device *device = memra_device_find(made->handles[i]);
        memra_device_give_back(device, made->allocations[i], &first);
    }
    free(made->snapshot.kv_len);
    free(made->snapshot.conv);
    free(made->snapshot.ssm);
    free(made->allocations);
    free(made->handles);
    free(made);
    return memra_kept(&first);
}

static own *new_own(memra_cache *cache) {
    const size_t n = (size_t)cache->n_layer;
    own *made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    made->cache = cache;
    made->snapshot = (memra_snapshot){
        .kv_len = calloc(n, sizeof(int64_t)), .conv = calloc(n, sizeof(memra_slice)),
        .ssm = calloc(n, sizeof(memra_slice)), .n_layer = cache->n_layer, .cache_id = cache->id,
        .generation = cache->generation, .by_library = 1};
    made->allocations = calloc(2 * n + (size_t)cache->n_devices, sizeof(uint64_t));
    made->handles = calloc(2 * n + (size_t)cache->n_devices, sizeof(uint64_t));
    if (made->snapshot.kv_len && made->snapshot.conv && made->snapshot.ssm && made->allocations && made->handles)
        return made;
    (void)free_own(made, MEMRA_OK);
    return NULL;
}

static int allocate(own *made, memra_device *device, uint64_t n_bytes, uint64_t *ptr) {
    MEMRA_TRY(memra_alloc(device, n_bytes, ptr));
    if (!*ptr) return MEMRA_OK;
    made->allocations[made->n_allocations] = *ptr;
    made->handles[made->n_allocations++] = device->handle;
    return MEMRA_OK;
}

/* One allocation of the arena's own shape per device, or one per plane. */
static int allocate_all(own *made, memra_cache *cache) {
    for (int32_t d = 0; d < cache->n_devices; d++) {
        memra_device *device = memra_device_at(cache, d);
        const memra_slice *states = &cache->devices[d].states;
        uint64_t base = 0;
        if (states->len) MEMRA_TRY(allocate(made, device, 4 * (uint64_t)states->len, &base));
        for (int64_t il = 0; il < cache->n_layer; il++) {
            const memra_recur_layer *layer = &cache->recur[il];
            if (!layer->present || layer->device_index != d) continue;
            memra_slice *conv = &made->snapshot.conv[il], *ssm = &made->snapshot.ssm[il];
            *conv = layer->conv_state;
            *ssm = layer->ssm_state;
            if (states->len) {
                conv->ptr = conv->len ? base + (layer->conv_state.ptr - states->ptr) : 0;
                ssm->ptr = base + (layer->home - states->ptr);
                continue;
            }
            MEMRA_TRY(allocate(made, device, 4 * (uint64_t)conv->len, &conv->ptr));
            MEMRA_TRY(allocate(made, device, 4 * (uint64_t)ssm->len, &ssm->ptr));
        }
    }
    return MEMRA_OK;
}

/* Rings, then states, as an arena has them: those of device d from the cache into the snapshot, or back; how many. */
static int32_t copies_of(
    const memra_cache *cache, const memra_snapshot *snap, bool back, int32_t d, memra_copy *entries) {
    int32_t n = 0;
    for (int states = 0; states < 2; states++)
        for (int64_t il = 0; il < cache->n_layer; il++) {
            const memra_recur_layer *layer = &cache->recur[il];
            if (!layer->present || layer->device_index != d) continue;
            const memra_slice *live = states ? &layer->ssm_state : &layer->conv_state;
            const uint64_t kept = (states ? snap->ssm : snap->conv)[il].ptr, n_bytes = 4 * (uint64_t)live->len;
            entries[n++] = back ? (memra_copy){live->ptr, kept, n_bytes} : (memra_copy){kept, live->ptr, n_bytes};
        }
    return n;
}

/* All of them; done NULL: only whether that can be. */
static int copy(const memra_cache *cache, const memra_snapshot *snap, bool back, bool *done) {
    memra_copy *entries = malloc(2 * (size_t)cache->n_layer * sizeof *entries);
    if (entries == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the copies");
    int status = MEMRA_OK;
    for (int32_t d = 0; d < cache->n_devices && status == MEMRA_OK; d++) {
        memra_device *device = memra_device_at(cache, d);
        const bool has_arena = cache->devices[d].has_arena;
        const bool has_kernels = device->kernels[MEMRA_K_COPY_MANY] && device->kernels[MEMRA_K_RESTORE];
        if (done == NULL && has_kernels) continue;
        const int32_t n = copies_of(cache, snap, back, d, entries);
        status = done == NULL ? memra_check_kept(device, has_arena, entries, n)
                              : memra_keep_planes(device, has_arena, entries, n, done);
    }
    free(entries);
    return status;
}

static void stamp(memra_cache *cache, memra_snapshot *snap) {
    for (int64_t il = 0; il < cache->n_layer; il++) snap->kv_len[il] = cache->kv[il].present ? cache->kv[il].len : -1;
    snap->pos = cache->pos;
    snap->generation = cache->generation;
    snap->invalid = MEMRA_VALID;
    snap->stamps++;
}

int memra_snapshot_new(memra_cache *cache, memra_snapshot **snapshot) {
    bool done = false;
    if (snapshot == NULL) return memra_fail(MEMRA_ERR_ARRAY, "snapshot: there is no place for it (NULL)");
    *snapshot = NULL;
    MEMRA_TRY(memra_check_cache(cache, "snapshot"));
    MEMRA_TRY(memra_check_settled(cache, "snapshot"));
    own *made = new_own(cache);
    if (made == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for a snapshot");
    int status = allocate_all(made, cache);
    if (status == MEMRA_OK) status = copy(cache, &made->snapshot, false, &done);
    if (status != MEMRA_OK) return free_own(made, status);
    stamp(cache, &made->snapshot);
    made->snapshot.next = cache->snapshots;
    cache->snapshots = &made->snapshot;
    *snapshot = &made->snapshot;
    return MEMRA_OK;
}

int memra_snapshot_free(memra_snapshot *snapshot) {
    own *made = (own *)snapshot;
    if (made == NULL) return MEMRA_OK;
    MEMRA_TRY(memra_check_fork());
    if (!snapshot->by_library)
        return memra_fail(MEMRA_ERR_SNAPSHOT, "memra_snapshot_free: this snapshot is Python's; its close frees it");
    for (int32_t i = 0; i < made->n_allocations; i++) {
        memra_device *device = memra_device_find(made->handles[i]);
        if (device != NULL && device->recording != NULL && memra_device_is_alive(device))
            return memra_fail(MEMRA_ERR_STATE, "snapshot: a capture is open, and nothing is freed in one");
    }
    if (snapshot->invalid != MEMRA_INVALID_CACHE_CLOSED) /* else there is no list any more */
        for (memra_snapshot **at = &made->cache->snapshots; *at != NULL; at = &(*at)->next)
            if (*at == snapshot) {
                *at = snapshot->next;
                break;
            }
    return free_own(made, MEMRA_OK);
}

/* A ring or state that is kept is as large as the layer's, and where that lives; none is kept where there is none. */
static int check_shape(
    const char *what, const char *name, int64_t il, const memra_slice *kept, const memra_slice *layers) {
    const int64_t len = layers ? layers->len : 0;
    const bool fits = kept->len == len && (!len || (kept->ptr && kept->dtype == layers->dtype &&
                                                    kept->device == layers->device));
    if (fits) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_SNAPSHOT, "%s: shape mismatch (%s): %" PRId64 " elements of dtype %" PRId32 " on device %" PRId32
        ", layer %" PRId64 " has %" PRId64, what, name, kept->len, kept->dtype, kept->device, il, len);
}

/* Whose it is, and that its fields fit the layers that they speak of. */
static int check_fits(const memra_cache *cache, const memra_snapshot *snap, const char *what) {
    if (snap == NULL) return memra_fail(MEMRA_ERR_SNAPSHOT, "%s: the snapshot is NULL", what);
    if (snap->cache_id != cache->id)
        return memra_fail(
            MEMRA_ERR_SNAPSHOT, "snapshot of cache %" PRIu64 "; this is cache %" PRIu64, snap->cache_id, cache->id);
    if (snap->invalid == MEMRA_INVALID_CLOSED) return memra_fail(MEMRA_ERR_SNAPSHOT, "this snapshot is closed");
    if (snap->n_layer != cache->n_layer)
        return memra_fail(
            MEMRA_ERR_SNAPSHOT, "%s: a snapshot of %" PRId64 " layers; this cache has %" PRId64, what, snap->n_layer,
            cache->n_layer);
    for (int64_t il = 0; il < cache->n_layer; il++) {
        const memra_recur_layer *layer = &cache->recur[il];
        MEMRA_TRY(check_shape(what, "conv", il, &snap->conv[il], layer->present ? &layer->conv_state : NULL));
        MEMRA_TRY(check_shape(what, "ssm", il, &snap->ssm[il], layer->present ? &layer->ssm_state : NULL));
        if ((snap->kv_len[il] >= 0) != (cache->kv[il].present != 0))
            return memra_fail(MEMRA_ERR_SNAPSHOT, "%s: kv_len names other layers than those with K/V", what);
    }
    bool fits = snap->pos >= 0 && snap->pos <= cache->max_ctx;
    for (int64_t il = 0; fits && il < cache->n_layer; il++) fits = snap->kv_len[il] <= cache->max_ctx;
    if (fits) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_SNAPSHOT, "%s: pos %" PRId64 " and the lengths in kv_len must lie in 0 .. %" PRId64, what, snap->pos,
        cache->max_ctx);
}

static int check_states(const memra_cache *cache) {
    memra_recur_layer *layer = NULL;
    for (int64_t il = 0; il < cache->n_layer; il++)
        if (cache->recur[il].present) MEMRA_TRY(memra_recur_of(cache, (int32_t)il, &layer));
    return MEMRA_OK;
}

int memra_snapshot_into(memra_cache *cache, memra_snapshot *snapshot) {
    bool done = false;
    MEMRA_TRY(memra_check_cache(cache, "snapshot_into"));
    MEMRA_TRY(memra_check_settled(cache, "snapshot_into"));
    MEMRA_TRY(check_fits(cache, snapshot, "snapshot_into"));
    MEMRA_TRY(check_states(cache));
    MEMRA_TRY(copy(cache, snapshot, false, NULL));
    snapshot->invalid = MEMRA_INVALID_HALF_WAY;
    MEMRA_TRY(copy(cache, snapshot, false, &done));
    stamp(cache, snapshot);
    return MEMRA_OK;
}

static int check_rollback(memra_cache *cache, const memra_snapshot *snap, int64_t accept_len) {
    static const char *const reasons[] = {"", "", "a snapshot_into failed half way", "its cache is closed", "it is closed"};
    MEMRA_TRY(memra_check_cache(cache, "rollback"));
    MEMRA_TRY(memra_check_not_recording(cache, "rollback"));
    MEMRA_TRY(memra_check_state(
        cache, "rollback", MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_PENDING_REPLAY) | MEMRA_IN(MEMRA_TAINTED)));
    MEMRA_TRY(check_fits(cache, snap, "rollback"));
    MEMRA_TRY(check_states(cache));
    if (snap->invalid == MEMRA_INVALID_GIVEN_UP)
        return memra_fail(
            MEMRA_ERR_SNAPSHOT, "this snapshot cannot be restored: it stands at position %" PRId64
            ", and the rows from %" PRId64 " on were given up since", snap->pos, snap->given_up);
    if (snap->invalid != MEMRA_VALID)
        return memra_fail(
            MEMRA_ERR_SNAPSHOT, "this snapshot cannot be restored: %s",
            snap->invalid <= MEMRA_INVALID_CLOSED ? reasons[snap->invalid] : "its struct is damaged");
    if (snap->generation != cache->generation)
        return memra_fail(
            MEMRA_ERR_SNAPSHOT, "snapshot of generation %" PRIu64 "; the cache was reset and is at %" PRIu64,
            snap->generation, cache->generation);
    int64_t end = 0; /* a round is rejected first */
    if (__builtin_add_overflow(cache->pos, cache->round_width ? 0 : cache->step_rows, &end)) end = INT64_MAX;
    if (cache->replay_to > end) end = cache->replay_to;
    if (cache->max_ctx < end) end = cache->max_ctx;
    const int64_t limit = cache->state == MEMRA_TAINTED ? 0 : end - snap->pos;
    if (accept_len < 0 || accept_len > limit)
        return memra_fail(
            MEMRA_ERR_CAPACITY,
            "accept_len is %" PRId64 "; %" PRId64 " tokens stand after the snapshot at position %" PRId64 "%s", accept_len,
            limit > 0 ? limit : 0, snap->pos,
            cache->state == MEMRA_TAINTED ? " (a tainted cache accepts none)" : "");
    MEMRA_TRY(memra_check_restore(cache));
    return copy(cache, snap, true, NULL);
}

/* The way back on every device: rings, states and counters. */
static int restore(const memra_cache *cache, const memra_snapshot *snap, const int64_t *lens, bool *done) {
    memra_copy *entries = malloc(2 * (size_t)cache->n_layer * sizeof *entries);
    if (entries == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the copies");
    int status = MEMRA_OK;
    for (int32_t d = 0; d < cache->n_devices && status == MEMRA_OK; d++) {
        const int32_t n = copies_of(cache, snap, true, d, entries);
        status = memra_restore(cache, d, entries, n, lens, snap->pos, done);
    }
    free(entries);
    return status;
}

/* The end of a change that leaves nothing of a round that is open: it is over, unless nothing was done. */
static int end_with_round(memra_cache *cache, const bool *done, int status) {
    (void)memra_end(cache, done, status);
    if (status == MEMRA_OK || *done) cache->round_width = 0;
    return status;
}

int memra_rollback(memra_cache *cache, memra_snapshot *snap, int64_t accept_len) {
    bool done = false;
    MEMRA_TRY(check_rollback(cache, snap, accept_len));
    int64_t *lens = malloc((size_t)cache->n_layer * sizeof *lens);
    if (lens == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the counters");
    for (int64_t il = 0; il < cache->n_layer; il++) {
        const memra_kv_layer *layer = &cache->kv[il];
        const bool in_round = cache->round_width && layer->step_ops & MEMRA_OP_APPEND; /* whose rows do not count */
        const int64_t stands = in_round ? cache->pos : layer->len;
        const int64_t saved = snap->kv_len[il], len = stands > saved ? stands : saved;
        lens[il] = saved < 0 ? -1 : len < saved + accept_len ? len : saved + accept_len;
    }
    const int status = restore(cache, snap, lens, &done);
    for (int64_t il = 0; il < cache->n_layer && status == MEMRA_OK; il++)
        if (lens[il] >= 0) cache->kv[il].len = lens[il];
    free(lens);
    MEMRA_TRY(end_with_round(cache, &done, status));
    memra_end_step(cache, snap->pos);
    cache->replay_to = accept_len ? snap->pos + accept_len : 0;
    cache->state = accept_len ? MEMRA_PENDING_REPLAY : MEMRA_READY;
    memra_give_up(cache, snap->pos + accept_len);
    return MEMRA_OK;
}

int memra_truncate(memra_cache *cache, int64_t new_len) {
    bool done = false;
    MEMRA_TRY(memra_check_cache(cache, "truncate"));
    MEMRA_TRY(memra_check_settled(cache, "truncate"));
    for (int64_t il = 0; il < cache->n_layer; il++)
        if (cache->recur[il].present)
            return memra_fail(
                MEMRA_ERR_STATE, "truncate: recurrent layers cannot go back by a length; use snapshot and rollback");
    if (new_len < 0 || new_len > cache->pos)
        return memra_fail(
            MEMRA_ERR_CAPACITY, "truncate to %" PRId64 "; the cache holds %" PRId64 " tokens, so 0 .. %" PRId64
            " is possible", new_len, cache->pos, cache->pos);
    MEMRA_TRY(memra_check_stamp(cache));
    int64_t *lens = malloc((size_t)cache->n_layer * sizeof *lens);
    if (lens == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the counters");
    for (int64_t il = 0; il < cache->n_layer; il++)
        lens[il] = !cache->kv[il].present ? -1 : cache->kv[il].len < new_len ? cache->kv[il].len : new_len;
    const int status = memra_stamp(cache, lens, new_len, &done);
    for (int64_t il = 0; il < cache->n_layer && status == MEMRA_OK; il++)
        if (lens[il] >= 0) cache->kv[il].len = lens[il];
    free(lens);
    MEMRA_TRY(memra_end(cache, &done, status));
    cache->pos = new_len;
    memra_give_up(cache, new_len);
    return MEMRA_OK;
}

/* Zeroes ring and both states of every layer of device d, then its counters. */
static int clear_device(memra_cache *cache, int32_t d, bool *done) {
    memra_copy *entries = malloc(3 * (size_t)cache->n_layer * sizeof *entries);
    if (entries == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the ranges");
    int32_t n = 0;
    for (int64_t il = 0; il < cache->n_layer; il++) {
        const memra_recur_layer *layer = &cache->recur[il];
        if (!layer->present || layer->device_index != d) continue;
        entries[n++] = (memra_copy){layer->conv_state.ptr, 0, 4 * (uint64_t)layer->conv_state.len};
        entries[n++] = (memra_copy){layer->ssm_state.ptr, 0, 4 * (uint64_t)layer->ssm_state.len};
        entries[n++] = (memra_copy){layer->ssm_state_alt.ptr, 0, 4 * (uint64_t)layer->ssm_state_alt.len};
    }
    const int status =
        memra_clear_planes(memra_device_at(cache, d), cache->devices[d].has_arena, entries, n, done);
    free(entries);
    return status;
}

int memra_reset(memra_cache *cache) {
    bool done = false;
    MEMRA_TRY(memra_check_cache(cache, "reset"));
    MEMRA_TRY(memra_check_not_recording(cache, "reset"));
    MEMRA_TRY(check_states(cache));
    MEMRA_TRY(memra_check_stamp(cache));
    int64_t *lens = malloc((size_t)cache->n_layer * sizeof *lens);
    if (lens == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the counters");
    for (int64_t il = 0; il < cache->n_layer; il++) lens[il] = cache->kv[il].present ? 0 : -1;
    int status = MEMRA_OK;
    for (int32_t d = 0; d < cache->n_devices && status == MEMRA_OK; d++) status = clear_device(cache, d, &done);
    if (status == MEMRA_OK) status = memra_stamp(cache, lens, 0, &done);
    free(lens);
    MEMRA_TRY(end_with_round(cache, &done, status));
    for (int64_t il = 0; il < cache->n_layer; il++)
        if (cache->kv[il].present) cache->kv[il].len = 0;
    memra_end_step(cache, 0);
    cache->replay_to = 0;
    cache->state = MEMRA_READY;
    cache->generation++;
    memra_keep_logits(cache, -1);
    cache->dflash_taps.present = 0;
    return MEMRA_OK;
}
