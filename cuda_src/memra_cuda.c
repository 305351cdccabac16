/* memra_cuda.c: finds libcuda.so.1 when the first device is opened, and each function in it at one fixed version. */
#include "memra_internal.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

memra_cuda memra_cu;

static const struct entry {
    const char *name;
    int version;
    size_t offset;
} entries[] = {
#define ENTRY(name, version, parameters) {#name, version, offsetof(memra_cuda, name)},
    MEMRA_CUDA_FUNCTIONS(ENTRY)
#undef ENTRY
};

/* What the library does without where a driver lacks it: texts, the number of a context (12.0), and the check of a
 * kernel's parameters (12.4). */
static const char *const optional[] = {"cuGetErrorName", "cuGetErrorString", "cuCtxGetId", "cuKernelGetParamInfo"};

enum { LEGACY_STREAM = 1 }; /* of cuGetProcAddress: stream 0 is the legacy one, whatever the program was built for */
typedef CUresult get_proc_v2(const char *name, void **function, int version, uint64_t flags, int *found);
typedef CUresult get_proc_v1(const char *name, void **function, int version, uint64_t flags);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t watch_forks = PTHREAD_ONCE_INIT;
static atomic_bool loaded;
static atomic_bool used, forked; /* the driver was used in this process; it was used before this process was forked */

static void in_child(void) {
    forked = forked || used;
}

static void watch(void) {
    (void)pthread_atfork(NULL, NULL, in_child);
}

int memra_check_fork(void) {
    if (!forked) return MEMRA_OK;
    return memra_fail(MEMRA_ERR_STATE,
                      "CUDA does not survive fork(): this process was forked from one that used the GPU; start children"
                      " with fork and exec ('spawn' in Python), or use the GPU in the child only");
}

static bool is_optional(const char *name) {
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++)
        if (!strcmp(optional[i], name)) return true;
    return false;
}

/* ISO C has no cast from an object pointer to a function pointer; POSIX says that they have one form. */
static void find(get_proc_v2 **v2, get_proc_v1 **v1, void *library) {
    void *found = dlsym(library, "cuGetProcAddress_v2");
    memcpy(v2, &found, sizeof found);
    found = dlsym(library, "cuGetProcAddress");
    memcpy(v1, &found, sizeof found);
}

static int load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return memra_fail(MEMRA_ERR_NO_DRIVER,
                          "dlopen: no libcuda.so.1 (-1): %s; install an NVIDIA display driver to use a GPU", dlerror());
    get_proc_v2 *v2;
    get_proc_v1 *v1;
    find(&v2, &v1, library);
    if (!v2 && !v1)
        return memra_fail(MEMRA_ERR_NO_DRIVER,
                          "cuGetProcAddress: no such entry point (-1): this driver is older than CUDA 11.3: install a "
                          "newer driver");
    memra_cuda made;
    memset(&made, 0, sizeof made);
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        const struct entry *entry = &entries[i];
        void *function = NULL;
        int found = 0;
        const CUresult code = v2 ? v2(entry->name, &function, entry->version, LEGACY_STREAM, &found)
                                 : v1(entry->name, &function, entry->version, LEGACY_STREAM);
        if ((code || !function) && !is_optional(entry->name))
            return memra_fail(MEMRA_ERR_NO_DRIVER,
                              "%s: no such entry point (-1): this driver lacks the call of CUDA %d.%d: install a newer "
                              "driver", entry->name, entry->version / 1000, entry->version % 1000 / 10);
        if (!code) memcpy((char *)&made + entry->offset, &function, sizeof function);
    }
    memra_cu = made;
    return MEMRA_OK;
}

int memra_cuda_load(void) {
    MEMRA_TRY(memra_check_fork());
    if (atomic_load_explicit(&loaded, memory_order_acquire)) return MEMRA_OK;
    (void)pthread_once(&watch_forks, watch);
    used = true; /* from here on a fork copies locks and state of the driver's */
    pthread_mutex_lock(&lock);
    int status = MEMRA_OK;
    if (!atomic_load_explicit(&loaded, memory_order_relaxed)) {
        status = load();
        if (status == MEMRA_OK) atomic_store_explicit(&loaded, true, memory_order_release);
        else used = false;
    }
    pthread_mutex_unlock(&lock);
    return status;
}
