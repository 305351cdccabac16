/* memra_cache.c: birth and end of a cache without Python.
 *
 * The twin of Cache.__init__ and of place.py: what the plan says is allocated, nothing else, and the structs say where.
 */
#include "memra_internal.h"

#include <inttypes.h>
#include <stdatomic.h>

static const uint64_t first_id = (uint64_t)1 << 32; /* Python counts its caches from 1 */
static _Atomic uint64_t n_born;

static int no_memory(void) {
    return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "cache: no host memory");
}

/* ---- Memory ---- */

/* Frees all that was allocated, on devices that are open still, and the structs. Returns the first failure. */
static int release(memra_cache_own *own) {
    memra_failure first = {0};
    for (int64_t i = 0; i < own->n_allocations; i++) {
        memra_device *device = memra_device_at(&own->cache, own->allocated_on[i]);
        memra_device_give_back(device, own->allocations[i], &first);
    }
    free(own->cache.kv);
    free(own->cache.recur);
    free(own->cache.devices);
    free(own->allocations);
    free(own->allocated_on);
    free(own);
    return memra_kept(&first);
}

/* An allocation that the cache owns from now on, whatever becomes of the clear. */
static int allocate(memra_cache_own *own, int32_t d, int64_t n_bytes, bool clear, uint64_t *ptr) {
    memra_device *device = memra_device_at(&own->cache, d);
    *ptr = 0;
    if (!n_bytes) return MEMRA_OK;
    MEMRA_TRY(memra_alloc(device, (uint64_t)n_bytes, ptr));
    own->allocations[own->n_allocations] = *ptr;
    own->allocated_on[own->n_allocations++] = d;
    return clear ? memra_clear(device, *ptr, (uint64_t)n_bytes) : MEMRA_OK;
}

static uint64_t bytes_on(const memra_plan *plan, memra_device *const *devices, int32_t d) {
    return (uint64_t)(devices[d]->has_arena ? plan->arena_bytes : plan->plane_bytes)[d];
}

/* Refuses what a GPU has no room for; devices that are streams of one GPU draw on the same memory. */
static int check_fit(const memra_plan *plan, memra_device *const *devices) {
    for (int32_t d = 0; d < plan->n_devices; d++) {
        uint64_t need = 0, available = 0, total = 0;
        bool counted = false;
        for (int32_t i = 0; i < plan->n_devices; i++) {
            if (devices[i]->ordinal != devices[d]->ordinal) continue;
            counted = counted || i < d;
            if (__builtin_add_overflow(need, bytes_on(plan, devices, i), &need)) need = UINT64_MAX;
        }
        if (counted) continue;
        MEMRA_TRY(memra_memory_info(devices[d], &available, &total));
        if (need > available)
            return memra_fail(MEMRA_ERR_OUT_OF_MEMORY,
                              "the cache needs %" PRIu64 " bytes on cuda:%" PRId32 ", which has %" PRIu64 " free; lower"
                              " max_ctx, choose smaller formats, or spread the layers over more devices; nvidia-smi says"
                              " who holds the rest",
                              need, devices[d]->ordinal, available);
    }
    return MEMRA_OK;
}

/* ---- What the structs say ---- */

static memra_slice slice_of(uint64_t ptr, int64_t len, int32_t dtype, int32_t ordinal) {
    return (memra_slice){len ? ptr : 0, len, dtype, ordinal};
}

static void describe_device(memra_cache_device *out, const memra_device *device) {
    out->stream = (uint64_t)(uintptr_t)device->stream;
    out->handle = device->handle;
    out->ordinal = device->ordinal;
    out->has_arena = device->has_arena;
}

static void describe_layer(const memra_plan_own *plan, int32_t il, memra_kv_layer *kv, memra_recur_layer *recur) {
    const memra_config *config = plan->config;
    kv->device_index = recur->device_index = plan->plan.device_of[il];
    kv->kv_source = memra_plan_kv_source(plan, il);
    kv->n_head = kv->kv_source < 0 ? 0 : (int32_t)memra_heads(config, il);
    if (memra_plan_has_kv(plan, il)) {
        int64_t dims[2], tok_bytes[2];
        int32_t formats[2];
        uint32_t head_dims[2];
        memra_plan_kv_dims(plan, il, dims);
        memra_plan_tok_bytes(plan, il, tok_bytes);
        memra_plan_formats(plan, il, formats);
        memra_head_dims(config, il, head_dims);
        const uint32_t window = memra_window(config, il);
        kv->present = 1;
        kv->kv_dim_k = dims[0];
        kv->kv_dim_v = dims[1];
        kv->k_tok_bytes = tok_bytes[0];
        kv->v_tok_bytes = tok_bytes[1];
        kv->k_format = formats[0];
        kv->v_format = formats[1];
        kv->n_head_kv = (int32_t)memra_kv_heads(config, il);
        kv->head_dim_k = (int32_t)head_dims[0];
        kv->head_dim_v = (int32_t)head_dims[1];
        kv->window = window > INT32_MAX ? INT32_MAX : (int32_t)window;
    }
    if (memra_plan_has_state(plan, il)) {
        recur->present = 1;
        recur->conv_dim = (int32_t)memra_conv_dim(config);
        recur->d_conv = (int32_t)config->ssm_conv_kernel;
        recur->num_k = (int32_t)config->ssm_group_count;
        recur->num_v = (int32_t)config->ssm_time_step_rank;
        recur->state_size = (int32_t)config->ssm_state_size;
    }
}

