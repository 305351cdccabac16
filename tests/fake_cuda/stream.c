// Streams and events, and the one place that runs a stream's work items.
#include "fake.h"
#include <time.h>

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static CUresult run_launch(struct call *call, struct stream *stream, struct op *op) {
    void *values[MAX_PARAMS];
    for (int i = 0; i < op->kernel->params->count; i++) values[i] = op->blob + op->kernel->params->offset[i];
    int code = op->kernel->launch(op->grid, op->block, op->smem, values);
    check_guards(op->kernel->name);
    if (!code) return OK;
    const char *(*fault)(void) = kernel_symbol(op->kernel->library, "memra_cpu_fault");
    stream->context->sticky = code;
    return fake_misuse(call, code, "%s: %s", op->kernel->name, fault ? fault() : "fault");
}

CUresult fake_check(struct call *call, struct stream *stream, struct op *op) {
    switch (op->kind) {
    case OP_COPY: case OP_COPY_IN: case OP_COPY_OUT: case OP_FILL:
        return copy_check(call, op);
    case OP_LAUNCH:
        return launch_check(call, stream, op);
    default:
        return OK;
    }
}

CUresult fake_run(struct call *call, struct stream *stream, struct op *op) {
    CUresult code = fake_check(call, stream, op);
    if (code == ILLEGAL_ADDRESS) stream->context->sticky = code;
    if (code) return code;
    switch (op->kind) {
    case OP_COPY: case OP_COPY_IN: case OP_COPY_OUT:
        memcpy((void *)op->dst, (void *)op->src, op->bytes);
        return OK;
    case OP_FILL:
        for (uint64_t i = 0; i < op->bytes; i += op->width) memcpy((char *)op->dst + i, &op->value, op->width);
        return OK;
    case OP_RECORD:
        op->event->recorded = true;
        op->event->nanoseconds = now();
        return OK;
    case OP_WAIT:
        return OK;
    case OP_HOST:
        op->function(op->argument);
        return OK;
    case OP_FREE:
        block_end(op->dst, call->record.call);
        return OK;
    case OP_LAUNCH:
        return run_launch(call, stream, op);
    }
    return NOT_SUPPORTED;
}

CUresult fake_enqueue(struct call *call, struct stream *stream, struct op *op) {
    if (stream->capture) return capture_add(call, stream, op);
    CUresult code = capture_implicit(call, stream);
    if (code) return code;
    return S.seed ? queue_add(call, stream, op) : fake_run(call, stream, op);
}

// ---------------------------------------------------------------- streams

CUresult stream_resolve(struct call *call, void *handle, struct stream **out) {
    if ((uintptr_t)handle <= 2) {
        struct context *context;
        CUresult code = context_current(call, &context);
        if (!code) *out = &context->default_stream;
        return code;
    }
    struct stream *stream = (struct stream *)object_find(handle, STREAM);
    if (!stream) return fake_misuse(call, INVALID_HANDLE, "no such stream: %p", handle);
    if (stream->context->object.dead) return CONTEXT_IS_DESTROYED;
    if (stream->object.dead) return fake_misuse(call, INVALID_HANDLE, "the stream is destroyed");
    *out = stream;
    return context_usable(call, stream->context);
}

static CUresult create(struct call *call, struct stream **out, unsigned flags, int priority) {
    struct context *context;
    CUresult code = context_current(call, &context);
    if (code) return code;
    struct stream *stream = calloc(1, sizeof *stream);
    object_add(&stream->object, STREAM);
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    stream->id = ++S.next_id;
    call->record.dst = (uintptr_t)stream;
    *out = stream;
    return OK;
}

API CUresult cuStreamCreate(struct stream **out, unsigned flags) {
    TRACED("cuStreamCreate");
    DONE(create(&call, out, flags, 0));
}

API CUresult cuStreamCreateWithPriority(struct stream **out, unsigned flags, int priority) {
    TRACED("cuStreamCreateWithPriority");
    DONE(create(&call, out, flags, priority));
}

#define STREAM(handle)     \
    struct stream *stream; \
    TRY(stream_resolve(&call, handle, &stream))

API CUresult cuStreamDestroy_v2(void *handle) {
    TRACED("cuStreamDestroy", .stream = (uintptr_t)handle);
    STREAM(handle);
    if (stream == &stream->context->default_stream) MISUSE(INVALID_HANDLE, "the default stream cannot be destroyed");
    if (stream->capture) {
        fake_note("cuStreamDestroy", "the stream was capturing");
        graph_release(stream->capture);
    }
    stream->object.dead = true;
    DONE(OK);
}

API CUresult cuStreamSynchronize(void *handle) {
    TRACED("cuStreamSynchronize", .stream = (uintptr_t)handle);
    STREAM(handle);
    TRY(capture_refuse(&call, stream));
    DONE(queue_finish(stream));
}

API CUresult cuStreamQuery(void *handle) {
    QUERY("cuStreamQuery", .stream = (uintptr_t)handle);
    STREAM(handle);
    TRY(capture_refuse(&call, stream));
    queue_progress();
    TRY(stream->context->sticky);
    DONE(stream->first ? NOT_READY : OK);
}

API CUresult cuStreamGetCtx(void *handle, struct context **out) {
    QUERY("cuStreamGetCtx");
    STREAM(handle);
    *out = stream->context;
    DONE(OK);
}

