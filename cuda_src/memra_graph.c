/* memra_graph.c: recorded steps: graph.py in C.
 *
 * While a capture is open operations take the position from the device, the scan works in place where the state was
 * born, and the host's clock moves only for the checks: at the end it returns to where it was. The graph remembers
 * which caches it moved and how far, and each launch moves them.
 */
#include "memra_internal.h"

#include <inttypes.h>

#define RELAXED 2 /* CU_STREAM_CAPTURE_MODE_RELAXED */

/* ---- What a launch does to a cache ---- */

memra_move *memra_move_of(struct memra_graph *graph, const memra_cache *cache) {
    memra_move *move = graph->moves;
    while (move != NULL && move->cache != cache) move = move->next;
    return move;
}

static void free_move(memra_move *move) {
    free(move->begin_lens);
    free(move->appended);
    free(move->sink.layer_ids);
    free(move);
}

int memra_graph_touch(struct memra_graph *graph, memra_cache *cache) {
    const size_t n = (size_t)cache->n_layer;
    if (memra_move_of(graph, cache) != NULL) return MEMRA_OK;
    if (cache->n_devices > 1)
        return memra_fail(
            MEMRA_ERR_STATE, "a capture belongs to one device; this cache spans %" PRId32, cache->n_devices);
    MEMRA_TRY(memra_check_state(cache, "capture", MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_UNSETTLED)));
    if (cache->step_rows || cache->round_width)
        return memra_fail(
            MEMRA_ERR_STATE, "capture: a step or a round was open when the capture began; end it first");
    memra_move *move = calloc(1, sizeof *move);
    if (move == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for a capture");
    *move = (memra_move){
        .cache = cache, .begin_pos = cache->pos, .begin_logits = cache->last_logits_dev,
        .begin_logits_at = cache->logits_at, .begin_logits_sure = cache->logits_sure,
        .begin_sure_pos = cache->sure_pos, .begin_state = cache->state,
        .begin_lens = calloc(n, sizeof(int64_t)), .appended = calloc(n, 1), .logits_at = -1};
    if (move->begin_lens == NULL || move->appended == NULL) {
        free_move(move);
        return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for a capture");
    }
    for (size_t il = 0; il < n; il++) move->begin_lens[il] = cache->kv[il].len;
    move->next = graph->moves;
    graph->moves = move;
    cache->recorder = MEMRA_RECORDED_BY_C;
    return MEMRA_OK;
}

void memra_graph_note(struct memra_graph *graph, const memra_cache *cache, int64_t end) {
    memra_move *move = memra_move_of(graph, cache);
    if (end - move->begin_pos > move->need) move->need = end - move->begin_pos;
}

