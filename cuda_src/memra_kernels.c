/* memra_kernels.c: the kernels by name, and one function that launches each.
 *
 * The twin of memra_driver/kernels.py, which has a sentence on what each one does; memra_api.h lists the shapes.
 */
#include "memra_internal.h"

#include <inttypes.h>
#include <stdio.h>

enum {
    PROGRAMMATIC_STREAM_SERIALIZATION = 6, /* CUlaunchAttributeID */
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8, /* CUfunction_attribute */
    APPEND_TILE = 16,                  /* blocks of 32 elements of a plane that a thread block of append_kv encodes: */
    APPEND_MANY = 1 << 15,             /* twice as many where there are so many */
    CONV_ROWS = 16,                    /* rows of one channel that a thread of conv_update walks */
    COPY_BLOCKS = 64,                  /* blocks that share one entry of copy_many */
    RESTORE_BYTES = 1 << 14,           /* that a block of restore copies */
    SCAN_COLUMNS = 16,                 /* of a head's state, per block of gdn_scan */
    RECUR_ROWS = 8,                    /* rows that a block of recur_step has in shared memory at a time */
    RECUR_COLUMNS = 512,               /* of the states that read one key head, which a block takes at a time */
    RECUR_BLOCKS = 132,                /* that recur_step is to have, where there are enough columns */
    RECUR_TICKETS = 4096,              /* key heads that several blocks of one launch may share */
    MOST_YZ = 65535,                   /* heads and sequences: the second and third dimension of a grid */
    ATTEND_MOST_KEYS = 64,             /* of a tile, which is summed together */
    ATTEND_PAD = 8,
    ATTEND_GROUPS = 132,               /* groups of key tiles that are summed apart */
    ATTEND_FOLDS = 12,                 /* and folds of them, which one block may have summed up, */
    ATTEND_FOLD_COLUMNS = 8,           /* where a launch has so many columns at most */
    ATTEND_FOLD_SEQS = 8,              /* and so many sequences at least */
    ATTEND_TAIL = 8,                   /* f32 behind the values of a partial sum */
    ATTEND_THREADS = 128,
    ATTEND_NARROW = 8,                 /* columns of an attend block, */
    ATTEND_WIDE = 32,                  /* and of a wide one */
    ATTEND_SHARED_BYTES = 99 << 10,    /* the smallest limit of a block among GPUs from sm_80 on */
    PIPE_ARCH = 90,                    /* the only one that attend_pipe works on */
    PIPE_WARPS = 8,                    /* that compute, */
    PIPE_BRINGERS = 4,                 /* and more, that bring K and V */
    PIPE_SHARED_BYTES = 227 << 10,     /* all that a block of sm_90 can have */
    PIPE_STAGE_BYTES = 70 << 10        /* of K and V at most, where a stage can be smaller */
};

/* Entries of attend_pipe for one pair of formats, by K/V heads, head dim and columns; behind them those for folds. */
#define FIXED(pair) \
    "attend_pipe_" pair "_2x256_8", "attend_pipe_" pair "_2x256_16", "attend_pipe_" pair "_2x256_32", \
        "attend_pipe_" pair "_4x256_8", "attend_pipe_" pair "_4x256_16", "attend_pipe_" pair "_8x128_8", \
        "attend_pipe_" pair "_8x128_16"
#define FOLDED(pair) \
    "attend_pipe_" pair "_2x256_8_folds", "attend_pipe_" pair "_4x256_8_folds", "attend_pipe_" pair "_8x128_8_folds"
#define FIXED_FP8(pair) FIXED(pair), FOLDED(pair)
#define FIXED_Q8(pair) FIXED(pair), "attend_pipe_" pair "_4x256_24", FOLDED(pair)

const char *const memra_kernel_names[MEMRA_N_KERNELS] = {
    "append_kv", "dequant_kv", "conv_update", "conv_ring_rebuild", "gdn_prep", "gdn_scan", "recur_step_32",
    "recur_step_64", "recur_step_128", "recur_step_256", "set_counters", "restore",
    "commit_counters", "advance_batch", "copy_many", "copy_rows", "attend_64", "attend_128", "attend_192", "attend_256",
    "attend_512", "attend_64_wide", "attend_128_wide", "attend_192_wide", "attend_256_wide",
    "attend_pipe_64_8", "attend_pipe_64_16", "attend_pipe_64_32", "attend_pipe_128_8", "attend_pipe_128_16",
    "attend_pipe_128_24", "attend_pipe_256_8", "attend_pipe_64_8_folds", "attend_pipe_128_8_folds",
    "attend_pipe_256_8_folds", FIXED_Q8("q8_0_q5_1"), FIXED_Q8("q8_0_q4_0"), FIXED_Q8("q8_0_fp8"),
    FIXED_FP8("fp8_q5_1"), FIXED_FP8("fp8_q4_0"), FIXED_FP8("fp8_fp8"), "attend_combine",
};

