/* memra_api.h: the functions of libmemra_driver.so. memra_driver.h includes it.
 *
 * Status. Every function that can fail returns enum memra_status and leaves a sentence for memra_last_error(). What is
 * refused (all but MEMRA_ERR_DRIVER and MEMRA_ERR_OUT_OF_MEMORY) was refused before anything was changed.
 *
 * Streams. Work is enqueued on the stream that the device was opened with, and nothing waits but memra_settle,
 * memra_digest, memra_health_read, memra_clear_health of several devices, memra_download, memra_device_synchronize and
 * what frees memory.
 *
 * Threads. A device, its caches, snapshots and graphs belong to one thread at a time; different devices may be driven
 * by different threads. Opening and closing devices, memra_last_error (per thread) and the layout table may be used
 * from any thread at any time. Every call makes the device's context current on its thread and leaves it so. After
 * fork() only memra_last_error, memra_abi_version, the tables, plans, policy and options may be used in the child: all
 * else returns MEMRA_ERR_STATE.
 *
 * Arrays are addresses of the device that owns the layer: f32 unless said otherwise, C-contiguous, token-major,
 * 4-byte aligned, alive until the stream has passed. rows is T; 0 rows do nothing.
 */
#ifndef MEMRA_API_H
#define MEMRA_API_H

#include "memra_driver.h" /* which includes this: either may come first */

#if defined(MEMRA_BUILD)
#define MEMRA_API __attribute__((visibility("default")))
#else
#define MEMRA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum memra_status {
    MEMRA_OK = 0,
    MEMRA_ERR_CONFIG = 1,         /* a geometry, policy or option that cannot be */
    MEMRA_ERR_ARRAY = 2,          /* a null, misaligned or overlapping address */
    MEMRA_ERR_DEVICE = 3,         /* a device that does not own what the call touches */
    MEMRA_ERR_CAPACITY = 4,       /* more positions than the cache was built for */
    MEMRA_ERR_STATE = 5,          /* what the state of the cache or device does not allow now */
    MEMRA_ERR_SNAPSHOT = 6,       /* a snapshot of another cache or generation, a closed or outdated one */
    MEMRA_ERR_UNSUPPORTED = 7,    /* no kernel for this geometry or GPU, or none loaded */
    MEMRA_ERR_HEALTH = 8,         /* the error record of a strict cache is not empty */
    MEMRA_ERR_OUT_OF_MEMORY = 9,  /* the device or the host has not enough */
    MEMRA_ERR_ABI = 10,           /* a struct of another version or size */
    MEMRA_ERR_NO_DRIVER = 11,     /* libcuda.so.1 is missing or too old */
    MEMRA_ERR_DRIVER = 12         /* a call of the CUDA driver failed; memra_last_driver_code() */
};

/* One field of a struct: what a binding compares its own layout with. field "" is the struct itself. */
typedef struct memra_layout_row {
    const char *type;
    const char *field;
    uint64_t offset;
    uint64_t size;
} memra_layout_row;
MEMRA_SIZE(memra_layout_row, 32);
MEMRA_FIELD(memra_layout_row, type, 0);
MEMRA_FIELD(memra_layout_row, field, 8);
MEMRA_FIELD(memra_layout_row, offset, 16);
MEMRA_FIELD(memra_layout_row, size, 24);

MEMRA_API int32_t memra_abi_version(void);
MEMRA_API const memra_layout_row *memra_layout_table(int32_t *n_rows);
MEMRA_API const char *memra_last_error(void);     /* of this thread; "" after none; never null */
MEMRA_API int32_t memra_last_driver_code(void);   /* CUresult of this thread's last MEMRA_ERR_DRIVER */

/* ---- Devices ---- */

typedef struct memra_device memra_device;

enum memra_device_flags {
    MEMRA_NO_ARENA = 1  /* every plane of a cache is an allocation of its own, so that a checker sees each overrun */
};
typedef struct memra_device_options {
    uint32_t struct_size;
    int32_t ordinal;
    uint64_t stream;   /* CUstream that stays the caller's; 0: the library makes a non-blocking one */
    uint64_t context;  /* CUcontext that is used and never released; 0: the primary context, retained until close */
    uint32_t flags;    /* enum memra_device_flags */
    uint32_t reserved;
} memra_device_options;
MEMRA_SIZE(memra_device_options, 32);
MEMRA_FIELD(memra_device_options, struct_size, 0);
MEMRA_FIELD(memra_device_options, ordinal, 4);
MEMRA_FIELD(memra_device_options, stream, 8);
MEMRA_FIELD(memra_device_options, context, 16);
MEMRA_FIELD(memra_device_options, flags, 24);
MEMRA_FIELD(memra_device_options, reserved, 28);

