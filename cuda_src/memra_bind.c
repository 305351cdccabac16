/* memra_bind.c: the library's hold on a cache that Python made. */
#include "memra_internal.h"

#include <inttypes.h>

int memra_check_abi(const memra_cache *cache, const char *what) {
    if (cache->abi_version != MEMRA_ABI_VERSION)
        return memra_fail(MEMRA_ERR_ABI, "%s: the cache speaks ABI version %" PRIu32 ", the library %d", what,
                          cache->abi_version, MEMRA_ABI_VERSION);
    return memra_check_size("memra_cache", cache->struct_size, sizeof *cache);
}

/* The legacy default stream has two names: 0, and the 1 that memra_device_open can be asked for by. */
static uint64_t one_name(uint64_t stream) {
    return stream ? stream : 1;
}

int memra_cache_bind(memra_cache *cache, memra_device *const *devices, int32_t n_devices) {
    if (!cache || !devices) return memra_fail(MEMRA_ERR_ARRAY, "memra_cache_bind: cache or devices is NULL");
    MEMRA_TRY(memra_check_fork());
    MEMRA_TRY(memra_check_abi(cache, "memra_cache_bind"));
    if (cache->state == MEMRA_CLOSED) return memra_fail(MEMRA_ERR_STATE, "memra_cache_bind: the cache is closed");
    if (n_devices != cache->n_devices)
        return memra_fail(MEMRA_ERR_DEVICE, "memra_cache_bind: %" PRId32 " devices for a cache on %" PRId32, n_devices,
                          cache->n_devices);
    for (int32_t d = 0; d < n_devices; d++) {
        const memra_cache_device *wanted = &cache->devices[d];
        MEMRA_TRY(memra_device_enter(devices[d]));
        const uint64_t stream = (uint64_t)(uintptr_t)devices[d]->stream;
        if (wanted->ordinal < 0)
            return memra_fail(MEMRA_ERR_DEVICE, "memra_cache_bind: device %" PRId32 " of the cache is host memory", d);
        if (devices[d]->ordinal != wanted->ordinal)
            return memra_fail(MEMRA_ERR_DEVICE,
                              "memra_cache_bind: device %" PRId32 " of the cache is cuda:%" PRId32 ", the one given is"
                              " cuda:%" PRId32, d, wanted->ordinal, devices[d]->ordinal);
        if (one_name(stream) != one_name(wanted->stream))
            return memra_fail(MEMRA_ERR_DEVICE,
                              "memra_cache_bind: device %" PRId32 " of the cache works on stream 0x%" PRIx64 ", the one"
                              " given on 0x%" PRIx64 "; open it with the cache's stream", d, wanted->stream, stream);
    }
    for (int32_t d = 0; d < n_devices; d++) {
        const memra_device *old = memra_device_at(cache, d);
        if (cache->recorder == MEMRA_NOT_RECORDING && (old == NULL || old == devices[d])) continue;
        if (cache->recorder != MEMRA_NOT_RECORDING)
            return memra_fail(MEMRA_ERR_STATE, "memra_cache_bind: a capture records this cache; end it first");
        for (struct memra_graph *graph = old->graphs; graph; graph = graph->next)
            if (memra_move_of(graph, cache) != NULL)
                return memra_fail(MEMRA_ERR_STATE,
                                  "memra_cache_bind: a graph of the device before moves this cache; close it first");
    }
    for (int32_t d = 0; d < n_devices; d++) cache->devices[d].handle = devices[d]->handle;
    return MEMRA_OK;
}
