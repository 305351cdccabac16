/* memra_rules.c: what the state of a cache allows now, and the small changes of its scalars: rules.py in C. */
#include "memra_internal.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>

/* ---- What is refused ---- */

int memra_check_cache(const memra_cache *cache, const char *what) {
    if (cache == NULL) return memra_fail(MEMRA_ERR_STATE, "%s: the cache is NULL", what);
    MEMRA_TRY(memra_check_abi(cache, what));
    if (cache->state == MEMRA_CLOSED) return memra_fail(MEMRA_ERR_STATE, "%s: the cache is closed", what);
    if (cache->state > MEMRA_CLOSED)
        return memra_fail(
            MEMRA_ERR_STATE, "state is %" PRIu32 " in the C struct, which is none of enum memra_state", cache->state);
    for (int32_t d = 0; d < cache->n_devices; d++) {
        memra_device *device = memra_device_at(cache, d);
        if (device == NULL)
            return memra_fail(
                MEMRA_ERR_DEVICE, "%s: device %d of the cache is %s; memra_cache_bind it to an open device", what,
                (int)d, cache->devices[d].handle ? "closed" : "not bound");
        MEMRA_TRY(memra_device_enter(device)); /* the last one stays current: memra_ops.c counts on it */
    }
    return MEMRA_OK;
}

int memra_check_state(const memra_cache *cache, const char *what, uint32_t allowed) {
    if (allowed & MEMRA_IN(cache->state)) return MEMRA_OK;
    switch (cache->state) {
        case MEMRA_CLOSED: return memra_fail(MEMRA_ERR_STATE, "%s: the cache is closed", what);
        case MEMRA_TAINTED:
            return memra_fail(
                MEMRA_ERR_STATE, "%s: tainted by an earlier driver error; reset, close, or roll back with accept_len 0",
                what);
        case MEMRA_UNSETTLED:
            return memra_fail(
                MEMRA_ERR_STATE, "%s: the device counters are ahead of the host; call settle first", what);
        case MEMRA_PENDING_REPLAY:
            return memra_fail(
                MEMRA_ERR_STATE, "%s: pending replay of %" PRId64 " tokens; run them first", what,
                (int64_t)((uint64_t)cache->replay_to - (uint64_t)cache->pos));
        default: return memra_fail(MEMRA_ERR_STATE, "%s: the cache is ready", what);
    }
}

int memra_check_length(const memra_cache *cache, const char *name, int64_t value) {
    if (value >= 0 && value <= cache->max_ctx) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_STATE, "%s is %" PRId64 "; it must lie in 0 .. %" PRId64, name, value, cache->max_ctx);
}

int memra_check_layer_length(const memra_cache *cache, int64_t il) {
    char name[48];
    if (cache->kv[il].len >= 0 && cache->kv[il].len <= cache->max_ctx) return MEMRA_OK;
    snprintf(name, sizeof name, "layer %" PRId64 ": len", il);
    return memra_check_length(cache, name, cache->kv[il].len);
}

int memra_check_lengths(const memra_cache *cache) {
    MEMRA_TRY(memra_check_length(cache, "pos", cache->pos));
    for (int64_t il = 0; il < cache->n_layer; il++)
        if (cache->kv[il].present) MEMRA_TRY(memra_check_layer_length(cache, il));
    return MEMRA_OK;
}

static int check_recorder(const memra_cache *cache, const char *what) {
    if (cache->recorder == MEMRA_RECORDED_BY_PYTHON)
        return memra_fail(MEMRA_ERR_STATE, "%s: Python records this cache; end that capture first", what);
    return MEMRA_OK;
}