/* Opens a device. Kernels are loaded by one of the next three, cubins of the device's architecture. */
MEMRA_API int memra_device_open(const memra_device_options *options, memra_device **device);
MEMRA_API int memra_device_load(memra_device *device, const void *cubin, uint64_t n_bytes);
MEMRA_API int memra_device_load_file(memra_device *device, const char *path);
MEMRA_API int memra_device_load_folder(memra_device *device, const char *folder);  /* every *.cubin in it */
MEMRA_API int memra_device_synchronize(memra_device *device);
MEMRA_API uint64_t memra_device_handle(const memra_device *device);  /* what memra_cache_device.handle says */
MEMRA_API uint64_t memra_device_stream(const memra_device *device);
MEMRA_API int32_t memra_device_arch(const memra_device *device);  /* 90 for sm_90: whose cubins it takes */
/* Waits, frees what is the device's own. Close its caches, snapshots and graphs first: what they hold on a context that
 * lives on stays allocated otherwise. NULL does nothing. */
MEMRA_API int memra_device_close(memra_device *device);

/* Memory of a device, in stream order. Zero bytes are address 0 and never reach the driver. */
MEMRA_API int memra_alloc(memra_device *device, uint64_t n_bytes, uint64_t *ptr);  /* uninitialised, 256-byte aligned */
/* Frees also where a driver call before the free itself fails; returns the first failure, a refusal frees nothing. */
MEMRA_API int memra_free(memra_device *device, uint64_t ptr);
MEMRA_API int memra_clear(memra_device *device, uint64_t ptr, uint64_t n_bytes);
MEMRA_API int memra_copy_bytes(memra_device *device, uint64_t dst, uint64_t src, uint64_t n_bytes);
MEMRA_API int memra_copy_table(memra_device *device, const memra_copy *entries, int32_t n);  /* one launch */
MEMRA_API int memra_upload(memra_device *device, uint64_t dst, const void *src, uint64_t n_bytes);
MEMRA_API int memra_download(memra_device *device, void *dst, uint64_t src, uint64_t n_bytes);  /* waits */
MEMRA_API int memra_memory_info(memra_device *device, uint64_t *available, uint64_t *total);
/* From now on up to n_bytes of freed memory stay with the process, where the driver would take back all that is free
 * whenever somebody waits: a server that opens and closes sessions keeps what one of them needs. It counts for the
 * device's default memory pool, for every user of it, until it is called again; 0 is how the process began. */
MEMRA_API int memra_keep_memory(memra_device *device, uint64_t n_bytes);
/* Waits for the stream, and gives unused memory of the pool back. */
MEMRA_API int memra_trim(memra_device *device);

/* ---- A model, and what a cache for it needs ---- */

/* Fields of memra_kv::ModelConfig that size a cache. Zeroed fields are absent. Pointers are host memory, read during
 * the call. swa_pattern: 1 for a layer with a sliding window. */