static bool is_pipe(enum memra_kernel k) {
    return k >= MEMRA_K_ATTEND_PIPE_64_8 && k < MEMRA_K_ATTEND_COMBINE;
}

static bool is_attend(enum memra_kernel k) {
    return (k >= MEMRA_K_ATTEND_64 && k <= MEMRA_K_ATTEND_256_WIDE) || is_pipe(k);
}

bool memra_kernel_serves(enum memra_kernel k, int32_t arch) {
    return !is_pipe(k) || arch == PIPE_ARCH;
}

/* A kernel's parameters in order: p a pointer, l a long long, i an int, f a float. */
static const char *params_of(enum memra_kernel k) {
#define RECUR "ppppppppppppliiiiiiiffpipi"
    static const char *const params[] = {
        "ppppppliiliilliipipi", "ppllliilliippipi", "ppppppliiipipi", "ppppiiiiillpi", "pppppppppppliiiifpipi",
        "ppppppppppiiifpipi", RECUR, RECUR, RECUR, RECUR, "piillllpi", "pplpplpiillllpi", "pppiillipi", "piipi",
        "pipi", "pplliipi",
    };
    if (k == MEMRA_K_ATTEND_COMBINE) return "pppliliiiiipipi";
    return is_attend(k) ? "ppppliliiiilliifipipipi" : params[k];
}

enum { NO_SUCH_PARAMETER = 1 }; /* CUDA_ERROR_INVALID_VALUE */

int memra_kernel_prepare(enum memra_kernel k, CUkernel kernel, CUdevice device) {
    size_t end = 0;
    const char *const params = params_of(k);
    for (size_t i = 0; params[i] && memra_cu.cuKernelGetParamInfo; i++) {
        const size_t size = params[i] == 'p' || params[i] == 'l' ? 8 : 4;
        const size_t offset = (end + size - 1) / size * size;
        size_t found_offset = 0, found_size = 0;
        const CUresult code = memra_cu.cuKernelGetParamInfo(kernel, i, &found_offset, &found_size);
        if (code && code != NO_SUCH_PARAMETER) return memra_cuda_status("cuKernelGetParamInfo()", code);
        if (code || found_offset != offset || found_size != size)
            return memra_fail(MEMRA_ERR_ABI,
                              "%s was built with other parameters than this library has: number %zu is not of %zu "
                              "bytes at %zu; take the cubins that belong to this library",
                              memra_kernel_names[k], i, size, offset);
        end = offset + size;
    }
    if (!is_attend(k)) return MEMRA_OK;
    const int n_bytes = is_pipe(k) ? PIPE_SHARED_BYTES : ATTEND_SHARED_BYTES;
    return MEMRA_CU(cuKernelSetAttribute, (MAX_DYNAMIC_SHARED_SIZE_BYTES, n_bytes, kernel, device));
}

int memra_kernel_loaded(const memra_device *device, enum memra_kernel k) {
    if (device->kernels[k]) return MEMRA_OK;
    return memra_fail(MEMRA_ERR_UNSUPPORTED,
                      "kernel %s is not loaded; memra_device_load_folder takes the folder that python -m memra_driver"
                      " --cubins sm_%d names", memra_kernel_names[k], device->arch);
}

/* ---- Shapes ---- */

/* Numbers of a launch, whatever the caller gave: -1 stands for one that is negative, INT64_MAX for one too large. */
static int64_t times(int64_t a, int64_t b) {
    int64_t product;
    if (a < 0 || b < 0) return -1;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

static int64_t parts(int64_t n, int64_t size) {
    return n < 0 ? -1 : n / size + (n % size != 0);
}

typedef struct launch_shape {
    int64_t blocks;
    unsigned x, y;  /* threads of a block */
    unsigned shared_bytes;
    unsigned grid_y, grid_z;  /* 0: the grid is a line */
} launch_shape;

static int launch(memra_device *device, enum memra_kernel k, launch_shape shape, void **params) {
    const char *const name = memra_kernel_names[k];
    MEMRA_TRY(memra_device_enter_again(device));
    MEMRA_TRY(memra_kernel_loaded(device, k));
    if (shape.blocks < 0) return memra_fail(MEMRA_ERR_CONFIG, "%s: a negative count", name);
    if (shape.blocks > INT32_MAX)
        return memra_fail(MEMRA_ERR_CAPACITY, "%s: more blocks than a grid has, %d; launch fewer rows", name,
                          INT32_MAX);
    if (!shape.blocks) return MEMRA_OK;
    const unsigned y = shape.grid_y ? shape.grid_y : 1, z = shape.grid_z ? shape.grid_z : 1;
    const unsigned blocks = (unsigned)shape.blocks;
    CUlaunchAttribute early = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value.allowed = 1};
    const CUlaunchConfig config = {{blocks, y, z}, {shape.x, shape.y, 1}, shape.shared_bytes, device->stream, &early,
                                   device->early};
    const CUresult code = memra_cu.cuLaunchKernelEx(&config, device->kernels[k], params, NULL);
    if (!code) return MEMRA_OK;
    char call[128];
    snprintf(call, sizeof call, "cuLaunchKernelEx(%s, grid (%u, %u, %u), block (%u, %u, 1))", name, blocks, y, z, shape.x,
             shape.y);
    return memra_fail_driver(call, code);
}

