/* memra_round.c: one speculative round as a transaction: round.py in C. */
#include "memra_internal.h"

#include <inttypes.h>

int memra_round_begin(memra_cache *cache, int64_t width) {
    MEMRA_TRY(memra_check_cache(cache, "a round"));
    if (width < 1 || width > cache->round_limit)
        return memra_fail(
            MEMRA_ERR_CONFIG, "a round of width %" PRId64 "; the cache was built with CacheOptions(round_width=%" PRId64
            ")", width, cache->round_limit);
    MEMRA_TRY(memra_check_recording(cache, "a round"));
    MEMRA_TRY(memra_check_state(cache, "a round", MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_UNSETTLED)));
    if (cache->step_rows)
        return memra_fail(
            MEMRA_ERR_STATE, "a round: a step of %" PRId64 " rows is open; advance or roll back first",
            cache->step_rows);
    if (cache->round_width) return memra_fail(MEMRA_ERR_STATE, "a round is open already");
    MEMRA_TRY(memra_check_lengths(cache));
    cache->round_width = width;
    return MEMRA_OK;
}

static int check_rows(const memra_cache *cache) {
    if (!cache->step_rows) return memra_fail(MEMRA_ERR_STATE, "nothing to commit: the round ran no step");
    MEMRA_TRY(memra_check_length(cache, "pos", cache->pos));
    return memra_check_length(cache, "pos, behind the rows of the round,", cache->pos + cache->step_rows);
}

/* Whether a commit exchanges the states of the layers, which saves their scan. */
static bool swaps(const memra_cache *cache, bool counts, int64_t accept) {
    return !counts && !memra_device_clock(cache) && accept == cache->step_rows;
}

/* The kernels that a commit takes, before the first of them is launched. */
static int check_kernels(const memra_cache *cache, bool counts, int64_t accept) {
    const bool scans = !swaps(cache, counts, accept);
    int32_t checked = -1; /* the layers of a device follow each other */
    for (int64_t il = 0; il < cache->n_layer; il++) {
        const memra_recur_layer *layer = &cache->recur[il];
        if (!layer->present || !layer->step_ops || layer->device_index == checked) continue;
        checked = layer->device_index;
        const memra_device *device = memra_device_at(cache, checked);
        if (layer->step_ops & MEMRA_OP_CONV) MEMRA_TRY(memra_kernel_loaded(device, MEMRA_K_CONV_RING_REBUILD));
        if (scans && layer->step_ops & MEMRA_OP_SCAN) MEMRA_TRY(memra_kernel_loaded(device, MEMRA_K_GDN_SCAN));
    }
    return memra_check_commit(cache, counts);
}

static int check_open(memra_cache *cache) {
    MEMRA_TRY(memra_check_cache(cache, "the end of a round"));
    if (!cache->round_width) return memra_fail(MEMRA_ERR_STATE, "the round is over");
    return memra_check_recording(cache, "the end of a round");
}

/* Layers whose rings and tapes lie equally far apart in one arena. */
typedef struct ring_run {
    int32_t first, last, n;
    uint64_t x_apart, ring_apart; /* bytes; of two and more */
} ring_run;

static bool continues(const memra_cache *cache, const ring_run *run, int32_t il) {
    const memra_recur_layer *last = &cache->recur[run->last], *next = &cache->recur[il];
    if (!run->n || next->device_index != last->device_index || !cache->devices[next->device_index].has_arena)
        return false;
    return run->n == 1 || (next->tape.ptr - last->tape.ptr == run->x_apart &&
                           next->conv_state.ptr - last->conv_state.ptr == run->ring_apart);
}

static int rebuild_run(
    const memra_cache *cache, const ring_run *run, const uint64_t *counts, int64_t accept, int64_t rows, bool *done) {
    if (!run->n) return MEMRA_OK;
    const memra_recur_layer *layer = &cache->recur[run->first];
    const int32_t d = layer->device_index;
    MEMRA_TRY(memra_launch_conv_ring_rebuild(
        memra_device_at(cache, d), layer->tape.ptr, layer->conv_state.ptr, layer->conv_state.ptr, counts ? counts[d] : 0,
        (int32_t)accept, (int32_t)rows, layer->conv_dim, layer->d_conv, run->n, (int64_t)run->x_apart / 4,
        (int64_t)run->ring_apart / 4, 0, run->first));
    *done = true;
    return MEMRA_OK;
}

/* The rings of all layers after the accepted rows: a launch for each run of them. */
static int rebuild_rings(
    const memra_cache *cache, const uint64_t *counts, int64_t accept, int64_t rows, bool *done) {
    ring_run run = {0};
    for (int32_t il = 0; il < cache->n_layer; il++) {
        if (!cache->recur[il].present || !(cache->recur[il].step_ops & MEMRA_OP_CONV)) continue;
        if (continues(cache, &run, il)) {
            run.x_apart = cache->recur[il].tape.ptr - cache->recur[run.last].tape.ptr;
            run.ring_apart = cache->recur[il].conv_state.ptr - cache->recur[run.last].conv_state.ptr;
        } else {
            MEMRA_TRY(rebuild_run(cache, &run, counts, accept, rows, done));
            run = (ring_run){.first = il};
        }
        run.last = il;
        run.n++;
    }
    return rebuild_run(cache, &run, counts, accept, rows, done);
}

/* The state of one layer after the accepted rows. swap: the states will be exchanged instead. A count that cannot be is
 * reported once a device, by the counters: they know the position. */