typedef struct memra_config {
    uint32_t struct_size;
    uint32_t n_layer;    /* every block, the trailing MTP blocks included */
    uint32_t n_head;     /* 0: as many as n_head_kv */
    uint32_t n_head_kv;
    uint32_t head_dim_k;
    uint32_t head_dim_v;
    uint32_t n_embd;
    uint32_t n_vocab;
    uint32_t full_attention_interval;  /* each interval's last layer attends; 0: every layer */
    uint32_t nextn_predict_layers;
    uint32_t has_ssm;
    uint32_t ssm_conv_kernel;
    uint32_t ssm_state_size;
    uint32_t ssm_time_step_rank;  /* value heads */
    uint32_t ssm_group_count;     /* key heads */
    uint32_t has_gemma4;
    const uint32_t *gemma4_head_count_kv;  /* layers past its end have n_head_kv heads */
    const uint8_t *gemma4_swa_pattern;     /* n_layer entries */
    uint32_t gemma4_n_head_count_kv;
    uint32_t gemma4_n_swa_pattern;
    uint32_t gemma4_sliding_window;
    uint32_t gemma4_key_length_global;
    uint32_t gemma4_key_length_swa;
    uint32_t gemma4_shared_kv_layers;  /* trailing layers that read an earlier layer's K/V */
    uint32_t has_step35;
    uint32_t step35_n_head_count;
    const uint32_t *step35_head_count;  /* query heads, n_layer entries */
    const uint8_t *step35_swa_pattern;  /* a layer past its end is windowed */
    uint32_t step35_n_swa_pattern;
    uint32_t step35_sliding_window;
} memra_config;
MEMRA_SIZE(memra_config, 136);
MEMRA_FIELD(memra_config, struct_size, 0);
MEMRA_FIELD(memra_config, n_layer, 4);
MEMRA_FIELD(memra_config, n_head, 8);
MEMRA_FIELD(memra_config, n_head_kv, 12);
MEMRA_FIELD(memra_config, head_dim_k, 16);
MEMRA_FIELD(memra_config, head_dim_v, 20);
MEMRA_FIELD(memra_config, n_embd, 24);
MEMRA_FIELD(memra_config, n_vocab, 28);
MEMRA_FIELD(memra_config, full_attention_interval, 32);
MEMRA_FIELD(memra_config, nextn_predict_layers, 36);
MEMRA_FIELD(memra_config, has_ssm, 40);
MEMRA_FIELD(memra_config, ssm_conv_kernel, 44);
MEMRA_FIELD(memra_config, ssm_state_size, 48);
MEMRA_FIELD(memra_config, ssm_time_step_rank, 52);
MEMRA_FIELD(memra_config, ssm_group_count, 56);
MEMRA_FIELD(memra_config, has_gemma4, 60);
MEMRA_FIELD(memra_config, gemma4_head_count_kv, 64);
MEMRA_FIELD(memra_config, gemma4_swa_pattern, 72);
MEMRA_FIELD(memra_config, gemma4_n_head_count_kv, 80);
MEMRA_FIELD(memra_config, gemma4_n_swa_pattern, 84);
MEMRA_FIELD(memra_config, gemma4_sliding_window, 88);
MEMRA_FIELD(memra_config, gemma4_key_length_global, 92);
MEMRA_FIELD(memra_config, gemma4_key_length_swa, 96);
MEMRA_FIELD(memra_config, gemma4_shared_kv_layers, 100);
MEMRA_FIELD(memra_config, has_step35, 104);
MEMRA_FIELD(memra_config, step35_n_head_count, 108);
MEMRA_FIELD(memra_config, step35_head_count, 112);
MEMRA_FIELD(memra_config, step35_swa_pattern, 120);
MEMRA_FIELD(memra_config, step35_n_swa_pattern, 128);
MEMRA_FIELD(memra_config, step35_sliding_window, 132);

/* Which formats the layers get: enum memra_format. gkv, wkv: e4m3 on Gemma's global, windowed layers. */
typedef struct memra_policy {
    uint32_t struct_size;
    int32_t k;
    int32_t v;
    uint32_t gkv;
    uint32_t wkv;
    uint32_t kv_fp8;  /* e4m3 on every layer of any other model */
} memra_policy;
MEMRA_SIZE(memra_policy, 24);
MEMRA_FIELD(memra_policy, struct_size, 0);
MEMRA_FIELD(memra_policy, k, 4);
MEMRA_FIELD(memra_policy, v, 8);
MEMRA_FIELD(memra_policy, gkv, 12);
MEMRA_FIELD(memra_policy, wkv, 16);
MEMRA_FIELD(memra_policy, kv_fp8, 20);
MEMRA_API void memra_policy_default(memra_policy *policy);  /* q8_0, q5_1, and e4m3 on Gemma's layers */
MEMRA_API int memra_policy_from_env(memra_policy *policy);  /* MEMRA_KV_K and its like, read now */

typedef struct memra_options {
    uint32_t struct_size;
    uint32_t reserve_logits;
    int64_t max_rows;     /* rows that one attend takes, at least 1 */
    int64_t round_width;  /* widest round; 0 plans no tape */
    const int32_t *tap_layers;  /* n_tap_layers of them reserve a tap sink of tap_rows rows */
    int64_t tap_rows;
    uint32_t n_tap_layers;
    uint32_t skip_mtp_state;  /* trailing MTP layers get neither K/V nor state */
    uint32_t strict;  /* memra_digest and memra_settle do their work, then fail while the error record is not empty */
    uint32_t reserved;
} memra_options;
MEMRA_SIZE(memra_options, 56);
MEMRA_FIELD(memra_options, struct_size, 0);
MEMRA_FIELD(memra_options, reserve_logits, 4);
MEMRA_FIELD(memra_options, max_rows, 8);
MEMRA_FIELD(memra_options, round_width, 16);
MEMRA_FIELD(memra_options, tap_layers, 24);
MEMRA_FIELD(memra_options, tap_rows, 32);
MEMRA_FIELD(memra_options, n_tap_layers, 40);
MEMRA_FIELD(memra_options, skip_mtp_state, 44);
MEMRA_FIELD(memra_options, strict, 48);
MEMRA_FIELD(memra_options, reserved, 52);
MEMRA_API void memra_options_default(memra_options *options);