/* A grid of (.., heads, sequences). */
static int check_yz(const char *name, const char *kind, int32_t heads, int32_t n_seqs) {
    if (heads <= MOST_YZ && n_seqs <= MOST_YZ) return MEMRA_OK;
    return memra_fail(MEMRA_ERR_CAPACITY, "%s: %d sequences, %d %s heads; at most %d of each", name, n_seqs, heads, kind,
                      MOST_YZ);
}

#define LINE(blocks, threads) ((launch_shape){blocks, threads, 1, 0, 0, 0})
#define LAUNCH(k, shape, ...) return launch(device, k, shape, (void *[]){__VA_ARGS__})

/* ---- One function a kernel, parameters and all in the order of memra_api.h ---- */

int memra_launch_append_kv(
    memra_device *device, uint64_t k_rows, uint64_t v_rows, uint64_t k, uint64_t v, uint64_t len_d, uint64_t pos_d,
    int64_t slot, int32_t rows, int32_t len, int64_t max_ctx, int32_t kv_dim_k, int32_t kv_dim_v, int64_t k_tok_bytes,
    int64_t v_tok_bytes, int32_t k_format, int32_t v_format, uint64_t seqs, int32_t n_seqs, uint64_t health,
    int32_t layer) {
    const int64_t blocks = times(rows, (kv_dim_k > kv_dim_v ? kv_dim_k : kv_dim_v) / MEMRA_BLOCK);
    const int64_t tile = times(n_seqs, blocks) < APPEND_MANY ? APPEND_TILE : 2 * APPEND_TILE;
    LAUNCH(MEMRA_K_APPEND_KV, LINE(times(n_seqs, parts(blocks, tile)), 128), &k_rows, &v_rows, &k, &v, &len_d,
           &pos_d, &slot, &rows, &len, &max_ctx, &kv_dim_k, &kv_dim_v, &k_tok_bytes, &v_tok_bytes, &k_format, &v_format,
           &seqs, &n_seqs, &health, &layer);
}

int memra_launch_dequant_kv(
    memra_device *device, uint64_t k, uint64_t v, int64_t start, int64_t rows, int64_t max_ctx, int32_t kv_dim_k,
    int32_t kv_dim_v, int64_t k_tok_bytes, int64_t v_tok_bytes, int32_t k_format, int32_t v_format, uint64_t k_out,
    uint64_t v_out, int32_t out_bf16, uint64_t health, int32_t layer) {
    const int64_t groups = times(rows, ((int64_t)kv_dim_k + kv_dim_v) / MEMRA_BLOCK);
    LAUNCH(MEMRA_K_DEQUANT_KV, LINE(parts(groups, 8), 256), &k, &v, &start, &rows, &max_ctx, &kv_dim_k, &kv_dim_v,
           &k_tok_bytes, &v_tok_bytes, &k_format, &v_format, &k_out, &v_out, &out_bf16, &health, &layer);
}

int memra_launch_conv_update(
    memra_device *device, uint64_t x, uint64_t w, uint64_t conv_state, uint64_t out, uint64_t tape, uint64_t pos_d,
    int64_t slot, int32_t rows, int32_t conv_dim, int32_t d_conv, uint64_t seqs, int32_t n_seqs, uint64_t health,
    int32_t layer) {
    const int64_t blocks = times(n_seqs, times(parts(conv_dim, 128), parts(rows, CONV_ROWS)));
    LAUNCH(MEMRA_K_CONV_UPDATE, LINE(blocks, 128), &x, &w, &conv_state, &out, &tape, &pos_d, &slot, &rows, &conv_dim,
           &d_conv, &seqs, &n_seqs, &health, &layer);
}