int memra_check_not_recording(const memra_cache *cache, const char *what) {
    MEMRA_TRY(check_recorder(cache, what));
    if (memra_recording(cache) != NULL)
        return memra_fail(MEMRA_ERR_STATE, "%s: a capture is open; only steps and rounds can be recorded", what);
    for (int32_t d = 0; d < cache->n_devices; d++) {
        const memra_device *device = memra_device_at(cache, d);
        bool alive = false;
        if (device != NULL) MEMRA_TRY(memra_device_look(device, &alive));
        if (alive) MEMRA_TRY(memra_check_no_capture(device, what));
    }
    return MEMRA_OK;
}

int memra_check_recording(memra_cache *cache, const char *what) {
    MEMRA_TRY(check_recorder(cache, what));
    struct memra_graph *graph = memra_recording(cache);
    for (int32_t d = 0; d < cache->n_devices; d++) {
        memra_device *device = memra_device_at(cache, d);
        if (graph != NULL && device->recording == NULL)
            return memra_fail(
                MEMRA_ERR_STATE, "%s: a capture belongs to one device; this cache spans %" PRId32, what,
                cache->n_devices);
        if (graph == NULL) MEMRA_TRY(memra_check_no_capture(device, what));
        int capturing = 1;
        if (graph != NULL && graph->flags & MEMRA_CAPTURE_YOURS)
            MEMRA_TRY(MEMRA_CU(cuStreamIsCapturing, (device->stream, &capturing)));
        if (!capturing)
            return memra_fail(
                MEMRA_ERR_STATE,
                "%s: a capture of the caller's was announced, and the stream is not capturing; begin it first", what);
    }
    if (graph == NULL && memra_graph_of_thread() != NULL)
        return memra_fail(
            MEMRA_ERR_STATE, "%s: a capture is open on device %" PRId32 ", and this cache lives elsewhere; a capture"
            " belongs to one device", what, memra_graph_of_thread()->device->ordinal);
    return graph == NULL ? MEMRA_OK : memra_graph_touch(graph, cache);
}

int memra_check_settled(memra_cache *cache, const char *what) {
    MEMRA_TRY(memra_check_not_recording(cache, what));
    if (cache->round_width)
        return memra_fail(MEMRA_ERR_STATE, "%s: a round is open; commit or leave it first", what);
    MEMRA_TRY(memra_check_state(cache, what, MEMRA_IN(MEMRA_READY)));
    if (cache->step_rows)
        return memra_fail(
            MEMRA_ERR_STATE, "%s: a step of %" PRId64 " rows is open; advance or roll back first", what,
            cache->step_rows);
    return memra_check_lengths(cache);
}

int memra_check_steppable(const memra_cache *cache, const char *what) {
    uint32_t allowed = MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_PENDING_REPLAY);
    if (cache->round_width || memra_recording(cache) != NULL) allowed |= MEMRA_IN(MEMRA_UNSETTLED);
    return memra_check_state(cache, what, allowed);
}

int memra_check_readable(memra_cache *cache, const char *what) {
    MEMRA_TRY(memra_check_recording(cache, what));
    return memra_check_steppable(cache, what);
}

int memra_check_replay(const memra_cache *cache, const char *what, int64_t rows) {
    const int64_t left = (int64_t)((uint64_t)cache->replay_to - (uint64_t)cache->pos); /* pos may have been assigned */
    if (cache->state != MEMRA_PENDING_REPLAY || rows <= left) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_STATE, "%s of %" PRId64 " rows: pending replay of %" PRId64 " tokens; a step may take at most those",
        what, rows, left);
}

int memra_check_replayable(const memra_cache *cache, const char *what, int64_t need) {
    MEMRA_TRY(check_recorder(cache, what));
    MEMRA_TRY(memra_check_state(cache, what, MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_UNSETTLED)));
    if (cache->round_width)
        return memra_fail(MEMRA_ERR_STATE, "%s: a round is open; commit or leave it first", what);
    if (cache->step_rows)
        return memra_fail(
            MEMRA_ERR_STATE, "%s: a step of %" PRId64 " rows is open; advance or roll back first", what,
            cache->step_rows);
    MEMRA_TRY(memra_check_lengths(cache));
    if (need > cache->max_ctx - cache->pos)
        return memra_fail(
            MEMRA_ERR_CAPACITY, "%s: %" PRId64 " rows behind position %" PRId64 "; max_ctx is %" PRId64, what, need,
            cache->pos, cache->max_ctx);
    return MEMRA_OK;
}