/* A kind of buffer, in the order in which a plan walks them: the same table as PLANES of memra_driver/planes.py. */
typedef struct memra_plane {
    const char *name;
    const char *owner;    /* what there is one of it for: an "attention" or "recurrent" layer, a "device", ... */
    const char *group;    /* which sum it counts in */
    int32_t dtype;        /* enum memra_dtype */
    int32_t section;      /* orders the arena */
    int32_t mtp_section;  /* the same in a trailing MTP layer */
    int32_t reserved;
} memra_plane;
MEMRA_SIZE(memra_plane, 40);
MEMRA_FIELD(memra_plane, name, 0);
MEMRA_FIELD(memra_plane, owner, 8);
MEMRA_FIELD(memra_plane, group, 16);
MEMRA_FIELD(memra_plane, dtype, 24);
MEMRA_FIELD(memra_plane, section, 28);
MEMRA_FIELD(memra_plane, mtp_section, 32);
MEMRA_FIELD(memra_plane, reserved, 36);
MEMRA_API const memra_plane *memra_plane_table(int32_t *n_planes);

/* One buffer of a cache, in arena order; plane "pad" only fills the arena. */
typedef struct memra_plan_row {
    const char *plane;
    int32_t layer;   /* -1: of the device */
    int32_t device;
    int32_t dtype;   /* enum memra_dtype */
    uint32_t reserved;
    int64_t len;
    int64_t n_bytes;
    int64_t offset;  /* in its device's arena */
} memra_plan_row;
MEMRA_SIZE(memra_plan_row, 48);
MEMRA_FIELD(memra_plan_row, plane, 0);
MEMRA_FIELD(memra_plan_row, layer, 8);
MEMRA_FIELD(memra_plan_row, device, 12);
MEMRA_FIELD(memra_plan_row, dtype, 16);
MEMRA_FIELD(memra_plan_row, reserved, 20);
MEMRA_FIELD(memra_plan_row, len, 24);
MEMRA_FIELD(memra_plan_row, n_bytes, 32);
MEMRA_FIELD(memra_plan_row, offset, 40);

typedef struct memra_plan {
    memra_plan_row *rows;
    int64_t *arena_bytes;    /* n_devices */
    int64_t *plane_bytes;    /* n_devices */
    int64_t *states_offset;  /* n_devices: where the range that a snapshot keeps begins, and its bytes */
    int64_t *states_bytes;
    int32_t *device_of;      /* n_layer */
    int64_t n_rows;
    int32_t n_devices;
    int32_t n_layer;
} memra_plan;
MEMRA_SIZE(memra_plan, 64);
MEMRA_FIELD(memra_plan, rows, 0);
MEMRA_FIELD(memra_plan, arena_bytes, 8);
MEMRA_FIELD(memra_plan, plane_bytes, 16);
MEMRA_FIELD(memra_plan, states_offset, 24);
MEMRA_FIELD(memra_plan, states_bytes, 32);
MEMRA_FIELD(memra_plan, device_of, 40);
MEMRA_FIELD(memra_plan, n_rows, 48);
MEMRA_FIELD(memra_plan, n_devices, 56);
MEMRA_FIELD(memra_plan, n_layer, 60);

/* What a cache would allocate. policy NULL: from the environment; options NULL: the defaults. fence: n_stages + 1 layer
 * numbers, stage s on device placement[s]; NULL: one stage on device 0, or stage s on device s. Nothing is allocated
 * on a device. */
MEMRA_API int memra_plan_new(
    const memra_config *config, int64_t max_ctx, const memra_policy *policy, const memra_options *options,
    const int32_t *fence, int32_t n_stages, const int32_t *placement, memra_plan **plan);
MEMRA_API void memra_plan_free(memra_plan *plan);

/* ---- A cache ---- */

/* A zeroed cache: one allocation and one clear per device. devices: one per stage (may repeat); fence NULL: one stage. */
MEMRA_API int memra_cache_new(
    const memra_config *config, int64_t max_ctx, const memra_policy *policy, const memra_options *options,
    memra_device *const *devices, const int32_t *fence, int32_t n_stages, memra_cache **cache);
/* Frees what memra_cache_new made; its snapshots keep their memory and fit nothing any more. NULL does nothing. Refused
 * while a capture is open; where the driver fails, that is told, and the cache is gone all the same. */
MEMRA_API int memra_cache_free(memra_cache *cache);
/* Lets the library work on a cache that Python made (Cache.as_c): one device per memra_cache.devices entry, opened on
 * the same GPU and stream. */
MEMRA_API int memra_cache_bind(memra_cache *cache, memra_device *const *devices, int32_t n_devices);