int memra_launch_conv_ring_rebuild(
    memra_device *device, uint64_t x, uint64_t ring_old, uint64_t conv_state, uint64_t accept_d, int32_t accept,
    int32_t rows, int32_t conv_dim, int32_t d_conv, int32_t n_layers, int64_t x_apart, int64_t ring_apart,
    uint64_t health, int32_t layer) {
    LAUNCH(MEMRA_K_CONV_RING_REBUILD, LINE(times(n_layers, parts(conv_dim, 128)), 128), &x, &ring_old, &conv_state,
           &accept_d, &accept, &rows, &conv_dim, &d_conv, &n_layers, &x_apart, &ring_apart, &health, &layer);
}

int memra_launch_gdn_prep(
    memra_device *device, uint64_t conv_out, uint64_t alpha, uint64_t beta_raw, uint64_t dt_bias, uint64_t a,
    uint64_t q, uint64_t k, uint64_t v, uint64_t g_log, uint64_t beta, uint64_t pos_d, int64_t slot, int32_t rows,
    int32_t num_k, int32_t num_v, int32_t state_size, float eps, uint64_t seqs, int32_t n_seqs, uint64_t health,
    int32_t layer) {
    const launch_shape blocks_of_heads = {times(times(n_seqs, rows), num_v), 32, 4, 0, 0, 0};
    LAUNCH(MEMRA_K_GDN_PREP, blocks_of_heads, &conv_out, &alpha, &beta_raw, &dt_bias, &a, &q, &k, &v, &g_log, &beta,
           &pos_d, &slot, &rows, &num_k, &num_v, &state_size, &eps, &seqs, &n_seqs, &health, &layer);
}

int memra_launch_gdn_scan(
    memra_device *device, uint64_t q, uint64_t k, uint64_t v, uint64_t g_log, uint64_t beta, uint64_t state_in,
    uint64_t state_out, uint64_t out, uint64_t tape, uint64_t accept_d, int32_t rows, int32_t num_v,
    int32_t state_size, float scale, uint64_t seqs, int32_t n_seqs, uint64_t health, int32_t layer) {
    MEMRA_TRY(check_yz("gdn_scan", "value", num_v, n_seqs));
    const int64_t all = times(times(n_seqs, num_v), state_size / SCAN_COLUMNS);
    const launch_shape shape = {all > 0 ? state_size / SCAN_COLUMNS : all, 32, 2, 0, (unsigned)num_v, (unsigned)n_seqs};
    LAUNCH(MEMRA_K_GDN_SCAN, shape, &q, &k, &v, &g_log, &beta, &state_in, &state_out, &out, &tape,
           &accept_d, &rows, &num_v, &state_size, &scale, &seqs, &n_seqs, &health, &layer);
}

static int check_recur(int32_t d_conv, int32_t num_k, int32_t num_v, int32_t state_size) {
    if (state_size != 32 && state_size != 64 && state_size != 128 && state_size != 256)
        return memra_fail(
            MEMRA_ERR_UNSUPPORTED, "recur_step: state_size %d has no kernel; there are [32, 64, 128, 256]", state_size);
    if (num_k < 1 || num_v < 1 || d_conv < 1 || d_conv > 8)
        return memra_fail(
            MEMRA_ERR_UNSUPPORTED, "recur_step: %d key and %d value heads, d_conv %d; at least 1 of each, d_conv at "
            "most 8", num_k, num_v, d_conv);
    return MEMRA_OK;
}

int memra_recur_split(
    int32_t n_seqs, int32_t num_k, int32_t num_v, int32_t state_size, int32_t *columns, int32_t *blocks) {
    if (!columns || !blocks) return memra_fail(MEMRA_ERR_ARRAY, "memra_recur_split: columns or blocks is NULL");
    MEMRA_TRY(check_recur(1, num_k, num_v, state_size));
    const int64_t keys = times(n_seqs, num_k), most = times(parts(num_v, num_k), state_size);
    int32_t best = 32;
    while (best < most && best < RECUR_COLUMNS) {
        const int32_t wider = best < state_size ? 2 * best : best + state_size;
        if (wider > RECUR_COLUMNS || times(keys, parts(most, wider)) < RECUR_BLOCKS) break;
        best = wider;
    }
    *columns = best;
    *blocks = keys <= RECUR_TICKETS ? (int32_t)parts(most, best) : 1;
    return MEMRA_OK;
}