int memra_graph_note_taps(struct memra_graph *graph, const memra_cache *cache) {
    memra_move *move = memra_move_of(graph, cache);
    const memra_tap_sink *sink = &cache->dflash_taps;
    int32_t *ids = malloc(sink->n_taps * sizeof *ids);
    if (ids == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for a capture");
    memcpy(ids, sink->layer_ids, sink->n_taps * sizeof *ids);
    free(move->sink.layer_ids);
    move->taps = true;
    move->sink = *sink;
    move->sink.layer_ids = ids;
    return MEMRA_OK;
}

/* The layers that are appended to stand at pos, and the sink that was recorded is armed. */
static int check_move(const memra_move *move) {
    const memra_cache *cache = move->cache;
    for (int64_t il = 0; il < cache->n_layer; il++)
        if (move->appended[il]) {
            MEMRA_TRY(memra_check_not_behind(cache, (int32_t)il));
            MEMRA_TRY(memra_check_not_ahead(cache, (int32_t)il));
        }
    if (!move->taps) return MEMRA_OK;
    const memra_tap_sink *taken = &move->sink, *armed = &cache->dflash_taps;
    const bool alike = armed->present && armed->n_taps == taken->n_taps && armed->hidden == taken->hidden &&
                       armed->buf.ptr == taken->buf.ptr &&
                       !memcmp(armed->layer_ids, taken->layer_ids, taken->n_taps * sizeof *taken->layer_ids);
    if (!alike)
        return memra_fail(
            MEMRA_ERR_STATE, "graph launch: it was captured with taps %s; capture it again",
            armed->present ? "other than those that are armed" : "and none are armed");
    if (armed->t < taken->t)
        return memra_fail(
            MEMRA_ERR_STATE, "graph launch: it was captured with taps of %" PRId64 " rows, and %" PRId64 " are armed",
            taken->t, armed->t);
    return MEMRA_OK;
}

/* The host's clock as it stood when the capture began. */
static void put_back(const memra_move *move) {
    memra_cache *cache = move->cache;
    cache->recorder = MEMRA_NOT_RECORDING;
    cache->round_width = 0;
    if (cache->state == MEMRA_CLOSED) return;
    memra_end_step(cache, move->begin_pos);
    cache->state = move->begin_state;
    cache->sure_pos = move->begin_sure_pos;
    cache->last_logits_dev = move->begin_logits;
    cache->logits_at = move->begin_logits_at;
    cache->logits_sure = move->begin_logits_sure;
    for (int64_t il = 0; il < cache->n_layer; il++) cache->kv[il].len = move->begin_lens[il];
}

/* ---- The capture ---- */

static _Thread_local struct memra_graph *of_thread;

struct memra_graph *memra_graph_of_thread(void) { return of_thread; }

static void free_graph(struct memra_graph *graph) {
    if (of_thread == graph) of_thread = NULL;
    for (memra_move *move = graph->moves, *next; move != NULL; move = next) {
        next = move->next;
        free_move(move);
    }
    free(graph);
}

int memra_capture_begin(memra_device *device, uint32_t flags) {
    MEMRA_TRY(memra_device_enter(device));
    if (device->recording != NULL) return memra_fail(MEMRA_ERR_STATE, "a capture is open on this device already");
    if (flags & ~(uint32_t)MEMRA_CAPTURE_YOURS)
        return memra_fail(MEMRA_ERR_CONFIG, "capture: flags 0x%" PRIx32 " are none of memra_capture_flags", flags);
    struct memra_graph *graph = calloc(1, sizeof *graph);
    if (graph == NULL) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "no host memory for a capture");
    *graph = (struct memra_graph){.device = device, .handle = device->handle, .flags = flags, .is_recording = true};
    if (!(flags & MEMRA_CAPTURE_YOURS)) {
        const int status = MEMRA_CU(cuStreamBeginCapture, (device->stream, RELAXED));
        if (status != MEMRA_OK) {
            free(graph);
            return status;
        }
    }
    device->recording = of_thread = graph;
    return MEMRA_OK;
}

/* Learns how far each cache moved, and puts the host's clocks back. */
static int finish(struct memra_graph *graph) {
    bool spoiled = false, unfinished = false;
    for (memra_move *move = graph->moves; move != NULL; move = move->next) {
        const memra_cache *cache = move->cache;
        spoiled |= cache->state == MEMRA_TAINTED || cache->state == MEMRA_CLOSED;
        unfinished |= cache->step_rows || cache->round_width;
        move->tokens = cache->pos - move->begin_pos;
        for (int64_t il = 0; il < cache->n_layer; il++) move->appended[il] = cache->kv[il].len != move->begin_lens[il];
        if (move->parks && cache->logits_at >= 0) move->logits_at = cache->logits_at - move->begin_pos;
        move->logits = cache->last_logits_dev.slice;
        put_back(move);
    }
    if (spoiled)
        return memra_fail(
            MEMRA_ERR_STATE, "a cache was closed or an operation interrupted inside the capture; it is given up");
    if (unfinished)
        return memra_fail(
            MEMRA_ERR_STATE, "a step or a round is open at the end of the capture; advance or commit inside it");
    return MEMRA_OK;
}

/* Ends what the stream still captures, and forgets it; an invalid capture ends with an error that is none here.
 * open: the stream captures still. */
static int discard(const memra_device *device, bool *open) {
    CUgraph made = NULL;
    int capturing = 0;
    const CUresult code = memra_cu.cuStreamEndCapture(device->stream, &made);
    *open = code && !memra_cu.cuStreamIsCapturing(device->stream, &capturing) && capturing;
    if (!code) return made != NULL ? MEMRA_CU(cuGraphDestroy, (made)) : MEMRA_OK;
    return *open ? memra_cuda_status("cuStreamEndCapture()", code) : MEMRA_OK;
}

