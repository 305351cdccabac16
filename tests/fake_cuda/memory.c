// The table of live allocations, pointer questions, memory pools.
#include "fake.h"

// ---------------------------------------------------------------- the table of live blocks

static size_t first_after(uint64_t ptr) { // index of the first block that begins after ptr
    size_t low = 0, high = S.n_blocks;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (S.blocks[middle].ptr <= ptr) low = middle + 1;
        else high = middle;
    }
    return low;
}

// What is asked for behind a stream-ordered free may not touch the block, what was asked for before it still may.
static bool is_there(const struct block *block) { return !block->left || (S.as_of && S.as_of < block->left); }

struct block *block_touching(uint64_t ptr) {
    size_t i = first_after(ptr);
    if (!i) return NULL;
    struct block *block = &S.blocks[i - 1];
    return ptr - block->ptr <= block->size && is_there(block) ? block : NULL;
}

struct block *block_find(uint64_t ptr) {
    struct block *block = block_touching(ptr);
    return block && ptr - block->ptr < block->size ? block : NULL;
}

uint64_t memory_live(int device) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < S.n_blocks; i++)
        if (!S.blocks[i].host && !S.blocks[i].left && S.blocks[i].context->device == device) bytes += S.blocks[i].size;
    return bytes;
}

void check_guards(const char *after) {
    for (size_t i = 0; i < S.n_blocks; i++) block_check(&S.blocks[i], after);
}

static CUresult allocate(struct call *call, struct context *context, size_t size, bool pooled, bool host, uint64_t *out) {
    call->record.bytes = size;
    if (!size) return fake_misuse(call, INVALID_VALUE, "0 bytes asked for");
    if (!host) {
        uint64_t live = memory_live(context->device), total = S.device[context->device].total_memory;
        if (live > total || size > total - live) return call->record.code = OUT_OF_MEMORY;
    }
    struct block block = {.size = size, .context = context, .pooled = pooled, .host = host, .serial = ++S.serial};
    if (!block_alloc(&block)) return call->record.code = OUT_OF_MEMORY;
    if (S.n_blocks == S.room_blocks) {
        S.room_blocks = 2 * S.room_blocks + 256;
        S.blocks = realloc(S.blocks, S.room_blocks * sizeof *S.blocks);
    }
    size_t i = first_after(block.ptr);
    memmove(&S.blocks[i + 1], &S.blocks[i], (S.n_blocks - i) * sizeof *S.blocks);
    S.blocks[i] = block;
    S.n_blocks++;
    *out = call->record.dst = block.ptr;
    if (pooled) {
        struct pool *pool = &S.device[context->device].pool;
        uint64_t live = memory_live(context->device);
        if (live > pool->used_high) pool->used_high = live;
    }
    return OK;
}

static void remove_block(struct block *block) {
    block_release(block);
    size_t i = block - S.blocks;
    memmove(block, block + 1, (S.n_blocks - i - 1) * sizeof *S.blocks);
    S.n_blocks--;
}

void block_end(uint64_t ptr, const char *after) {
    struct block *block = &S.blocks[first_after(ptr) - 1];
    block_check(block, after);
    remove_block(block);
}

// stream: the free is ordered in it; null: it happens now, whatever still uses the memory.
static CUresult release(struct call *call, uint64_t ptr, bool host, struct stream *stream) {
    struct block *block = block_find(ptr);
    if (!block || block->ptr != ptr || block->host != host)
        return fake_misuse(call, INVALID_VALUE, "0x%llx is not the start of a live allocation (freed twice?)",
                           (unsigned long long)ptr);
    if (!host && block->context->device != call->record.device)
        return fake_misuse(call, INVALID_VALUE, "memory of device %d freed in a context of device %d",
                           block->context->device, call->record.device);
    call->record.bytes = block->size;
    if (stream && S.seed) {
        CUresult code = queue_add(call, stream, &(struct op){.kind = OP_FREE, .dst = ptr});
        if (!code) block->left = S.asked;
        return code;
    }
    block_end(ptr, call->record.call);
    return OK;
}

void context_release_memory(struct context *context) {
    for (size_t i = S.n_blocks; i-- > 0;)
        if (S.blocks[i].context == context) remove_block(&S.blocks[i]);
}