int memra_launch_recur_step(
    memra_device *device, uint64_t x, uint64_t w, uint64_t alpha, uint64_t beta_raw, uint64_t dt_bias, uint64_t a,
    uint64_t conv_state, uint64_t state_in, uint64_t state_out, uint64_t out, uint64_t tape, uint64_t pos_d,
    int64_t slot, int32_t rows, int32_t d_conv, int32_t num_k, int32_t num_v, int32_t state_size, int32_t columns,
    int32_t blocks, float eps, float scale, uint64_t seqs, int32_t n_seqs, uint64_t health, int32_t layer) {
    MEMRA_TRY(check_recur(d_conv, num_k, num_v, state_size));
    const bool fits = columns >= 32 && columns <= RECUR_COLUMNS && columns % 32 == 0 &&
                      (columns < state_size ? state_size % columns : columns % state_size) == 0;
    if (!fits || (blocks != 1 && blocks != parts(times(parts(num_v, num_k), state_size), columns)))
        return memra_fail(
            MEMRA_ERR_CONFIG, "recur_step: %d columns by %d blocks do not share %d value heads of %d over %d key heads",
            columns, blocks, num_v, state_size, num_k);
    const enum memra_kernel k = state_size == 32    ? MEMRA_K_RECUR_STEP_32
                                : state_size == 64  ? MEMRA_K_RECUR_STEP_64
                                : state_size == 128 ? MEMRA_K_RECUR_STEP_128
                                                    : MEMRA_K_RECUR_STEP_256;
    const int64_t stage = (int64_t)(rows < RECUR_ROWS ? rows : RECUR_ROWS) * (2 * state_size + columns);
    const int64_t gates = 2 * RECUR_ROWS * (columns < state_size ? 1 : columns / state_size);
    const int64_t rings = blocks > 1 ? 2 * state_size * (d_conv - 1) : 0;
    MEMRA_TRY(check_yz("recur_step", "key", num_k, n_seqs));
    const launch_shape shape = {rows < 0 || n_seqs < 0 ? -1 : n_seqs ? blocks : 0, 256, 1,
                                (unsigned)(4 * (stage + gates + rings)), (unsigned)num_k, (unsigned)n_seqs};
    LAUNCH(k, shape, &x, &w, &alpha, &beta_raw, &dt_bias, &a, &conv_state, &state_in, &state_out, &out, &tape, &pos_d,
           &slot, &rows, &d_conv, &num_k, &num_v, &state_size, &columns, &blocks, &eps, &scale, &seqs, &n_seqs,
           &health, &layer);
}

int memra_launch_set_counters(
    memra_device *device, uint64_t counters, int32_t a, int32_t b, int64_t a_lo, int64_t a_hi, int64_t b_lo,
    int64_t b_hi, uint64_t health, int32_t layer) {
    LAUNCH(MEMRA_K_SET_COUNTERS, LINE(1, 128), &counters, &a, &b, &a_lo, &a_hi, &b_lo, &b_hi, &health, &layer);
}

int memra_launch_restore(
    memra_device *device, uint64_t src, uint64_t dst, int64_t bytes, uint64_t src2, uint64_t dst2, int64_t bytes2,
    uint64_t counters, int32_t a, int32_t b, int64_t a_lo, int64_t a_hi, int64_t b_lo, int64_t b_hi, uint64_t health,
    int32_t layer) {
    const int64_t blocks = bytes < 0 || bytes2 < 0 ? -1 : parts(bytes, RESTORE_BYTES) + parts(bytes2, RESTORE_BYTES);
    LAUNCH(MEMRA_K_RESTORE, LINE(blocks ? blocks : 1, 256), &src, &dst, &bytes, &src2, &dst2, &bytes2, &counters, &a, &b,
           &a_lo, &a_hi, &b_lo, &b_hi, &health, &layer);
}

int memra_launch_commit_counters(
    memra_device *device, uint64_t counters, uint64_t pos_d, uint64_t accept_d, int32_t accept, int32_t rows,
    int64_t mask_lo, int64_t mask_hi, int32_t move_pos, uint64_t health, int32_t layer) {
    LAUNCH(MEMRA_K_COMMIT_COUNTERS, LINE(1, 128), &counters, &pos_d, &accept_d, &accept, &rows, &mask_lo, &mask_hi,
           &move_pos, &health, &layer);
}

int memra_launch_advance_batch(
    memra_device *device, uint64_t seqs, int32_t n_seqs, int32_t n, uint64_t health, int32_t layer) {
    LAUNCH(MEMRA_K_ADVANCE_BATCH, LINE(parts(n_seqs, 128), 128), &seqs, &n_seqs, &n, &health, &layer);
}

int memra_launch_copy_many(memra_device *device, uint64_t table, int32_t n, uint64_t health, int32_t layer) {
    LAUNCH(MEMRA_K_COPY_MANY, LINE(times(n, COPY_BLOCKS), 256), &table, &n, &health, &layer);
}