/* ---- The operations of a step ----
 *
 * T rows work on positions pos .. pos + T - 1. The first append, conv or scan opens a step; the others of the step have
 * the same T, each runs once a layer, and memra_advance ends it. attend, dequant, prep and tap_write are free to repeat.
 * Shapes: k_rows [T, kv_dim_k], v_rows [T, kv_dim_v]; q [T, n_head, head_dim_k] and its out [T, n_head, head_dim_v]; x and
 * its out [T, conv_dim], w [conv_dim, d_conv] with column 0 for the oldest input; conv_out [T, conv_dim], alpha, beta_raw,
 * g_log, beta [T, num_v], dt_bias, a [num_v]; the scan's q, k, v, out [T, num_v, state_size]; residual [T, hidden].
 * memra_attend takes at most max_rows rows, and may allocate scratch, which it refuses inside a capture.
 */

MEMRA_API int memra_append_kv(memra_cache *cache, int32_t il, int64_t rows, uint64_t k_rows, uint64_t v_rows);
/* Rows start .. stop-1 as f32, or as bf16 where out_bf16. */
MEMRA_API int memra_dequant_kv(
    memra_cache *cache, int32_t il, int64_t start, int64_t stop, uint64_t k_out, uint64_t v_out, int32_t out_bf16);
MEMRA_API int memra_attend(
    memra_cache *cache, int32_t il, int64_t rows, uint64_t q, uint64_t out, float scale,
    int32_t window /* keys that a row sees; 0: all; -1: the layer's own */);
MEMRA_API int memra_conv_update(memra_cache *cache, int32_t il, int64_t rows, uint64_t x, uint64_t w, uint64_t out);
MEMRA_API int memra_gdn_prep(
    memra_cache *cache, int32_t il, int64_t rows, uint64_t conv_out, uint64_t alpha, uint64_t beta_raw,
    uint64_t dt_bias, uint64_t a, uint64_t q, uint64_t k, uint64_t v, uint64_t g_log, uint64_t beta, float eps);
/* Its operands are not searched for what is not finite: the two before report what they are made of. */
MEMRA_API int memra_gdn_scan(
    memra_cache *cache, int32_t il, int64_t rows, uint64_t q, uint64_t k, uint64_t v, uint64_t g_log, uint64_t beta,
    uint64_t out, float scale);
/* conv_update, gdn_prep and gdn_scan in one launch, with their bits; it counts as the layer's conv and scan. */
MEMRA_API int memra_recur_step(
    memra_cache *cache, int32_t il, int64_t rows, uint64_t x, uint64_t w, uint64_t alpha, uint64_t beta_raw,
    uint64_t dt_bias, uint64_t a, uint64_t out, float eps, float scale);
MEMRA_API int memra_tap_write(memra_cache *cache, int32_t il, int64_t rows, uint64_t residual);
/* Ends the step: pos += rows. With no step open it moves pos alone. */
MEMRA_API int memra_advance(memra_cache *cache, int64_t rows);

/* ---- Beside the sequence ---- */

MEMRA_API int memra_park_logits(memra_cache *cache, uint64_t row);       /* n_vocab f32 */
MEMRA_API int memra_take_logits(memra_cache *cache, uint64_t *row);      /* 0: none are parked; they stay parked */
MEMRA_API int memra_arm_taps(memra_cache *cache, const int32_t *layer_ids, int32_t n, int64_t t, int64_t hidden);
MEMRA_API int memra_disarm_taps(memra_cache *cache);
MEMRA_API int memra_health_read(memra_cache *cache, memra_health *health);  /* of all devices; waits */
MEMRA_API int memra_clear_health(memra_cache *cache);  /* of all devices, or where one fails of none */
/* SHA-256 over formats, lengths, K/V below len, rings, states and pos: equal for equal sequences on one kind of device,
 * and to Python's Cache.digest. Waits. */
MEMRA_API int memra_digest(memra_cache *cache, char hex[65]);

/* ---- Back and forth ---- */

/* Both launch restore on each device with recurrent layers, or copy_many where more than two ranges are to be copied: the
 * states of some layers were exchanged and those of others not, or planes are allocations of their own. */
MEMRA_API int memra_snapshot_new(memra_cache *cache, memra_snapshot **snapshot);
MEMRA_API int memra_snapshot_into(memra_cache *cache, memra_snapshot *snapshot);
MEMRA_API int memra_snapshot_free(memra_snapshot *snapshot);  /* what memra_snapshot_new made; NULL does nothing */
/* Ring, state and pos return to the snapshot; the K/V rows of the first accept_len tokens behind it are kept. Where
 * accept_len > 0 a replay is pending: steps over those rows again bring the state up to them, and until then only they,
 * another rollback, reset and digest run. Also in the middle of a step or round; 0 is what a tainted cache takes. */
