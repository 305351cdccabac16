/* memra_internal.h: what the files of libmemra_driver.so share. Not installed for users. */
#ifndef MEMRA_INTERNAL_H
#define MEMRA_INTERNAL_H

#include "memra_driver.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* ---- Errors (memra_error.c) ---- */

/* Keeps the sentence for memra_last_error and returns status: `return memra_fail(MEMRA_ERR_STATE, "...", ...)`. */
int memra_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
void memra_fail_more(const char *more);  /* goes behind the sentence of a failure that is passed on */

/* The first failure of several calls of which none keeps the next one from being made. What went with its context (a
 * driver that is at its end, a destroyed context) is none. */
typedef struct memra_failure {
    int status;
    int32_t driver_code;
    char sentence[1024];
} memra_failure;

void memra_keep(memra_failure *first, int status);
void memra_keep_any(memra_failure *first, int status);  /* that one as well, where nothing comes to an end */
int memra_kept(const memra_failure *first);  /* its status; sentence and driver's code are the last ones again */
int memra_fail_driver(const char *call, int code);  /* MEMRA_ERR_OUT_OF_MEMORY for code 2, else MEMRA_ERR_DRIVER */
int memra_check_size(const char *type, uint32_t found, size_t expected);  /* MEMRA_ERR_ABI where they differ */
#define MEMRA_TRY(call)                    \
    do {                                   \
        const int status_ = (call);        \
        if (status_ != MEMRA_OK) return status_; \
    } while (0)

/* ---- The CUDA driver (memra_cuda.c) ---- */

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUlaunchAttribute {
    int id;
    union { char bytes[64]; int allowed; uint64_t align; } value;
} CUlaunchAttribute;
typedef struct CUlaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned n_attributes;
} CUlaunchConfig;

/* name, the version of the prototype that is asked for, parameters */
#define MEMRA_CUDA_FUNCTIONS(F)                                                                                      \
    F(cuInit, 2000, (unsigned flags))                                                                                \
    F(cuDriverGetVersion, 2020, (int *version))                                                                      \
    F(cuDeviceGet, 2000, (CUdevice * device, int ordinal))                                                           \
    F(cuDeviceGetCount, 2000, (int *count))                                                                          \
    F(cuDeviceGetAttribute, 2000, (int *value, int attribute, CUdevice device))                                      \
    F(cuDevicePrimaryCtxRetain, 7000, (CUcontext * context, CUdevice device))                                        \
    F(cuDevicePrimaryCtxRelease, 11000, (CUdevice device))                                                           \
    F(cuCtxGetCurrent, 4000, (CUcontext * context))                                                                  \
    F(cuCtxSetCurrent, 4000, (CUcontext context))                                                                    \
    F(cuCtxGetDevice, 2000, (CUdevice * device))                                                                     \
    F(cuCtxGetId, 12000, (CUcontext context, unsigned long long *id))                                                \
    F(cuStreamCreate, 2000, (CUstream * stream, unsigned flags))                                                     \
    F(cuStreamDestroy, 4000, (CUstream stream))                                                                      \
    F(cuStreamSynchronize, 2000, (CUstream stream))                                                                  \
    F(cuStreamGetCtx, 9020, (CUstream stream, CUcontext * context))                                                  \
    F(cuStreamIsCapturing, 10000, (CUstream stream, int *status))                                                    \
    F(cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned flags))                                     \
    F(cuEventCreate, 2000, (CUevent * event, unsigned flags))                                                        \
    F(cuEventRecord, 2000, (CUevent event, CUstream stream))                                                         \
    F(cuEventDestroy, 4000, (CUevent event))                                                                         \
    F(cuStreamBeginCapture, 10010, (CUstream stream, int mode))                                                      \
    F(cuStreamEndCapture, 10000, (CUstream stream, CUgraph * graph))                                                 \
    F(cuGraphInstantiateWithFlags, 11040, (CUgraphExec * exec, CUgraph graph, unsigned long long flags))             \
    F(cuGraphUpload, 11010, (CUgraphExec exec, CUstream stream))                                                     \
    F(cuGraphLaunch, 10000, (CUgraphExec exec, CUstream stream))                                                     \
    F(cuGraphExecDestroy, 10000, (CUgraphExec exec))                                                                 \
    F(cuGraphDestroy, 10000, (CUgraph graph))                                                                        \
    F(cuMemGetInfo, 3020, (size_t *available, size_t *total))                                                        \
    F(cuMemAlloc, 3020, (uint64_t * ptr, size_t n_bytes))                                                            \
    F(cuMemFree, 3020, (uint64_t ptr))                                                                               \
    F(cuMemAllocAsync, 11020, (uint64_t * ptr, size_t n_bytes, CUstream stream))                                     \
    F(cuMemFreeAsync, 11020, (uint64_t ptr, CUstream stream))                                                        \
    F(cuMemsetD8Async, 3020, (uint64_t dst, unsigned char value, size_t n_bytes, CUstream stream))                   \
    F(cuMemcpyDtoDAsync, 3020, (uint64_t dst, uint64_t src, size_t n_bytes, CUstream stream))                        \
    F(cuMemcpyPeerAsync, 4000,                                                                                       \
      (uint64_t dst, CUcontext dst_context, uint64_t src, CUcontext src_context, size_t n_bytes, CUstream stream))   \
    F(cuMemcpyHtoDAsync, 3020, (uint64_t dst, const void *src, size_t n_bytes, CUstream stream))                     \
    F(cuMemcpyDtoHAsync, 3020, (void *dst, uint64_t src, size_t n_bytes, CUstream stream))                           \
    F(cuDeviceGetDefaultMemPool, 11020, (void **pool, CUdevice device))                                              \
    F(cuMemPoolGetAttribute, 11020, (void *pool, int attribute, void *value))                                        \
    F(cuMemPoolSetAttribute, 11020, (void *pool, int attribute, void *value))                                        \
    F(cuMemPoolTrimTo, 11020, (void *pool, size_t keep))                                                             \
    F(cuLibraryLoadData, 12000,                                                                                      \
      (CUlibrary * library, const void *code, int *jit_options, void **jit_values, unsigned n_jit, int *options,     \
       void **values, unsigned n))                                                                                   \
    F(cuLibraryUnload, 12000, (CUlibrary library))                                                                   \
    F(cuLibraryGetKernel, 12000, (CUkernel * kernel, CUlibrary library, const char *name))                           \
    F(cuKernelSetAttribute, 12000, (int attribute, int value, CUkernel kernel, CUdevice device))                     \
    F(cuKernelGetParamInfo, 12040, (CUkernel kernel, size_t index, size_t *offset, size_t *n_bytes))                 \
    F(cuLaunchKernelEx, 11060, (const CUlaunchConfig *config, CUkernel kernel, void **parameters, void **extra))     \
    F(cuGetErrorName, 6000, (CUresult code, const char **name))                                                      \
    F(cuGetErrorString, 6000, (CUresult code, const char **text))