int memra_launch_copy_rows(
    memra_device *device, uint64_t src, uint64_t dst, int64_t src_stride, int64_t dst_stride, int32_t rows,
    int32_t columns, uint64_t health, int32_t layer) {
    LAUNCH(MEMRA_K_COPY_ROWS, LINE(times(rows, parts(columns, 1024)), 256), &src, &dst, &src_stride, &dst_stride, &rows,
           &columns, &health, &layer);
}

/* Keys of a tile: tile_shift_of in attend.cuh. */
static int64_t attend_tile(int32_t n_head_kv) {
    return n_head_kv <= 2 ? ATTEND_MOST_KEYS : ATTEND_MOST_KEYS / 2;
}

/* Shared memory of an attend block; struct Shared in attend.cuh is its layout. */
static int64_t attend_shared_bytes(int64_t columns, int32_t n_head_kv, int64_t head_dim_k, int64_t head_dim_v) {
    const int64_t widest = head_dim_k > head_dim_v ? head_dim_k : head_dim_v, keys = attend_tile(n_head_kv);
    const int64_t tile = keys * (widest + ATTEND_PAD), query = 2 * columns * (head_dim_k + ATTEND_PAD);
    const int64_t weight = columns * (ATTEND_MOST_KEYS + ATTEND_PAD);
    return 2 * (tile + query + weight) + 4 * (keys * head_dim_k / 32 + columns * (ATTEND_MOST_KEYS + 3) + 1);
}

/* What decides, beside the GPU, which path serves attention: AttendGeometry in kernels.py. */
typedef struct geometry {
    int32_t n_head_kv, head_dim_k, head_dim_v;
    int64_t k_tok_bytes, v_tok_bytes;
    int32_t k_format, v_format;
} geometry;

static int32_t team_warps_of(const geometry *g) {
    return g->n_head_kv == 1 ? 8 : g->n_head_kv == 2 ? 4 : g->n_head_kv <= 4 ? 2 : 1;
}

/* Bytes of a stage of one plane: four quarters that begin in lines of 128 bytes, and room to shift them. */
static int64_t stage_bytes(int64_t tokens, int64_t tok_bytes) {
    return 4 * ((tokens / 4 * tok_bytes + 127) / 128 * 128) + 128;
}

/* Whether shared memory has room for two stages of K and of V; struct Block in attend_pipe.cuh is its layout. */
static bool pipe_fits(const geometry *g, int64_t columns) {
    const int64_t heads = g->n_head_kv, team_warps = team_warps_of(g), tile = attend_tile(g->n_head_kv);
    int64_t tokens = 16 * team_warps < tile ? 16 * team_warps : tile;
    while (tokens > 16 && tokens * (g->k_tok_bytes + g->v_tok_bytes) > PIPE_STAGE_BYTES) tokens /= 2;
    const int64_t stages = stage_bytes(tokens, g->k_tok_bytes) + stage_bytes(tokens, g->v_tok_bytes);
    const int64_t query = heads * columns / 8 * g->head_dim_k * (g->k_format == MEMRA_FP8 ? 32 : 16);
    const int64_t weight = 2 * heads * (tokens / 16) * columns * 32;
    const int64_t reals = 4 * columns * heads * (1 + g->head_dim_k / 64 + 2 * team_warps);
    return 2 * stages <= PIPE_SHARED_BYTES - query - weight - reals - 768;
}

static bool packed_in_lines(const geometry *g, int32_t format, int64_t head_dim, int64_t tok_bytes) {
    if (format < MEMRA_Q8_0 || format > MEMRA_FP8) return false;
    return head_dim % 64 == 0 && tok_bytes % 16 == 0 &&
           tok_bytes == g->n_head_kv * head_dim / MEMRA_BLOCK * memra_block_bytes(format);
}