MEMRA_API int memra_rollback(memra_cache *cache, memra_snapshot *snapshot, int64_t accept_len);
MEMRA_API int memra_truncate(memra_cache *cache, int64_t new_len);  /* for caches without recurrent layers */
MEMRA_API int memra_reset(memra_cache *cache);
MEMRA_API int memra_sync(memra_cache *cache);    /* stamps every len_d and pos_d from the host values */
MEMRA_API int memra_settle(memra_cache *cache);  /* reads the counters back after a device-side count; waits */

/* A round: one step of up to `width` rows, then one of the other three. */
MEMRA_API int memra_round_begin(memra_cache *cache, int64_t width);
MEMRA_API int memra_round_commit(memra_cache *cache, int64_t accept_len);
/* accept_d: one i32 on the device of the last layer, where logits live; the cache's other devices get a copy in the
 * order of both streams. */
MEMRA_API int memra_round_commit_from_device(memra_cache *cache, uint64_t accept_d);
MEMRA_API int memra_round_reject(memra_cache *cache);

/* ---- Recorded steps ---- */

typedef struct memra_graph memra_graph;

enum memra_capture_flags {
    MEMRA_CAPTURE_YOURS = 1  /* the caller begins and ends the stream capture, and launches the graph by itself */
};
/* What is enqueued between the two is recorded. memra_capture_abandon ends one that failed. Of a capture of the caller's
 * it does not matter which of the two begins, and which of the two ends, comes first; operations between them are
 * refused unless the stream captures. A capture that ends with a step or round open is given up. Where the driver fails
 * and the stream goes on capturing, either leaves the capture open, to be ended or abandoned again. */
MEMRA_API int memra_capture_begin(memra_device *device, uint32_t flags);
MEMRA_API int memra_capture_end(memra_device *device, memra_graph **graph);
MEMRA_API int memra_capture_abandon(memra_device *device);
MEMRA_API int memra_graph_launch(memra_graph *graph);  /* not for MEMRA_CAPTURE_YOURS */
MEMRA_API int memra_graph_close(memra_graph *graph);   /* NULL does nothing */
/* Around launches of a graph that the caller launches: the states come home and the counters are stamped, then the
 * host's clock moves. */
MEMRA_API int memra_prepare_replay(
    memra_cache *cache, memra_graph *graph /* with it what memra_replayed would refuse is refused in time; or NULL */,
    int64_t launches);
MEMRA_API int memra_replayed(memra_cache *cache, memra_graph *graph, int64_t launches);

/* ---- The kernels: extern "C" entries of the cubins, and one function that launches each on the device's stream ----
 *
 * An entry's parameters are those of its function behind `device`: uint64_t is a pointer, int64_t a long long.
 * Positions come from pos_d (one i32) unless it is 0, else from slot; seqs is 0 or a table of n_seqs memra_seq, n_seqs
 * 1 without one. A grid is one-dimensional but for those of gdn_scan and recur_step; one of no blocks is not launched.
 * a / b rounds up here, a // b down.
 * On GPUs from sm_90 on, with drivers from 12.3 on, the functions launch with
 * CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: blocks may start while the kernel in front of them in the stream
 * ends, whoever launched that, and wait for all of it (griddepcontrol.wait) before they look at memory; that what came
 * before it has ended too they take from its end, so a kernel of yours that is launched so waits as well. In a graph these
 * edges are programmatic, and a query of edges without their data is CUDA_ERROR_LOSSY_QUERY. Who launches an entry may
 * launch it so, or leave it.
 *
 *   entry              blocks of the grid                                                     threads   dynamic shared
 *   append_kv          n_seqs * (b / (n_seqs * b < 32768 ? 16 : 32))                          128       0
 *   dequant_kv         rows * ((kv_dim_k + kv_dim_v) // 32) / 8                               256       0
 *   conv_update        n_seqs * (conv_dim / 128) * (rows / 16)                                128       0
 *   conv_ring_rebuild  n_layers * (conv_dim / 128)                                            128       0
 *   gdn_prep           n_seqs * rows * num_v                                                  32 x 4    0
 *   gdn_scan           (state_size // 16, num_v, n_seqs)                                      32 x 2    0
 *   recur_step_N       (blocks, num_k, n_seqs)                                                256       D
 *   set_counters       1                                                                      128       0
 *   restore            bytes / 16384 + bytes2 / 16384, 1 at least                             256       0
 *   commit_counters    1                                                                      128       0
 *   advance_batch      n_seqs / 128                                                           128       0
 *   copy_many          64 * n                                                                 256       0
 *   copy_rows          rows * (columns / 1024)                                                256       0
 *   attend_W           n_seqs * (rows * gqa / 8) * n_head_kv * pieces                         128       S(8)
 *   attend_W_wide      n_seqs * (rows * gqa / 32) * n_head_kv * pieces                        128       S(32)
 *   attend_pipe_*      132                                                                    384       232448
 *   attend_combine     n_seqs * rows * n_head * (head_dim_v / 64) / (pieces == 132 ? 1 : 12)  384       0
 *
 * N is state_size: 32, 64, 128 or 256. The states of gdn_scan and recur_step lie at multiples of 16 bytes. A warp of gdn_scan
 * has 8 columns; a block may have 1, 2 or 4 warps, and a grid as many blocks as make the columns of a head. `blocks` of
 * recur_step share a key head, and have `columns` columns each of the states that read it: no result depends on the two.
 * columns, at most 512, divides state_size into multiples of 32 or is a multiple of it; blocks is (num_v / num_k) *
 * state_size / columns, or 1. D = 4 * (min(rows, 8) * (2 * state_size + columns) + 16 * max(1, columns // state_size)
 * + (blocks > 1 ? 2 * state_size * (d_conv - 1) : 0)) bytes. Launches of recur_step out of one loaded cubin must not
 * run at the same time. restore copies bytes and bytes2, either of which may be 0; counters may be 0 where no mask has a
 * bit.
 *
 * b is rows * (max(kv_dim_k, kv_dim_v) // 32). W is the least of 64, 128, 192, 256, 512 that head_dim_v does not
 * exceed; wide entries go up to 256. gqa is n_head // n_head_kv.
 * S(c) = 2 * (t * (max(head_dim_k, head_dim_v) + 8) + 2 * c * (head_dim_k + 8) + 72 * c)
 * + 4 * (t * head_dim_k / 32 + 67 * c + 1) bytes, which an entry of attend must have been allowed by
 * cuKernelSetAttribute. t, the keys that are summed together, is 64, or 32 where n_head_kv is more than 2; attend_combine
 * takes it from n_head_kv, too.
 * attend_pipe_* are for sm_90 and for tokens whose bytes are packed, a multiple of 16 in either plane (see memra_launch_attend
 * for the rest): attend_pipe_W_C, where W is the least of 64, 128, 256 that is no less than head_dim_v divided by 8, 4, 2, 1
 * for 1, 2, up to 4, up to 8 K/V heads, and attend_pipe_K_V_HxD_C for the formats K and V, H K/V heads and head_dim D on both
 * sides. They are for 132 pieces; where C is 8, the same name with _folds is for 12.
 */