static int commit_layer(
    memra_cache *cache, int32_t il, uint64_t accept_d, int64_t accept, int64_t rows, bool swap, bool *done) {
    const memra_recur_layer *layer = &cache->recur[il];
    memra_device *device = memra_device_at(cache, layer->device_index);
    const uint64_t vector = 4 * (uint64_t)rows * (uint64_t)layer->num_v * (uint64_t)layer->state_size;
    const uint64_t gate = 4 * (uint64_t)rows * (uint64_t)layer->num_v;
    const uint64_t q = layer->tape.ptr + 4 * (uint64_t)rows * (uint64_t)layer->conv_dim;
    if (!(layer->step_ops & MEMRA_OP_SCAN) || swap) return MEMRA_OK;
    const uint64_t state = memra_recording(cache) != NULL ? layer->home : layer->ssm_state.ptr; /* what the scan read */
    MEMRA_TRY(memra_launch_gdn_scan(
        device, q, q + vector, q + 2 * vector, q + 3 * vector, q + 3 * vector + gate, state, state, 0, 0, accept_d,
        (int32_t)(accept_d ? rows : accept), layer->num_v, layer->state_size, 1.0f, 0, 1, 0, il));
    *done = true;
    return MEMRA_OK;
}

static void finish(memra_cache *cache, int64_t end) {
    for (int64_t il = 0; il < cache->n_layer; il++)
        if (cache->kv[il].present && cache->kv[il].step_ops & MEMRA_OP_APPEND) cache->kv[il].len = end;
    cache->round_width = 0;
    memra_end_step(cache, end);
    memra_drop_logits_above(cache, end);
}

/* The counters of the layers that took part stand at `end`. */
static int move_counters(
    memra_cache *cache, const uint64_t *counts, int64_t accept, int64_t rows, int64_t end, bool *done) {
    int64_t *lens = malloc((size_t)cache->n_layer * sizeof *lens);
    if (lens == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the counters");
    for (int64_t il = 0; il < cache->n_layer; il++)
        lens[il] = cache->kv[il].present && cache->kv[il].step_ops & MEMRA_OP_APPEND ? end : -1;
    const int status = memra_commit_counters(cache, lens, counts, accept, rows, end, done);
    free(lens);
    return status;
}

static int end_round(memra_cache *cache, const bool *done, int status) {
    memra_end(cache, done, status);
    if (cache->state == MEMRA_TAINTED) cache->round_width = 0;
    return status;
}

/* counts: where each device has the number of rows that stand; NULL: it is `accept`. */
static int commit(memra_cache *cache, const uint64_t *counts, int64_t accept) {
    const int64_t rows = cache->step_rows, end = cache->pos + (counts ? rows : accept);
    const bool swap = swaps(cache, counts != NULL, accept);
    bool done = false;
    int status = rebuild_rings(cache, counts, accept, rows, &done);
    for (int64_t il = 0; il < cache->n_layer && status == MEMRA_OK; il++)
        if (cache->recur[il].present && cache->recur[il].step_ops)
            status = commit_layer(
                cache, (int32_t)il, counts ? counts[cache->recur[il].device_index] : 0, accept, rows, swap, &done);
    if (status == MEMRA_OK) status = move_counters(cache, counts, accept, rows, end, &done);
    MEMRA_TRY(end_round(cache, &done, status));
    for (int64_t il = 0; il < cache->n_layer; il++)
        if (swap && cache->recur[il].present && cache->recur[il].step_ops & MEMRA_OP_SCAN)
            memra_swap_states(&cache->recur[il]);
    memra_drop_unsure_logits(cache);
    finish(cache, end);
    return MEMRA_OK;
}

int memra_round_commit(memra_cache *cache, int64_t accept_len) {
    MEMRA_TRY(check_open(cache));
    MEMRA_TRY(check_rows(cache));
    if (accept_len < 0 || accept_len > cache->step_rows)
        return memra_fail(
            MEMRA_ERR_CAPACITY, "accept_len is %" PRId64 "; the round ran %" PRId64 " rows", accept_len,
            cache->step_rows);
    if (accept_len) MEMRA_TRY(check_kernels(cache, false, accept_len));
    return accept_len ? commit(cache, NULL, accept_len) : memra_round_reject(cache);
}

int memra_round_commit_from_device(memra_cache *cache, uint64_t accept_d) {
    memra_range range;
    MEMRA_TRY(check_open(cache));
    MEMRA_TRY(check_rows(cache));
    MEMRA_TRY(memra_range_of("accept_d", accept_d, 1, 1, 4, &range));
    MEMRA_TRY(check_kernels(cache, true, 0));
    uint64_t *counts = calloc((size_t)cache->n_devices, sizeof *counts);
    if (counts == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the counts");
    memra_device *last = memra_device_at(cache, memra_last_device(cache));
    const int64_t begin = cache->pos;
    int status = MEMRA_OK;
    for (int32_t d = 0; d < cache->n_devices && status == MEMRA_OK; d++)
        status = memra_count_beside(last, accept_d, memra_device_at(cache, d), &counts[d]);
    if (status == MEMRA_OK) status = commit(cache, counts, 0);
    free(counts);
    MEMRA_TRY(status);
    memra_unsettle(cache, begin);
    return MEMRA_OK;
}

int memra_round_reject(memra_cache *cache) {
    bool done = false;
    MEMRA_TRY(check_open(cache));
    if (cache->step_rows) MEMRA_TRY(memra_check_commit(cache, false));
    if (cache->step_rows)
        MEMRA_TRY(end_round(cache, &done, move_counters(cache, NULL, 0, cache->step_rows, cache->pos, &done)));
    finish(cache, cache->pos);
    return MEMRA_OK;
}