bool block_reachable(const struct block *block, const struct context *from) {
    if (block->host) return true;
    int owner = block->context->device;
    return block->pooled ? S.device[owner].pool.access[from->device] : from->peer[owner];
}

// ---------------------------------------------------------------- entry points

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size) {
    TRACED("cuMemAlloc", .bytes = size);
    struct context *context;
    TRY(context_current(&call, &context));
    DONE(allocate(&call, context, size, false, false, out));
}

API CUresult cuMemFree_v2(CUdeviceptr ptr) {
    TRACED("cuMemFree", .src = ptr);
    struct context *context;
    TRY(context_current(&call, &context));
    struct block *block = block_find(ptr);
    if (block && !block->pooled) (void)queue_finish_context(context); // as the driver does, but not for a pool's memory
    DONE(release(&call, ptr, false, NULL));
}

API CUresult cuMemAllocAsync(CUdeviceptr *out, size_t size, void *handle) {
    TRACED("cuMemAllocAsync", .stream = (uintptr_t)handle, .bytes = size);
    struct stream *stream;
    TRY(stream_resolve(&call, handle, &stream));
    TRY(capture_refuse(&call, stream));
    if (!S.device[stream->context->device].attribute[115]) DONE(NOT_SUPPORTED);
    TRY(allocate(&call, stream->context, size, true, false, out));
    if (S.seed) block_find(*out)->born = queue_moment(stream);
    DONE(OK);
}

API CUresult cuMemFreeAsync(CUdeviceptr ptr, void *handle) {
    TRACED("cuMemFreeAsync", .stream = (uintptr_t)handle, .src = ptr);
    struct stream *stream;
    TRY(stream_resolve(&call, handle, &stream));
    TRY(capture_refuse(&call, stream));
    DONE(release(&call, ptr, false, stream));
}

static CUresult host_alloc(struct call *call, void **out, size_t size) {
    struct context *context;
    uint64_t ptr = 0;
    CUresult code = context_current(call, &context);
    if (!code) code = allocate(call, context, size, false, true, &ptr);
    if (!code) *out = (void *)ptr;
    return code;
}

API CUresult cuMemAllocHost_v2(void **out, size_t size) {
    TRACED("cuMemAllocHost", .bytes = size);
    DONE(host_alloc(&call, out, size));
}

API CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    TRACED("cuMemHostAlloc", .bytes = size);
    (void)flags;
    DONE(host_alloc(&call, out, size));
}

API CUresult cuMemFreeHost(void *ptr) {
    TRACED("cuMemFreeHost", .src = (uintptr_t)ptr);
    DONE(release(&call, (uintptr_t)ptr, true, NULL));
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    QUERY("cuMemGetInfo");
    struct context *context;
    TRY(context_current(&call, &context));
    uint64_t live = memory_live(context->device);
    *total = S.device[context->device].total_memory;
    *free_bytes = live < *total ? *total - live : 0;
    DONE(OK);
}

// Answers one CUpointer_attribute; false when there is no such attribute.
static bool pointer_attribute(void *out, int attribute, const struct block *block, uint64_t ptr) {
    switch (attribute) {
    case 1: *(void **)out = block ? block->context : NULL; return true;
    case 2: *(unsigned *)out = !block ? 0 : block->host ? 1 : 2; return true;
    case 3: *(uint64_t *)out = block ? ptr : 0; return true;
    case 4: *(uint64_t *)out = block && block->host ? ptr : 0; return true;
    case 7: *(uint64_t *)out = block ? block->serial : 0; return true;
    case 8: *(unsigned *)out = 0; return true;
    case 9: *(int *)out = block ? block->context->device : -2; return true;
    case 11: *(uint64_t *)out = block ? block->ptr : 0; return true;
    case 12: *(size_t *)out = block ? block->size : 0; return true;
    case 13: *(unsigned *)out = block != NULL; return true;
    default: return false;
    }
}

API CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr ptr) {
    QUERY("cuPointerGetAttribute");
    struct block *block = block_find(ptr);
    if (!block) DONE(INVALID_VALUE); // what a driver says of memory that it does not know
    if (!pointer_attribute(out, attribute, block, ptr)) MISUSE(NOT_SUPPORTED, "attribute %d", attribute);
    DONE(OK);
}

API CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **out, CUdeviceptr ptr) {
    QUERY("cuPointerGetAttributes");
    struct block *block = block_find(ptr);
    for (unsigned i = 0; i < count; i++)
        if (!pointer_attribute(out[i], attributes[i], block, ptr)) MISUSE(NOT_SUPPORTED, "attribute %d", attributes[i]);
    DONE(OK);
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr ptr) {
    QUERY("cuMemGetAddressRange");
    struct block *block = block_find(ptr);
    if (!block) DONE(NOT_FOUND);
    if (base) *base = block->ptr;
    if (size) *size = block->size;
    DONE(OK);
}

// ---------------------------------------------------------------- pools

static CUresult get_pool(struct pool **out, CUdevice device) {
    if (device < 0 || device >= S.device_count) return INVALID_DEVICE;
    *out = &S.device[device].pool;
    return OK;
}

API CUresult cuDeviceGetDefaultMemPool(struct pool **out, CUdevice device) {
    QUERY("cuDeviceGetDefaultMemPool");
    DONE(get_pool(out, device));
}

API CUresult cuDeviceGetMemPool(struct pool **out, CUdevice device) {
    QUERY("cuDeviceGetMemPool");
    DONE(get_pool(out, device));
}

API CUresult cuMemPoolGetAttribute(struct pool *pool, int attribute, void *out) {
    QUERY("cuMemPoolGetAttribute");
    if (!object_find(pool, POOL)) MISUSE(INVALID_VALUE, "no such pool: %p", (void *)pool);
    uint64_t live = memory_live(pool->device);
    switch (attribute) {
    case 1: case 2: case 3: *(int *)out = 1; DONE(OK);
    case 4: *(uint64_t *)out = pool->release_threshold; DONE(OK);
    case 5: case 7: *(uint64_t *)out = live; DONE(OK);
    case 6: case 8: *(uint64_t *)out = pool->used_high; DONE(OK);
    default: MISUSE(INVALID_VALUE, "no pool attribute %d", attribute);
    }
}

API CUresult cuMemPoolSetAttribute(struct pool *pool, int attribute, void *value) {
    TRACED("cuMemPoolSetAttribute", .dst = (uintptr_t)pool, .src = (uint64_t)attribute);
    if (!object_find(pool, POOL)) MISUSE(INVALID_VALUE, "no such pool: %p", (void *)pool);
    if (attribute == 4) pool->release_threshold = *(uint64_t *)value;
    if (attribute == 6 || attribute == 8) pool->used_high = memory_live(pool->device);
    DONE(attribute >= 1 && attribute <= 8 ? OK : INVALID_VALUE);
}

struct access { int location_type, location_id; int flags; }; // CUmemAccessDesc

API CUresult cuMemPoolSetAccess(struct pool *pool, const struct access *access, size_t count) {
    TRACED("cuMemPoolSetAccess", .dst = (uintptr_t)pool);
    if (!object_find(pool, POOL)) MISUSE(INVALID_VALUE, "no such pool: %p", (void *)pool);
    for (size_t i = 0; i < count; i++) {
        if (access[i].location_type != 1 || access[i].location_id < 0 || access[i].location_id >= S.device_count)
            MISUSE(INVALID_VALUE, "access for location (%d, %d)", access[i].location_type, access[i].location_id);
        if (access[i].location_id != pool->device) pool->access[access[i].location_id] = access[i].flags == 3;
    }
    DONE(OK);
}

API CUresult cuMemPoolGetAccess(int *flags, struct pool *pool, const struct access *location) {
    QUERY("cuMemPoolGetAccess");
    if (!object_find(pool, POOL)) MISUSE(INVALID_VALUE, "no such pool: %p", (void *)pool);
    if (location->location_id < 0 || location->location_id >= S.device_count) DONE(INVALID_VALUE);
    *flags = pool->access[location->location_id] ? 3 : 0;
    DONE(OK);
}

API CUresult cuMemPoolTrimTo(struct pool *pool, size_t keep) {
    TRACED("cuMemPoolTrimTo", .dst = (uintptr_t)pool, .bytes = keep);
    DONE(object_find(pool, POOL) ? OK : INVALID_VALUE);
}