int memra_check_not_behind(const memra_cache *cache, int32_t il) {
    const int64_t len = cache->kv[il].len;
    if (len >= cache->pos) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_STATE,
        "layer %" PRId32 ": len is %" PRId64 ", pos is %" PRId64 ": nobody wrote rows %" PRId64 " .. %" PRId64
        "; set len or roll back",
        il, len, cache->pos, len, cache->pos - 1);
}

int memra_check_not_ahead(const memra_cache *cache, int32_t il) {
    const int64_t len = cache->kv[il].len;
    if (len <= cache->pos) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_STATE,
        "layer %" PRId32 ": len is %" PRId64 ", pos is %" PRId64 ": a round or a recorded step would give up rows %"
        PRId64 " .. %" PRId64 "; set len to pos, then sync_d",
        il, len, cache->pos, cache->pos, len - 1);
}

/* ---- Layers and arguments ---- */

static int no_such_layer(const memra_cache *cache, int32_t il, bool kv) {
    char owners[256];
    size_t at = 0;
    owners[0] = 0;
    for (int64_t i = 0; i < cache->n_layer && at < sizeof owners - 24; i++)
        if (kv ? cache->kv[i].present : cache->recur[i].present)
            at += (size_t)snprintf(owners + at, sizeof owners - at, "%s%" PRId64, at ? ", " : "", i);
    return memra_fail(
        MEMRA_ERR_CONFIG, "layer %" PRId32 " has no %s; layers [%s] have", il, kv ? "K/V" : "recurrent state", owners);
}

static int check_layer(const memra_cache *cache, int32_t il) {
    if (il >= 0 && il < cache->n_layer) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_CONFIG, "layer %" PRId32 "; layers are 0 .. %" PRId64, il, cache->n_layer - 1);
}

int memra_kv_of(const memra_cache *cache, int32_t il, memra_kv_layer **layer) {
    MEMRA_TRY(check_layer(cache, il));
    if (!cache->kv[il].present) return no_such_layer(cache, il, true);
    *layer = &cache->kv[il];
    return MEMRA_OK;
}

int memra_recur_of(const memra_cache *cache, int32_t il, memra_recur_layer **layer) {
    MEMRA_TRY(check_layer(cache, il));
    const memra_recur_layer *found = &cache->recur[il];
    if (!found->present) return no_such_layer(cache, il, false);
    const uint64_t state = found->ssm_state.ptr, alt = found->ssm_state_alt.ptr;
    if (!(state == found->home && alt == found->away) && !(state == found->away && alt == found->home))
        return memra_fail(
            MEMRA_ERR_STATE, "layer %" PRId32 ": ssm_state is 0x%" PRIx64 ", ssm_state_alt 0x%" PRIx64
            " in the C struct; they are 0x%" PRIx64 " and 0x%" PRIx64 ", in either order", il, state, alt, found->home,
            found->away);
    *layer = &cache->recur[il];
    return MEMRA_OK;
}

int memra_check_rows(int64_t rows) {
    if (rows < 0) return memra_fail(MEMRA_ERR_ARRAY, "rows is %" PRId64 "; at least 0", rows);
    if (rows > INT_MAX) return memra_fail(MEMRA_ERR_CAPACITY, "rows is %" PRId64 "; at most %d", rows, INT_MAX);
    return MEMRA_OK;
}

