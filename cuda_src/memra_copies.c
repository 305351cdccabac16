/* memra_copies.c: many planes in few calls: copy_actions, keep_actions and zero_actions of place.py in C. */
#include "memra_internal.h"

#define ALIGN_BYTES 256u  /* what the planes of an arena are aligned to; the padding between two is nobody's */

static int by_dst(const void *a, const void *b) {
    const uint64_t x = ((const memra_copy *)a)->dst, y = ((const memra_copy *)b)->dst;
    return (x > y) - (x < y);
}

/* Sorts by destination, drops empty entries, and makes one of two that follow each other in an arena, on both sides
 * where they have two. */
static int32_t merge(bool has_arena, bool two_sided, memra_copy *entries, int32_t n) {
    int32_t kept = 0, sorted = 1;
    while (sorted < n && entries[sorted - 1].dst <= entries[sorted].dst) sorted++;
    if (sorted < n) qsort(entries, (size_t)n, sizeof *entries, by_dst); /* which takes longer than all the rest */
    for (int32_t i = 0; i < n; i++) {
        if (!entries[i].bytes) continue;
        memra_copy *last = kept ? &entries[kept - 1] : NULL;
        const uint64_t step = last ? (last->bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES : 0;
        const bool follows = has_arena && last && entries[i].dst == last->dst + step &&
                             (!two_sided || entries[i].src == last->src + step);
        if (follows)
            last->bytes = step + entries[i].bytes;
        else
            entries[kept++] = entries[i];
    }
    return kept;
}

int32_t memra_merge_copies(bool has_arena, memra_copy *entries, int32_t n) {
    return merge(has_arena, true, entries, n);
}

enum { MOST_COPIES = 2 }; /* more are one launch */

int memra_check_copies(const memra_device *device, bool has_arena, memra_copy *entries, int32_t n) {
    return merge(has_arena, true, entries, n) > MOST_COPIES ? memra_kernel_loaded(device, MEMRA_K_COPY_MANY) : MEMRA_OK;
}

int memra_copy_planes(memra_device *device, bool has_arena, memra_copy *entries, int32_t n, bool *done) {
    n = merge(has_arena, true, entries, n);
    if (n > MOST_COPIES) {
        MEMRA_TRY(memra_copy_table(device, entries, n));
        *done = true;
        return MEMRA_OK;
    }
    for (int32_t i = 0; i < n; i++) {
        MEMRA_TRY(memra_copy_bytes(device, entries[i].dst, entries[i].src, entries[i].bytes));
        *done = true;
    }
    return MEMRA_OK;
}

int memra_check_kept(const memra_device *device, bool has_arena, memra_copy *entries, int32_t n) {
    n = merge(has_arena, true, entries, n);
    return n ? memra_kernel_loaded(device, n > MOST_COPIES ? MEMRA_K_COPY_MANY : MEMRA_K_RESTORE) : MEMRA_OK;
}

int memra_keep_planes(memra_device *device, bool has_arena, memra_copy *entries, int32_t n, bool *done) {
    n = merge(has_arena, true, entries, n);
    if (n > MOST_COPIES) return memra_copy_planes(device, has_arena, entries, n, done);
    if (n == 0) return MEMRA_OK;
    const memra_copy none = {0, 0, 0}, *second = n > 1 ? &entries[1] : &none;
    MEMRA_TRY(memra_launch_restore(
        device, entries->src, entries->dst, (int64_t)entries->bytes, second->src, second->dst, (int64_t)second->bytes,
        0, 0, 0, 0, 0, 0, 0, 0, 0));
    *done = true;
    return MEMRA_OK;
}

int memra_clear_planes(memra_device *device, bool has_arena, memra_copy *entries, int32_t n, bool *done) {
    n = merge(has_arena, false, entries, n);
    for (int32_t i = 0; i < n; i++) {
        MEMRA_TRY(memra_clear(device, entries[i].dst, entries[i].bytes));
        *done = true;
    }
    return MEMRA_OK;
}
