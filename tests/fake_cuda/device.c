// Devices, contexts, entry point look-up.
#include "fake.h"
#include <dlfcn.h>

// ---------------------------------------------------------------- the library itself

API CUresult cuInit(unsigned flags) {
    QUERY("cuInit");
    if (flags) MISUSE(INVALID_VALUE, "flags must be 0");
    if (S.device_count == 0) DONE(NO_DEVICE);
    S.initialised = true;
    DONE(OK);
}

API CUresult cuDriverGetVersion(int *version) {
    *version = S.driver_version;
    return OK;
}

static const struct {
    int code;
    const char *name, *text;
} codes[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {INVALID_SOURCE, "CUDA_ERROR_INVALID_SOURCE", "device kernel image is invalid"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "not possible in the present state"},
    {PEER_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between the two devices"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {PEER_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {PEER_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {PRIMARY_CONTEXT_ACTIVE, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "primary context is active"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility was attempted on non supported HW"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted when the stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "an earlier error ended the capture"},
    {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "would make the legacy stream wait for a capture"},
};

static CUresult describe(CUresult code, const char **out, bool name) {
    *out = NULL;
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i].code == code) *out = name ? codes[i].name : codes[i].text;
    return *out ? OK : INVALID_VALUE;
}

API CUresult cuGetErrorName(CUresult code, const char **out) { return describe(code, out, true); }
API CUresult cuGetErrorString(CUresult code, const char **out) { return describe(code, out, false); }

// NVRTC asks for a private table; an error makes it carry on without.
API CUresult cuGetExportTable(const void **table, const void *id) {
    (void)id;
    *table = NULL;
    return NOT_SUPPORTED;
}

API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    static const char *const suffixes[] = {"_v3", "_v2", ""};
    (void)version, (void)flags;
    if (!strcmp(symbol, "cuGraphInstantiate")) symbol = "cuGraphInstantiateWithFlags"; // its name since CUDA 12
    Dl_info self;
    dladdr((void *)cuInit, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = NULL;
    for (int i = 0; i < 3 && !*function; i++) {
        char name[128];
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]);
        *function = dlsym(library, name);
    }
    dlclose(library);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

// ---------------------------------------------------------------- devices

static bool is_device(int device) { return device >= 0 && device < S.device_count; }

API CUresult cuDeviceGetCount(int *count) {
    QUERY("cuDeviceGetCount");
    *count = S.device_count;
    DONE(OK);
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    QUERY("cuDeviceGet");
    if (!is_device(ordinal)) DONE(INVALID_DEVICE);
    *device = ordinal;
    DONE(OK);
}

API CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    QUERY("cuDeviceGetName");
    if (!is_device(device)) DONE(INVALID_DEVICE);
    snprintf(name, room, "Stand-in GPU %d", device);
    DONE(OK);
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    QUERY("cuDeviceGetAttribute");
    if (!is_device(device)) DONE(INVALID_DEVICE);
    if (attribute <= 0 || attribute >= MAX_ATTRIBUTE) MISUSE(INVALID_VALUE, "no attribute %d", attribute);
    *value = S.device[device].attribute[attribute];
    DONE(OK);
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    QUERY("cuDeviceTotalMem");
    if (!is_device(device)) DONE(INVALID_DEVICE);
    *bytes = S.device[device].total_memory;
    DONE(OK);
}

API CUresult cuDeviceGetUuid_v2(char *uuid, CUdevice device) {
    QUERY("cuDeviceGetUuid");
    if (!is_device(device)) DONE(INVALID_DEVICE);
    memset(uuid, 0, 16);
    uuid[15] = (char)(device + 1);
    DONE(OK);
}

API CUresult cuDeviceGetPCIBusId(char *out, int room, CUdevice device) {
    QUERY("cuDeviceGetPCIBusId");
    if (!is_device(device)) DONE(INVALID_DEVICE);
    snprintf(out, room, "0000:%02x:00.0", device + 1);
    DONE(OK);
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    QUERY("cuDeviceCanAccessPeer");
    if (!is_device(device) || !is_device(peer)) DONE(INVALID_DEVICE);
    *can = S.peers && device != peer;
    DONE(OK);
}

API CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice device, CUdevice peer) {
    QUERY("cuDeviceGetP2PAttribute");
    if (!is_device(device) || !is_device(peer)) DONE(INVALID_DEVICE);
    if (device == peer) MISUSE(INVALID_VALUE, "one device");
    *value = S.peers && (attribute == 2 || attribute == 3); // access, native atomics
    DONE(OK);
}

// ---------------------------------------------------------------- primary contexts

API CUresult cuDevicePrimaryCtxRetain(struct context **out, CUdevice device) {
    TRACED_ON(device, "cuDevicePrimaryCtxRetain");
    if (!is_device(device)) DONE(INVALID_DEVICE);
    struct context *context = S.device[device].primary;
    if (!context) {
        context = calloc(1, sizeof *context);
        object_add(&context->object, CONTEXT);
        context->device = device;
        context->peer[device] = true;
        context->default_stream.context = context;
        context->default_stream.id = ++S.next_id;
        S.device[device].primary = context;
    }
    context->retained++;
    *out = context;
    call.record.dst = (uintptr_t)context;
    DONE(OK);
}

