// The control side of the stand-in: the state, the call trace, injected failures, noted misuse, settings.
#include "fake.h"

struct state S;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---------------------------------------------------------------- trace, failures, errors

static struct fake_record *trace;
static size_t n_trace, room_trace;

static struct rule {
    char name[NAME_ROOM];
    long left;
    int code;
    bool breaks; // the call succeeds; those behind it fail, until the context is reset
} rules[32];
static int n_rules;

static char *errors;
static size_t errors_used, errors_room;

static void append_error(const char *call, const char *format, va_list arguments) {
    char line[1024];
    int used = snprintf(line, sizeof line, "%s: ", call);
    int wanted = vsnprintf(line + used, sizeof line - used - 1, format, arguments);
    size_t n = used + wanted;
    if (n > sizeof line - 2) n = sizeof line - 2;
    line[n++] = '\n';
    if (errors_used + n + 1 > errors_room) {
        errors_room = 2 * errors_room + n + 4096;
        errors = realloc(errors, errors_room);
    }
    memcpy(errors + errors_used, line, n);
    errors_used += n;
}

void fake_note(const char *call, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    append_error(call, format, arguments);
    va_end(arguments);
}

CUresult fake_misuse(struct call *call, CUresult code, const char *format, ...) {
    char name[NAME_ROOM];
    const char *node = call->record.node;
    snprintf(name, sizeof name, "%s%s%s", call->record.call, node ? " " : "", node ? node : "");
    va_list arguments;
    va_start(arguments, format);
    append_error(name, format, arguments);
    va_end(arguments);
    return call->record.code = code;
}

int fake_injected(struct call *call) {
    int code = OK;
    for (int i = 0; i < n_rules; i++) {
        struct rule *rule = &rules[i];
        bool counts = !strcmp(rule->name, "*") ? call->traced : !strcmp(rule->name, call->record.call);
        if (!counts || rule->left <= 0 || --rule->left) continue;
        if (rule->breaks) call->breaks = rule->code;
        else if (!code) code = rule->code;
    }
    if (code && strstr(call->record.call, "Synchronize")) queue_void_reads(); // nobody waits for them any more
    return code;
}

void fake_break(struct call *call) {
    struct context *context = call->record.device < 0 ? NULL : S.device[call->record.device].primary;
    if (call->breaks && context) context_break(context, call->breaks);
    call->breaks = 0;
}

int fake_enter(struct call *call) {
    pthread_mutex_lock(&lock);
    call->traced |= S.trace_queries;
    if (!S.initialised && strcmp(call->record.call, "cuInit")) return NOT_INITIALIZED;
    return fake_injected(call);
}

void fake_keep(struct call *call) {
    if (!call->kept) {
        if (n_trace == room_trace) {
            room_trace = 2 * room_trace + 1024;
            trace = realloc(trace, room_trace * sizeof *trace);
        }
        call->kept = true;
        call->at = n_trace++;
    }
    trace[call->at] = call->record;
}

void fake_leave(struct call *call) {
    if (call->traced) fake_keep(call);
    fake_break(call);
    pthread_mutex_unlock(&lock);
}

// ---------------------------------------------------------------- handles

#define BUCKETS 8192
static struct object *buckets[BUCKETS];

static unsigned bucket_of(const void *handle) { return ((uintptr_t)handle >> 4) * 2654435761u % BUCKETS; }

void object_add(struct object *object, enum kind kind) {
    unsigned bucket = bucket_of(object);
    object->kind = kind;
    object->next = buckets[bucket];
    buckets[bucket] = object;
}

struct object *object_find(const void *handle, enum kind kind) {
    for (struct object *object = buckets[bucket_of(handle)]; object; object = object->next)
        if (object == handle) return object->kind == kind ? object : NULL;
    return NULL;
}

// ---------------------------------------------------------------- settings

static void set_defaults(void) {
    static const int attributes[][2] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {9, 65536},
        {10, 32}, {12, 65536}, {13, 1980000}, {16, 132}, {19, 1}, {31, 1}, {36, 3201000}, {37, 6144}, {38, 62914560},
        {39, 2048}, {40, 3}, {41, 1}, {75, 9}, {76, 0}, {78, 1}, {79, 1}, {80, 1}, {81, 233472}, {82, 65536},
        {95, 1}, {97, 232448}, {106, 32}, {111, 1024}, {115, 1}, {120, 1},
    };
    S.device_count = getenv("FAKE_CUDA_DEVICES") ? atoi(getenv("FAKE_CUDA_DEVICES")) : 2;
    S.driver_version = 13020;
    S.trace_queries = false;
    queue_seed(getenv("FAKE_CUDA_DEFERRED") ? strtoull(getenv("FAKE_CUDA_DEFERRED"), NULL, 10) : 0);
    S.peers = true;
    if (getenv("FAKE_CUDA_KERNELS")) // for a program that does not know fake_set_kernels
        snprintf(S.kernels, sizeof S.kernels, "%s", getenv("FAKE_CUDA_KERNELS"));
    for (int d = 0; d < MAX_DEVICES; d++) {
        memset(S.device[d].attribute, 0, sizeof S.device[d].attribute);
        for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
            S.device[d].attribute[attributes[i][0]] = attributes[i][1];
        S.device[d].attribute[33] = d + 1; // PCI bus
        S.device[d].total_memory = 1ull << 30;
    }
}

