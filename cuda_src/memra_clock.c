/* memra_clock.c: how a cache moves, and how host and device agree on where it stands: clock.py in C. */
#include "memra_internal.h"

#include <inttypes.h>

#define COUNTERS_PER_LAUNCH 128  /* bits of the masks of set_counters and commit_counters */

/* The value of counter i of device d: len_d of its layers in layer order, then pos_d; -1: leave it. il: its layer. */
typedef struct counter {
    uint64_t ptr;
    int64_t value;
} counter;

/* Fills `found` with the counters of device d, n_layer + 1 at most; returns how many. */
static int32_t counters_of(
    const memra_cache *cache, int32_t d, const int64_t *lens, int64_t pos, counter *found) {
    int32_t n = 0;
    for (int64_t il = 0; il < cache->n_layer; il++)
        if (cache->kv[il].present && cache->kv[il].device_index == d)
            found[n++] = (counter){cache->kv[il].len_d.ptr, lens == NULL ? -1 : lens[il]};
    found[n++] = (counter){cache->devices[d].pos_d.ptr, pos};
    return n;
}

static void set_bit(uint64_t mask[2], int32_t i) { mask[i / 64] |= 1ull << i % 64; }

/* Two values, and the counters that get either, as a launch takes them. */
typedef struct two_values {
    int32_t low, high;
    uint64_t in_low[2], in_high[2];
} two_values;

static two_values which_of(const counter *counters, int32_t n, int64_t low, int64_t high) {
    two_values found = {.low = (int32_t)low, .high = (int32_t)high};
    for (int32_t i = 0; i < n; i++) {
        if (counters[i].value == low) set_bit(found.in_low, i);
        if (counters[i].value == high) set_bit(found.in_high, i);
    }
    return found;
}
#define TWO_VALUES(v) \
    (v).low, (v).high, (int64_t)(v).in_low[0], (int64_t)(v).in_low[1], (int64_t)(v).in_high[0], (int64_t)(v).in_high[1]

/* One launch that sets target[i] to the lower or the higher of at most two values. */
static int set_counters(
    memra_device *device, uint64_t target, const counter *counters, int32_t n, int64_t low, int64_t high,
    uint64_t health, bool *done) {
    const two_values v = which_of(counters, n, low, high);
    MEMRA_TRY(memra_launch_set_counters(device, target, TWO_VALUES(v), health, 0));
    *done = true;
    return MEMRA_OK;
}

/* The smallest value above `above` among the counters; -1: there is none. */
static int64_t next_value(const counter *counters, int32_t n, int64_t above) {
    int64_t found = -1;
    for (int32_t i = 0; i < n; i++)
        if (counters[i].value > above && (found < 0 || counters[i].value < found)) found = counters[i].value;
    return found;
}

static int stamp_device(
    const memra_cache *cache, int32_t d, const int64_t *lens, int64_t pos, counter *counters, bool *done) {
    memra_device *device = memra_device_at(cache, d);
    const memra_cache_device *at = &cache->devices[d];
    const int32_t n = counters_of(cache, d, lens, pos, counters);
    if (!at->counters.len) { /* each is an allocation of its own */
        for (int32_t i = 0; i < n; i++)
            if (counters[i].value >= 0)
                MEMRA_TRY(set_counters(
                    device, counters[i].ptr, &counters[i], 1, counters[i].value, counters[i].value, at->health.ptr,
                    done));
        return MEMRA_OK;
    }
    for (int32_t first = 0; first < n; first += COUNTERS_PER_LAUNCH) {
        const int32_t here = n - first < COUNTERS_PER_LAUNCH ? n - first : COUNTERS_PER_LAUNCH;
        for (int64_t low = next_value(counters + first, here, -1); low >= 0;) {
            const int64_t other = next_value(counters + first, here, low), high = other < 0 ? low : other;
            MEMRA_TRY(set_counters(
                device, at->counters.ptr + 4 * (uint64_t)first, counters + first, here, low, high, at->health.ptr,
                done));
            low = next_value(counters + first, here, high);
        }
    }
    return MEMRA_OK;
}