#define MEMRA_CUDA_POINTER(name, version, parameters) CUresult(*name) parameters;
typedef struct memra_cuda {
    MEMRA_CUDA_FUNCTIONS(MEMRA_CUDA_POINTER)
} memra_cuda;
#undef MEMRA_CUDA_POINTER

/* The driver's functions, loaded once; NULL after a failure, which memra_cuda_load reported. A function that this
 * driver lacks is NULL and memra_cuda_load names it, unless the library can do without (cuGetErrorName and the like). */
extern memra_cuda memra_cu;
int memra_cuda_load(void);
int memra_check_fork(void);  /* refused in a child of a process that had used the driver */
/* memra_cu.f(...) as a status: `MEMRA_TRY(MEMRA_CU(cuMemFree, (ptr)))`. */
#define MEMRA_CU(f, arguments) memra_cuda_status(#f "()", memra_cu.f arguments)
int memra_cuda_status(const char *call, CUresult code);

/* ---- Devices (memra_device.c) and kernels (memra_kernels.c) ---- */

enum {
    MEMRA_FIXED_Q8 = 8, MEMRA_FIXED_FP8 = 7,  /* entries of attend_pipe for a pair of formats, by that of K, */
    MEMRA_FOLDS = 3,                          /* and how many more for folds, as many as have 8 columns */
    MEMRA_FIXED = 3 * (MEMRA_FIXED_Q8 + MEMRA_FIXED_FP8 + 2 * MEMRA_FOLDS)
};
enum memra_kernel {
    MEMRA_K_APPEND_KV, MEMRA_K_DEQUANT_KV, MEMRA_K_CONV_UPDATE, MEMRA_K_CONV_RING_REBUILD, MEMRA_K_GDN_PREP,
    MEMRA_K_GDN_SCAN, MEMRA_K_RECUR_STEP_32, MEMRA_K_RECUR_STEP_64, MEMRA_K_RECUR_STEP_128, MEMRA_K_RECUR_STEP_256,
    MEMRA_K_SET_COUNTERS, MEMRA_K_RESTORE, MEMRA_K_COMMIT_COUNTERS, MEMRA_K_ADVANCE_BATCH, MEMRA_K_COPY_MANY,
    MEMRA_K_COPY_ROWS,
    MEMRA_K_ATTEND_64, MEMRA_K_ATTEND_128, MEMRA_K_ATTEND_192, MEMRA_K_ATTEND_256,
    MEMRA_K_ATTEND_512, MEMRA_K_ATTEND_64_WIDE, MEMRA_K_ATTEND_128_WIDE, MEMRA_K_ATTEND_192_WIDE,
    MEMRA_K_ATTEND_256_WIDE, MEMRA_K_ATTEND_PIPE_64_8, MEMRA_K_ATTEND_PIPE_64_16, MEMRA_K_ATTEND_PIPE_64_32,
    MEMRA_K_ATTEND_PIPE_128_8, MEMRA_K_ATTEND_PIPE_128_16, MEMRA_K_ATTEND_PIPE_128_24, MEMRA_K_ATTEND_PIPE_256_8,
    MEMRA_K_ATTEND_PIPE_FOLDS,  /* the first of MEMRA_FOLDS, */
    MEMRA_K_ATTEND_PIPE_FIXED = MEMRA_K_ATTEND_PIPE_FOLDS + MEMRA_FOLDS,  /* and of MEMRA_FIXED: see memra_kernels.c */
    MEMRA_K_ATTEND_COMBINE = MEMRA_K_ATTEND_PIPE_FIXED + MEMRA_FIXED,
    MEMRA_N_KERNELS
};
extern const char *const memra_kernel_names[MEMRA_N_KERNELS];
/* After loading: refused where its parameters are others than ours; attend gets the shared memory that it needs. */
int memra_kernel_prepare(enum memra_kernel k, CUkernel kernel, CUdevice device);
bool memra_kernel_serves(enum memra_kernel k, int32_t arch);  /* false: it works on another architecture only */
enum { MEMRA_COPIES_MOST = INT32_MAX / 64 }; /* entries that one launch of copy_many takes: each has 64 blocks */
int memra_kernel_loaded(const memra_device *device, enum memra_kernel k);  /* MEMRA_ERR_UNSUPPORTED where it is not */