/* Says where a plane stands. Counters come in the order in which an arena packs them: the first one begins the run. */
static void put_plane(memra_cache *cache, const memra_planned *row, memra_slice slice) {
    memra_kv_layer *kv = row->layer < 0 ? NULL : &cache->kv[row->layer];
    memra_recur_layer *recur = row->layer < 0 ? NULL : &cache->recur[row->layer];
    memra_cache_device *device = &cache->devices[row->device];
    switch (row->plane) {
        case MEMRA_P_K: kv->k = slice; break;
        case MEMRA_P_V: kv->v = slice; break;
        case MEMRA_P_LEN_D: kv->len_d = slice; break;
        case MEMRA_P_CONV_STATE: recur->conv_state = slice; break;
        case MEMRA_P_SSM_STATE: recur->ssm_state = slice, recur->home = slice.ptr; break;
        case MEMRA_P_SSM_STATE_ALT: recur->ssm_state_alt = slice, recur->away = slice.ptr; break;
        case MEMRA_P_TAPE: recur->tape = slice; break;
        case MEMRA_P_POS_D: device->pos_d = slice; break;
        case MEMRA_P_HEALTH: device->health = slice; break;
        case MEMRA_P_LOGITS: cache->logits = slice; break;
        case MEMRA_P_TAPS: cache->taps = slice; break;
        case MEMRA_N_PLANES: break;
    }
    if (device->has_arena && slice.dtype == MEMRA_I32) {
        if (!device->counters.len) device->counters = slice_of(slice.ptr, 1, MEMRA_I32, slice.device);
        else device->counters.len++;
    }
}

/* ---- Birth ---- */

/* One cleared arena a device, or planes in the Rust order; there, what is written before it is read is not cleared. */
static int place(memra_cache_own *own, const memra_plan_own *plan, uint64_t *arenas) {
    memra_cache *cache = &own->cache;
    int32_t n_planes;
    const memra_plane *table = memra_plane_table(&n_planes);
    for (int32_t d = 0; d < cache->n_devices; d++)
        if (cache->devices[d].has_arena) MEMRA_TRY(allocate(own, d, plan->plan.arena_bytes[d], true, &arenas[d]));
    for (int64_t i = 0; i < plan->n_planes; i++) {
        const memra_planned *row = &plan->planes[i];
        const memra_cache_device *device = &cache->devices[row->device];
        const bool scratch = row->plane == MEMRA_P_TAPE || row->plane == MEMRA_P_LOGITS || row->plane == MEMRA_P_TAPS;
        uint64_t ptr = arenas[row->device] + (uint64_t)row->offset;
        if (!device->has_arena) MEMRA_TRY(allocate(own, row->device, row->n_bytes, !scratch, &ptr));
        put_plane(cache, row, slice_of(ptr, row->len, table[row->plane].dtype, device->ordinal));
    }
    for (int32_t d = 0; d < cache->n_devices; d++)
        if (cache->devices[d].has_arena)
            cache->devices[d].states = slice_of(arenas[d] + (uint64_t)plan->plan.states_offset[d],
                                                plan->plan.states_bytes[d] / 4, MEMRA_F32, cache->devices[d].ordinal);
    return MEMRA_OK;
}