static int restore_device(
    const memra_cache *cache, int32_t d, memra_copy *entries, int32_t n, const int64_t *lens, int64_t pos,
    counter *counters, bool *done) {
    memra_device *device = memra_device_at(cache, d);
    const memra_cache_device *at = &cache->devices[d];
    const int32_t n_counters = counters_of(cache, d, lens, pos, counters);
    const int64_t low = next_value(counters, n_counters, -1), next = next_value(counters, n_counters, low);
    const int64_t high = next < 0 ? low : next;
    const bool is_two = n_counters <= COUNTERS_PER_LAUNCH && next_value(counters, n_counters, high) < 0;
    n = memra_merge_copies(at->has_arena, entries, n);
    if (!is_two || !at->counters.len || n > 2) {
        MEMRA_TRY(memra_copy_planes(device, at->has_arena, entries, n, done));
        return stamp_device(cache, d, lens, pos, counters, done);
    }
    const two_values v = which_of(counters, n_counters, low, high);
    const memra_copy none = {0, 0, 0}, *first = n > 0 ? &entries[0] : &none, *second = n > 1 ? &entries[1] : &none;
    MEMRA_TRY(memra_launch_restore(
        device, first->src, first->dst, (int64_t)first->bytes, second->src, second->dst, (int64_t)second->bytes,
        at->counters.ptr, TWO_VALUES(v), at->health.ptr, 0));
    *done = true;
    return MEMRA_OK;
}