static void destroy_context(struct context *context) {
    context->object.dead = true;
    context->retained = 0;
    S.device[context->device].primary = NULL;
    queue_drop(context);
    context_release_graphs(context);
    context_release_memory(context);
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    TRACED_ON(device, "cuDevicePrimaryCtxRelease");
    if (!is_device(device)) DONE(INVALID_DEVICE);
    struct context *context = S.device[device].primary;
    if (!context) MISUSE(INVALID_CONTEXT, "device %d: released more often than retained", device);
    if (--context->retained == 0) destroy_context(context);
    DONE(OK);
}

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    TRACED_ON(device, "cuDevicePrimaryCtxReset");
    if (!is_device(device)) DONE(INVALID_DEVICE);
    if (S.device[device].primary) destroy_context(S.device[device].primary);
    DONE(OK);
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    QUERY("cuDevicePrimaryCtxGetState");
    if (!is_device(device)) DONE(INVALID_DEVICE);
    *flags = 0;
    *active = S.device[device].primary != NULL;
    DONE(OK);
}

// ---------------------------------------------------------------- the current context

static __thread struct context *current[16];
static __thread int depth; // current[depth] is current; null: none

CUresult context_usable(struct call *call, struct context *context) {
    if (context->object.dead) return call->record.code = CONTEXT_IS_DESTROYED;
    call->record.device = context->device;
    return call->record.code = context->sticky;
}

CUresult context_current(struct call *call, struct context **out) {
    *out = current[depth];
    if (!*out) return fake_misuse(call, INVALID_CONTEXT, "no context is current on this thread");
    return context_usable(call, *out);
}

static CUresult known_context(struct call *call, struct context *context) {
    if (!object_find(context, CONTEXT)) return fake_misuse(call, INVALID_CONTEXT, "no such context: %p", (void *)context);
    return context->object.dead ? CONTEXT_IS_DESTROYED : OK;
}

API CUresult cuCtxSetCurrent(struct context *context) {
    QUERY("cuCtxSetCurrent");
    if (context) TRY(known_context(&call, context));
    current[depth] = context;
    DONE(OK);
}

API CUresult cuCtxGetCurrent(struct context **out) {
    QUERY("cuCtxGetCurrent");
    *out = current[depth];
    DONE(OK);
}

API CUresult cuCtxPushCurrent_v2(struct context *context) {
    QUERY("cuCtxPushCurrent");
    TRY(known_context(&call, context));
    if (depth == 15) MISUSE(INVALID_VALUE, "16 contexts pushed");
    current[++depth] = context;
    DONE(OK);
}

API CUresult cuCtxPopCurrent_v2(struct context **out) {
    QUERY("cuCtxPopCurrent");
    if (!current[depth]) MISUSE(INVALID_CONTEXT, "no context is current on this thread");
    if (out) *out = current[depth];
    current[depth] = NULL;
    if (depth) depth--;
    DONE(OK);
}

API CUresult cuCtxGetDevice(CUdevice *device) {
    QUERY("cuCtxGetDevice");
    struct context *context;
    TRY(context_current(&call, &context));
    *device = context->device;
    DONE(OK);
}

API CUresult cuCtxGetApiVersion(struct context *context, unsigned *version) {
    QUERY("cuCtxGetApiVersion");
    TRY(known_context(&call, context));
    *version = 3020;
    DONE(OK);
}

API CUresult cuCtxGetId(struct context *context, uint64_t *id) {
    QUERY("cuCtxGetId");
    if (!context) TRY(context_current(&call, &context));
    TRY(known_context(&call, context));
    *id = context->default_stream.id;
    DONE(OK);
}

API CUresult cuCtxSynchronize(void) {
    TRACED("cuCtxSynchronize");
    struct context *context;
    TRY(context_current(&call, &context));
    TRY(capture_refuse_all(&call, context));
    DONE(queue_finish_context(context));
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    QUERY("cuCtxGetStreamPriorityRange");
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    DONE(OK);
}

API CUresult cuCtxEnablePeerAccess(struct context *peer, unsigned flags) {
    TRACED("cuCtxEnablePeerAccess", .src = (uintptr_t)peer);
    struct context *context;
    TRY(context_current(&call, &context));
    TRY(known_context(&call, peer));
    if (flags) MISUSE(INVALID_VALUE, "flags must be 0");
    if (peer->device == context->device) MISUSE(INVALID_DEVICE, "a device is not its own peer");
    if (!S.peers) DONE(PEER_UNSUPPORTED);
    if (context->peer[peer->device]) DONE(PEER_ALREADY_ENABLED);
    context->peer[peer->device] = true;
    DONE(OK);
}

API CUresult cuCtxDisablePeerAccess(struct context *peer) {
    TRACED("cuCtxDisablePeerAccess", .src = (uintptr_t)peer);
    struct context *context;
    TRY(context_current(&call, &context));
    TRY(known_context(&call, peer));
    if (!context->peer[peer->device]) DONE(PEER_NOT_ENABLED);
    context->peer[peer->device] = false;
    DONE(OK);
}
