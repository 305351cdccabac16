// What surrounds an allocation, and what happens to its bytes at birth and death.
//
// A block is  guard | size bytes, 256-aligned | guard. Fresh bytes are 0xA5, freed ones 0xDD; freed blocks rest in
// a quarantine for a while, so that a write after free is seen. Under MEMRA_CPU_SANITIZE all of that is left to the
// address sanitizer, whose red zone then begins at byte `size`.
#include "fake.h"

enum { FRESH = 0xA5, FREED = 0xDD };

#ifdef MEMRA_CPU_SANITIZE

bool block_alloc(struct block *block) {
    void *raw = NULL;
    if (posix_memalign(&raw, 256, block->size)) return false;
    memset(raw, FRESH, block->size);
    block->raw = raw;
    block->ptr = (uintptr_t)raw;
    return true;
}

void block_release(const struct block *block) { free(block->raw); }
void block_check(const struct block *block, const char *after) { (void)block, (void)after; }
void quarantine_check(const char *after) { (void)after; }

#else

enum { GUARD = 256, RESTED = 4096 };
#define QUARANTINE_BYTES (64ull << 20)

static struct block rested[RESTED]; // a ring
static size_t first, count;
static uint64_t rested_bytes;

static unsigned char guard_byte(size_t i) { return 0xC0 | (i & 15); }

static void write_guard(char *guard) {
    for (size_t i = 0; i < GUARD; i++) guard[i] = (char)guard_byte(i);
}

static size_t guard_damage(const char *guard) { // offset of the first changed byte, GUARD when intact
    size_t i = 0;
    while (i < GUARD && (unsigned char)guard[i] == guard_byte(i)) i++;
    return i;
}

bool block_alloc(struct block *block) {
    block->raw = aligned_alloc(256, (block->size + 255) / 256 * 256 + 2 * GUARD);
    if (!block->raw) return false;
    block->ptr = (uintptr_t)block->raw + GUARD;
    write_guard(block->raw);
    memset(block->raw + GUARD, FRESH, block->size);
    write_guard(block->raw + GUARD + block->size);
    return true;
}

void block_check(const struct block *block, const char *after) {
    char *end = (char *)block->ptr + block->size;
    size_t before = guard_damage(block->raw), behind = guard_damage(end);
    if (before < GUARD) {
        fake_note(after, "%zu bytes before an allocation of %llu bytes were written", GUARD - before,
                  (unsigned long long)block->size);
        write_guard(block->raw);
    }
    if (behind < GUARD) {
        fake_note(after, "byte %llu of an allocation of %llu bytes was written",
                  (unsigned long long)(block->size + behind), (unsigned long long)block->size);
        write_guard(end);
    }
}

static void check_rested(const struct block *block, const char *after) {
    const unsigned char *bytes = (unsigned char *)block->ptr;
    if (bytes[0] == FREED && !memcmp(bytes, bytes + 1, block->size - 1)) return; // as fast as memory is read
    uint64_t i = 0;
    while (bytes[i] == FREED) i++;
    fake_note(after, "byte %llu of a freed allocation of %llu bytes was written", (unsigned long long)i,
              (unsigned long long)block->size);
    memset((void *)block->ptr, FREED, block->size);
}

static void evict(void) {
    struct block *oldest = &rested[first];
    check_rested(oldest, "quarantine");
    free(oldest->raw);
    rested_bytes -= oldest->size;
    first = (first + 1) % RESTED;
    count--;
}

void block_release(const struct block *block) {
    memset((void *)block->ptr, FREED, block->size);
    while (count && (count == RESTED || rested_bytes + block->size > QUARANTINE_BYTES)) evict();
    rested[(first + count++) % RESTED] = *block;
    rested_bytes += block->size;
}

void quarantine_check(const char *after) {
    for (size_t i = 0; i < count; i++) check_rested(&rested[(first + i) % RESTED], after);
}

#endif
