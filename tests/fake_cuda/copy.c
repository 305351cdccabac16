// Copies and fills.
#include "fake.h"

// n bytes at ptr must lie in one live allocation of `device`, or one that it reaches (-1: of any).
static CUresult check_range(struct call *call, uint64_t ptr, uint64_t n, int device, const char *side) {
    struct block *block = block_find(ptr);
    if (!block)
        return fake_misuse(call, INVALID_VALUE, "%s 0x%llx is not in a live allocation", side, (unsigned long long)ptr);
    if (S.as_of && !queue_passed(block->born))
        return fake_misuse(call, INVALID_VALUE, "%s 0x%llx is used before its stream has reached the allocation", side,
                           (unsigned long long)ptr);
    if (n > block->ptr + block->size - ptr)
        return fake_misuse(call, INVALID_VALUE, "%s: %llu bytes at byte %llu of an allocation of %llu bytes", side,
                           (unsigned long long)n, (unsigned long long)(ptr - block->ptr), (unsigned long long)block->size);
    if (device >= 0 && !(S.device[device].primary && block_reachable(block, S.device[device].primary)))
        return fake_misuse(call, INVALID_VALUE, "%s is memory of device %d, the stream is of device %d", side,
                           block->context->device, device);
    return OK;
}

CUresult copy_check(struct call *call, const struct op *op) {
    CUresult code = OK;
    if (op->kind != OP_COPY_OUT) code = check_range(call, op->dst, op->bytes, op->dst_device, "destination");
    if (!code && (op->kind == OP_COPY || op->kind == OP_COPY_OUT))
        code = check_range(call, op->src, op->bytes, op->src_device, "source");
    if (!code && op->pinned)
        code = check_range(call, op->kind == OP_COPY_IN ? op->src : op->dst, op->bytes, -1, "pinned memory");
    if (!code && op->kind == OP_COPY && op->dst < op->src + op->bytes && op->src < op->dst + op->bytes)
        return fake_misuse(call, INVALID_VALUE, "source and destination overlap");
    return code;
}

static CUresult copy(struct call *call, struct stream *stream, uint64_t dst, int dst_device, uint64_t src,
                     int src_device, uint64_t n) {
    if (!n) return OK;
    struct op op = {.kind = OP_COPY, .dst = dst, .dst_device = dst_device, .src = src, .src_device = src_device,
                    .bytes = n};
    return fake_enqueue(call, stream, &op);
}

static CUresult copy_in(struct call *call, struct stream *stream, uint64_t dst, const void *src, uint64_t n) {
    if (!n) return OK;
    if (!src) return fake_misuse(call, INVALID_VALUE, "the host pointer is null");
    struct op op = {.kind = OP_COPY_IN, .dst = dst, .dst_device = stream->context->device, .src = (uintptr_t)src,
                    .bytes = n};
    return fake_enqueue(call, stream, &op);
}

static CUresult copy_out(struct call *call, struct stream *stream, void *dst, uint64_t src, uint64_t n) {
    if (!n) return OK;
    if (!dst) return fake_misuse(call, INVALID_VALUE, "the host pointer is null");
    struct op op = {.kind = OP_COPY_OUT, .dst = (uintptr_t)dst, .src = src, .src_device = stream->context->device,
                    .bytes = n};
    return fake_enqueue(call, stream, &op);
}

static CUresult fill(struct call *call, struct stream *stream, uint64_t dst, uint32_t value, uint32_t width, uint64_t n) {
    if (!n) return OK;
    if (dst % width) return fake_misuse(call, INVALID_VALUE, "0x%llx is not aligned to %u", (unsigned long long)dst, width);
    struct op op = {.kind = OP_FILL, .dst = dst, .dst_device = stream->context->device, .bytes = n * width,
                    .value = value, .width = width};
    return fake_enqueue(call, stream, &op);
}

#define STREAM(handle)     \
    struct stream *stream; \
    TRY(stream_resolve(&call, handle, &stream))
#define DEVICE stream->context->device

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, void *handle) {
    TRACED("cuMemcpyDtoDAsync", .stream = (uintptr_t)handle, .dst = dst, .src = src, .bytes = n);
    STREAM(handle);
    DONE(copy(&call, stream, dst, DEVICE, src, DEVICE, n));
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t n) {
    TRACED("cuMemcpyDtoD", .dst = dst, .src = src, .bytes = n);
    STREAM(NULL);
    DONE(copy(&call, stream, dst, DEVICE, src, DEVICE, n));
}

API CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, void *handle) {
    TRACED("cuMemcpyAsync", .stream = (uintptr_t)handle, .dst = dst, .src = src, .bytes = n);
    STREAM(handle);
    if (!block_find(src)) DONE(copy_in(&call, stream, dst, (void *)src, n));
    if (!block_find(dst)) DONE(copy_out(&call, stream, (void *)dst, src, n));
    DONE(copy(&call, stream, dst, DEVICE, src, DEVICE, n));
}

static CUresult copy_peer(struct call *call, struct stream *stream, CUdeviceptr dst, struct context *dst_context,
                          CUdeviceptr src, struct context *src_context, size_t n) {
    if (!object_find(dst_context, CONTEXT) || !object_find(src_context, CONTEXT))
        return fake_misuse(call, INVALID_CONTEXT, "no such context");
    if (dst_context->object.dead || src_context->object.dead) return CONTEXT_IS_DESTROYED;
    int device = stream->context->device;
    if (device != dst_context->device && device != src_context->device)
        return fake_misuse(call, INVALID_VALUE, "the stream is of device %d, which is neither side's", device);
    return copy(call, stream, dst, dst_context->device, src, src_context->device, n);
}

API CUresult cuMemcpyPeerAsync(CUdeviceptr dst, struct context *dst_context, CUdeviceptr src,
                               struct context *src_context, size_t n, void *handle) {
    TRACED("cuMemcpyPeerAsync", .stream = (uintptr_t)handle, .dst = dst, .src = src, .bytes = n);
    STREAM(handle);
    DONE(copy_peer(&call, stream, dst, dst_context, src, src_context, n));
}

API CUresult cuMemcpyPeer(CUdeviceptr dst, struct context *dst_context, CUdeviceptr src, struct context *src_context,
                          size_t n) {
    TRACED("cuMemcpyPeer", .dst = dst, .src = src, .bytes = n);
    STREAM(NULL);
    DONE(copy_peer(&call, stream, dst, dst_context, src, src_context, n));
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, void *handle) {
    TRACED("cuMemcpyHtoDAsync", .stream = (uintptr_t)handle, .dst = dst, .src = (uintptr_t)src, .bytes = n);
    STREAM(handle);
    DONE(copy_in(&call, stream, dst, src, n));
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t n) {
    TRACED("cuMemcpyHtoD", .dst = dst, .src = (uintptr_t)src, .bytes = n);
    STREAM(NULL);
    TRY(copy_in(&call, stream, dst, src, n));
    DONE(block_find((uintptr_t)src) ? queue_finish(stream) : OK); // pageable memory is staged and may arrive later
}

API CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, void *handle) {
    TRACED("cuMemcpyDtoHAsync", .stream = (uintptr_t)handle, .dst = (uintptr_t)dst, .src = src, .bytes = n);
    STREAM(handle);
    DONE(copy_out(&call, stream, dst, src, n));
}

API CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t n) {
    TRACED("cuMemcpyDtoH", .dst = (uintptr_t)dst, .src = src, .bytes = n);
    STREAM(NULL);
    TRY(copy_out(&call, stream, dst, src, n));
    DONE(queue_finish(stream));
}

API CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t n, void *handle) {
    TRACED("cuMemsetD8Async", .stream = (uintptr_t)handle, .dst = dst, .src = value, .bytes = n);
    STREAM(handle);
    DONE(fill(&call, stream, dst, value, 1, n));
}

API CUresult cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t n) {
    TRACED("cuMemsetD8", .dst = dst, .src = value, .bytes = n);
    STREAM(NULL);
    DONE(fill(&call, stream, dst, value, 1, n));
}

API CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned value, size_t n, void *handle) {
    TRACED("cuMemsetD32Async", .stream = (uintptr_t)handle, .dst = dst, .src = value, .bytes = 4 * n);
    STREAM(handle);
    DONE(fill(&call, stream, dst, value, 4, n));
}

API CUresult cuMemsetD32_v2(CUdeviceptr dst, unsigned value, size_t n) {
    TRACED("cuMemsetD32", .dst = dst, .src = value, .bytes = 4 * n);
    STREAM(NULL);
    DONE(fill(&call, stream, dst, value, 4, n));
}
