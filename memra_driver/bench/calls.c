/* Host time of calls as a program in C makes them: loops for the bench, which hands over functions and arguments.
 *
 * All return nanoseconds for all calls of `steps` steps, or -status of the first that failed. One step before is not
 * counted: it finds the processor's caches as Python left them. */
#define _POSIX_C_SOURCE 199309L
#include <stdint.h>
#include <time.h>

typedef struct bench_op {
    void (*op)(void);                          /* of the library, whatever its parameters are */
    int (*advance)(void *cache, int64_t rows); /* ends a step, uncounted; NULL where the operation may be repeated */
    void *cache;
    const int32_t *layers;
    const uint64_t *at; /* operands */
    int64_t rows;
    int32_t n_layers, steps;
    float eps, scale;
} bench_op;

typedef struct bench_launch {
    void *kernel;
    void **params;
    unsigned grid[3], block[3], shared_bytes;
} bench_launch;

typedef int (*launch_function)(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **params,
                               void **extra);

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

/* bench_name(o) calls o->op, whose parameters behind cache, layer and rows are those given. */
#define OPERATION(name, parameters, arguments)                                                       \
    int64_t bench_##name(const bench_op *o) {                                                        \
        int (*const op) parameters = (int(*) parameters)o->op;                                       \
        const uint64_t *const at = o->at;                                                            \
        int64_t spent = 0;                                                                           \
        for (int step = -1; step < o->steps; step++) {                                               \
            const int64_t begin = now();                                                             \
            for (int i = 0; i < o->n_layers; i++) {                                                  \
                const int status = op arguments;                                                     \
                if (status) return -status;                                                          \
            }                                                                                        \
            if (step >= 0) spent += now() - begin;                                                   \
            const int status = o->advance ? o->advance(o->cache, o->rows) : 0;                       \
            if (status) return -status;                                                              \
        }                                                                                            \
        return spent;                                                                                \
    }
#define FIRST_PARAMETERS void *cache, int32_t layer, int64_t rows
#define FIRST_ARGUMENTS o->cache, o->layers[i], o->rows
typedef uint64_t ptr;

OPERATION(append_kv, (FIRST_PARAMETERS, ptr k_rows, ptr v_rows), (FIRST_ARGUMENTS, at[0], at[1]))
OPERATION(attend, (FIRST_PARAMETERS, ptr q, ptr out, float scale, int32_t window),
          (FIRST_ARGUMENTS, at[0], at[1], o->scale, -1))
OPERATION(conv_update, (FIRST_PARAMETERS, ptr x, ptr w, ptr out), (FIRST_ARGUMENTS, at[0], at[1], at[2]))
OPERATION(gdn_prep, (FIRST_PARAMETERS, ptr conv_out, ptr alpha, ptr beta_raw, ptr dt_bias, ptr a, ptr q, ptr k, ptr v,
                     ptr g_log, ptr beta, float eps),
          (FIRST_ARGUMENTS, at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9], o->eps))
OPERATION(gdn_scan, (FIRST_PARAMETERS, ptr q, ptr k, ptr v, ptr g_log, ptr beta, ptr out, float scale),
          (FIRST_ARGUMENTS, at[0], at[1], at[2], at[3], at[4], at[5], o->scale))
OPERATION(recur_step, (FIRST_PARAMETERS, ptr x, ptr w, ptr alpha, ptr beta_raw, ptr dt_bias, ptr a, ptr out, float eps,
                       float scale),
          (FIRST_ARGUMENTS, at[0], at[1], at[2], at[3], at[4], at[5], at[6], o->eps, o->scale))

/* The body of a loop over launches; `call` makes the one at l. */
#define LAUNCHES(call)                                        \
    int64_t spent = 0;                                        \
    for (int step = -1; step < steps; step++) {               \
        const int64_t begin = now();                          \
        for (int i = 0; i < count; i++) {                     \
            const bench_launch *l = &each[i];                 \
            const int status = call;                          \
            if (status) return -status;                       \
        }                                                     \
        if (step >= 0) spent += now() - begin;                \
    }                                                         \
    return spent

int64_t bench_launches(launch_function launch, void *stream, const bench_launch *each, int count, int steps) {
    LAUNCHES(launch(l->kernel, l->grid[0], l->grid[1], l->grid[2], l->block[0], l->block[1], l->block[2], l->shared_bytes,
                    stream, l->params, 0));
}

/* CUlaunchAttribute and CUlaunchConfig. */
typedef struct attribute {
    int id;
    union { char bytes[64]; int allowed; uint64_t align; } value;
} attribute;

typedef struct config {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    attribute *attributes;
    unsigned n_attributes;
} config;

enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

/* The same by cuLaunchKernelEx; early: as launches that may begin before the one in front has ended. */
int64_t bench_launches_ex(int (*launch)(const config *, void *, void **, void **), void *stream, const bench_launch *each,
                          int count, int steps, int early) {
    attribute may_begin = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value.allowed = 1};
    LAUNCHES(launch(&(config){{l->grid[0], l->grid[1], l->grid[2]}, {l->block[0], l->block[1], l->block[2]},
                              l->shared_bytes, stream, &may_begin, early != 0}, l->kernel, l->params, 0));
}
