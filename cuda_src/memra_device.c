/* memra_device.c: devices, from open to close, and the list of those that are open.
 *
 * A device that is not in the list is closed: its memory is gone, and only its address is ever looked at.
 */
#include "memra_internal.h"

#include <pthread.h>

enum {
    CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, MEMORY_POOLS_SUPPORTED = 115, /* CUdevice_attribute */
    OLDEST_ARCH = 80, EARLY_ARCH = 90, /* nvrtc.py has them too, */
    EARLY_DRIVER = 12030, /* and launches.py this: older ones cannot record a launch that begins early */
    NON_BLOCKING = 1, /* CU_STREAM_NON_BLOCKING */
    INVALID_VALUE = 1, DEINITIALIZED = 4, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, CONTEXT_IS_DESTROYED = 709,
    TABLE_ENTRIES = 4096 /* of the copy table that a device is born with */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static memra_device *devices;
static uint64_t last_handle;

static bool is_open(const memra_device *device) {
    pthread_mutex_lock(&lock);
    const memra_device *each = devices;
    while (each && each != device) each = each->next;
    pthread_mutex_unlock(&lock);
    return each != NULL;
}

static void add(memra_device *device) {
    pthread_mutex_lock(&lock);
    device->handle = ++last_handle;
    device->next = devices;
    devices = device;
    pthread_mutex_unlock(&lock);
}

/* False where it is not in the list. */
static bool take_out(memra_device *device) {
    pthread_mutex_lock(&lock);
    memra_device **at = &devices;
    while (*at && *at != device) at = &(*at)->next;
    const bool found = *at != NULL;
    if (found) *at = device->next;
    pthread_mutex_unlock(&lock);
    return found;
}

memra_device *memra_device_find(uint64_t handle) {
    pthread_mutex_lock(&lock);
    memra_device *each = devices;
    while (each && each->handle != handle) each = each->next;
    pthread_mutex_unlock(&lock);
    return each;
}

static int check_open(const memra_device *device) {
    MEMRA_TRY(memra_check_fork());
    if (!device) return memra_fail(MEMRA_ERR_DEVICE, "the device is NULL");
    return is_open(device) ? MEMRA_OK : memra_fail(MEMRA_ERR_STATE, "the device is closed");
}

static int make_current(CUcontext context) {
    CUcontext current = NULL;
    MEMRA_TRY(MEMRA_CU(cuCtxGetCurrent, (&current)));
    return current == context ? MEMRA_OK : MEMRA_CU(cuCtxSetCurrent, (context));
}

/* Whether the context is the one that the device was opened on, and not one that somebody reset: the driver follows
 * streams and memory of such a one without a look, and the process dies. A driver that does not say fails with `code`,
 * and the context is taken for the one that it was. */
static bool is_alive(const memra_device *device, CUresult *code) {
    unsigned long long id = 0;
    *code = 0;
    if (!device->context) return false;
    if (!memra_cu.cuCtxGetId) return true;
    const CUresult told = memra_cu.cuCtxGetId(device->context, &id);
    switch (told) {
        case 0: return id == device->context_id;
        case INVALID_VALUE: case DEINITIALIZED: case INVALID_CONTEXT: case INVALID_HANDLE: case CONTEXT_IS_DESTROYED:
            return false;
        default: *code = told; return true;
    }
}

bool memra_device_is_alive(const memra_device *device) {
    CUresult code;
    return is_alive(device, &code);
}

int memra_device_look(const memra_device *device, bool *alive) {
    CUresult code;
    *alive = is_alive(device, &code);
    return memra_cuda_status("cuCtxGetId()", code);
}

int memra_device_enter(memra_device *device) {
    bool alive;
    MEMRA_TRY(check_open(device));
    MEMRA_TRY(memra_device_look(device, &alive));
    if (!alive)
        return memra_fail(MEMRA_ERR_STATE, "somebody destroyed the context of device %d: what lived there is gone",
                          device->ordinal);
    return make_current(device->context);
}

_Thread_local const memra_device *memra_entered;

int memra_device_enter_again(memra_device *device) {
    return device && device == memra_entered ? MEMRA_OK : memra_device_enter(device);
}

/* ---- Birth and end ---- */

static int open_context(memra_device *device, uint64_t given) {
    MEMRA_TRY(MEMRA_CU(cuDeviceGet, (&device->device, device->ordinal)));
    if (!given) {
        const int retained = MEMRA_CU(cuDevicePrimaryCtxRetain, (&device->context, device->device));
        if (retained == MEMRA_ERR_OUT_OF_MEMORY)
            memra_fail_more("; the GPU has no room for a context: nvidia-smi says who holds its memory");
        MEMRA_TRY(retained);
        device->owns_context = true;
        return make_current(device->context);
    }
    device->context = (CUcontext)(uintptr_t)given;
    MEMRA_TRY(make_current(device->context));
    CUdevice found = -1;
    MEMRA_TRY(MEMRA_CU(cuCtxGetDevice, (&found)));
    if (found == device->device) return MEMRA_OK;
    return memra_fail(MEMRA_ERR_DEVICE, "the context given is of cuda:%d, not of cuda:%d", found, device->ordinal);
}

static int open_stream(memra_device *device, uint64_t given) {
    if (!given) {
        MEMRA_TRY(MEMRA_CU(cuStreamCreate, (&device->stream, NON_BLOCKING)));
        device->owns_stream = true;
        return MEMRA_OK;
    }
    device->stream = (CUstream)(uintptr_t)given;
    CUcontext found = NULL; /* a default stream is of the current one */
    MEMRA_TRY(MEMRA_CU(cuStreamGetCtx, (device->stream, &found)));
    if (found == device->context) return MEMRA_OK;
    return memra_fail(MEMRA_ERR_DEVICE, "stream 0x%llx belongs to another context than that of device %d",
                      (unsigned long long)given, device->ordinal);
}

static int open_parts(memra_device *device, const memra_device_options *options) {
    int major = 0, minor = 0, pools = 0, version = 0;
    MEMRA_TRY(open_context(device, options->context));
    if (memra_cu.cuCtxGetId) MEMRA_TRY(MEMRA_CU(cuCtxGetId, (device->context, &device->context_id)));
    MEMRA_TRY(MEMRA_CU(cuDeviceGetAttribute, (&major, CAPABILITY_MAJOR, device->device)));
    MEMRA_TRY(MEMRA_CU(cuDeviceGetAttribute, (&minor, CAPABILITY_MINOR, device->device)));
    MEMRA_TRY(MEMRA_CU(cuDeviceGetAttribute, (&pools, MEMORY_POOLS_SUPPORTED, device->device)));
    device->arch = 10 * major + minor;
    if (device->arch < OLDEST_ARCH)
        return memra_fail(MEMRA_ERR_UNSUPPORTED, "cuda:%d is sm_%d; the kernels need sm_%d or newer (Ampere, 2020)",
                          device->ordinal, device->arch, OLDEST_ARCH);
    MEMRA_TRY(MEMRA_CU(cuDriverGetVersion, (&version)));
    device->early = device->arch >= EARLY_ARCH && version >= EARLY_DRIVER;
    device->has_pools = pools != 0;
    device->has_arena = !(options->flags & MEMRA_NO_ARENA);
    MEMRA_TRY(open_stream(device, options->stream));
    return memra_device_table(device, TABLE_ENTRIES);
}

static void keep(memra_failure *first, const char *call, CUresult code) {
    memra_keep(first, memra_cuda_status(call, code));
}

/* Frees all that is the device's own, as far as it was made, and the struct. Returns the first failure, `first` being
 * what has failed before. */
static int take_apart(memra_device *device, memra_failure *first, bool alive) {
    for (struct memra_graph *graph = device->graphs; graph; graph = graph->next) { /* they can be closed still */
        if (graph->exec && alive) keep(first, "cuGraphExecDestroy()", memra_cu.cuGraphExecDestroy(graph->exec));
        graph->exec = NULL;
    }
    while (device->scratch) {
        memra_scratch *scratch = device->scratch;
        device->scratch = scratch->next;
        if (alive) memra_keep(first, memra_device_free(device, scratch->ptr));
        free(scratch);
    }
    if (device->table && alive) memra_keep(first, memra_device_free(device, device->table));
    if (device->count && alive) memra_keep(first, memra_device_free(device, device->count));
    free(device->entries);
    for (int32_t i = 0; i < device->n_libraries; i++)
        keep(first, "cuLibraryUnload()", memra_cu.cuLibraryUnload(device->libraries[i]));
    if (device->owns_stream && alive) keep(first, "cuStreamDestroy()", memra_cu.cuStreamDestroy(device->stream));
    if (device->owns_context) {
        const CUresult code = memra_cu.cuDevicePrimaryCtxRelease(device->device);
        keep(first, "cuDevicePrimaryCtxRelease()", code == INVALID_CONTEXT ? 0 : code); /* somebody has reset it */
    }
    free(device);
    return memra_kept(first);
}

int memra_device_open(const memra_device_options *options, memra_device **device) {
    if (!options || !device) return memra_fail(MEMRA_ERR_ARRAY, "memra_device_open: options or device is NULL");
    *device = NULL;
    MEMRA_TRY(memra_check_size("memra_device_options", options->struct_size, sizeof *options));
    if (options->flags & ~(uint32_t)MEMRA_NO_ARENA)
        return memra_fail(MEMRA_ERR_CONFIG, "memra_device_open: flags 0x%x; only MEMRA_NO_ARENA (1) is known",
                          options->flags);
    MEMRA_TRY(memra_cuda_load());
    MEMRA_TRY(MEMRA_CU(cuInit, (0)));
    CUcontext before = NULL;
    MEMRA_TRY(MEMRA_CU(cuCtxGetCurrent, (&before)));
    memra_device *made = calloc(1, sizeof *made);
    if (!made) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "memra_device_open: no host memory");
    made->ordinal = options->ordinal;
    memra_failure first = {0};
    const int status = open_parts(made, options);
    if (status != MEMRA_OK) {
        memra_keep_any(&first, status);
        (void)take_apart(made, &first, memra_device_is_alive(made));
        (void)memra_cu.cuCtxSetCurrent(before);
        return memra_kept(&first);
    }
    add(made);
    *device = made;
    return MEMRA_OK;
}