int memra_restore(
    const memra_cache *cache, int32_t d, memra_copy *entries, int32_t n, const int64_t *lens, int64_t pos, bool *done) {
    counter *counters = malloc(((size_t)cache->n_layer + 1) * sizeof *counters);
    if (counters == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the counters");
    const int status = restore_device(cache, d, entries, n, lens, pos, counters, done);
    free(counters);
    return status;
}

int memra_check_kernel(const memra_cache *cache, enum memra_kernel k) {
    for (int32_t d = 0; d < cache->n_devices; d++) MEMRA_TRY(memra_kernel_loaded(memra_device_at(cache, d), k));
    return MEMRA_OK;
}

int memra_check_stamp(const memra_cache *cache) { return memra_check_kernel(cache, MEMRA_K_SET_COUNTERS); }

int memra_check_restore(const memra_cache *cache) {
    MEMRA_TRY(memra_check_stamp(cache));
    return memra_check_kernel(cache, MEMRA_K_RESTORE);
}

int memra_check_commit(const memra_cache *cache, bool counts) {
    return memra_check_kernel(
        cache, counts || memra_device_clock(cache) ? MEMRA_K_COMMIT_COUNTERS : MEMRA_K_SET_COUNTERS);
}

int memra_stamp(memra_cache *cache, const int64_t *lens, int64_t pos, bool *done) {
    counter *counters = malloc(((size_t)cache->n_layer + 1) * sizeof *counters);
    if (counters == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the counters");
    int status = MEMRA_OK;
    for (int32_t d = 0; d < cache->n_devices && status == MEMRA_OK; d++)
        status = stamp_device(cache, d, lens, pos, counters, done);
    free(counters);
    return status;
}

/* One launch: the counters of `mask` from `target` on, and pos_d with the last of a device. */
static int commit(
    const memra_cache *cache, int32_t d, uint64_t target, const uint64_t mask[2], uint64_t accept_d, int64_t accept,
    int64_t rows, bool last, bool *done) {
    const memra_cache_device *at = &cache->devices[d];
    MEMRA_TRY(memra_launch_commit_counters(
        memra_device_at(cache, d), target, at->pos_d.ptr, accept_d, (int32_t)accept, (int32_t)rows, (int64_t)mask[0],
        (int64_t)mask[1], last, at->health.ptr, 0));
    *done = true;
    return MEMRA_OK;
}

static int move_device(
    const memra_cache *cache, int32_t d, const uint8_t *in, uint64_t accept_d, int64_t accept, int64_t rows,
    bool *done) {
    const memra_cache_device *at = &cache->devices[d];
    uint64_t target = at->pos_d.ptr, mask[2] = {0, 0}; /* the launch that waits for whether another follows */
    bool waiting = false;
    int32_t i = 0;
    for (int64_t il = 0; il < cache->n_layer; il++) {
        const memra_kv_layer *layer = &cache->kv[il];
        if (!layer->present || layer->device_index != d) continue;
        const int32_t index = i++;
        if (!in[il]) continue;
        const uint64_t window = at->counters.ptr + 4u * (uint64_t)(index - index % COUNTERS_PER_LAUNCH);
        const uint64_t wanted = at->counters.len ? window : layer->len_d.ptr;
        if (waiting && target != wanted) {
            MEMRA_TRY(commit(cache, d, target, mask, accept_d, accept, rows, false, done));
            mask[0] = mask[1] = 0;
        }
        target = wanted;
        waiting = true;
        set_bit(mask, at->counters.len ? index % COUNTERS_PER_LAUNCH : 0);
    }
    return commit(cache, d, target, mask, accept_d, accept, rows, true, done);
}

int memra_move_counters(
    memra_cache *cache, const uint8_t *in, const uint64_t *counts, int64_t accept, int64_t rows, bool *done) {
    for (int32_t d = 0; d < cache->n_devices; d++)
        MEMRA_TRY(move_device(cache, d, in, counts ? counts[d] : 0, accept, rows, done));
    return MEMRA_OK;
}

int memra_commit_counters(
    memra_cache *cache, const int64_t *lens, const uint64_t *counts, int64_t accept, int64_t rows, int64_t pos,
    bool *done) {
    if (!counts && !memra_device_clock(cache)) return memra_stamp(cache, lens, pos, done);
    uint8_t *in = calloc((size_t)cache->n_layer, 1);
    if (in == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the counters");
    for (int64_t il = 0; lens != NULL && il < cache->n_layer; il++) in[il] = lens[il] >= 0;
    const int status = memra_move_counters(cache, in, counts, accept, rows, done);
    free(in);
    return status;
}

static int check_advance(memra_cache *cache, int64_t rows) {
    MEMRA_TRY(memra_check_cache(cache, "advance"));
    MEMRA_TRY(memra_check_recording(cache, "advance"));
    if (cache->round_width) return memra_fail(MEMRA_ERR_STATE, "advance: a round is open; its commit moves pos");
    MEMRA_TRY(memra_check_steppable(cache, "advance"));
    if (cache->step_rows && rows != cache->step_rows)
        return memra_fail(
            MEMRA_ERR_STATE, "advance by %" PRId64 ", but a step of %" PRId64 " rows is open; advance by %" PRId64,
            rows, cache->step_rows, cache->step_rows);
    if (rows < 0)
        return memra_fail(MEMRA_ERR_STATE, "advance by %" PRId64 "; use rollback or truncate to go back", rows);
    MEMRA_TRY(memra_check_replay(cache, "advance", rows));
    MEMRA_TRY(memra_check_length(cache, "pos", cache->pos));
    if (rows > cache->max_ctx - cache->pos)
        return memra_fail(
            MEMRA_ERR_CAPACITY,
            "advance from %" PRId64 " by %" PRId64 " needs %" PRIu64 " positions; max_ctx is %" PRId64, cache->pos, rows,
            (uint64_t)cache->pos + (uint64_t)rows, cache->max_ctx);
    return MEMRA_OK;
}

int memra_advance(memra_cache *cache, int64_t rows) {
    bool done = false;
    MEMRA_TRY(check_advance(cache, rows));
    if (rows == 0) return MEMRA_OK;
    MEMRA_TRY(memra_check_commit(cache, false));
    MEMRA_TRY(memra_end(cache, &done, memra_commit_counters(cache, NULL, NULL, rows, rows, cache->pos + rows, &done)));
    if (!cache->step_rows && cache->state == MEMRA_READY && memra_recording(cache) == NULL)
        memra_give_up(cache, cache->pos); /* the engine wrote rows of its own from here on */
    if (memra_recording(cache) != NULL) memra_graph_note(memra_recording(cache), cache, cache->pos + rows);
    memra_end_step(cache, cache->pos + rows);
    if (cache->state == MEMRA_PENDING_REPLAY && cache->pos == cache->replay_to) {
        cache->state = MEMRA_READY;
        cache->replay_to = 0;
    }
    return MEMRA_OK;
}

/* Every len_d and pos_d from the host values. */
static int stamp_all(memra_cache *cache, bool *done) {
    int64_t *lens = malloc((size_t)cache->n_layer * sizeof *lens);
    if (lens == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the counters");
    for (int64_t il = 0; il < cache->n_layer; il++) lens[il] = cache->kv[il].present ? cache->kv[il].len : -1;
    const int status = memra_stamp(cache, lens, cache->pos, done);
    free(lens);
    return status;
}

int memra_sync(memra_cache *cache) {
    bool done = false;
    MEMRA_TRY(memra_check_cache(cache, "sync_d"));
    MEMRA_TRY(memra_check_not_recording(cache, "sync_d"));
    MEMRA_TRY(memra_check_state(cache, "sync_d", MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_PENDING_REPLAY)));
    MEMRA_TRY(memra_check_lengths(cache));
    MEMRA_TRY(memra_check_stamp(cache));
    MEMRA_TRY(memra_end(cache, &done, stamp_all(cache, &done)));
    const int64_t end = cache->pos + cache->step_rows;
    memra_give_up(cache, end > cache->replay_to ? end : cache->replay_to);
    return MEMRA_OK;
}

int memra_settle(memra_cache *cache) {
    MEMRA_TRY(memra_check_cache(cache, "settle"));
    MEMRA_TRY(memra_check_not_recording(cache, "settle"));
    if (cache->round_width) return memra_fail(MEMRA_ERR_STATE, "settle: a round is open; commit or leave it first");
    MEMRA_TRY(memra_check_state(cache, "settle", MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_UNSETTLED)));
    if (cache->state == MEMRA_READY) return MEMRA_OK;
    int32_t pos = 0, *lens = calloc((size_t)cache->n_layer, sizeof *lens);
    if (lens == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the counters");
    int status = memra_download(memra_device_at(cache, 0), &pos, cache->devices[0].pos_d.ptr, sizeof pos);
    for (int64_t il = 0; il < cache->n_layer && status == MEMRA_OK; il++) {
        const memra_kv_layer *layer = &cache->kv[il];
        if (layer->present)
            status = memra_download(
                memra_device_at(cache, layer->device_index), &lens[il], layer->len_d.ptr, sizeof lens[il]);
    }
    memra_health health;
    if (status == MEMRA_OK) status = memra_strict_health(cache, &health);
    for (int64_t il = 0; il < cache->n_layer && status == MEMRA_OK; il++)
        if (cache->kv[il].present) cache->kv[il].len = lens[il];
    free(lens);
    MEMRA_TRY(status);
    if (cache->logits_sure) memra_keep_logits(cache, cache->logits_at - (cache->pos - pos));
    memra_end_step(cache, pos);
    cache->state = MEMRA_READY;
    memra_drop_logits_above(cache, pos);
    return memra_check_strict(&health);
}

/* The states of device d that are not where they were born, to be copied there; returns how many. */
static int32_t homeward(const memra_cache *cache, int32_t d, memra_copy *entries) {
    int32_t n = 0;
    for (int64_t il = 0; il < cache->n_layer; il++) {
        const memra_recur_layer *layer = &cache->recur[il];
        if (layer->present && layer->device_index == d && layer->ssm_state.ptr != layer->home)
            entries[n++] = (memra_copy){layer->home, layer->away, 4 * (uint64_t)layer->ssm_state.len};
    }
    return n;
}

int memra_prepare_replay(memra_cache *cache, memra_graph *graph, int64_t launches) {
    const memra_move *move = NULL;
    bool done = false;
    MEMRA_TRY(memra_check_cache(cache, "prepare_replay"));
    MEMRA_TRY(memra_check_not_recording(cache, "prepare_replay"));
    if (graph == NULL)
        MEMRA_TRY(memra_check_replayable(cache, "prepare_replay", 0));
    else
        MEMRA_TRY(memra_check_launches(cache, "prepare_replay", graph, launches, &move));
    for (int64_t il = 0; il < cache->n_layer; il++) {
        memra_recur_layer *layer = NULL;
        if (cache->recur[il].present) MEMRA_TRY(memra_recur_of(cache, (int32_t)il, &layer));
    }
    if (cache->state == MEMRA_READY) MEMRA_TRY(memra_check_stamp(cache));
    memra_copy *entries = malloc((size_t)cache->n_layer * sizeof *entries);
    if (entries == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for the copies");
    int status = MEMRA_OK;
    for (int32_t d = 0; d < cache->n_devices && status == MEMRA_OK; d++)
        status = memra_check_copies(
            memra_device_at(cache, d), cache->devices[d].has_arena, entries, homeward(cache, d, entries));
    for (int32_t d = 0; d < cache->n_devices && status == MEMRA_OK; d++)
        status = memra_copy_planes(
            memra_device_at(cache, d), cache->devices[d].has_arena, entries, homeward(cache, d, entries), &done);
    free(entries);
    if (status == MEMRA_OK && cache->state == MEMRA_READY) status = stamp_all(cache, &done);
    MEMRA_TRY(memra_end(cache, &done, status));
    for (int64_t il = 0; il < cache->n_layer; il++)
        if (cache->recur[il].present && cache->recur[il].ssm_state.ptr != cache->recur[il].home)
            memra_swap_states(&cache->recur[il]);
    return MEMRA_OK;
}
