/* world.h: what a fuzzed call sequence works on, and how bytes become arguments.
 *
 * An input is a string of bytes: two that set the world up, then calls. A call is the number of the function, a byte
 * that from 0xf0 on forces one pointer to NULL, the number of bytes for its arguments (below 64), and these. A byte of
 * 0 always stands for the sound value, and so does the end of the string, so that a short input is a sound call. Every
 * array is a block of its own of exactly as many entries as its count promises, so that a sanitizer sees each step
 * beyond; where a count promises more than MOST, the block has MOST: no function may read so far without having refused
 * the count.
 */
#ifndef FUZZ_WORLD_H
#define FUZZ_WORLD_H

#include "memra_driver.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    POOL = 6,             /* objects of a kind that are kept at most */
    MOST = 65537,         /* entries of an array whose count promises more: one for each layer that can be, and one */
    MAX_FUNCTIONS = 128,
    MAX_POINTERS = 8,     /* parameters of a function that are pointers */
    N_LAYER = 4,
    MAX_CTX = 64,
    WORK_BYTES = 1 << 16, /* device memory that arguments lie in */
    DEVICE_BYTES = 24 << 20
};

/* What the runs of all inputs have done, for who asks. */
typedef struct function_tally {
    uint64_t calls, ok, refused, failed; /* failed: the driver's errors, and no memory */
    uint64_t nulls[MAX_POINTERS];
} function_tally;
typedef struct tally {
    uint64_t inputs, calls;
    function_tally functions[MAX_FUNCTIONS];
} tally;
extern tally *fuzz_tally;
extern bool fuzz_tells; /* each call and what came of it, on stderr */

typedef struct input {
    const uint8_t *at, *end;
    int function;      /* of the call that is being made */
    int forced_null;   /* number of the pointer that is NULL; -1: none */
    int pointer, address; /* how many it has drawn */
    bool nulled;       /* the pointer that is forced was drawn */
} input;

/* ---- Scalars ---- */

uint8_t draw_byte(input *in);
int64_t draw_int(input *in, int64_t sound);
int32_t draw_int32(input *in, int32_t sound);
int64_t standing_rows(void); /* of layer 1 of the first cache there is */
float draw_float(input *in);
uint64_t draw_address(input *in);
uint64_t draw_bytes(input *in);  /* a size in bytes */

/* ---- Pointers; each counts as one that can be forced to NULL ---- */

memra_device *draw_device(input *in);
memra_cache *draw_cache(input *in);
memra_snapshot *draw_snapshot(input *in);
memra_graph *draw_graph(input *in);
memra_plan *draw_plan(input *in);
memra_config *draw_config(input *in);
memra_policy *draw_policy(input *in);
memra_options *draw_options(input *in);
memra_device_options *draw_device_options(input *in);
memra_device **draw_devices(input *in, int64_t n);
int32_t *draw_fence(input *in, int64_t n_stages);
int32_t *draw_placement(input *in, int64_t n_stages);
int32_t *draw_layer_ids(input *in, int64_t n);
memra_copy *draw_entries(input *in, int64_t n);
uint8_t *draw_host(input *in, uint64_t n_bytes);
uint8_t *draw_cubin(input *in, uint64_t *n_bytes);
const char *draw_path(input *in, bool folder);
void *draw_out(input *in, size_t n_bytes);  /* room for an answer, filled with a pattern */

/* ---- What a call is held to ---- */

void end_value(input *in);                        /* a function without a status */
void end_status(input *in, int status, bool null_is_sound);
/* An answer: written on success, else untouched or empty. */
void check_out(const char *name, int status, const void *out, size_t n_bytes);
_Noreturn void broken(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- What a call made or ended ---- */

void keep_device(memra_device *const *made, int status);
void keep_cache(memra_cache *const *made, int status);
void keep_snapshot(memra_snapshot *const *made, int status);
void keep_graph(memra_graph *const *made, int status);
void keep_plan(memra_plan *const *made, int status);
void keep_memory(const memra_device *device, const uint64_t *ptr, int status);
void drop_device(const memra_device *ended, int status);
void drop_cache(const memra_cache *ended, int status);
void drop_snapshot(const memra_snapshot *ended, int status);
void drop_graph(const memra_graph *ended, int status);
void drop_plan(const memra_plan *ended);
void drop_memory(const memra_device *device, uint64_t ptr, int status);

/* ---- Generated from memra_api.h by tests/cfuzz.py ---- */

typedef struct function {
    const char *name;
    void (*call)(input *in);
    int n_pointers;
    const char *pointers[MAX_POINTERS];
    bool may_touch, may_change; /* a refusal may come behind driver calls, and behind changes */
} function;
extern const function functions[];
extern const int n_functions;
extern const char *const kernel_names[];
extern const int n_kernel_names;

#endif