typedef struct memra_scratch {  /* attention's partial sums; older, smaller buffers stay since graphs hold them */
    struct memra_scratch *next;
    uint64_t ptr;
    uint64_t n_bytes;
} memra_scratch;

struct memra_device {
    uint64_t handle;  /* unique in the process; memra_cache_device.handle names it */
    int32_t ordinal;
    CUdevice device;
    CUcontext context;
    unsigned long long context_id; /* no other context of the process ever has it */
    CUstream stream;
    bool owns_context, owns_stream, has_arena, has_pools;
    int32_t arch;
    bool early;  /* a kernel may be started before the one in front of it has ended */
    CUlibrary libraries[MEMRA_N_KERNELS];  /* each was loaded for a kernel that no other has */
    int32_t n_libraries;
    CUkernel kernels[MEMRA_N_KERNELS];
    memra_scratch *scratch;
    uint64_t table;        /* the entries of the last copy table, on the device and here; has room for more */
    uint64_t table_bytes;
    memra_copy *entries;
    int32_t n_entries;
    uint64_t count;        /* one i32: a count that another device knows; 0: not asked for yet */
    struct memra_graph *recording;  /* the capture that is open */
    struct memra_graph *graphs;     /* all that were recorded on it and are not closed */
    struct memra_device *next;      /* in the registry of open devices */
};

/* The open device with this handle, or NULL. */
memra_device *memra_device_find(uint64_t handle);
/* Binds the device's context to this thread; refused in a forked child and for a NULL device. */
int memra_device_enter(memra_device *device);
/* The same, but for a device that MEMRA_ENTERED names: the driver is not asked twice in one operation. */
int memra_device_enter_again(memra_device *device);
extern _Thread_local const memra_device *memra_entered;
/* Runs `launch` without asking the driver again about `device`, which this thread has just entered; NULL: it asks. */
#define MEMRA_ENTERED(device, launch) (memra_entered = (device), memra_leave(launch))
static inline int memra_leave(int status) {
    memra_entered = NULL;
    return status;
}
/* Refused while a capture is open on the device's stream, the library's or anybody's. */
int memra_check_no_capture(const memra_device *device, const char *what);
/* False where somebody destroyed its context: nothing of it can be freed, nor needs to be. Where the driver does not say,
 * memra_device_look fails, and both take it for alive. */
