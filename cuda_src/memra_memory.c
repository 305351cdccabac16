/* memra_memory.c: memory of a device, in the order of its stream.
 *
 * A capture would repeat what is enqueued here at every launch, with host memory as it is by then; so nothing
 * is allocated, freed, moved from or to the host, or waited for while one is open.
 */
#include "memra_internal.h"

#include <stdio.h>

enum {
    RELEASE_THRESHOLD = 4, RESERVED_MEM_CURRENT = 5, USED_MEM_CURRENT = 7, /* CUmemPool_attribute */
    DISABLE_TIMING = 2 /* CU_EVENT_DISABLE_TIMING */
};

/* The status of a call whose one argument that matters is a size or an address. */
static int status_of(const char *call, const char *format, uint64_t shown, CUresult code) {
    if (!code) return MEMRA_OK;
    char argument[32], text[80];
    snprintf(argument, sizeof argument, format, (unsigned long long)shown);
    snprintf(text, sizeof text, "%s(%s)", call, argument);
    return memra_fail_driver(text, code);
}

/* What the driver calls free, and what the memory pool holds unused; `failed` names the call that said no. */
static CUresult room_on(const memra_device *device, uint64_t *available, uint64_t *total, const char **failed) {
    size_t free_bytes = 0, all = 0;
    uint64_t reserved = 0, used = 0;
    void *pool = NULL;
    CUresult code = memra_cu.cuMemGetInfo(&free_bytes, &all);
    *failed = "cuMemGetInfo()";
    if (!code && device->has_pools) {
        code = memra_cu.cuDeviceGetDefaultMemPool(&pool, device->device);
        *failed = "cuDeviceGetDefaultMemPool()";
        for (int i = 0; i < 2 && !code; i++) {
            const int which = i ? USED_MEM_CURRENT : RESERVED_MEM_CURRENT;
            code = memra_cu.cuMemPoolGetAttribute(pool, which, i ? &used : &reserved);
            *failed = "cuMemPoolGetAttribute()";
        }
    }
    *available = free_bytes + (reserved > used ? reserved - used : 0); /* another thread may allocate between the two */
    *total = all;
    return code;
}

/* Appends what the device has to the failure of an allocation, and keeps its code. */
static int full(const memra_device *device, int status) {
    uint64_t available, total;
    const char *failed;
    char room[160];
    if (status != MEMRA_ERR_OUT_OF_MEMORY || room_on(device, &available, &total, &failed)) return status;
    snprintf(room, sizeof room, "; cuda:%d has %llu of %llu bytes free; nvidia-smi says who holds the rest",
             device->ordinal, (unsigned long long)available, (unsigned long long)total);
    memra_fail_more(room);
    return status;
}

static int allocate(const memra_device *device, uint64_t n_bytes, uint64_t *ptr) {
    *ptr = 0;
    if (!n_bytes) return MEMRA_OK;
    if (device->has_pools)
        return full(device, status_of("cuMemAllocAsync", "%llu", n_bytes,
                                      memra_cu.cuMemAllocAsync(ptr, n_bytes, device->stream)));
    return full(device, status_of("cuMemAlloc", "%llu", n_bytes, memra_cu.cuMemAlloc(ptr, n_bytes)));
}

int memra_device_free(const memra_device *device, uint64_t ptr) {
    if (device->has_pools)
        return status_of("cuMemFreeAsync", "0x%llx", ptr, memra_cu.cuMemFreeAsync(ptr, device->stream));
    return status_of("cuMemFree", "0x%llx", ptr, memra_cu.cuMemFree(ptr));
}

int memra_device_synchronize(memra_device *device) {
    MEMRA_TRY(memra_device_enter(device));
    MEMRA_TRY(memra_check_no_capture(device, "synchronize"));
    return MEMRA_CU(cuStreamSynchronize, (device->stream));
}

int memra_alloc(memra_device *device, uint64_t n_bytes, uint64_t *ptr) {
    MEMRA_TRY(memra_device_enter(device));
    if (!ptr) return memra_fail(MEMRA_ERR_ARRAY, "memra_alloc: ptr is NULL");
    MEMRA_TRY(memra_check_no_capture(device, "alloc"));
    return allocate(device, n_bytes, ptr);
}

/* A driver call that only looks round keeps nothing from being freed. */
int memra_free(memra_device *device, uint64_t ptr) {
    memra_failure first = {0};
    int status = memra_device_enter(device);
    if (status != MEMRA_OK && status != MEMRA_ERR_DRIVER) return status;
    memra_keep(&first, status);
    if (!ptr) return memra_kept(&first);
    status = memra_check_no_capture(device, "free");
    if (status != MEMRA_OK && status != MEMRA_ERR_DRIVER) return status;
    memra_keep(&first, status);
    if (!device->has_pools) memra_keep(&first, MEMRA_CU(cuStreamSynchronize, (device->stream))); /* cuMemFree knows no order */
    memra_keep(&first, memra_device_free(device, ptr));
    return memra_kept(&first);
}

void memra_device_give_back(memra_device *device, uint64_t ptr, memra_failure *first) {
    bool alive = false;
    if (device) memra_keep(first, memra_device_look(device, &alive));
    if (alive) memra_keep(first, memra_free(device, ptr));
}