/* The entry that was made for this geometry and pair of formats; MEMRA_N_KERNELS where none was. */
static enum memra_kernel fixed_entry(const geometry *g, int64_t n_columns, bool folds) {
    static const struct {
        int32_t n_head_kv, head_dim, columns;
    } entries[MEMRA_FIXED_Q8] = {{2, 256, 8}, {2, 256, 16}, {2, 256, 32}, {4, 256, 8},
                                 {4, 256, 16}, {8, 128, 8}, {8, 128, 16}, {4, 256, 24}};
    const int first_of_v[] = {-1, 0, 1, 2}; /* q8_0 is none of V's */
    const int v = first_of_v[g->v_format], n = g->k_format == MEMRA_FP8 ? MEMRA_FIXED_FP8 : MEMRA_FIXED_Q8;
    if (g->head_dim_k != g->head_dim_v || v < 0 || (g->k_format != MEMRA_Q8_0 && g->k_format != MEMRA_FP8))
        return MEMRA_N_KERNELS;
    const int before = g->k_format == MEMRA_FP8 ? 3 * (MEMRA_FIXED_Q8 + MEMRA_FOLDS) : 0;
    int found = -1, narrow = 0; /* narrow: entries of 8 columns before the one that is found */
    for (int e = 0; e < n && (found < 0 || entries[found].columns < n_columns); e++)
        if (entries[e].n_head_kv == g->n_head_kv && entries[e].head_dim == g->head_dim_k) found = e;
    if (found < 0) return MEMRA_N_KERNELS;
    for (int e = 0; e < found; e++) narrow += entries[e].columns == 8;
    const int of_pair = folds ? n + narrow : found;
    return (enum memra_kernel)((int)MEMRA_K_ATTEND_PIPE_FIXED + before + v * (n + MEMRA_FOLDS) + of_pair);
}

/* The entry of attend_pipe; MEMRA_N_KERNELS where the portable path serves. */
static enum memra_kernel pipe_entry(const geometry *g, int64_t n_columns, bool folds) {
    static const struct {
        int32_t width, columns; /* dims of V that a warp sums up, columns of a block */
    } entries[] = {{64, 8}, {64, 16}, {64, 32}, {128, 8}, {128, 16}, {128, 24}, {256, 8}};
    const size_t n_entries = sizeof entries / sizeof *entries;
    if (g->n_head_kv > PIPE_WARPS || !packed_in_lines(g, g->k_format, g->head_dim_k, g->k_tok_bytes) ||
        !packed_in_lines(g, g->v_format, g->head_dim_v, g->v_tok_bytes) || !pipe_fits(g, 8))
        return MEMRA_N_KERNELS;
    const enum memra_kernel fixed = fixed_entry(g, n_columns, folds);
    if (fixed != MEMRA_N_KERNELS) return fixed;
    size_t e = 0;
    while (e < n_entries && entries[e].width * team_warps_of(g) < g->head_dim_v) e++;
    if (e == n_entries) return MEMRA_N_KERNELS;
    while (entries[e].columns < n_columns && e + 1 < n_entries && entries[e + 1].width == entries[e].width &&
           pipe_fits(g, entries[e + 1].columns))
        e++;
    if (!folds) return (enum memra_kernel)((int)MEMRA_K_ATTEND_PIPE_64_8 + (int)e);
    int narrow = 0;
    for (size_t i = 0; i < e; i++) narrow += entries[i].columns == 8;
    return (enum memra_kernel)((int)MEMRA_K_ATTEND_PIPE_FOLDS + narrow);
}

int32_t memra_attend_pieces(int32_t n_seqs, int64_t columns) {
    return n_seqs >= ATTEND_FOLD_SEQS && columns <= ATTEND_FOLD_COLUMNS ? ATTEND_FOLDS : ATTEND_GROUPS;
}

static int check_pieces(int32_t pieces) {
    if (pieces == ATTEND_GROUPS || pieces == ATTEND_FOLDS) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_CONFIG, "attend: %d partial sums of a head; %d, or %d as memra_attend_pieces says", pieces,
        ATTEND_GROUPS, ATTEND_FOLDS);
}