static int fill(memra_cache_own *own, const memra_plan_own *plan, memra_device *const *devices) {
    memra_cache *cache = &own->cache;
    const size_t n_layer = (size_t)plan->plan.n_layer, n_devices = (size_t)plan->plan.n_devices;
    const size_t most = (size_t)plan->n_planes + n_devices;
    *cache = (memra_cache){
        .struct_size = sizeof *cache, .abi_version = MEMRA_ABI_VERSION, .max_ctx = plan->max_ctx,
        .n_layer = plan->plan.n_layer, .n_devices = plan->plan.n_devices, .id = first_id + n_born++, .logits_at = -1,
        .round_limit = plan->options.round_width, .max_rows = plan->options.max_rows, .n_vocab = plan->config->n_vocab,
        .strict = plan->options.strict != 0,
    };
    cache->kv = calloc(n_layer, sizeof *cache->kv);
    cache->recur = calloc(n_layer, sizeof *cache->recur);
    cache->devices = calloc(n_devices, sizeof *cache->devices);
    own->allocations = calloc(most, sizeof *own->allocations);
    own->allocated_on = calloc(most, sizeof *own->allocated_on);
    uint64_t *arenas = calloc(n_devices, sizeof *arenas);
    int status = MEMRA_OK;
    if (!cache->kv || !cache->recur || !cache->devices || !own->allocations || !own->allocated_on || !arenas) {
        status = no_memory();
    } else {
        for (size_t d = 0; d < n_devices; d++) describe_device(&cache->devices[d], devices[d]);
        for (size_t il = 0; il < n_layer; il++) describe_layer(plan, (int32_t)il, &cache->kv[il], &cache->recur[il]);
        status = place(own, plan, arenas);
    }
    free(arenas);
    return status;
}

static int birth(const memra_plan_own *plan, memra_device *const *devices, memra_cache **cache) {
    for (int32_t d = 0; d < plan->plan.n_devices; d++) {
        MEMRA_TRY(memra_device_enter(devices[d]));
        MEMRA_TRY(memra_check_no_capture(devices[d], "memra_cache_new"));
    }
    MEMRA_TRY(check_fit(&plan->plan, devices));
    memra_cache_own *own = calloc(1, sizeof *own);
    if (!own) return no_memory();
    const int status = fill(own, plan, devices);
    if (status == MEMRA_OK) {
        *cache = &own->cache;
        return MEMRA_OK;
    }
    memra_failure first = {0};
    memra_keep_any(&first, status);
    (void)release(own);
    return memra_kept(&first);
}

/* The devices without repetition, and the index of each stage's among them. */
static void unite(memra_device *const *devices, int32_t n_stages, memra_device **each, int32_t *placement) {
    int32_t n = 0;
    for (int32_t s = 0; s < n_stages; s++) {
        int32_t i = 0;
        while (i < n && each[i] != devices[s]) i++;
        if (i == n) each[n++] = devices[s];
        placement[s] = i;
    }
}

int memra_cache_new(
    const memra_config *config, int64_t max_ctx, const memra_policy *policy, const memra_options *options,
    memra_device *const *devices, const int32_t *fence, int32_t n_stages, memra_cache **cache) {
    if (!cache || !devices) return memra_fail(MEMRA_ERR_ARRAY, "memra_cache_new: devices or cache is NULL");
    *cache = NULL;
    MEMRA_TRY(memra_check_fork());
    MEMRA_TRY(memra_check_config(config));
    MEMRA_TRY(memra_check_fence(config, fence, n_stages)); /* it bounds n_stages */
    const int32_t n = fence ? n_stages : 1;
    memra_device **each = calloc((size_t)n, sizeof *each);
    int32_t *placement = calloc((size_t)n, sizeof *placement);
    memra_plan *plan = NULL;
    int status = MEMRA_OK;
    if (each && placement) {
        unite(devices, n, each, placement);
        status = memra_plan_new(config, max_ctx, policy, options, fence, n, placement, &plan);
    } else {
        status = no_memory();
    }
    if (status == MEMRA_OK) status = birth((const memra_plan_own *)plan, each, cache);
    memra_plan_free(plan);
    free(each);
    free(placement);
    return status;
}

/* ---- End ---- */

int memra_cache_free(memra_cache *cache) {
    if (!cache) return MEMRA_OK;
    MEMRA_TRY(memra_check_fork());
    MEMRA_TRY(memra_check_abi(cache, "memra_cache_free"));
    if (cache->id < first_id)
        return memra_fail(MEMRA_ERR_STATE, "memra_cache_free: cache %" PRIu64 " is Python's; Cache.close frees it",
                          cache->id);
    /* A context that is lost records nothing, and the host's memory shall not be lost with it. */
    const int recording = memra_check_not_recording(cache, "memra_cache_free");
    if (recording == MEMRA_ERR_STATE) return recording;
    memra_failure first = {0};
    memra_keep(&first, recording);
    cache->state = MEMRA_CLOSED;
    memra_graphs_forget(cache);
    while (cache->snapshots) {
        memra_snapshot *snapshot = cache->snapshots;
        cache->snapshots = snapshot->next;
        snapshot->next = NULL;
        snapshot->invalid = MEMRA_INVALID_CACHE_CLOSED;
    }
    while (cache->owned) {
        memra_owned *owned = cache->owned;
        cache->owned = owned->next;
        memra_keep(&first, owned->release(owned));
    }
    memra_keep(&first, release((memra_cache_own *)cache));
    return memra_kept(&first);
}
