// Deferred mode: work items wait in their streams and run when somebody waits for them, or asks. A seed chooses the
// order between streams; within one the order is that of the calls, and what waits for an event runs behind it. So a
// program that forgot to wait, or to order two streams, meets what a real device may show it.
//
// Everything happens as late as a driver allows: pinned memory is read when the copy runs, pageable memory is staged at
// the call; what a copy brings to the host is there after a wait; stream-ordered memory is gone when the stream is there.
// A fault of the device reaches the host at the next call behind it.
#include "fake.h"

struct moment {             // a place in a stream; never freed, like the objects that remember it
    struct stream *stream;
    bool passed;
    struct moment *next;
};

struct item {               // a work item that waits
    struct op op;
    struct fake_record record; // the call that asked for it
    uint64_t asked;         // its number
    struct moment *moment;  // OP_RECORD: reached with it; OP_WAIT: waits for it
    void *staged;           // the bytes of a copy from pageable memory
    int fault;              // what the device meets instead of running it
    bool skipped;
    struct item *next;
};

static struct stream **busy; // those with items
static size_t n_busy, room_busy;
static struct moment *moments;
static uint64_t state;

void queue_seed(uint64_t seed) { S.seed = state = seed; }

static uint64_t draw(uint64_t n) { // splitmix64, below n
    uint64_t x = state += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return (x ^ x >> 31) % n;
}

// ---------------------------------------------------------------- asking for work

static struct item *push(struct stream *stream, const struct op *op) {
    struct item *item = calloc(1, sizeof *item);
    item->op = *op;
    item->asked = ++S.asked;
    if (stream->last) {
        stream->last->next = item;
    } else {
        stream->first = item;
        if (n_busy == room_busy) busy = realloc(busy, (room_busy = 2 * room_busy + 16) * sizeof *busy);
        busy[n_busy++] = stream;
    }
    stream->last = item;
    return item;
}

static struct moment *new_moment(struct stream *stream) {
    struct moment *moment = calloc(1, sizeof *moment);
    moment->stream = stream;
    moment->next = moments;
    return moments = moment;
}

struct moment *queue_moment(struct stream *stream) {
    struct moment *moment = new_moment(stream);
    push(stream, &(struct op){.kind = OP_RECORD})->moment = moment;
    return moment;
}

bool queue_passed(const struct moment *moment) { return !moment || moment->passed; }

void queue_wait(struct stream *stream, struct moment *moment) {
    if (!queue_passed(moment)) push(stream, &(struct op){.kind = OP_WAIT})->moment = moment;
}

// The default stream and those that are not non-blocking wait for each other.
static void order_with_default(struct stream *stream) {
    enum { NON_BLOCKING = 1 };
    struct stream *standard = &stream->context->default_stream;
    if (stream != standard) {
        if (!(stream->flags & NON_BLOCKING) && standard->first) queue_wait(stream, queue_moment(standard));
        return;
    }
    for (size_t i = 0, n = n_busy; i < n; i++)
        if (busy[i] != standard && busy[i]->context == stream->context && !(busy[i]->flags & NON_BLOCKING))
            queue_wait(stream, queue_moment(busy[i]));
}

CUresult queue_add(struct call *call, struct stream *stream, const struct op *op) {
    CUresult code = fake_check(call, stream, (struct op *)op);
    if (code == INVALID_VALUE && call->record.node) code = ILLEGAL_ADDRESS; // only the device looks at a graph's nodes
    if (code && code != ILLEGAL_ADDRESS) return code;
    order_with_default(stream);
    struct item *item = push(stream, op);
    item->record = call->record;
    item->fault = code;
    item->record.code = call->record.code = OK;
    switch (op->kind) {
    case OP_RECORD:
        item->moment = op->event->latest = new_moment(stream);
        break;
    case OP_WAIT:
        item->moment = op->event->latest;
        break;
    case OP_COPY_OUT:
        item->op.pinned = block_find(op->dst);
        break;
    case OP_COPY_IN:
        item->op.pinned = block_find(op->src);
        if (item->op.pinned) break;
        item->staged = memcpy(malloc(op->bytes), (void *)op->src, op->bytes);
        item->op.src = (uintptr_t)item->staged;
        break;
    default:
        break;
    }
    return OK;
}