/* Both ends of a copy, or of a fill (whose value is no address). */
static int check_ends(const char *what, uint64_t n_bytes, bool dst, bool src) {
    if (!n_bytes || (dst && src)) return MEMRA_OK;
    return memra_fail(MEMRA_ERR_ARRAY, "%s: %llu bytes %s address 0", what, (unsigned long long)n_bytes,
                      dst ? "from" : "to");
}

int memra_clear(memra_device *device, uint64_t ptr, uint64_t n_bytes) {
    MEMRA_TRY(memra_device_enter(device));
    MEMRA_TRY(check_ends("memra_clear", n_bytes, ptr != 0, true));
    if (!n_bytes) return MEMRA_OK;
    return status_of("cuMemsetD8Async", "%llu", n_bytes, memra_cu.cuMemsetD8Async(ptr, 0, n_bytes, device->stream));
}

int memra_copy_bytes(memra_device *device, uint64_t dst, uint64_t src, uint64_t n_bytes) {
    MEMRA_TRY(memra_device_enter(device));
    MEMRA_TRY(check_ends("memra_copy_bytes", n_bytes, dst != 0, src != 0));
    if (!n_bytes) return MEMRA_OK;
    return status_of("cuMemcpyDtoDAsync", "%llu", n_bytes,
                     memra_cu.cuMemcpyDtoDAsync(dst, src, n_bytes, device->stream));
}

int memra_upload(memra_device *device, uint64_t dst, const void *src, uint64_t n_bytes) {
    MEMRA_TRY(memra_device_enter(device));
    MEMRA_TRY(check_ends("memra_upload", n_bytes, dst != 0, src != NULL));
    if (!n_bytes) return MEMRA_OK;
    MEMRA_TRY(memra_check_no_capture(device, "upload"));
    return status_of("cuMemcpyHtoDAsync", "%llu", n_bytes,
                     memra_cu.cuMemcpyHtoDAsync(dst, src, n_bytes, device->stream));
}

int memra_download(memra_device *device, void *dst, uint64_t src, uint64_t n_bytes) {
    MEMRA_TRY(memra_device_enter(device));
    MEMRA_TRY(check_ends("memra_download", n_bytes, dst != NULL, src != 0));
    MEMRA_TRY(memra_check_no_capture(device, "download"));
    if (n_bytes)
        MEMRA_TRY(status_of("cuMemcpyDtoHAsync", "%llu", n_bytes,
                            memra_cu.cuMemcpyDtoHAsync(dst, src, n_bytes, device->stream)));
    return MEMRA_CU(cuStreamSynchronize, (device->stream));
}

int memra_memory_info(memra_device *device, uint64_t *available, uint64_t *total) {
    MEMRA_TRY(memra_device_enter(device));
    if (!available || !total) return memra_fail(MEMRA_ERR_ARRAY, "memra_memory_info: available or total is NULL");
    const char *failed;
    const CUresult code = room_on(device, available, total, &failed);
    return memra_cuda_status(failed, code);
}

int memra_keep_memory(memra_device *device, uint64_t n_bytes) {
    void *pool = NULL;
    MEMRA_TRY(memra_device_enter(device));
    if (n_bytes > INT64_MAX)
        return memra_fail(MEMRA_ERR_CONFIG, "memra_keep_memory: %llu bytes", (unsigned long long)n_bytes);
    if (!device->has_pools) return MEMRA_OK;
    MEMRA_TRY(MEMRA_CU(cuDeviceGetDefaultMemPool, (&pool, device->device)));
    return MEMRA_CU(cuMemPoolSetAttribute, (pool, RELEASE_THRESHOLD, &n_bytes));
}

int memra_trim(memra_device *device) {
    void *pool = NULL;
    MEMRA_TRY(memra_device_synchronize(device));
    if (!device->has_pools) return MEMRA_OK;
    MEMRA_TRY(MEMRA_CU(cuDeviceGetDefaultMemPool, (&pool, device->device)));
    return MEMRA_CU(cuMemPoolTrimTo, (pool, 0));
}

/* ---- The copy table ---- */

int memra_device_table(memra_device *device, int32_t n) {
    const uint64_t n_bytes = (uint64_t)n * sizeof *device->entries;
    if (n_bytes <= device->table_bytes) return MEMRA_OK;
    memra_copy *entries = malloc(n_bytes);
    if (!entries) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "copy table: no host memory for %d entries", n);
    uint64_t table = 0;
    const int status = allocate(device, n_bytes, &table);
    if (status != MEMRA_OK) {
        free(entries);
        return status;
    }
    const uint64_t old = device->table;
    free(device->entries);
    device->table = table;
    device->table_bytes = n_bytes;
    device->entries = entries;
    device->n_entries = 0;
    if (!old) return MEMRA_OK;
    if (!device->has_pools) MEMRA_TRY(MEMRA_CU(cuStreamSynchronize, (device->stream)));
    return memra_device_free(device, old);
}

