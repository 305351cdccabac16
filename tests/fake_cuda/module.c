// Libraries, modules, kernels, launches. Whatever the image, the code is the shared object of fake_set_kernels.
#include "fake.h"
#include <dlfcn.h>

enum {
    STATIC_SHARED = 49152, SHARED_OPTIN = 232448,
    CAPABILITY_MAJOR = 75, PROGRAMMATIC_STREAM_SERIALIZATION = 6 // CUdevice_attribute, CUlaunchAttributeID
};

void *kernel_symbol(struct library *library, const char *name) { return dlsym(library->code, name); }

// ---------------------------------------------------------------- libraries and modules

static CUresult load(struct call *call, struct library **out, const void *image, struct context *context) {
    if (!image) return fake_misuse(call, INVALID_VALUE, "the image is null");
    if (!*S.kernels) return fake_misuse(call, INVALID_SOURCE, "fake_set_kernels was not called");
    void *code = dlopen(S.kernels, RTLD_NOW | RTLD_LOCAL);
    if (!code) return fake_misuse(call, INVALID_SOURCE, "%s", dlerror());
    struct library *library = calloc(1, sizeof *library);
    object_add(&library->object, LIBRARY);
    library->code = code;
    library->context = context;
    call->record.dst = (uintptr_t)library;
    *out = library;
    return OK;
}

static CUresult library_resolve(struct call *call, struct library *library) {
    if (!object_find(library, LIBRARY)) return fake_misuse(call, INVALID_HANDLE, "no such library: %p", (void *)library);
    if (library->context && library->context->object.dead) return CONTEXT_IS_DESTROYED;
    if (library->object.dead) return fake_misuse(call, INVALID_HANDLE, "the library is unloaded");
    return OK;
}

static CUresult find_kernel(struct call *call, struct library *library, const char *name, struct kernel **out) {
    CUresult code = library_resolve(call, library);
    if (code) return code;
    char symbol[2 * NAME_ROOM];
    snprintf(symbol, sizeof symbol, "memra_cpu_launch_%s", name);
    launcher launch = (launcher)(uintptr_t)dlsym(library->code, symbol);
    snprintf(symbol, sizeof symbol, "memra_cpu_params_%s", name);
    const struct params *params = dlsym(library->code, symbol);
    if (!launch || !params) return NOT_FOUND;
    struct kernel *kernel = calloc(1, sizeof *kernel);
    object_add(&kernel->object, KERNEL);
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    kernel->library = library;
    kernel->context = library->context;
    kernel->launch = launch;
    kernel->params = params;
    kernel->max_dynamic_shared = STATIC_SHARED;
    *out = kernel;
    return OK;
}

// The code stays mapped: kernels that are launched after an unload are refused by their library's handle.
static CUresult unload(struct call *call, struct library *library) {
    CUresult code = library_resolve(call, library);
    if (!code) library->object.dead = true;
    return code;
}

API CUresult cuLibraryLoadData(struct library **out, const void *image, int *jit_options, void **jit_values, unsigned n_jit,
                               int *options, void **values, unsigned n) {
    TRACED("cuLibraryLoadData");
    (void)jit_options, (void)jit_values, (void)n_jit, (void)options, (void)values, (void)n;
    DONE(load(&call, out, image, NULL));
}

API CUresult cuLibraryUnload(struct library *library) {
    TRACED("cuLibraryUnload", .src = (uintptr_t)library);
    DONE(unload(&call, library));
}

API CUresult cuLibraryGetKernel(struct kernel **out, struct library *library, const char *name) {
    QUERY("cuLibraryGetKernel");
    DONE(find_kernel(&call, library, name, out));
}

API CUresult cuModuleLoadData(struct library **out, const void *image) {
    TRACED("cuModuleLoadData");
    struct context *context;
    TRY(context_current(&call, &context));
    DONE(load(&call, out, image, context));
}

API CUresult cuModuleLoadDataEx(struct library **out, const void *image, unsigned n, int *options, void **values) {
    TRACED("cuModuleLoadDataEx");
    (void)n, (void)options, (void)values;
    struct context *context;
    TRY(context_current(&call, &context));
    DONE(load(&call, out, image, context));
}

API CUresult cuModuleUnload(struct library *module) {
    TRACED("cuModuleUnload", .src = (uintptr_t)module);
    DONE(unload(&call, module));
}

API CUresult cuModuleGetFunction(struct kernel **out, struct library *module, const char *name) {
    QUERY("cuModuleGetFunction");
    DONE(find_kernel(&call, module, name, out));
}

// ---------------------------------------------------------------- kernels

static CUresult kernel_resolve(struct call *call, struct kernel *kernel) {
    if (!object_find(kernel, KERNEL)) return fake_misuse(call, INVALID_HANDLE, "no such kernel: %p", (void *)kernel);
    return library_resolve(call, kernel->library);
}

