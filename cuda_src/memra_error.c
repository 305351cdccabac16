/* memra_error.c: what a failed call leaves behind, a status and one sentence per thread. */
#include "memra_internal.h"

#include <stdarg.h>
#include <stdio.h>

enum { OUT_OF_MEMORY = 2, DEINITIALIZED = 4, CONTEXT_IS_DESTROYED = 709, STUB_LIBRARY = 34, SYSTEM_DRIVER_MISMATCH = 803, COMPAT_NOT_SUPPORTED = 804 };

static _Thread_local char sentence[1024];
static _Thread_local int32_t driver_code;

int memra_fail(int status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return status;
}

void memra_fail_more(const char *more) {
    const size_t used = strlen(sentence);
    snprintf(sentence + used, sizeof sentence - used, "%s", more);
}

void memra_keep(memra_failure *first, int status) {
    const bool is_gone = driver_code == DEINITIALIZED || driver_code == CONTEXT_IS_DESTROYED;
    if (status != MEMRA_ERR_DRIVER || !is_gone) memra_keep_any(first, status);
}

void memra_keep_any(memra_failure *first, int status) {
    if (status == MEMRA_OK || first->status != MEMRA_OK) return;
    first->status = status;
    first->driver_code = driver_code;
    memcpy(first->sentence, sentence, sizeof sentence);
}

int memra_kept(const memra_failure *first) {
    if (first->status == MEMRA_OK) return MEMRA_OK;
    driver_code = first->driver_code;
    return memra_fail(first->status, "%s", first->sentence);
}

/* After one of these every later call on the context fails too. */
static bool is_sticky(int code) {
    static const int codes[] = {700, 710, 714, 715, 716, 717, 718, 719};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i] == code) return true;
    return false;
}

/* What to do about it, where the driver does not say. driver.py has the same. */
#define RELOAD "reload NVIDIA's kernel modules (nvidia-modprobe -u -c 0), or restart the machine"
static const char *advice_for(int code) {
    switch (code) {
        case STUB_LIBRARY: return "; put the driver's own libcuda.so.1 before the toolkit's stub";
        case 46:
            return "; another process holds the GPU in exclusive mode, or its mode is prohibited: nvidia-smi -q -d"
                   " COMPUTE";
        case 100:
            return "; nvidia-smi -L lists the GPUs; CUDA_VISIBLE_DEVICES may hide them, and a container must be given"
                   " them";
        case 101:
            return "; nvidia-smi -L lists the GPUs; CUDA_VISIBLE_DEVICES may hide some, and numbers them from 0";
        case 200: case 209: case 218: case 222:
            return "; the cubin is of another GPU, or of an NVRTC newer than the driver: update the driver; see"
                   " memra-driver info";
        case 802: return "; nvidia-fabricmanager must run on this machine";
        case SYSTEM_DRIVER_MISMATCH: return "; the driver was updated and its kernel module was not: " RELOAD;
        case COMPAT_NOT_SUPPORTED: return "; remove the CUDA compatibility package, or update the driver";
        case 999: return "; " RELOAD;
        default:
            return is_sticky(code) ? "; the error is sticky: the context is lost, end this process" : "";
    }
}

int memra_fail_driver(const char *call, int code) {
    const char *name = NULL, *text = NULL;
    int status = MEMRA_ERR_DRIVER;
    if (memra_cu.cuGetErrorName) (void)memra_cu.cuGetErrorName(code, &name);
    if (memra_cu.cuGetErrorString) (void)memra_cu.cuGetErrorString(code, &text);
    if (code == OUT_OF_MEMORY) status = MEMRA_ERR_OUT_OF_MEMORY;
    if (code == STUB_LIBRARY || code == SYSTEM_DRIVER_MISMATCH || code == COMPAT_NOT_SUPPORTED)
        status = MEMRA_ERR_NO_DRIVER;
    driver_code = code;
    return memra_fail(status, "%s: %s (%d): %s%s", call, name ? name : "unknown CUresult", code,
                      text ? text : "this driver has no text for it", advice_for(code));
}

int memra_cuda_status(const char *call, CUresult code) {
    return code ? memra_fail_driver(call, code) : MEMRA_OK;
}

int memra_check_size(const char *type, uint32_t found, size_t expected) {
    if (found == expected) return MEMRA_OK;
    return memra_fail(MEMRA_ERR_ABI,
                      "%s: struct_size is %u, this library has %zu bytes; compile against the header of this library",
                      type, found, expected);
}

int32_t memra_abi_version(void) {
    return MEMRA_ABI_VERSION;
}

const char *memra_last_error(void) {
    return sentence;
}

int32_t memra_last_driver_code(void) {
    return driver_code;
}