int memra_device_look(const memra_device *device, bool *alive);
bool memra_device_is_alive(const memra_device *device);
/* Frees what lives on a device, unless that is closed (NULL) or lost: nobody can free what it had. */
void memra_device_give_back(memra_device *device, uint64_t ptr, memra_failure *first);
/* The three work on a device that was entered. */
int memra_device_free(const memra_device *device, uint64_t ptr);  /* without memory pools: waits for nothing */
int memra_device_table(memra_device *device, int32_t n);  /* room for a copy table of n entries */
/* The i32 at `count` on device `from`, on device `to`, in the order of both streams; good until the next call. */
int memra_count_beside(memra_device *from, uint64_t count, memra_device *to, uint64_t *found);
/* Room for attention's partial sums; refused while a capture is open and a larger buffer would be needed. */
int memra_device_scratch(memra_device *device, uint64_t n_bytes, uint64_t *ptr);

/* ---- Models and plans (memra_config.c, memra_geometry.c, memra_plan.c): config.py, options.py, plan.py in C ---- */

/* Of a config that memra_check_config passed, and a layer that it has. */
int memra_check_config(const memra_config *config);
int32_t memra_n_trunk(const memra_config *config);               /* layers before the trailing MTP blocks */
bool memra_attends(const memra_config *config, int32_t il);      /* false: it is recurrent */
bool memra_is_windowed(const memra_config *config, int32_t il);
uint32_t memra_window(const memra_config *config, int32_t il);   /* tokens; 0: it sees all */
uint32_t memra_heads(const memra_config *config, int32_t il);    /* query heads */
uint32_t memra_kv_heads(const memra_config *config, int32_t il);
void memra_head_dims(const memra_config *config, int32_t il, uint32_t dims[2]);  /* of K, of V */
bool memra_owns_kv(const memra_config *config, int32_t il);
int32_t memra_kv_source(const memra_config *config, int32_t il);  /* -1: it reads no K/V, or nobody owns any */
uint64_t memra_conv_dim(const memra_config *config);              /* UINT64_MAX where it is more than that */
int memra_check_policy(const memra_policy *policy);
int memra_check_options(const memra_options *options);
int64_t memra_block_bytes(int32_t format);

enum memra_plane_id {  /* rows of memra_plane_table */
    MEMRA_P_K, MEMRA_P_V, MEMRA_P_LEN_D, MEMRA_P_CONV_STATE, MEMRA_P_SSM_STATE, MEMRA_P_SSM_STATE_ALT, MEMRA_P_POS_D,
    MEMRA_P_HEALTH, MEMRA_P_TAPE, MEMRA_P_LOGITS, MEMRA_P_TAPS, MEMRA_N_PLANES
};
typedef struct memra_planned {
    enum memra_plane_id plane;
    int32_t section;  /* orders the arena */
    int32_t layer;    /* -1: of the device */
    int32_t device;
    int64_t len, n_bytes, offset;
} memra_planned;

/* What memra_plan_new makes: `plan` is its first field. */
typedef struct memra_plan_own {
    memra_plan plan;
    const memra_config *config;  /* the caller's: not for use behind the call that made the plan */
    int64_t max_ctx;
    memra_policy policy;
    memra_options options;
    memra_planned *planes;  /* the rows without the padding, in the order of the walk */
    int64_t n_planes;
} memra_plan_own;
int memra_check_fence(const memra_config *config, const int32_t *fence, int32_t n_stages);
int memra_check_placement(const int32_t *placement, int32_t n_stages);
int memra_check_geometry(const memra_plan_own *own);
bool memra_plan_is_mtp(const memra_plan_own *own, int32_t il);
bool memra_plan_has_kv(const memra_plan_own *own, int32_t il);
bool memra_plan_has_state(const memra_plan_own *own, int32_t il);
int32_t memra_plan_kv_source(const memra_plan_own *own, int32_t il);
void memra_plan_formats(const memra_plan_own *own, int32_t il, int32_t formats[2]);
void memra_plan_kv_dims(const memra_plan_own *own, int32_t il, int64_t dims[2]);
void memra_plan_tok_bytes(const memra_plan_own *own, int32_t il, int64_t n_bytes[2]);

/* ---- Caches (memra_cache.c, memra_bind.c, memra_rules.c) ---- */

