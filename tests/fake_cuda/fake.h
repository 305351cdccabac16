// A stand-in libcuda.so.1 for tests on a machine without a GPU: host memory plays device memory, kernels are
// functions compiled by g++ (tests/cpu_shim). It is stricter than a driver: what a driver leaves undefined or
// quietly repairs (a copy on another device's stream, overlapping copies) is refused here and noted in fake_errors().
//
// Each work item of a stream is a `struct op` that owns all it needs; `fake_enqueue` is the one place that
// decides when it runs: at once, in deferred mode (queue.c) when somebody waits, or, on a capturing stream, whenever
// the graph is launched.
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_SOURCE = 300, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500,
    NOT_READY = 600, PEER_UNSUPPORTED = 217,
    ILLEGAL_ADDRESS = 700, PEER_ALREADY_ENABLED = 704, PEER_NOT_ENABLED = 705, PRIMARY_CONTEXT_ACTIVE = 708,
    CONTEXT_IS_DESTROYED = 709, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901, CAPTURE_IMPLICIT = 906,
};

#define MAX_DEVICES 8
#define MAX_ATTRIBUTE 160
#define MAX_PARAMS 40
#define NAME_ROOM 64

// ---------------------------------------------------------------- what Python reads (tests/standin.py mirrors it)

struct fake_record {
    const char *call;       // the cu name, without a version suffix; "node": a graph runs one of its nodes
    const char *kernel;     // launches only
    const char *node;       // of a node the call that it was captured from
    uint64_t stream;        // the handle as passed; 0 where a call has none
    uint64_t dst, src;      // addresses or handles; the value of a memset stands in src
    uint64_t bytes;
    uint32_t grid[3], block[3], smem;
    int32_t device;         // the device that the call worked on, -1 where none
    int32_t code;           // what the call returned
    int32_t captured;       // became a node of a graph instead of running
    int32_t early;          // a launch that may begin before the kernel in front of it has ended
};

// ---------------------------------------------------------------- objects

enum kind { CONTEXT = 1, STREAM, EVENT, LIBRARY, KERNEL, POOL, GRAPH, GRAPH_EXEC };

struct object {             // first member of everything that has a handle; never freed, so that a stale handle is known
    enum kind kind;
    bool dead;
    struct object *next;
};

struct stream {
    struct object object;
    struct context *context;
    unsigned flags;
    int priority;
    uint64_t id;
    struct graph *capture;  // null: not capturing
    struct item *first, *last; // deferred mode: what has not run yet
};

struct context {
    struct object object;
    int device;
    int retained;           // the object is dead at 0
    int sticky;             // after a kernel fault every call returns this
    bool peer[MAX_DEVICES]; // may touch memory of that device
    struct stream default_stream;
};

struct event {
    struct object object;
    struct context *context;
    unsigned flags;
    struct moment *latest;   // deferred mode: what a wait from now on waits for; null: nothing
    bool recorded;
    uint64_t nanoseconds;
};

struct library {
    struct object object;
    struct context *context; // modules only; libraries belong to no context
    void *code;              // dlopen handle of the kernels
};

struct params {             // exported by the shim for each kernel as memra_cpu_params_<name>
    int32_t count;
    int32_t is_pointer[MAX_PARAMS];
    size_t offset[MAX_PARAMS], size[MAX_PARAMS];
};

typedef int (*launcher)(const unsigned grid[3], const unsigned block[3], unsigned smem, void **params);

struct kernel {             // plays CUkernel (context null) and CUfunction
    struct object object;
    struct context *context;
    struct library *library;
    char name[NAME_ROOM];
    launcher launch;
    const struct params *params;
    int max_dynamic_shared;
};

struct pool {
    struct object object;
    int device;
    uint64_t release_threshold, used_high;
    bool access[MAX_DEVICES];
};

struct block {              // one live allocation
    uint64_t ptr, size;
    char *raw;
    struct context *context; // null for host memory
    bool pooled, host;
    uint64_t serial;
    uint64_t left;           // deferred mode: number of the work item that frees it; 0: none
    struct moment *born;     // deferred mode: when its stream reaches the allocation; null: it has
};

struct op {                 // one work item of a stream
    enum { OP_COPY, OP_COPY_IN, OP_COPY_OUT, OP_FILL, OP_LAUNCH, OP_RECORD, OP_WAIT, OP_HOST,
           OP_FREE } kind;
    uint64_t dst, src, bytes;
    int dst_device, src_device; // whose memory a copy or fill may touch
    uint32_t value, width;   // OP_FILL
    bool pinned;             // OP_COPY_IN, OP_COPY_OUT: the host side is an allocation too, and must live until it runs
    bool external;           // OP_RECORD, OP_WAIT: an event of outside the capture
    struct kernel *kernel;
    struct event *event;
    void (*function)(void *);
    void *argument;
    unsigned grid[3], block[3], smem;
    struct fake_record captured; // of a node: the call that it was captured from
    _Alignas(16) char blob[1024]; // parameter values of a launch
};

struct graph {              // plays CUgraph and CUgraphExec
    struct object object;
    struct context *context;
    struct stream *stream;   // captures into this; null once the capture has ended
    bool invalid;            // the capture met something that it cannot hold
    struct op *ops;
    size_t n, room;
    uint64_t serial;
    struct moment *last;     // deferred mode: the end of the latest launch, for which the next one waits
    struct graph *next;      // of the live ones
};

// ---------------------------------------------------------------- state, all behind one lock

struct device {
    int attribute[MAX_ATTRIBUTE];
    uint64_t total_memory;
    struct context *primary;
    struct pool pool;
};