int memra_range_of(
    const char *name, uint64_t ptr, int64_t rows, int64_t columns, int32_t item_bytes, memra_range *range) {
    int64_t n_bytes = 0;
    if (__builtin_mul_overflow(rows, columns, &n_bytes) || __builtin_mul_overflow(n_bytes, item_bytes, &n_bytes) ||
        ptr + (uint64_t)n_bytes < ptr)
        return memra_fail(
            MEMRA_ERR_ARRAY, "%s of %" PRId64 " rows of %" PRId64 " elements at 0x%" PRIx64 " ends beyond all memory",
            name, rows, columns, ptr);
    if (n_bytes && ptr == 0) return memra_fail(MEMRA_ERR_ARRAY, "%s is null; it takes an address of the device", name);
    if (n_bytes && ptr % (uint64_t)item_bytes)
        return memra_fail(
            MEMRA_ERR_ARRAY, "%s lies at 0x%" PRIx64 ", which is not aligned to its %" PRId32 "-byte elements", name,
            ptr, item_bytes);
    *range = (memra_range){name, ptr, (uint64_t)n_bytes};
    return MEMRA_OK;
}

static int check_apart(const memra_range *out, const memra_range *other) {
    if (!out->n_bytes || !other->n_bytes) return MEMRA_OK;
    if (out->ptr >= other->ptr + other->n_bytes || other->ptr >= out->ptr + out->n_bytes) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_ARRAY, "%s and %s share memory; other rows of %s are still read while %s is written", out->name,
        other->name, other->name, out->name);
}

int memra_check_ranges(const memra_range *outputs, int32_t n_outputs, const memra_range *inputs, int32_t n_inputs) {
    for (int32_t i = 0; i < n_outputs; i++) {
        for (int32_t j = i + 1; j < n_outputs; j++) MEMRA_TRY(check_apart(&outputs[i], &outputs[j]));
        for (int32_t j = 0; j < n_inputs; j++) MEMRA_TRY(check_apart(&outputs[i], &inputs[j]));
    }
    return MEMRA_OK;
}

/* ---- One operation of a step ---- */

static const char *name_of(uint32_t op) {
    return op == MEMRA_OP_APPEND ? "append"
           : op == MEMRA_OP_CONV ? "conv"
           : op == MEMRA_OP_SCAN ? "scan"
                                 : "recur_step";
}

static uint32_t *ops_of(memra_cache *cache, int32_t il, uint32_t op) {
    return op == MEMRA_OP_APPEND ? &cache->kv[il].step_ops : &cache->recur[il].step_ops;
}

int memra_step_check(memra_cache *cache, int32_t il, uint32_t op, int64_t rows) {
    const char *name = name_of(op);
    MEMRA_TRY(memra_check_recording(cache, name));
    MEMRA_TRY(memra_check_steppable(cache, name));
    if (cache->round_width && rows > cache->round_width)
        return memra_fail(
            MEMRA_ERR_CAPACITY, "layer %" PRId32 ": %" PRId64 " rows in a round of width %" PRId64, il, rows,
            cache->round_width);
    if (cache->step_rows && rows != cache->step_rows)
        return memra_fail(
            MEMRA_ERR_STATE, "layer %" PRId32 ": %" PRId64 " rows, but the open step has %" PRId64 "; advance first",
            il, rows, cache->step_rows);
    const uint32_t ran = *ops_of(cache, il, op) & op;
    if (ran)
        return memra_fail(
            MEMRA_ERR_STATE, "layer %" PRId32 " has run %s in this step; each runs once, then advance", il,
            name_of(ran));
    MEMRA_TRY(memra_check_replay(cache, name, rows));
    MEMRA_TRY(memra_check_length(cache, "pos", cache->pos));
    const bool appends = op == MEMRA_OP_APPEND;
    if (appends) MEMRA_TRY(memra_check_layer_length(cache, il));
    if (rows > cache->max_ctx - cache->pos)
        return memra_fail(
            MEMRA_ERR_CAPACITY,
            "layer %" PRId32 ": %" PRId64 " rows behind len %" PRId64 " need %" PRId64 " tokens; max_ctx is %" PRId64,
            il, rows, cache->pos, cache->pos + rows, cache->max_ctx);
    if (!appends) return MEMRA_OK;
    MEMRA_TRY(memra_check_not_behind(cache, il));
    return cache->round_width || memra_recording(cache) != NULL ? memra_check_not_ahead(cache, il) : MEMRA_OK;
}