API CUresult cuStreamGetDevice(void *handle, CUdevice *out) {
    QUERY("cuStreamGetDevice");
    STREAM(handle);
    *out = stream->context->device;
    DONE(OK);
}

API CUresult cuStreamGetFlags(void *handle, unsigned *out) {
    QUERY("cuStreamGetFlags");
    STREAM(handle);
    *out = stream->flags;
    DONE(OK);
}

API CUresult cuStreamGetPriority(void *handle, int *out) {
    QUERY("cuStreamGetPriority");
    STREAM(handle);
    *out = stream->priority;
    DONE(OK);
}

API CUresult cuStreamGetId(void *handle, unsigned long long *out) {
    QUERY("cuStreamGetId");
    STREAM(handle);
    *out = stream->id;
    DONE(OK);
}

API CUresult cuLaunchHostFunc(void *handle, void (*function)(void *), void *argument) {
    TRACED("cuLaunchHostFunc", .stream = (uintptr_t)handle);
    STREAM(handle);
    DONE(fake_enqueue(&call, stream, &(struct op){.kind = OP_HOST, .function = function, .argument = argument}));
}

// ---------------------------------------------------------------- events

static CUresult event_resolve(struct call *call, struct event *event) {
    if (!object_find(event, EVENT)) return fake_misuse(call, INVALID_HANDLE, "no such event: %p", (void *)event);
    if (event->context->object.dead) return CONTEXT_IS_DESTROYED;
    if (event->object.dead) return fake_misuse(call, INVALID_HANDLE, "the event is destroyed");
    return context_usable(call, event->context);
}

API CUresult cuEventCreate(struct event **out, unsigned flags) {
    TRACED("cuEventCreate");
    struct context *context;
    TRY(context_current(&call, &context));
    struct event *event = calloc(1, sizeof *event);
    object_add(&event->object, EVENT);
    event->context = context;
    event->flags = flags;
    call.record.dst = (uintptr_t)event;
    *out = event;
    DONE(OK);
}

API CUresult cuEventDestroy_v2(struct event *event) {
    TRACED("cuEventDestroy", .src = (uintptr_t)event);
    TRY(event_resolve(&call, event));
    event->object.dead = true;
    DONE(OK);
}

enum { EXTERNAL = 1 }; // of both calls: in a capture a node of the graph, outside none of its business

static CUresult record(struct call *call, struct event *event, void *handle, unsigned flags) {
    struct stream *stream;
    CUresult code = event_resolve(call, event);
    if (!code) code = stream_resolve(call, handle, &stream);
    if (code) return code;
    if (stream->context != event->context)
        return fake_misuse(call, INVALID_HANDLE, "an event of device %d recorded on a stream of device %d",
                           event->context->device, stream->context->device);
    if (flags > EXTERNAL || (flags && !stream->capture)) return fake_misuse(call, INVALID_VALUE, "flags %u", flags);
    return fake_enqueue(call, stream, &(struct op){.kind = OP_RECORD, .event = event, .external = flags == EXTERNAL});
}

API CUresult cuEventRecord(struct event *event, void *handle) {
    TRACED("cuEventRecord", .stream = (uintptr_t)handle, .src = (uintptr_t)event);
    DONE(record(&call, event, handle, 0));
}

API CUresult cuEventRecordWithFlags(struct event *event, void *handle, unsigned flags) {
    TRACED("cuEventRecord", .stream = (uintptr_t)handle, .src = (uintptr_t)event);
    DONE(record(&call, event, handle, flags));
}

API CUresult cuStreamWaitEvent(void *handle, struct event *event, unsigned flags) {
    TRACED("cuStreamWaitEvent", .stream = (uintptr_t)handle, .src = (uintptr_t)event);
    TRY(event_resolve(&call, event));
    STREAM(handle);
    if (flags > EXTERNAL || (flags && !stream->capture)) MISUSE(INVALID_VALUE, "flags %u", flags);
    DONE(fake_enqueue(&call, stream, &(struct op){.kind = OP_WAIT, .event = event, .external = flags == EXTERNAL}));
}

API CUresult cuEventSynchronize(struct event *event) {
    TRACED("cuEventSynchronize", .src = (uintptr_t)event);
    TRY(event_resolve(&call, event));
    DONE(queue_finish_moment(event->context, event->latest));
}

API CUresult cuEventQuery(struct event *event) {
    QUERY("cuEventQuery");
    TRY(event_resolve(&call, event));
    queue_progress();
    TRY(event->context->sticky);
    DONE(queue_passed(event->latest) ? OK : NOT_READY);
}

API CUresult cuEventElapsedTime_v2(float *milliseconds, struct event *start, struct event *end) {
    QUERY("cuEventElapsedTime");
    TRY(event_resolve(&call, start));
    TRY(event_resolve(&call, end));
    if ((start->flags | end->flags) & 2) MISUSE(INVALID_HANDLE, "an event was made without timing");
    if (!queue_passed(start->latest) || !queue_passed(end->latest)) DONE(NOT_READY);
    if (!start->recorded || !end->recorded) MISUSE(INVALID_HANDLE, "an event was never recorded");
    *milliseconds = (float)((int64_t)(end->nanoseconds - start->nanoseconds) * 1e-6);
    DONE(OK);
}

API CUresult cuEventElapsedTime(float *milliseconds, struct event *start, struct event *end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}