extern struct state {
    bool initialised;
    int device_count, driver_version;
    bool peers;              // whether the devices reach each other's memory
    struct device device[MAX_DEVICES];
    char kernels[4096];      // the shared object that library_load hands out, whatever the image
    uint64_t serial, reset_serial, next_id;
    uint64_t seed;           // of deferred mode; 0: every work item runs at once
    uint64_t asked;          // counts the work items of deferred mode
    uint64_t as_of;          // number of the one that runs: it sees memory that is to be freed behind it; 0: none
    bool trace_queries;
    struct block *blocks;    // sorted by address
    size_t n_blocks, room_blocks;
    struct graph *graphs;    // captures under way, graphs, executable graphs
} S;

// ---------------------------------------------------------------- inside an entry point

struct call {
    struct fake_record record;
    bool traced, kept;
    int breaks;             // what the context's calls return from now on; 0: nothing
    size_t at;              // where the trace has it, once kept
};

int fake_enter(struct call *call);                   // takes the lock; an injected failure comes back as its code
int fake_injected(struct call *call);          // the failure that is injected here, or OK
void fake_break(struct call *call);                  // lets the context fail from now on, where that is injected
void fake_keep(struct call *call);                   // puts the record into the trace, or brings it up to date there
void fake_leave(struct call *call);                  // keeps the record, drops the lock
CUresult fake_misuse(struct call *call, CUresult code, const char *format, ...) __attribute__((format(printf, 3, 4)));
void fake_note(const char *call, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Opens an entry point: lock, initialised?, injected failure. TRACED calls create, destroy, enqueue or wait;
// QUERY calls change nothing that a test would count.
#define OPEN(traced_, device_, name, ...)                                                                     \
    struct call call __attribute__((cleanup(fake_leave))) = {                                                 \
        .record = {.call = (name), .device = (device_), ##__VA_ARGS__}, .traced = (traced_)};                 \
    do {                                                                                                      \
        int code_ = fake_enter(&call);                                                                        \
        if (code_) return call.record.code = code_;                                                           \
    } while (0)
#define TRACED(name, ...) OPEN(true, -1, name, ##__VA_ARGS__)
#define TRACED_ON(device, name, ...) OPEN(true, device, name, ##__VA_ARGS__)
#define QUERY(name, ...) OPEN(false, -1, name, ##__VA_ARGS__)
#define DONE(code_) return call.record.code = (code_)
#define MISUSE(code_, ...) return fake_misuse(&call, code_, __VA_ARGS__)
#define TRY(expression)                                                                                       \
    do {                                                                                                      \
        int code_ = (expression);                                                                             \
        if (code_) return call.record.code = code_;                                                           \
    } while (0)

void object_add(struct object *object, enum kind kind);
struct object *object_find(const void *handle, enum kind kind); // dead ones too; null when never made

CUresult context_current(struct call *call, struct context **out);            // refuses none, destroyed, faulted
CUresult context_usable(struct call *call, struct context *context);
CUresult stream_resolve(struct call *call, void *handle, struct stream **out); // 0, 1, 2 are the context's default

bool block_alloc(struct block *block);               // fills raw and ptr from size; poisoned, guarded
void block_release(const struct block *block);       // poisons, keeps it in quarantine
void block_check(const struct block *block, const char *after); // notes broken guards
void quarantine_check(const char *after);            // notes writes to freed memory

uint64_t memory_live(int device);
void block_end(uint64_t ptr, const char *after);     // frees what a work item was to free
struct block *block_find(uint64_t ptr);              // the live allocation that holds ptr
struct block *block_touching(uint64_t ptr);          // the same; one past the end counts
bool block_reachable(const struct block *block, const struct context *from);
void context_release_memory(struct context *context);
void check_guards(const char *after);                // of every live block

void *kernel_symbol(struct library *library, const char *name);

// What a work item touches must be live and in reach, when it is asked for and when it runs.
CUresult copy_check(struct call *call, const struct op *op);
CUresult launch_check(struct call *call, const struct stream *stream, const struct op *op);

CUresult fake_enqueue(struct call *call, struct stream *stream, struct op *op);
CUresult fake_check(struct call *call, struct stream *stream, struct op *op);
CUresult fake_run(struct call *call, struct stream *stream, struct op *op); // checks first

// Deferred mode.
CUresult queue_add(struct call *call, struct stream *stream, const struct op *op);
struct moment *queue_moment(struct stream *stream);          // what comes behind all that the stream has now
void queue_wait(struct stream *stream, struct moment *moment);
bool queue_passed(const struct moment *moment);
void queue_progress(void);                                   // somebody asks, and time goes by
CUresult queue_finish(struct stream *stream);
CUresult queue_finish_moment(struct context *context, struct moment *moment);
CUresult queue_finish_context(struct context *context);
void queue_finish_all(void);
void queue_drop(const struct context *context);              // its work items never run
void queue_void_reads(void);                                 // nor do those that write into pageable memory
void queue_seed(uint64_t seed);
void context_break(struct context *context, int code);       // every call of it fails from now on

// These invalidate the captures that the call does not go with, and return its error; OK where there is none.
CUresult capture_refuse(struct call *call, struct stream *stream);              // not while this stream captures
CUresult capture_refuse_all(struct call *call, const struct context *context);  // not while any stream does
CUresult capture_implicit(struct call *call, const struct stream *stream);      // the default stream beside a blocking one
CUresult capture_add(struct call *call, struct stream *stream, struct op *op);  // keeps the work item for the graph
void context_release_graphs(struct context *context);
void graph_release(struct graph *graph);
