// Stream capture and graphs. A capturing stream keeps its work items, parameter values and all; a launch of the
// graph runs them in that order. Copies with pageable memory, stream-ordered memory, and events but those of outside the
// capture (the EXTERNAL flags) are not for a capture here, though a driver takes some of them; only the RELAXED mode is.
#include "fake.h"

enum { NOT_CAPTURING, CAPTURING, INVALIDATED }; // CUstreamCaptureStatus
enum { RELAXED = 2 };
enum { NON_BLOCKING = 1 };

static struct graph *graph_new(struct context *context, enum kind kind) {
    struct graph *graph = calloc(1, sizeof *graph);
    object_add(&graph->object, kind);
    graph->context = context;
    graph->serial = ++S.serial;
    graph->next = S.graphs;
    S.graphs = graph;
    return graph;
}

void graph_release(struct graph *graph) {
    struct graph **link = &S.graphs;
    while (*link != graph) link = &(*link)->next;
    *link = graph->next;
    if (graph->stream) graph->stream->capture = NULL;
    free(graph->ops);
    graph->ops = NULL;
    graph->n = graph->room = 0;
    graph->object.dead = true;
}

void context_release_graphs(struct context *context) {
    for (struct graph *graph = S.graphs, *next; graph; graph = next) {
        next = graph->next;
        if (graph->context == context) graph_release(graph);
    }
}

static CUresult graph_resolve(struct call *call, struct graph *graph, enum kind kind) {
    const char *what = kind == GRAPH ? "graph" : "executable graph";
    if (!object_find(graph, kind)) return fake_misuse(call, INVALID_VALUE, "no such %s: %p", what, (void *)graph);
    if (graph->context->object.dead) return CONTEXT_IS_DESTROYED;
    if (graph->object.dead) return fake_misuse(call, INVALID_VALUE, "the %s is destroyed", what);
    return context_usable(call, graph->context);
}

// ---------------------------------------------------------------- capture

// The first error of a capture is misuse and ends it; what follows on the stream is told so.
static CUresult invalidate(struct call *call, struct graph *capture, CUresult code, const char *text) {
    if (capture->invalid) return CAPTURE_INVALIDATED;
    capture->invalid = true;
    return fake_misuse(call, code, "%s", text);
}

CUresult capture_refuse(struct call *call, struct stream *stream) {
    if (!stream->capture) return capture_implicit(call, stream);
    return invalidate(call, stream->capture, CAPTURE_UNSUPPORTED, "the stream is capturing");
}

CUresult capture_refuse_all(struct call *call, const struct context *context) {
    CUresult code = OK;
    for (struct graph *graph = S.graphs; graph; graph = graph->next)
        if (graph->stream && graph->context == context)
            code = invalidate(call, graph, CAPTURE_UNSUPPORTED, "a stream of the context is capturing");
    return code;
}

CUresult capture_implicit(struct call *call, const struct stream *stream) {
    CUresult code = OK;
    if (stream != &stream->context->default_stream) return code;
    for (struct graph *graph = S.graphs; graph; graph = graph->next)
        if (graph->stream && graph->context == stream->context && !(graph->stream->flags & NON_BLOCKING))
            code = invalidate(call, graph, CAPTURE_IMPLICIT, "the default stream waits for a capturing one");
    return code;
}

static bool is_pinned(uint64_t address) {
    struct block *block = block_find(address);
    return block && block->host;
}

static bool can_be_captured(const struct op *op) {
    switch (op->kind) {
    case OP_COPY: case OP_FILL: case OP_LAUNCH: case OP_HOST: return true;
    case OP_COPY_IN: return is_pinned(op->src);
    case OP_COPY_OUT: return is_pinned(op->dst);
    case OP_RECORD: case OP_WAIT: return op->external;
    case OP_FREE: break;
    }
    return false;
}

CUresult capture_add(struct call *call, struct stream *stream, struct op *op) {
    struct graph *graph = stream->capture;
    if (graph->invalid || !can_be_captured(op)) return capture_refuse(call, stream);
    CUresult code = fake_check(call, stream, op);
    if (code) {
        graph->invalid = true;
        return code;
    }
    if (graph->n == graph->room) {
        graph->room = 2 * graph->room + 64;
        graph->ops = realloc(graph->ops, graph->room * sizeof *graph->ops);
    }
    call->record.captured = true;
    op->captured = call->record;
    graph->ops[graph->n++] = *op;
    return OK;
}

#define STREAM(handle)     \
    struct stream *stream; \
    TRY(stream_resolve(&call, handle, &stream))

API CUresult cuStreamBeginCapture_v2(void *handle, int mode) {
    TRACED("cuStreamBeginCapture", .stream = (uintptr_t)handle, .src = (uint64_t)mode);
    STREAM(handle);
    if (stream == &stream->context->default_stream) MISUSE(CAPTURE_UNSUPPORTED, "the default stream cannot capture");
    if (mode != RELAXED) MISUSE(NOT_SUPPORTED, "capture mode %d", mode);
    if (stream->capture) MISUSE(ILLEGAL_STATE, "the stream captures already");
    stream->capture = graph_new(stream->context, GRAPH);
    stream->capture->stream = stream;
    DONE(OK);
}