API CUresult cuKernelGetFunction(struct kernel **out, struct kernel *kernel) {
    QUERY("cuKernelGetFunction");
    struct context *context;
    TRY(kernel_resolve(&call, kernel));
    TRY(context_current(&call, &context));
    struct kernel *function = calloc(1, sizeof *function);
    *function = *kernel;
    object_add(&function->object, KERNEL);
    function->context = context;
    *out = function;
    DONE(OK);
}

static CUresult param_info(struct call *call, struct kernel *kernel, size_t index, size_t *offset, size_t *size) {
    CUresult code = kernel_resolve(call, kernel);
    if (code) return code;
    if (index >= (size_t)kernel->params->count) return INVALID_VALUE;
    *offset = kernel->params->offset[index];
    if (size) *size = kernel->params->size[index];
    return OK;
}

API CUresult cuKernelGetParamInfo(struct kernel *kernel, size_t index, size_t *offset, size_t *size) {
    QUERY("cuKernelGetParamInfo");
    DONE(param_info(&call, kernel, index, offset, size));
}

API CUresult cuFuncGetParamInfo(struct kernel *kernel, size_t index, size_t *offset, size_t *size) {
    QUERY("cuFuncGetParamInfo");
    DONE(param_info(&call, kernel, index, offset, size));
}

API CUresult cuKernelGetName(const char **out, struct kernel *kernel) {
    QUERY("cuKernelGetName");
    TRY(kernel_resolve(&call, kernel));
    *out = kernel->name;
    DONE(OK);
}

API CUresult cuFuncGetName(const char **out, struct kernel *kernel) {
    QUERY("cuFuncGetName");
    TRY(kernel_resolve(&call, kernel));
    *out = kernel->name;
    DONE(OK);
}

static CUresult get_attribute(struct call *call, int *out, int attribute, struct kernel *kernel) {
    CUresult code = kernel_resolve(call, kernel);
    if (code) return code;
    switch (attribute) {
    case 0: *out = 1024; return OK; // threads per block
    case 1: case 2: case 3: *out = 0; return OK; // static shared, constant, local bytes
    case 4: *out = 32; return OK; // registers
    case 5: case 6: *out = 90; return OK; // PTX and binary version
    case 8: *out = kernel->max_dynamic_shared; return OK;
    case 7: case 9: *out = 0; return OK;
    default: return fake_misuse(call, INVALID_VALUE, "no function attribute %d", attribute);
    }
}

static CUresult set_attribute(struct call *call, struct kernel *kernel, int attribute, int value) {
    CUresult code = kernel_resolve(call, kernel);
    if (code) return code;
    if (attribute == 8 && (value < 0 || value > SHARED_OPTIN))
        return fake_misuse(call, INVALID_VALUE, "%d bytes of dynamic shared memory, at most %d", value, SHARED_OPTIN);
    if (attribute < 8) return fake_misuse(call, INVALID_VALUE, "function attribute %d cannot be set", attribute);
    if (attribute == 8) kernel->max_dynamic_shared = value;
    return OK;
}

API CUresult cuKernelGetAttribute(int *out, int attribute, struct kernel *kernel, CUdevice device) {
    QUERY("cuKernelGetAttribute");
    (void)device;
    DONE(get_attribute(&call, out, attribute, kernel));
}

API CUresult cuFuncGetAttribute(int *out, int attribute, struct kernel *kernel) {
    QUERY("cuFuncGetAttribute");
    DONE(get_attribute(&call, out, attribute, kernel));
}

API CUresult cuKernelSetAttribute(int attribute, int value, struct kernel *kernel, CUdevice device) {
    TRACED_ON(device, "cuKernelSetAttribute");
    DONE(set_attribute(&call, kernel, attribute, value));
}

API CUresult cuFuncSetAttribute(struct kernel *kernel, int attribute, int value) {
    TRACED("cuFuncSetAttribute");
    DONE(set_attribute(&call, kernel, attribute, value));
}

API CUresult cuFuncSetCacheConfig(struct kernel *kernel, int config) {
    QUERY("cuFuncSetCacheConfig");
    (void)config;
    DONE(kernel_resolve(&call, kernel));
}

// ---------------------------------------------------------------- launches

static CUresult check_shape(struct call *call, const struct kernel *kernel, const struct op *op) {
    const unsigned *g = op->grid, *b = op->block;
    bool grid_fits = g[0] && g[1] && g[2] && g[0] <= 2147483647u && g[1] <= 65535 && g[2] <= 65535;
    uint64_t threads = (uint64_t)b[0] * b[1] * b[2];
    bool block_fits = b[0] <= 1024 && b[1] <= 1024 && b[2] <= 64 && threads >= 1 && threads <= 1024;
    if (!grid_fits || !block_fits)
        return fake_misuse(call, INVALID_VALUE, "%s: grid (%u, %u, %u), block (%u, %u, %u)", kernel->name, g[0], g[1], g[2],
                           b[0], b[1], b[2]);
    if (op->smem > (unsigned)kernel->max_dynamic_shared)
        return fake_misuse(call, INVALID_VALUE, "%s: %u bytes of dynamic shared memory, %d allowed", kernel->name, op->smem,
                           kernel->max_dynamic_shared);
    return OK;
}