/* open: the stream captures still, for the driver ended nothing. */
static int instantiate(struct memra_graph *graph, bool *open) {
    CUgraph made = NULL;
    const CUresult ended = memra_cu.cuStreamEndCapture(graph->device->stream, &made);
    if (ended) {
        int capturing = 0;
        if (!memra_cu.cuStreamIsCapturing(graph->device->stream, &capturing) && capturing)
            discard(graph->device, open);
        return memra_cuda_status("cuStreamEndCapture()", ended);
    }
    memra_failure first = {0};
    memra_keep_any(&first, MEMRA_CU(cuGraphInstantiateWithFlags, (&graph->exec, made, 0)));
    memra_keep_any(&first, MEMRA_CU(cuGraphDestroy, (made)));
    MEMRA_TRY(memra_kept(&first));
    return MEMRA_CU(cuGraphUpload, (graph->exec, graph->device->stream));
}

int memra_capture_end(memra_device *device, memra_graph **graph) {
    if (graph == NULL) return memra_fail(MEMRA_ERR_ARRAY, "capture: there is no place for the graph (NULL)");
    *graph = NULL;
    MEMRA_TRY(memra_device_enter(device));
    struct memra_graph *made = device->recording;
    if (made == NULL) return memra_fail(MEMRA_ERR_STATE, "no capture is open on this device");
    bool open = false;
    memra_failure first = {0};
    memra_keep_any(&first, made->flags & MEMRA_CAPTURE_YOURS ? MEMRA_OK : instantiate(made, &open));
    if (open) return first.status; /* it can be ended again, or abandoned */
    device->recording = NULL;
    if (of_thread == made) of_thread = NULL;
    made->is_recording = false;
    memra_keep_any(&first, finish(made));
    if (first.status != MEMRA_OK) {
        if (made->exec != NULL) memra_cu.cuGraphExecDestroy(made->exec);
        free_graph(made);
        return memra_kept(&first);
    }
    made->next = device->graphs;
    device->graphs = made;
    *graph = made;
    return MEMRA_OK;
}

void memra_graphs_forget(const memra_cache *cache) {
    for (int32_t d = 0; d < cache->n_devices; d++) {
        memra_device *device = memra_device_at(cache, d);
        for (struct memra_graph *graph = device ? device->graphs : NULL; graph != NULL; graph = graph->next) {
            memra_move *move = memra_move_of(graph, cache);
            if (move != NULL) move->cache = NULL;
        }
    }
}

int memra_capture_abandon(memra_device *device) {
    MEMRA_TRY(memra_device_enter(device));
    struct memra_graph *graph = device->recording;
    if (graph == NULL) return MEMRA_OK;
    bool open = false; /* one that goes on */
    const int status = graph->flags & MEMRA_CAPTURE_YOURS ? MEMRA_OK : discard(device, &open);
    if (!open) memra_graph_drop(device);
    return status;
}

void memra_graph_drop(memra_device *device) {
    struct memra_graph *graph = device->recording;
    if (graph == NULL) return;
    device->recording = NULL;
    for (memra_move *move = graph->moves; move != NULL; move = move->next) put_back(move);
    free_graph(graph);
}

int memra_graph_close(memra_graph *graph) {
    if (graph == NULL) return MEMRA_OK;
    MEMRA_TRY(memra_check_fork());
    if (graph->is_recording) return memra_fail(MEMRA_ERR_STATE, "the capture is still open; end or abandon it");
    memra_device *device = memra_device_find(graph->handle);
    memra_failure first = {0};
    bool alive = false;
    if (graph->exec != NULL && device != NULL) memra_keep(&first, memra_device_look(device, &alive));
    if (alive) memra_keep(&first, MEMRA_CU(cuGraphExecDestroy, (graph->exec)));
    if (device != NULL)
        for (struct memra_graph **at = &device->graphs; *at != NULL; at = &(*at)->next)
            if (*at == graph) {
                *at = graph->next;
                break;
            }
    free_graph(graph);
    return memra_kept(&first);
}

/* ---- Launches ---- */