int memra_launch_attend(
    memra_device *device, uint64_t q, uint64_t k, uint64_t v, uint64_t pos_d, int64_t slot, int32_t rows,
    int64_t max_ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim_k, int32_t head_dim_v, int64_t k_tok_bytes,
    int64_t v_tok_bytes, int32_t k_format, int32_t v_format, float scale, int32_t window, uint64_t part,
    int32_t pieces, uint64_t seqs, int32_t n_seqs, uint64_t health, int32_t layer) {
    static const struct {
        int32_t width;
        enum memra_kernel narrow, wide; /* the widest has no wide one */
    } entries[] = {
        {64, MEMRA_K_ATTEND_64, MEMRA_K_ATTEND_64_WIDE},    {128, MEMRA_K_ATTEND_128, MEMRA_K_ATTEND_128_WIDE},
        {192, MEMRA_K_ATTEND_192, MEMRA_K_ATTEND_192_WIDE}, {256, MEMRA_K_ATTEND_256, MEMRA_K_ATTEND_256_WIDE},
        {512, MEMRA_K_ATTEND_512, MEMRA_K_ATTEND_512},
    };
    size_t e = 0;
    while (e < sizeof entries / sizeof *entries && entries[e].width < head_dim_v) e++;
    if (e == sizeof entries / sizeof *entries || head_dim_v < 1 || head_dim_k < 1 || head_dim_k > 512)
        return memra_fail(MEMRA_ERR_UNSUPPORTED, "attend: heads of %d and %d have no kernel; at most 512 each",
                          head_dim_k, head_dim_v);
    if (n_head_kv < 1 || n_head < n_head_kv || n_head % n_head_kv)
        return memra_fail(MEMRA_ERR_UNSUPPORTED, "attend: %d query heads over %d K/V heads", n_head, n_head_kv);
    const int64_t n_columns = times(rows, n_head / n_head_kv);
    MEMRA_TRY(check_pieces(pieces));
    if (pieces == ATTEND_FOLDS && n_columns > ATTEND_FOLD_COLUMNS)
        return memra_fail(MEMRA_ERR_CONFIG, "attend: folds of %" PRId64 " columns; at most %d", n_columns,
                          ATTEND_FOLD_COLUMNS);
    const geometry g = {n_head_kv, head_dim_k, head_dim_v, k_tok_bytes, v_tok_bytes, k_format, v_format};
    const enum memra_kernel pipe = device && device->arch == PIPE_ARCH
                                       ? pipe_entry(&g, n_columns, pieces == ATTEND_FOLDS)
                                       : MEMRA_N_KERNELS;
    if (pipe != MEMRA_N_KERNELS) {
        const int64_t all = times(n_seqs, n_columns), blocks = all > 0 ? ATTEND_GROUPS : all;
        const launch_shape persistent = {blocks, 32 * (PIPE_WARPS + PIPE_BRINGERS), 1, PIPE_SHARED_BYTES, 0, 0};
        LAUNCH(pipe, persistent, &q, &k, &v, &pos_d, &slot, &rows, &max_ctx, &n_head, &n_head_kv, &head_dim_k,
               &head_dim_v, &k_tok_bytes, &v_tok_bytes, &k_format, &v_format, &scale, &window, &part, &pieces, &seqs,
               &n_seqs, &health, &layer);
    }
    const bool is_wide = n_columns > ATTEND_NARROW && entries[e].wide != entries[e].narrow &&
                         attend_shared_bytes(ATTEND_WIDE, n_head_kv, head_dim_k, head_dim_v) <= ATTEND_SHARED_BYTES;
    const int64_t columns = is_wide ? ATTEND_WIDE : ATTEND_NARROW;
    const int64_t blocks = times(times(n_seqs, parts(n_columns, columns)), times(n_head_kv, pieces));
    const unsigned shared_bytes = (unsigned)attend_shared_bytes(columns, n_head_kv, head_dim_k, head_dim_v);
    const launch_shape blocks_of_groups = {blocks, ATTEND_THREADS, 1, shared_bytes, 0, 0};
    LAUNCH(is_wide ? entries[e].wide : entries[e].narrow, blocks_of_groups, &q, &k, &v, &pos_d, &slot, &rows, &max_ctx,
           &n_head, &n_head_kv, &head_dim_k, &head_dim_v, &k_tok_bytes, &v_tok_bytes, &k_format, &v_format, &scale,
           &window, &part, &pieces, &seqs, &n_seqs, &health, &layer);
}

int memra_launch_attend_combine(
    memra_device *device, uint64_t part, uint64_t out, uint64_t pos_d, int64_t slot, int32_t rows, int64_t max_ctx,
    int32_t n_head, int32_t n_head_kv, int32_t head_dim_v, int32_t window, int32_t pieces, uint64_t seqs,
    int32_t n_seqs, uint64_t health, int32_t layer) {
    MEMRA_TRY(check_pieces(pieces));
    const int64_t chunks = times(times(times(n_seqs, rows), n_head), parts(head_dim_v, 64));
    const int64_t blocks = pieces == ATTEND_GROUPS ? chunks : parts(chunks, ATTEND_FOLDS);
    LAUNCH(MEMRA_K_ATTEND_COMBINE, LINE(blocks, 32 * ATTEND_FOLDS), &part, &out, &pos_d, &slot, &rows, &max_ctx,
           &n_head, &n_head_kv, &head_dim_v, &window, &pieces, &seqs, &n_seqs, &health, &layer);
}

uint64_t memra_attend_part_bytes(int64_t n_seqs, int64_t rows, int32_t n_head, int32_t head_dim_v) {
    const int64_t sums = times(times(n_seqs, rows), times(n_head, ATTEND_GROUPS));
    const int64_t n_bytes = times(times(sums, (int64_t)head_dim_v + ATTEND_TAIL), 4);
    return n_bytes < 0 ? 0 : (uint64_t)n_bytes;
}