/* A cache that the library made: `cache` is its first field, so that the two are one address. */
typedef struct memra_cache_own {
    memra_cache cache;
    uint64_t *allocations;  /* what is to be freed, by device */
    int32_t *allocated_on;  /* index into cache.devices */
    int64_t n_allocations;
} memra_cache_own;

/* Rules: each is a refusal or MEMRA_OK, and changes nothing. `what` begins the sentence. */
int memra_check_abi(const memra_cache *cache, const char *what);
int memra_check_cache(const memra_cache *cache, const char *what);  /* of this ABI, open, on open devices, not forked */
int memra_check_state(const memra_cache *cache, const char *what, uint32_t allowed);  /* bits MEMRA_IN(state) */
int memra_check_settled(memra_cache *cache, const char *what);  /* ready, and no step, round or capture open */
int memra_check_steppable(const memra_cache *cache, const char *what);
int memra_check_not_recording(const memra_cache *cache, const char *what);
int memra_check_recording(memra_cache *cache, const char *what);  /* in a capture: the graph learns of the cache */
int memra_check_readable(memra_cache *cache, const char *what);   /* an operation that changes nothing */
int memra_check_replay(const memra_cache *cache, const char *what, int64_t rows);
int memra_check_length(const memra_cache *cache, const char *name, int64_t value);
int memra_check_layer_length(const memra_cache *cache, int64_t il);  /* of a layer that has K/V */
int memra_check_lengths(const memra_cache *cache);
int memra_check_replayable(const memra_cache *cache, const char *what, int64_t need);
int memra_check_not_ahead(const memra_cache *cache, int32_t il);
int memra_check_not_behind(const memra_cache *cache, int32_t il);
#define MEMRA_IN(state) (1u << (state))

/* Layer il, of the kind asked for; a sentence otherwise. */
int memra_kv_of(const memra_cache *cache, int32_t il, memra_kv_layer **layer);
int memra_recur_of(const memra_cache *cache, int32_t il, memra_recur_layer **layer);

/* Memory of an argument: not null, 4-byte aligned, and what is written shares nothing with anything else. */
typedef struct memra_range {
    const char *name;
    uint64_t ptr;
    uint64_t n_bytes;
} memra_range;
int memra_check_rows(int64_t rows);
int memra_range_of(const char *name, uint64_t ptr, int64_t rows, int64_t columns, int32_t item_bytes, memra_range *range);
int memra_check_ranges(const memra_range *outputs, int32_t n_outputs, const memra_range *inputs, int32_t n_inputs);

/* One mutating operation of a step: checked before its launch, noted after it. */
int memra_step_check(memra_cache *cache, int32_t il, uint32_t op, int64_t rows);
void memra_step_done(memra_cache *cache, int32_t il, uint32_t op, int64_t rows);

/* The device of memra_cache.devices[d]; after memra_check_cache. */
memra_device *memra_device_at(const memra_cache *cache, int32_t d);
int32_t memra_last_device(const memra_cache *cache);  /* index of the last layer's, where logits live */
struct memra_graph *memra_recording(const memra_cache *cache);
bool memra_device_clock(const memra_cache *cache);  /* kernels must take the position from pos_d */
void memra_end_step(memra_cache *cache, int64_t pos);
void memra_swap_states(memra_recur_layer *layer);
void memra_taint(memra_cache *cache);
void memra_give_up(memra_cache *cache, int64_t stands);
void memra_drop_logits_above(memra_cache *cache, int64_t stands);
void memra_keep_logits(memra_cache *cache, int64_t at);  /* -1: forgotten */
void memra_unsettle(memra_cache *cache, int64_t since);
void memra_drop_unsure_logits(memra_cache *cache);
int memra_strict_health(memra_cache *cache, memra_health *health);  /* empty unless strict */
int memra_check_strict(const memra_health *health);

/* ---- What changes a cache in several calls of the driver. *done: whether one of them was made already; where a later one
 * fails the cache is tainted: `return memra_end(cache, &done, status)`. ---- */

int memra_end(memra_cache *cache, const bool *done, int status);
/* For what does more before it comes to its last kernel: MEMRA_ERR_UNSUPPORTED unless every device has that one. */
int memra_check_kernel(const memra_cache *cache, enum memra_kernel k);
/* The same for memra_stamp, memra_restore or memra_commit_counters. */
int memra_check_stamp(const memra_cache *cache);
int memra_check_restore(const memra_cache *cache);
int memra_check_commit(const memra_cache *cache, bool counts);
/* len_d of the layers with lens[il] >= 0, and every pos_d (memra_clock.c). */
int memra_stamp(memra_cache *cache, const int64_t *lens, int64_t pos, bool *done);
/* The copies of device d, and its counters like memra_stamp: one launch for both where there are few of either. */
int memra_restore(
    const memra_cache *cache, int32_t d, memra_copy *entries, int32_t n, const int64_t *lens, int64_t pos, bool *done);
