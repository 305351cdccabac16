/* memra_driver.h: the structs that C, C++, CUDA and Python share.
 *
 * Plain C11, also C++17 and NVRTC. Fixed-width types only; device memory is a uint64_t; every
 * size and offset is asserted below, so a compiler that lays a struct out differently stops here.
 * The leading fields of each struct are those of the Rust memra_kv 0.72.0 structs of the same
 * name, in their order; what follows the line "tail" is ours. C may write len and pos and may
 * exchange the two state slices of a layer; the rest is to be read. After the cache is closed
 * every ptr is stale. The functions of libmemra_driver.so are declared in memra_api.h.
 */
#ifndef MEMRA_DRIVER_H
#define MEMRA_DRIVER_H

#include "memra_formats.h"

/* NVRTC has no <stddef.h>, and before 13.3 no __builtin_offsetof. */
#if defined(__CUDACC_RTC__)
#define MEMRA_OFFSETOF(type, field) __INTADDR__(&((type *)0)->field)
#else
#include <stddef.h>
#define MEMRA_OFFSETOF(type, field) offsetof(type, field)
#endif
#define MEMRA_FIELD(type, field, n) MEMRA_ASSERT(MEMRA_OFFSETOF(type, field) == (n), #type "." #field " moved")

#ifdef __cplusplus
extern "C" {
#endif

#define MEMRA_ABI_VERSION 1

enum memra_dtype { MEMRA_U8 = 1, MEMRA_I32 = 2, MEMRA_F32 = 3 };

/* What a cache allows now. */
enum memra_state {
    MEMRA_READY = 0,
    MEMRA_UNSETTLED = 1,       /* the device counters moved and the host has not read them */
    MEMRA_PENDING_REPLAY = 2,  /* K/V stands at replay_to, the recurrent state at pos */
    MEMRA_TAINTED = 3,         /* a driver error in the middle of a change */
    MEMRA_CLOSED = 4
};

/* Bits of step_ops: what a layer has run in the open step. */
enum memra_step_op { MEMRA_OP_APPEND = 1, MEMRA_OP_CONV = 2, MEMRA_OP_SCAN = 4 };

/* Whose capture a cache takes part in; the other one's calls on it are refused until it ends. */
enum memra_recorder { MEMRA_NOT_RECORDING = 0, MEMRA_RECORDED_BY_PYTHON = 1, MEMRA_RECORDED_BY_C = 2 };

/* A run of elements in device or host memory. */
typedef struct memra_slice {
    uint64_t ptr;    /* 0 when empty */
    int64_t len;     /* elements */
    int32_t dtype;   /* enum memra_dtype */
    int32_t device;  /* CUDA ordinal; -1: host memory */
} memra_slice;
MEMRA_SIZE(memra_slice, 24);
MEMRA_FIELD(memra_slice, ptr, 0);
MEMRA_FIELD(memra_slice, len, 8);
MEMRA_FIELD(memra_slice, dtype, 16);
MEMRA_FIELD(memra_slice, device, 20);

/* Quantised K/V of one full-attention layer. Token t of K starts at byte t * k_tok_bytes. */
typedef struct memra_kv_layer {
    uint32_t present;  /* 0: the layer owns no K/V (Rust: None) */
    uint32_t reserved;
    memra_slice k;         /* u8 [max_ctx * k_tok_bytes + 8] */
    memra_slice v;         /* u8 [max_ctx * v_tok_bytes + 8] */
    int64_t kv_dim_k;      /* elements of K per token: n_head_kv * head_dim_k */
    int64_t kv_dim_v;
    int64_t k_tok_bytes;
    int64_t v_tok_bytes;
    int64_t len;           /* tokens that stand; C may write it, then Cache.sync_d */
    memra_slice len_d;     /* i32 [1]: len on the device */
    /* tail */
    int32_t k_format;      /* enum memra_format */
    int32_t v_format;
    int32_t n_head_kv;
    int32_t head_dim_k;
    int32_t head_dim_v;
    int32_t window;        /* keys that a query sees; 0: all before it */
    uint32_t step_ops;     /* enum memra_step_op bits of the open step */
    int32_t device_index;  /* into memra_cache.devices */
    int32_t n_head;        /* query heads; also where present is 0: */
    int32_t kv_source;     /* the layer whose K/V this one reads, itself or another's; -1: it attends nothing */
} memra_kv_layer;
MEMRA_SIZE(memra_kv_layer, 160);
MEMRA_FIELD(memra_kv_layer, present, 0);
MEMRA_FIELD(memra_kv_layer, reserved, 4);
MEMRA_FIELD(memra_kv_layer, k, 8);
MEMRA_FIELD(memra_kv_layer, v, 32);
MEMRA_FIELD(memra_kv_layer, kv_dim_k, 56);
MEMRA_FIELD(memra_kv_layer, kv_dim_v, 64);
MEMRA_FIELD(memra_kv_layer, k_tok_bytes, 72);
MEMRA_FIELD(memra_kv_layer, v_tok_bytes, 80);
MEMRA_FIELD(memra_kv_layer, len, 88);
MEMRA_FIELD(memra_kv_layer, len_d, 96);
MEMRA_FIELD(memra_kv_layer, k_format, 120);
MEMRA_FIELD(memra_kv_layer, v_format, 124);
MEMRA_FIELD(memra_kv_layer, n_head_kv, 128);
MEMRA_FIELD(memra_kv_layer, head_dim_k, 132);
MEMRA_FIELD(memra_kv_layer, head_dim_v, 136);
MEMRA_FIELD(memra_kv_layer, window, 140);
MEMRA_FIELD(memra_kv_layer, step_ops, 144);
MEMRA_FIELD(memra_kv_layer, device_index, 148);
MEMRA_FIELD(memra_kv_layer, n_head, 152);
MEMRA_FIELD(memra_kv_layer, kv_source, 156);

/* Recurrent state of one linear-attention layer. */
typedef struct memra_recur_layer {
    uint32_t present;  /* 0: not a recurrent layer (Rust: None) */
    uint32_t reserved;
    memra_slice conv_state;     /* f32 [conv_dim][d_conv - 1], column 0 the oldest */
    memra_slice ssm_state;      /* f32 [num_v][state_size columns][state_size rows], the current one: an eager */
    memra_slice ssm_state_alt;  /* scan makes the two change places, so read the pointer anew; this one is scratch */
    /* tail */
    int32_t conv_dim;
    int32_t d_conv;
    int32_t num_k;
    int32_t num_v;
    int32_t state_size;
    uint32_t step_ops;     /* enum memra_step_op bits of the open step */
    uint32_t swaps;        /* how often ssm_state and ssm_state_alt changed places */
    int32_t device_index;  /* into memra_cache.devices */
    uint64_t home;         /* where ssm_state was born: recorded steps work there, in place */
    uint64_t away;         /* where ssm_state_alt was born */
    memra_slice tape;      /* f32: what a round keeps of its rows, x | q | k | v | g_log | beta; empty: no rounds */
} memra_recur_layer;
MEMRA_SIZE(memra_recur_layer, 152);
MEMRA_FIELD(memra_recur_layer, present, 0);
MEMRA_FIELD(memra_recur_layer, reserved, 4);
MEMRA_FIELD(memra_recur_layer, conv_state, 8);
MEMRA_FIELD(memra_recur_layer, ssm_state, 32);
MEMRA_FIELD(memra_recur_layer, ssm_state_alt, 56);
MEMRA_FIELD(memra_recur_layer, conv_dim, 80);
MEMRA_FIELD(memra_recur_layer, d_conv, 84);
MEMRA_FIELD(memra_recur_layer, num_k, 88);
MEMRA_FIELD(memra_recur_layer, num_v, 92);
MEMRA_FIELD(memra_recur_layer, state_size, 96);
MEMRA_FIELD(memra_recur_layer, step_ops, 100);
MEMRA_FIELD(memra_recur_layer, swaps, 104);
MEMRA_FIELD(memra_recur_layer, device_index, 108);
MEMRA_FIELD(memra_recur_layer, home, 112);
MEMRA_FIELD(memra_recur_layer, away, 120);
MEMRA_FIELD(memra_recur_layer, tape, 128);

/* Logits of the last token, parked on the device (Rust: Option<CudaSlice<f32>>). */
typedef struct memra_logits {
    uint32_t present;
    uint32_t reserved;
    memra_slice slice;  /* f32 [n_vocab] */
} memra_logits;
MEMRA_SIZE(memra_logits, 32);
MEMRA_FIELD(memra_logits, present, 0);
MEMRA_FIELD(memra_logits, reserved, 4);
MEMRA_FIELD(memra_logits, slice, 8);

/* Hidden states of chosen layers, [t][n_taps][hidden] f32 (Rust: DflashTapSink). */
typedef struct memra_tap_sink {
    uint32_t present;
    uint32_t n_taps;
    int32_t *layer_ids;  /* host memory, n_taps entries; slot order */
    memra_slice buf;
    int64_t hidden;
    int64_t t;
} memra_tap_sink;
MEMRA_SIZE(memra_tap_sink, 56);
MEMRA_FIELD(memra_tap_sink, present, 0);
MEMRA_FIELD(memra_tap_sink, n_taps, 4);
MEMRA_FIELD(memra_tap_sink, layer_ids, 8);
MEMRA_FIELD(memra_tap_sink, buf, 16);
MEMRA_FIELD(memra_tap_sink, hidden, 40);
MEMRA_FIELD(memra_tap_sink, t, 48);

/* What a cache keeps once per device. */
typedef struct memra_cache_device {
    memra_slice pos_d;     /* i32 [1]: pos on the device, constant during a step */
    memra_slice health;    /* u8 [sizeof(memra_health)] */
    memra_slice counters;  /* i32: len_d of its layers in layer order, then pos_d; empty where they are not packed */
    memra_slice states;    /* f32: from the first conv_state to the last ssm_state at birth, what a snapshot keeps */
    uint64_t stream;       /* CUstream that all its work is ordered in */
    uint64_t handle;       /* the library's device, set by memra_cache_bind; 0: none */
    int32_t ordinal;       /* CUDA ordinal; -1: host memory */
    uint32_t has_arena;    /* 1: all planes are parts of one allocation, neighbours 256-byte aligned */
} memra_cache_device;
MEMRA_SIZE(memra_cache_device, 120);
MEMRA_FIELD(memra_cache_device, pos_d, 0);
MEMRA_FIELD(memra_cache_device, health, 24);
MEMRA_FIELD(memra_cache_device, counters, 48);
MEMRA_FIELD(memra_cache_device, states, 72);
MEMRA_FIELD(memra_cache_device, stream, 96);
MEMRA_FIELD(memra_cache_device, handle, 104);
MEMRA_FIELD(memra_cache_device, ordinal, 112);
MEMRA_FIELD(memra_cache_device, has_arena, 116);

/* Why a snapshot cannot be restored. */
enum memra_invalid {
    MEMRA_VALID = 0,
    MEMRA_INVALID_GIVEN_UP = 1,      /* K/V rows below its pos, from given_up on, were given up since */
    MEMRA_INVALID_HALF_WAY = 2,      /* snapshot_into failed half way */
    MEMRA_INVALID_CACHE_CLOSED = 3,
    MEMRA_INVALID_CLOSED = 4
};

/* Lengths, rings and states of a cache at one position; K/V bytes are not copied. */
typedef struct memra_snapshot {
    int64_t *kv_len;    /* host memory, n_layer entries; -1: the layer has no K/V */
    memra_slice *conv;  /* host memory, n_layer entries; len 0: the layer has none */
    memra_slice *ssm;
    int64_t pos;
    /* tail */
    int64_t n_layer;
    int64_t given_up;
    uint64_t cache_id;
    uint64_t generation;
    uint32_t invalid;  /* enum memra_invalid */
    uint32_t stamps;   /* counts the times that it was brought up to now */
    struct memra_snapshot *next;  /* of the same cache */
    uint32_t by_library;  /* 1: memra_snapshot_new made it, and memra_snapshot_free frees it */
    uint32_t reserved;
} memra_snapshot;
MEMRA_SIZE(memra_snapshot, 88);
MEMRA_FIELD(memra_snapshot, kv_len, 0);
MEMRA_FIELD(memra_snapshot, conv, 8);
MEMRA_FIELD(memra_snapshot, ssm, 16);
MEMRA_FIELD(memra_snapshot, pos, 24);
MEMRA_FIELD(memra_snapshot, n_layer, 32);
MEMRA_FIELD(memra_snapshot, given_up, 40);
MEMRA_FIELD(memra_snapshot, cache_id, 48);
MEMRA_FIELD(memra_snapshot, generation, 56);
MEMRA_FIELD(memra_snapshot, invalid, 64);
MEMRA_FIELD(memra_snapshot, stamps, 68);
MEMRA_FIELD(memra_snapshot, next, 72);
MEMRA_FIELD(memra_snapshot, by_library, 80);
MEMRA_FIELD(memra_snapshot, reserved, 84);

/* A buffer that the library allocated for a cache on first use; release frees it and the node, and returns the status of
 * the driver's free. */
struct memra_owned;
typedef int (*memra_release)(struct memra_owned *owned);
typedef struct memra_owned {
    struct memra_owned *next;
    memra_release release;
    memra_slice slice;
} memra_owned;
MEMRA_SIZE(memra_owned, 40);
MEMRA_FIELD(memra_owned, next, 0);
MEMRA_FIELD(memra_owned, release, 8);
MEMRA_FIELD(memra_owned, slice, 16);

/* One sequence. kv and recur have n_layer entries each; at most one of a pair is present. */
typedef struct memra_cache {
    uint32_t struct_size;
    uint32_t abi_version;
    memra_kv_layer *kv;
    memra_recur_layer *recur;
    int64_t pos;      /* tokens committed; C may write it, then Cache.sync_d */
    int64_t max_ctx;  /* capacity of every K/V layer in tokens */
    memra_logits last_logits_dev;
    memra_tap_sink dflash_taps;
    /* tail */
    int64_t n_layer;
    memra_cache_device *devices;
    int32_t n_devices;
    uint32_t strict;       /* 1: the calls that wait fail when the error record is not empty */
    uint32_t state;        /* enum memra_state */
    uint32_t recorder;     /* enum memra_recorder: whose capture the cache takes part in */
    int64_t step_rows;     /* rows of the open step; 0: none is open */
    int64_t round_width;   /* of the open round; 0: none is open */
    int64_t replay_to;     /* while a replay is pending: where it ends; else 0 */
    uint64_t generation;   /* counts resets */
    uint64_t id;           /* unique in the process */
    int64_t logits_at;     /* the length that the sequence had with the token whose logits are parked; -1: none */
    int64_t sure_pos;      /* while unsettled: where the cache stood when the host last knew */
    int64_t round_limit;   /* the widest round that the tape has room for */
    int64_t max_rows;      /* rows that one attend takes */
    int64_t n_vocab;       /* elements of a row of logits; 0: not known */
    memra_slice logits;    /* the buffer that logits are parked in, once it exists */
    memra_slice taps;      /* the buffer that taps are cut from, once it exists */
    memra_snapshot *snapshots;  /* all that are open, linked by next */
    memra_owned *owned;    /* what the library allocated; its owner releases each when the cache closes */
    uint32_t logits_sure;  /* 1: parked behind every count that the host does not know; settle corrects logits_at */
    uint32_t reserved;
} memra_cache;
MEMRA_SIZE(memra_cache, 312);
MEMRA_FIELD(memra_cache, struct_size, 0);
MEMRA_FIELD(memra_cache, abi_version, 4);
MEMRA_FIELD(memra_cache, kv, 8);
MEMRA_FIELD(memra_cache, recur, 16);
MEMRA_FIELD(memra_cache, pos, 24);
MEMRA_FIELD(memra_cache, max_ctx, 32);
MEMRA_FIELD(memra_cache, last_logits_dev, 40);
MEMRA_FIELD(memra_cache, dflash_taps, 72);
MEMRA_FIELD(memra_cache, n_layer, 128);
MEMRA_FIELD(memra_cache, devices, 136);
MEMRA_FIELD(memra_cache, n_devices, 144);
MEMRA_FIELD(memra_cache, strict, 148);
MEMRA_FIELD(memra_cache, state, 152);
MEMRA_FIELD(memra_cache, recorder, 156);
MEMRA_FIELD(memra_cache, step_rows, 160);
MEMRA_FIELD(memra_cache, round_width, 168);
MEMRA_FIELD(memra_cache, replay_to, 176);
MEMRA_FIELD(memra_cache, generation, 184);
MEMRA_FIELD(memra_cache, id, 192);
MEMRA_FIELD(memra_cache, logits_at, 200);
MEMRA_FIELD(memra_cache, sure_pos, 208);
MEMRA_FIELD(memra_cache, round_limit, 216);
MEMRA_FIELD(memra_cache, max_rows, 224);
MEMRA_FIELD(memra_cache, n_vocab, 232);
MEMRA_FIELD(memra_cache, logits, 240);
MEMRA_FIELD(memra_cache, taps, 264);
MEMRA_FIELD(memra_cache, snapshots, 288);
MEMRA_FIELD(memra_cache, owned, 296);
MEMRA_FIELD(memra_cache, logits_sure, 304);
MEMRA_FIELD(memra_cache, reserved, 308);

/* The error record. Every kernel takes its address and the layer that it works for.
 * first[kind] is 0 while kind was never seen, else UINT64_MAX - (position << 16 | layer): the
 * lowest position wins, then the lowest layer, in whatever order the blocks of a kernel run.
 * Which operation counts what: section 10 of SPEC.md.
 */
enum memra_fault {
    MEMRA_FAULT_NONFINITE = 0,       /* NaN or infinity in an input */
    MEMRA_FAULT_SCALE_OVERFLOW = 1,  /* finite inputs, but f16 d or m became infinite */
    MEMRA_FAULT_FP8_SATURATED = 2,   /* a finite input beyond 464 in e4m3 */
    MEMRA_FAULT_SLOT_RANGE = 3,      /* rows outside 0 .. max_ctx; nothing was written */
    MEMRA_FAULT_BAD_ACCEPT = 4       /* an accept count outside 0 .. rows; it counted as 0 */
};
#define MEMRA_FAULT_KINDS 5
typedef struct memra_health {
    uint64_t count[MEMRA_FAULT_KINDS];  /* groups of at most 32 inputs; of the last two, launches (of a batch, members) */
    uint64_t first[MEMRA_FAULT_KINDS];
    uint32_t flags;  /* bit (1 << kind) */
    uint32_t reserved;
} memra_health;
MEMRA_SIZE(memra_health, 88);
MEMRA_FIELD(memra_health, count, 0);
MEMRA_FIELD(memra_health, first, 40);
MEMRA_FIELD(memra_health, flags, 80);
MEMRA_FIELD(memra_health, reserved, 84);

/* One sequence of a batch at one layer: addresses on the device; those that the layer lacks are 0. */
typedef struct memra_seq {
    uint64_t k;
    uint64_t v;
    uint64_t len_d;
    uint64_t conv_state;
    uint64_t ssm_state;
    uint64_t pos_d;
    uint64_t health;
    int64_t max_ctx;
} memra_seq;
MEMRA_SIZE(memra_seq, 64);
MEMRA_FIELD(memra_seq, k, 0);
MEMRA_FIELD(memra_seq, v, 8);
MEMRA_FIELD(memra_seq, len_d, 16);
MEMRA_FIELD(memra_seq, conv_state, 24);
MEMRA_FIELD(memra_seq, ssm_state, 32);
MEMRA_FIELD(memra_seq, pos_d, 40);
MEMRA_FIELD(memra_seq, health, 48);
MEMRA_FIELD(memra_seq, max_ctx, 56);

/* One entry of copy_many's table. */
typedef struct memra_copy {
    uint64_t dst;
    uint64_t src;
    uint64_t bytes;
} memra_copy;
MEMRA_SIZE(memra_copy, 24);
MEMRA_FIELD(memra_copy, dst, 0);
MEMRA_FIELD(memra_copy, src, 8);
MEMRA_FIELD(memra_copy, bytes, 16);

#ifdef __cplusplus
}
#endif

#if !defined(__CUDACC_RTC__)
#include "memra_api.h"
#endif
#endif