/* The host's clock follows `launches` launches; nothing here can fail, for the device has moved. */
static void move_clock(memra_cache *cache, const memra_move *move, int64_t launches) {
    const int64_t moved = move->tokens * (launches - 1);
    const int64_t begin = cache->pos, end = begin + move->tokens * launches;
    if (cache->state == MEMRA_READY) memra_give_up(cache, begin);
    if (move->unsettles || !cache->logits_sure) memra_drop_unsure_logits(cache);
    if (move->parks) {
        cache->last_logits_dev.slice = move->logits;
        memra_keep_logits(cache, move->logits_at < 0 ? -1 : begin + moved + move->logits_at);
        /* Its token stands wherever the cache does, though the host knows only the most that this can be. */
        cache->logits_sure = move->logits_at >= 0 && cache->state == MEMRA_UNSETTLED && !move->unsettles;
    }
    memra_end_step(cache, end);
    for (int64_t il = 0; il < cache->n_layer; il++)
        if (move->appended[il]) cache->kv[il].len = end;
    if (move->unsettles) memra_unsettle(cache, begin);
}

int memra_graph_launch(memra_graph *graph) {
    if (graph == NULL) return memra_fail(MEMRA_ERR_STATE, "graph launch: the graph is NULL");
    if (graph->is_recording) return memra_fail(MEMRA_ERR_STATE, "graph launch: the capture is still open");
    if (graph->flags & MEMRA_CAPTURE_YOURS)
        return memra_fail(
            MEMRA_ERR_STATE, "graph launch: this graph is the caller's; prepare_replay, launch it, then replayed");
    memra_device *device = memra_device_find(graph->handle);
    if (device == NULL) return memra_fail(MEMRA_ERR_DEVICE, "graph launch: its device is closed");
    MEMRA_TRY(memra_device_enter(device));
    if (device->recording != NULL)
        return memra_fail(
            MEMRA_ERR_STATE, "graph launch: a capture is open; only steps and rounds can be recorded");
    for (const memra_move *move = graph->moves; move != NULL; move = move->next) {
        if (move->cache == NULL) return memra_fail(MEMRA_ERR_STATE, "graph launch: the cache is closed");
        MEMRA_TRY(memra_check_cache(move->cache, "graph launch"));
        MEMRA_TRY(memra_check_replayable(move->cache, "graph launch", move->need));
        MEMRA_TRY(check_move(move));
    }
    for (const memra_move *move = graph->moves; move != NULL; move = move->next)
        MEMRA_TRY(memra_prepare_replay(move->cache, NULL, 0));
    const int status = MEMRA_CU(cuGraphLaunch, (graph->exec, device->stream));
    for (const memra_move *move = graph->moves; move != NULL; move = move->next) {
        if (status != MEMRA_OK)
            memra_taint(move->cache);
        else
            move_clock(move->cache, move, 1);
    }
    return status;
}

int memra_check_launches(
    memra_cache *cache, const char *what, struct memra_graph *graph, int64_t launches, const memra_move **move) {
    int64_t moved = 0, need = 0;
    *move = memra_move_of(graph, cache);
    if (*move == NULL) return memra_fail(MEMRA_ERR_CONFIG, "this graph moves another cache");
    if (launches < 0) return memra_fail(MEMRA_ERR_CONFIG, "%" PRId64 " launches", launches);
    if (__builtin_mul_overflow((*move)->tokens, launches ? launches - 1 : 0, &moved) ||
        __builtin_add_overflow(moved, launches ? (*move)->need : 0, &need))
        need = INT64_MAX;
    MEMRA_TRY(memra_check_replayable(cache, what, need));
    return launches ? check_move(*move) : MEMRA_OK;
}

int memra_replayed(memra_cache *cache, memra_graph *graph, int64_t launches) {
    const memra_move *move = NULL;
    MEMRA_TRY(memra_check_cache(cache, "replayed"));
    if (graph == NULL) return memra_fail(MEMRA_ERR_CONFIG, "replayed: the graph is NULL");
    MEMRA_TRY(memra_check_launches(cache, "replayed", graph, launches, &move));
    if (launches) move_clock(cache, move, launches);
    return MEMRA_OK;
}