int memra_check_no_capture(const memra_device *device, const char *what) {
    int capturing = 0;
    if (device->recording)
        return memra_fail(MEMRA_ERR_STATE, "%s: a capture is open; only steps and rounds can be recorded", what);
    MEMRA_TRY(MEMRA_CU(cuStreamIsCapturing, (device->stream, &capturing)));
    if (!capturing) return MEMRA_OK;
    return memra_fail(MEMRA_ERR_STATE,
                      "%s: the stream is capturing; only steps and rounds can be recorded, behind memra_capture_begin"
                      " with MEMRA_CAPTURE_YOURS", what);
}

/* A wait or a free would spoil a capture, whoever began it. */
static int check_no_capture(const memra_device *device, memra_failure *first) {
    int capturing = 0;
    const CUresult code = memra_cu.cuStreamIsCapturing(device->stream, &capturing);
    keep(first, "cuStreamIsCapturing()", code);
    if (!device->recording && (code || !capturing)) return MEMRA_OK; /* a stream that fails records nothing */
    return memra_fail(MEMRA_ERR_STATE, "device close: a capture is open; end or abandon it first");
}

int memra_device_close(memra_device *device) {
    if (!device) return MEMRA_OK;
    MEMRA_TRY(check_open(device));
    memra_failure first = {0};
    const CUcontext context = device->context;
    CUcontext before = NULL;
    CUresult code = memra_cu.cuCtxGetCurrent(&before);
    keep(&first, "cuCtxGetCurrent()", code);
    const bool puts_back = !code && before != context;
    const CUresult bound = before == context ? 0 : memra_cu.cuCtxSetCurrent(context);
    keep(&first, "cuCtxSetCurrent()", bound);
    const bool alive = is_alive(device, &code);
    keep(&first, "cuCtxGetId()", code);
    if (!bound && alive) MEMRA_TRY(check_no_capture(device, &first));
    if (!take_out(device)) return memra_fail(MEMRA_ERR_STATE, "the device is closed");
    if (!alive) memra_graph_drop(device);
    if (alive) keep(&first, "cuStreamSynchronize()", memra_cu.cuStreamSynchronize(device->stream));
    (void)take_apart(device, &first, alive);
    if (puts_back) keep(&first, "cuCtxSetCurrent()", memra_cu.cuCtxSetCurrent(before));
    return memra_kept(&first);
}

/* ---- What it is ---- */

uint64_t memra_device_handle(const memra_device *device) {
    return check_open(device) == MEMRA_OK ? device->handle : 0;
}

uint64_t memra_device_stream(const memra_device *device) {
    return check_open(device) == MEMRA_OK ? (uint64_t)(uintptr_t)device->stream : 0;
}

int32_t memra_device_arch(const memra_device *device) {
    return check_open(device) == MEMRA_OK ? device->arch : 0;
}