MEMRA_API int memra_launch_append_kv(
    memra_device *device, uint64_t k_rows, uint64_t v_rows, uint64_t k, uint64_t v, uint64_t len_d, uint64_t pos_d,
    int64_t slot, int32_t rows, int32_t len, int64_t max_ctx, int32_t kv_dim_k, int32_t kv_dim_v, int64_t k_tok_bytes,
    int64_t v_tok_bytes, int32_t k_format, int32_t v_format, uint64_t seqs, int32_t n_seqs, uint64_t health,
    int32_t layer);
MEMRA_API int memra_launch_dequant_kv(
    memra_device *device, uint64_t k, uint64_t v, int64_t start, int64_t rows, int64_t max_ctx, int32_t kv_dim_k,
    int32_t kv_dim_v, int64_t k_tok_bytes, int64_t v_tok_bytes, int32_t k_format, int32_t v_format, uint64_t k_out,
    uint64_t v_out, int32_t out_bf16, uint64_t health, int32_t layer);
MEMRA_API int memra_launch_conv_update(
    memra_device *device, uint64_t x, uint64_t w, uint64_t conv_state, uint64_t out, uint64_t tape, uint64_t pos_d,
    int64_t slot, int32_t rows, int32_t conv_dim, int32_t d_conv, uint64_t seqs, int32_t n_seqs, uint64_t health,
    int32_t layer);
MEMRA_API int memra_launch_conv_ring_rebuild(
    memra_device *device, uint64_t x, uint64_t ring_old, uint64_t conv_state, uint64_t accept_d, int32_t accept,
    int32_t rows, int32_t conv_dim, int32_t d_conv, int32_t n_layers, int64_t x_apart, int64_t ring_apart,
    uint64_t health, int32_t layer);
MEMRA_API int memra_launch_gdn_prep(
    memra_device *device, uint64_t conv_out, uint64_t alpha, uint64_t beta_raw, uint64_t dt_bias, uint64_t a,
    uint64_t q, uint64_t k, uint64_t v, uint64_t g_log, uint64_t beta, uint64_t pos_d, int64_t slot, int32_t rows,
    int32_t num_k, int32_t num_v, int32_t state_size, float eps, uint64_t seqs, int32_t n_seqs, uint64_t health,
    int32_t layer);