API CUresult cuStreamEndCapture(void *handle, struct graph **out) {
    TRACED("cuStreamEndCapture", .stream = (uintptr_t)handle);
    *out = NULL;
    STREAM(handle);
    struct graph *graph = stream->capture;
    if (!graph) MISUSE(ILLEGAL_STATE, "the stream is not capturing");
    if (graph->invalid) {
        graph_release(graph);
        DONE(CAPTURE_INVALIDATED);
    }
    stream->capture = NULL;
    graph->stream = NULL;
    *out = graph;
    call.record.dst = (uintptr_t)graph;
    DONE(OK);
}

API CUresult cuStreamIsCapturing(void *handle, int *status) {
    QUERY("cuStreamIsCapturing");
    STREAM(handle);
    *status = !stream->capture ? NOT_CAPTURING : stream->capture->invalid ? INVALIDATED : CAPTURING;
    DONE(OK);
}

// ---------------------------------------------------------------- graphs

API CUresult cuGraphGetNodes(struct graph *graph, void **nodes, size_t *n) {
    QUERY("cuGraphGetNodes");
    TRY(graph_resolve(&call, graph, GRAPH));
    for (size_t i = 0; nodes && i < *n; i++) nodes[i] = i < graph->n ? &graph->ops[i] : NULL;
    if (!nodes || *n > graph->n) *n = graph->n;
    DONE(OK);
}

API CUresult cuGraphInstantiateWithFlags(struct graph **out, struct graph *graph, unsigned long long flags) {
    TRACED("cuGraphInstantiate", .src = (uintptr_t)graph);
    struct context *context;
    TRY(context_current(&call, &context));
    TRY(graph_resolve(&call, graph, GRAPH));
    if (context != graph->context)
        MISUSE(INVALID_CONTEXT, "a graph of device %d in a context of device %d", graph->context->device,
               context->device);
    if (flags) MISUSE(NOT_SUPPORTED, "flags %llu", flags);
    struct graph *exec = graph_new(context, GRAPH_EXEC);
    exec->n = exec->room = graph->n;
    exec->ops = malloc(graph->n * sizeof *graph->ops + 1);
    if (graph->n) memcpy(exec->ops, graph->ops, graph->n * sizeof *graph->ops);
    call.record.dst = (uintptr_t)exec;
    *out = exec;
    DONE(OK);
}

static CUresult launchable(struct call *call, struct graph *exec, void *handle, struct stream **stream) {
    CUresult code = graph_resolve(call, exec, GRAPH_EXEC);
    if (!code) code = stream_resolve(call, handle, stream);
    if (!code) code = capture_refuse(call, *stream);
    if (!code && exec->context != (*stream)->context)
        return fake_misuse(call, INVALID_HANDLE, "a graph of device %d on a stream of device %d", exec->context->device,
                           (*stream)->context->device);
    return code;
}

API CUresult cuGraphUpload(struct graph *exec, void *handle) {
    TRACED("cuGraphUpload", .stream = (uintptr_t)handle, .src = (uintptr_t)exec);
    struct stream *stream;
    DONE(launchable(&call, exec, handle, &stream));
}

// What was live at the capture may be gone by now: to the device that is an illegal address, whatever the node.
static CUresult run_node(struct stream *stream, void *handle, struct op *op) {
    struct call call = {.record = op->captured, .traced = true};
    call.record.call = "node";
    call.record.node = op->captured.call;
    call.record.stream = (uintptr_t)handle;
    call.record.captured = false;
    CUresult code = fake_injected(&call);
    if (!code) {
        code = S.seed ? queue_add(&call, stream, op) : fake_run(&call, stream, op);
        if (code == INVALID_VALUE) code = stream->context->sticky = ILLEGAL_ADDRESS;
    }
    call.record.code = code;
    fake_keep(&call);
    fake_break(&call);
    return code;
}

API CUresult cuGraphLaunch(struct graph *exec, void *handle) {
    TRACED("cuGraphLaunch", .stream = (uintptr_t)handle, .src = (uintptr_t)exec);
    struct stream *stream;
    TRY(launchable(&call, exec, handle, &stream));
    fake_keep(&call); // before its nodes
    if (S.seed) queue_wait(stream, exec->last);
    CUresult code = OK;
    for (size_t i = 0; i < exec->n && !code; i++) code = run_node(stream, handle, &exec->ops[i]);
    if (S.seed) exec->last = queue_moment(stream);
    DONE(code);
}

static CUresult destroy(struct call *call, struct graph *graph, enum kind kind) {
    CUresult code = graph_resolve(call, graph, kind);
    if (!code) graph_release(graph);
    return code;
}

API CUresult cuGraphDestroy(struct graph *graph) {
    TRACED("cuGraphDestroy", .src = (uintptr_t)graph);
    DONE(destroy(&call, graph, GRAPH));
}

API CUresult cuGraphExecDestroy(struct graph *exec) {
    TRACED("cuGraphExecDestroy", .src = (uintptr_t)exec);
    DONE(destroy(&call, exec, GRAPH_EXEC));
}