// A pointer that a kernel gets is null or lies in (or just past) live memory that its device can reach.
static CUresult check_pointers(struct call *call, const struct stream *stream, const struct kernel *kernel,
                               const struct op *op) {
    for (int i = 0; i < kernel->params->count; i++) {
        if (!kernel->params->is_pointer[i]) continue;
        uint64_t ptr;
        memcpy(&ptr, op->blob + kernel->params->offset[i], sizeof ptr);
        if (!ptr) continue;
        struct block *block = block_find(ptr);
        if (!block) block = block_touching(ptr);
        if (block && S.as_of && !queue_passed(block->born))
            return fake_misuse(call, ILLEGAL_ADDRESS, "%s: parameter %d is used before its stream has reached the allocation",
                               kernel->name, i);
        if (block && block_reachable(block, stream->context)) continue;
        if (block)
            return fake_misuse(call, ILLEGAL_ADDRESS, "%s: parameter %d is memory of device %d, out of reach of device %d",
                               kernel->name, i, block->context->device, stream->context->device);
        return fake_misuse(call, ILLEGAL_ADDRESS, "%s: parameter %d, 0x%llx, is not live device memory", kernel->name, i,
                           (unsigned long long)ptr);
    }
    return OK;
}

CUresult launch_check(struct call *call, const struct stream *stream, const struct op *op) {
    CUresult code = kernel_resolve(call, op->kernel);
    return code ? code : check_pointers(call, stream, op->kernel, op);
}

static CUresult launch(struct call *call, struct kernel *kernel, struct op *op, void *handle, void **params, void **extra) {
    CUresult code = kernel_resolve(call, kernel);
    if (code) return code;
    call->record.kernel = kernel->name;
    struct stream *stream;
    code = stream_resolve(call, handle, &stream);
    if (code) return code;
    struct context *context = kernel->context;
    if (!context) context = stream->context; // a kernel without one runs in that of the stream
    if (context != stream->context)
        return fake_misuse(call, INVALID_HANDLE, "%s: context of device %d, stream of device %d", kernel->name,
                           context->device, stream->context->device);
    if (extra) return fake_misuse(call, NOT_SUPPORTED, "%s: parameters in `extra`", kernel->name);
    const bool can = S.device[context->device].attribute[CAPABILITY_MAJOR] >= 9 && S.driver_version >= 12030;
    if (call->record.early && !can) return fake_misuse(call, NOT_SUPPORTED, "%s: begins early", kernel->name);
    if (kernel->params->count && !params) return fake_misuse(call, INVALID_VALUE, "%s: no parameters", kernel->name);
    code = check_shape(call, kernel, op);
    if (code) return code;
    for (int i = 0; i < kernel->params->count; i++)
        memcpy(op->blob + kernel->params->offset[i], params[i], kernel->params->size[i]);
    op->kernel = kernel;
    return fake_enqueue(call, stream, op);
}

API CUresult cuLaunchKernel(struct kernel *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                            unsigned bz, unsigned smem, void *handle, void **params, void **extra) {
    TRACED("cuLaunchKernel", .stream = (uintptr_t)handle, .grid = {gx, gy, gz}, .block = {bx, by, bz}, .smem = smem);
    struct op op = {.kind = OP_LAUNCH, .grid = {gx, gy, gz}, .block = {bx, by, bz}, .smem = smem};
    DONE(launch(&call, kernel, &op, handle, params, extra));
}

struct launch_attribute { // CUlaunchAttribute
    int id;
    union { char pad[64]; int allowed; uint64_t align; } value;
};

struct launch_config { // CUlaunchConfig
    unsigned grid[3], block[3], smem;
    void *stream;
    const struct launch_attribute *attributes;
    unsigned n_attributes;
};

API CUresult cuLaunchKernelEx(const struct launch_config *c, struct kernel *kernel, void **params, void **extra) {
    TRACED("cuLaunchKernelEx", .stream = (uintptr_t)c->stream, .grid = {c->grid[0], c->grid[1], c->grid[2]},
           .block = {c->block[0], c->block[1], c->block[2]}, .smem = c->smem);
    struct op op = {.kind = OP_LAUNCH, .grid = {c->grid[0], c->grid[1], c->grid[2]},
                    .block = {c->block[0], c->block[1], c->block[2]}, .smem = c->smem};
    for (unsigned i = 0; i < c->n_attributes; i++) {
        const struct launch_attribute *a = &c->attributes[i];
        if (a->id != PROGRAMMATIC_STREAM_SERIALIZATION) MISUSE(NOT_SUPPORTED, "launch attribute %d", a->id);
        call.record.early = a->value.allowed;
    }
    DONE(launch(&call, kernel, &op, c->stream, params, extra));
}