MEMRA_API int memra_launch_gdn_scan(
    memra_device *device, uint64_t q, uint64_t k, uint64_t v, uint64_t g_log, uint64_t beta, uint64_t state_in,
    uint64_t state_out, uint64_t out, uint64_t tape, uint64_t accept_d, int32_t rows, int32_t num_v,
    int32_t state_size, float scale, uint64_t seqs, int32_t n_seqs, uint64_t health, int32_t layer);
MEMRA_API int memra_launch_recur_step(
    memra_device *device, uint64_t x, uint64_t w, uint64_t alpha, uint64_t beta_raw, uint64_t dt_bias, uint64_t a,
    uint64_t conv_state, uint64_t state_in, uint64_t state_out, uint64_t out, uint64_t tape, uint64_t pos_d,
    int64_t slot, int32_t rows, int32_t d_conv, int32_t num_k, int32_t num_v, int32_t state_size, int32_t columns,
    int32_t blocks, float eps, float scale, uint64_t seqs, int32_t n_seqs, uint64_t health, int32_t layer);
/* columns and blocks for memra_launch_recur_step that keep a whole GPU busy. */
MEMRA_API int memra_recur_split(
    int32_t n_seqs, int32_t num_k, int32_t num_v, int32_t state_size, int32_t *columns, int32_t *blocks);
MEMRA_API int memra_launch_set_counters(
    memra_device *device, uint64_t counters, int32_t a, int32_t b, int64_t a_lo, int64_t a_hi, int64_t b_lo,
    int64_t b_hi, uint64_t health, int32_t layer);
MEMRA_API int memra_launch_restore(
    memra_device *device, uint64_t src, uint64_t dst, int64_t bytes, uint64_t src2, uint64_t dst2, int64_t bytes2,
    uint64_t counters, int32_t a, int32_t b, int64_t a_lo, int64_t a_hi, int64_t b_lo, int64_t b_hi, uint64_t health,
    int32_t layer);
MEMRA_API int memra_launch_commit_counters(
    memra_device *device, uint64_t counters, uint64_t pos_d, uint64_t accept_d, int32_t accept, int32_t rows,
    int64_t mask_lo, int64_t mask_hi, int32_t move_pos, uint64_t health, int32_t layer);
MEMRA_API int memra_launch_advance_batch(
    memra_device *device, uint64_t seqs, int32_t n_seqs, int32_t n, uint64_t health, int32_t layer);
MEMRA_API int memra_launch_copy_many(
    memra_device *device, uint64_t table, int32_t n, uint64_t health, int32_t layer);
MEMRA_API int memra_launch_copy_rows(
    memra_device *device, uint64_t src, uint64_t dst, int64_t src_stride, int64_t dst_stride, int32_t rows,
    int32_t columns, uint64_t health, int32_t layer);
/* On sm_90 the entry is one of attend_pipe_* where its geometry is served, whatever the position and the number of rows: at
 * most 8 K/V heads, head dims that are multiples of 64, tokens as above, and room for two stages of them in shared memory.
 * Elsewhere the entry is attend_W; attend_W_wide where there are more than 8 columns, rows * gqa, and S(32) is at most
 * 99 KiB. part has memra_attend_part_bytes of room, whatever pieces is; it and the planes are 16-byte aligned. */
MEMRA_API int memra_launch_attend(
    memra_device *device, uint64_t q, uint64_t k, uint64_t v, uint64_t pos_d, int64_t slot, int32_t rows,
    int64_t max_ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim_k, int32_t head_dim_v, int64_t k_tok_bytes,
    int64_t v_tok_bytes, int32_t k_format, int32_t v_format, float scale, int32_t window, uint64_t part,
    int32_t pieces, uint64_t seqs, int32_t n_seqs, uint64_t health, int32_t layer);
MEMRA_API int memra_launch_attend_combine(
    memra_device *device, uint64_t part, uint64_t out, uint64_t pos_d, int64_t slot, int32_t rows, int64_t max_ctx,
    int32_t n_head, int32_t n_head_kv, int32_t head_dim_v, int32_t window, int32_t pieces, uint64_t seqs,
    int32_t n_seqs, uint64_t health, int32_t layer);
/* Partial sums for each head of a row, and pieces for both launches: 132 groups, or 12 folds of them, which fewer blocks
 * make, for 8 sequences and more of at most 8 columns, rows * gqa, each. No result depends on it. */
MEMRA_API int32_t memra_attend_pieces(int32_t n_seqs, int64_t columns);
MEMRA_API uint64_t memra_attend_part_bytes(int64_t n_seqs, int64_t rows, int32_t n_head, int32_t head_dim_v);
/* Such room, shared by all that work on the device and never moved: what memra_attend takes its own from. */
MEMRA_API int memra_attend_scratch(memra_device *device, uint64_t n_bytes, uint64_t *part);

#ifdef __cplusplus
}
#endif
#endif