// ---------------------------------------------------------------- running it

static struct item *pop(struct stream *stream) {
    struct item *item = stream->first;
    stream->first = item->next;
    if (stream->first) return item;
    stream->last = NULL;
    size_t i = 0;
    while (busy[i] != stream) i++;
    busy[i] = busy[--n_busy];
    return item;
}

static void discard(struct item *item) {
    if (item->op.kind == OP_RECORD) item->moment->passed = true;
    free(item->staged);
    free(item);
}

void queue_drop(const struct context *context) {
    for (size_t i = n_busy; i-- > 0;) {
        struct stream *stream = busy[i];
        while (stream->context == context && stream->first) {
            struct item *item = pop(stream);
            if (item->op.kind == OP_FREE) block_end(item->op.dst, item->record.call);
            discard(item);
        }
    }
}

void context_break(struct context *context, int code) {
    context->sticky = code;
    queue_drop(context);
}

static void run_first(struct stream *stream) {
    struct item *item = pop(stream);
    struct call call = {.record = item->record};
    CUresult code = item->fault;
    S.as_of = item->asked;
    bool marks = item->op.kind == OP_RECORD || item->op.kind == OP_WAIT;
    if (!code && !item->skipped && !(marks && !item->op.event)) code = fake_run(&call, stream, &item->op);
    S.as_of = 0;
    discard(item);
    if (code) context_break(stream->context, code == INVALID_VALUE ? ILLEGAL_ADDRESS : code);
}

static bool is_ready(const struct stream *stream) {
    const struct item *item = stream->first;
    return item && (item->op.kind != OP_WAIT || queue_passed(item->moment));
}

static struct stream *any_ready(const struct stream *but) { // there is always one, unless it is `but`
    size_t start = n_busy ? draw(n_busy) : 0;
    for (size_t i = 0; i < n_busy; i++) {
        struct stream *stream = busy[(start + i) % n_busy];
        if (stream != but && is_ready(stream)) return stream;
    }
    return NULL;
}

// What this waits for was asked for before it, so the search for what can run comes to an end.
static struct stream *needed_for(struct stream *stream) {
    while (!is_ready(stream)) stream = stream->first->moment->stream;
    return stream;
}

static void run_until(struct stream *stream, const struct moment *moment) {
    enum { WHAT_IS_NEEDED, ANY, OTHERS_FIRST } order = draw(3);
    while (moment ? !moment->passed : stream->first != NULL) {
        struct stream *other = order == WHAT_IS_NEEDED ? NULL : any_ready(order == OTHERS_FIRST ? stream : NULL);
        run_first(other ? other : needed_for(stream));
    }
}

CUresult queue_finish(struct stream *stream) {
    if (stream->first) run_until(stream, NULL);
    return stream->context->sticky;
}

CUresult queue_finish_moment(struct context *context, struct moment *moment) {
    if (!queue_passed(moment)) run_until(moment->stream, moment);
    return context->sticky;
}

CUresult queue_finish_context(struct context *context) {
    for (size_t i = 0; i < n_busy;) {
        if (busy[i]->context == context) queue_finish(busy[i]), i = 0;
        else i++;
    }
    return context->sticky;
}

void queue_finish_all(void) {
    while (n_busy) queue_finish(busy[draw(n_busy)]);
}

void queue_progress(void) {
    for (uint64_t steps = n_busy ? 1 + draw(4) : 0; steps-- > 0 && n_busy;) run_first(any_ready(NULL));
}

void queue_void_reads(void) {
    for (size_t i = 0; i < n_busy; i++)
        for (struct item *item = busy[i]->first; item; item = item->next)
            if (item->op.kind == OP_COPY_OUT && !item->op.pinned) item->skipped = true;
}