void memra_step_done(memra_cache *cache, int32_t il, uint32_t op, int64_t rows) {
    struct memra_graph *graph = memra_recording(cache);
    if (!cache->step_rows && cache->state == MEMRA_READY && graph == NULL)
        memra_give_up(cache, cache->pos); /* rows from pos on are new, whatever stood there */
    *ops_of(cache, il, op) |= op;
    cache->step_rows = rows;
    if (graph != NULL) memra_graph_note(graph, cache, cache->pos + rows);
}

/* ---- The scalars ---- */

memra_device *memra_device_at(const memra_cache *cache, int32_t d) {
    return memra_device_find(cache->devices[d].handle);
}

int32_t memra_last_device(const memra_cache *cache) { return cache->kv[cache->n_layer - 1].device_index; }

struct memra_graph *memra_recording(const memra_cache *cache) {
    for (int32_t d = 0; d < cache->n_devices; d++) {
        const memra_device *device = memra_device_at(cache, d);
        if (device != NULL && device->recording != NULL) return device->recording;
    }
    return NULL;
}

bool memra_device_clock(const memra_cache *cache) {
    return cache->state == MEMRA_UNSETTLED || memra_recording(cache) != NULL;
}

void memra_end_step(memra_cache *cache, int64_t pos) {
    for (int64_t il = 0; il < cache->n_layer; il++) cache->kv[il].step_ops = cache->recur[il].step_ops = 0;
    cache->step_rows = 0;
    cache->pos = pos;
}

void memra_swap_states(memra_recur_layer *layer) {
    const uint64_t state = layer->ssm_state.ptr;
    layer->ssm_state.ptr = layer->ssm_state_alt.ptr;
    layer->ssm_state_alt.ptr = state;
    layer->swaps++;
}

void memra_taint(memra_cache *cache) { cache->state = MEMRA_TAINTED; }

int memra_end(memra_cache *cache, const bool *done, int status) {
    if (status != MEMRA_OK && *done) {
        memra_taint(cache);
        memra_fail_more("; the cache is tainted: reset, close, or roll back with accept_len 0 to a valid snapshot");
    }
    return status;
}

void memra_keep_logits(memra_cache *cache, int64_t at) {
    cache->logits_at = at;
    cache->logits_sure = 0;
    cache->last_logits_dev.present = at >= 0;
}

void memra_drop_logits_above(memra_cache *cache, int64_t stands) {
    if (cache->logits_at > stands) memra_keep_logits(cache, -1);
}

void memra_give_up(memra_cache *cache, int64_t stands) {
    memra_drop_logits_above(cache, stands);
    for (memra_snapshot *snap = cache->snapshots; snap != NULL; snap = snap->next)
        if (snap->pos > stands && snap->invalid == MEMRA_VALID) {
            snap->invalid = MEMRA_INVALID_GIVEN_UP;
            snap->given_up = stands;
        }
}

void memra_unsettle(memra_cache *cache, int64_t since) {
    if (cache->state != MEMRA_UNSETTLED) cache->sure_pos = since;
    cache->state = MEMRA_UNSETTLED;
    memra_move *move = memra_recording(cache) != NULL ? memra_move_of(memra_recording(cache), cache) : NULL;
    if (move != NULL) move->unsettles = true;
}

void memra_drop_unsure_logits(memra_cache *cache) {
    if (cache->state == MEMRA_UNSETTLED) memra_drop_logits_above(cache, cache->sure_pos);
}