/* Brings the entries to the device, unless they are there already. */
static int upload_table(memra_device *device, const memra_copy *entries, int32_t n) {
    const uint64_t n_bytes = (uint64_t)n * sizeof *entries;
    if (n == device->n_entries && !memcmp(device->entries, entries, n_bytes)) return MEMRA_OK;
    int capturing = 0;
    MEMRA_TRY(MEMRA_CU(cuStreamIsCapturing, (device->stream, &capturing)));
    if (capturing)
        return memra_fail(MEMRA_ERR_STATE, "copy table: a capture is open, and the table would be read at each launch");
    MEMRA_TRY(memra_device_table(device, n));
    device->n_entries = 0; /* an upload that fails leaves no claim about what the table holds */
    memcpy(device->entries, entries, n_bytes);
    MEMRA_TRY(status_of("cuMemcpyHtoDAsync", "%llu", n_bytes,
                        memra_cu.cuMemcpyHtoDAsync(device->table, device->entries, n_bytes, device->stream)));
    device->n_entries = n;
    return MEMRA_OK;
}

int memra_copy_table(memra_device *device, const memra_copy *entries, int32_t n) {
    MEMRA_TRY(memra_device_enter(device));
    if (n < 0) return memra_fail(MEMRA_ERR_CONFIG, "memra_copy_table: %d entries", n);
    if (!n) return MEMRA_OK;
    if (!entries) return memra_fail(MEMRA_ERR_ARRAY, "memra_copy_table: entries is NULL");
    if (n > MEMRA_COPIES_MOST)
        return memra_fail(MEMRA_ERR_CAPACITY, "memra_copy_table: %d entries; at most %d", n, MEMRA_COPIES_MOST);
    MEMRA_TRY(memra_kernel_loaded(device, MEMRA_K_COPY_MANY));
    MEMRA_TRY(upload_table(device, entries, n));
    return memra_launch_copy_many(device, device->table, n, 0, 0);
}

/* ---- A count that another device knows ---- */

/* What `then` is given from now on waits for what `first` has been given so far. */
static int order(memra_device *first, memra_device *then) {
    CUevent event = NULL;
    MEMRA_TRY(memra_device_enter(first));
    MEMRA_TRY(MEMRA_CU(cuEventCreate, (&event, DISABLE_TIMING)));
    int status = MEMRA_CU(cuEventRecord, (event, first->stream));
    if (status == MEMRA_OK) status = memra_device_enter(then);
    if (status == MEMRA_OK) status = MEMRA_CU(cuStreamWaitEvent, (then->stream, event, 0));
    const CUresult destroyed = memra_cu.cuEventDestroy(event);
    return status == MEMRA_OK ? memra_cuda_status("cuEventDestroy()", destroyed) : status;
}

int memra_count_beside(memra_device *from, uint64_t count, memra_device *to, uint64_t *found) {
    *found = count;
    if (from == to) return MEMRA_OK;
    MEMRA_TRY(memra_device_enter(to));
    if (!to->count) MEMRA_TRY(allocate(to, sizeof(int32_t), &to->count));
    *found = to->count;
    const bool in_order = from->context == to->context && from->stream == to->stream;
    if (!in_order) MEMRA_TRY(order(from, to));
    MEMRA_TRY(from->context == to->context
                  ? MEMRA_CU(cuMemcpyDtoDAsync, (to->count, count, sizeof(int32_t), to->stream))
                  : MEMRA_CU(cuMemcpyPeerAsync, (to->count, to->context, count, from->context, sizeof(int32_t),
                                                 to->stream)));
    return in_order ? MEMRA_OK : order(to, from);
}

/* ---- Scratch of attention ---- */

int memra_device_scratch(memra_device *device, uint64_t n_bytes, uint64_t *ptr) {
    *ptr = 0;
    if (!n_bytes) return MEMRA_OK;
    if (!device->scratch || device->scratch->n_bytes < n_bytes) {
        int capturing = 0; /* by whomever: what is allocated in a capture is of the graph */
        MEMRA_TRY(MEMRA_CU(cuStreamIsCapturing, (device->stream, &capturing)));
        if (device->recording || capturing)
            return memra_fail(MEMRA_ERR_STATE,
                              "attend needs %llu bytes of scratch, and a capture allocates nothing; attend once before",
                              (unsigned long long)n_bytes);
        MEMRA_TRY(memra_device_enter(device)); /* the cache's other devices may have been entered behind it */
        memra_scratch *scratch = malloc(sizeof *scratch);
        if (!scratch) return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "attend: no host memory");
        const int status = allocate(device, n_bytes, &scratch->ptr);
        if (status != MEMRA_OK) {
            free(scratch);
            return status;
        }
        scratch->n_bytes = n_bytes;
        scratch->next = device->scratch;
        device->scratch = scratch;
    }
    *ptr = device->scratch->ptr;
    return MEMRA_OK;
}

int memra_attend_scratch(memra_device *device, uint64_t n_bytes, uint64_t *part) {
    MEMRA_TRY(memra_device_enter(device));
    if (!part) return memra_fail(MEMRA_ERR_ARRAY, "memra_attend_scratch: part is NULL");
    return memra_device_scratch(device, n_bytes, part);
}