__attribute__((constructor)) static void start(void) {
    for (int d = 0; d < MAX_DEVICES; d++) {
        object_add(&S.device[d].pool.object, POOL);
        S.device[d].pool.device = d;
        S.device[d].pool.access[d] = true;
    }
    set_defaults();
}

#define LOCKED(...)                  \
    do {                             \
        pthread_mutex_lock(&lock);   \
        __VA_ARGS__                  \
        pthread_mutex_unlock(&lock); \
    } while (0)

// Forgets trace, rules and errors; settings go back to their defaults; live counts start anew; faulted contexts work
// again. Contexts, streams and memory stay: their owners may still be about to close them.
API void fake_reset(void) {
    LOCKED(queue_finish_all(); n_trace = 0; n_rules = 0; errors_used = 0; set_defaults(); S.reset_serial = S.serial;
           for (int d = 0; d < MAX_DEVICES; d++) if (S.device[d].primary) S.device[d].primary->sticky = OK;);
}

// The nth call of `name` from now returns `code` and does nothing. "*" counts every traced call.
// Returns 0 when there is no room for another rule.
// breaks: the nth call succeeds instead, and every later call of its context returns `code`.
API int fake_set_fail(const char *name, long nth, int code, int breaks) {
    int kept = 0;
    LOCKED(if (n_rules < (int)(sizeof rules / sizeof *rules)) {
        struct rule *rule = &rules[n_rules++];
        snprintf(rule->name, sizeof rule->name, "%s", name);
        rule->left = nth;
        rule->code = code;
        rule->breaks = breaks;
        kept = 1;
    });
    return kept;
}

// How many rules have not fired yet.
API int fake_pending_failures(void) {
    int pending = 0;
    LOCKED(for (int i = 0; i < n_rules; i++) pending += rules[i].left > 0;);
    return pending;
}

API void fake_clear_failures(void) { LOCKED(n_rules = 0;); }
API void fake_trace_clear(void) { LOCKED(n_trace = 0;); }
API void fake_errors_clear(void) { LOCKED(errors_used = 0;); }

// Copies up to `room` records, returns how many there are.
API size_t fake_trace(struct fake_record *out, size_t room) {
    size_t n;
    LOCKED(n = n_trace; if (out && n_trace) memcpy(out, trace, (n < room ? n : room) * sizeof *trace););
    return n;
}

// Copies up to `room` bytes of text, one line for each misuse; returns how many there are.
API size_t fake_errors(char *out, size_t room) {
    size_t n;
    LOCKED(n = errors_used; if (out && n) memcpy(out, errors, n < room ? n : room););
    return n;
}

static bool counted(const struct block *block) { return block->serial > S.reset_serial && !block->left; }

// Bytes and number of allocations made since fake_reset that are still alive, or were not asked to end.
API uint64_t fake_live_bytes(void) {
    uint64_t bytes = 0;
    LOCKED(for (size_t i = 0; i < S.n_blocks; i++) if (counted(&S.blocks[i])) bytes += S.blocks[i].size;);
    return bytes;
}

API uint64_t fake_live_count(void) {
    uint64_t count = 0;
    LOCKED(for (size_t i = 0; i < S.n_blocks; i++) count += counted(&S.blocks[i]););
    return count;
}

// Captures begun, graphs and executable graphs made since fake_reset that are still alive.
API uint64_t fake_live_graphs(void) {
    uint64_t count = 0;
    LOCKED(for (struct graph *graph = S.graphs; graph; graph = graph->next) count += graph->serial > S.reset_serial;);
    return count;
}

// Notes every broken guard and every write to freed memory; returns the number of errors noted in all.
API uint64_t fake_check_guards(void) {
    uint64_t lines = 0;
    LOCKED(check_guards("fake_check_guards"); quarantine_check("fake_check_guards");
           for (size_t i = 0; i < errors_used; i++) lines += errors[i] == '\n';);
    return lines;
}

API void fake_set_total_memory(int device, uint64_t bytes) { LOCKED(S.device[device].total_memory = bytes;); }
// The device gives out so many bytes more than it has given out now.
API void fake_set_memory_left(int device, uint64_t bytes) {
    LOCKED(S.device[device].total_memory = memory_live(device) + bytes;);
}
// seed 0: every work item runs at once; else it waits, and the seed shuffles the order of streams.
API void fake_set_deferred(uint64_t seed) { LOCKED(queue_finish_all(); queue_seed(seed);); }
// Runs whatever waits, on every stream.
API void fake_finish(void) { LOCKED(queue_finish_all();); }
// Queries, too, are kept in the trace, and counted by the rule "*".
API void fake_set_trace_queries(int on) { LOCKED(S.trace_queries = on;); }
API void fake_set_attribute(int device, int attribute, int value) {
    LOCKED(S.device[device].attribute[attribute] = value;);
}
API void fake_set_peers(int can) { LOCKED(S.peers = can;); }
API void fake_set_device_count(int n) { LOCKED(S.device_count = n;); }
API void fake_set_driver_version(int version) { LOCKED(S.driver_version = version;); }
API void fake_set_kernels(const char *path) { LOCKED(snprintf(S.kernels, sizeof S.kernels, "%s", path);); }