/* The layers with in[il] stand at pos_d + the accepted rows, and pos_d moves by as many. counts: where each device has
 * the number of these; NULL: it is `accept`. */
int memra_move_counters(
    memra_cache *cache, const uint8_t *in, const uint64_t *counts, int64_t accept, int64_t rows, bool *done);
/* Either of the two, as the clock demands: lens[il] >= 0 where a layer takes part. */
int memra_commit_counters(
    memra_cache *cache, const int64_t *lens, const uint64_t *counts, int64_t accept, int64_t rows, int64_t pos,
    bool *done);
/* Whole planes: neighbours in an arena become one range, and more than two ranges one launch (memra_copies.c). */
int memra_copy_planes(memra_device *device, bool has_arena, memra_copy *entries, int32_t n, bool *done);
/* Makes one entry of neighbours, and returns how many are left. */
int32_t memra_merge_copies(bool has_arena, memra_copy *entries, int32_t n);
/* Whether that can be: sorts the entries, and refuses where a launch is needed and its kernel is not loaded. */
int memra_check_copies(const memra_device *device, bool has_arena, memra_copy *entries, int32_t n);
/* The same two for the copies into a snapshot: up to two ranges are one launch as well. */
int memra_check_kept(const memra_device *device, bool has_arena, memra_copy *entries, int32_t n);
int memra_keep_planes(memra_device *device, bool has_arena, memra_copy *entries, int32_t n, bool *done);
int memra_clear_planes(memra_device *device, bool has_arena, memra_copy *entries, int32_t n, bool *done);

/* ---- Graphs (memra_graph.c) ---- */

typedef struct memra_move {  /* what one launch does to a cache */
    struct memra_move *next;
    memra_cache *cache;   /* NULL: closed since */
    int64_t begin_pos, begin_logits_at, begin_sure_pos;
    memra_logits begin_logits;
    uint32_t begin_state, begin_logits_sure;
    int64_t *begin_lens;  /* n_layer */
    int64_t need;         /* positions from pos on that a launch may write */
    int64_t tokens;
    uint8_t *appended;    /* n_layer: 1 where the layer stands at pos behind it */
    bool unsettles, parks;
    int64_t logits_at;    /* of a launch that parks: so far behind where it starts; -1: not kept */
    memra_slice logits;   /* and where it parks them */
    bool taps;            /* the sink that a launch writes to must be armed alike: */
    memra_tap_sink sink;  /* layer_ids is a copy of its own */
} memra_move;

struct memra_graph {
    memra_device *device; /* while it is recorded */
    uint64_t handle;      /* of the device, which may be closed later */
    CUgraphExec exec;  /* NULL: the caller's own */
    uint32_t flags;
    bool is_recording;
    memra_move *moves;
    struct memra_graph *next;  /* of the same device */
};

void memra_graph_drop(memra_device *device);  /* the capture that is open on it went with its context */
void memra_graphs_forget(const memra_cache *cache);  /* it is closed: graphs that move it can not be launched again */

int memra_graph_touch(struct memra_graph *graph, memra_cache *cache);
memra_move *memra_move_of(struct memra_graph *graph, const memra_cache *cache);  /* NULL: takes no part */
void memra_graph_note(struct memra_graph *graph, const memra_cache *cache, int64_t end);
/* What one launch of the graph does to the cache, where `launches` of them have room. */
int memra_check_launches(
    memra_cache *cache, const char *what, struct memra_graph *graph, int64_t launches, const memra_move **move);
struct memra_graph *memra_graph_of_thread(void);  /* the capture that this thread began last; NULL: it is over */
int memra_graph_note_taps(struct memra_graph *graph, const memra_cache *cache);

/* ---- memra_sha256.c ---- */

typedef struct memra_sha256 {
    uint32_t h[8];
    uint64_t n_bytes;
    uint8_t block[64];
    bool by_instructions;  /* that the processor has for it */
} memra_sha256;

void memra_sha256_begin(memra_sha256 *sha);
void memra_sha256_update(memra_sha256 *sha, const void *data, size_t n);
void memra_sha256_finish(memra_sha256 *sha, char hex[65]);

#endif
