/* pool.h: the objects that the calls of one input have made, shared by draws.c and laws.c. */
#ifndef FUZZ_POOL_H
#define FUZZ_POOL_H

#include "world.h"

typedef struct pool {
    memra_device *devices[POOL];
    memra_device *closed;  /* the last one that was closed: its address */
    memra_cache *caches[POOL];
    memra_snapshot *snapshots[POOL];
    memra_graph *graphs[POOL];
    memra_plan *plans[POOL];
    uint64_t memory[POOL];
    memra_device *memory_of[POOL];
    uint64_t work;         /* WORK_BYTES of the first device */
    bool wild;             /* an address or size was drawn that is nobody's: the driver may see misuse */
    bool orphans;          /* a device was closed before what lived on it, or a driver call was made to fail */
} pool;
extern pool world;

void *scratch(size_t n_bytes);  /* a block of its own until the next call; of no bytes: an address that nothing is at */
void free_scratch(void);

extern const char *paths[];     /* the first of a file, the second of a folder, others of both and of neither */
extern int n_paths;
extern uint8_t *cubin;          /* a sound one */
extern size_t cubin_bytes;

#endif
