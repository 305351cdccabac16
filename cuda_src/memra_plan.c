/* memra_plan.c: every buffer of a cache with its bytes and its place, before any exists: plan.py in C.
 *
 * Host memory only. Same planes, same offsets, same refusals; a test holds the two against each other.
 */
#include "memra_internal.h"

#include <stdio.h>

enum { ALIGN_BYTES = 256, TAIL_PAD_BYTES = 8 };

static const memra_plane planes[MEMRA_N_PLANES] = {
    [MEMRA_P_K] = {"k", "attention", "kv", MEMRA_U8, 0, 0, 0},
    [MEMRA_P_V] = {"v", "attention", "kv", MEMRA_U8, 0, 0, 0},
    [MEMRA_P_LEN_D] = {"len_d", "attention", "counters", MEMRA_I32, 1, 1, 0},
    [MEMRA_P_CONV_STATE] = {"conv_state", "recurrent", "recurrent", MEMRA_F32, 3, 3, 0},
    [MEMRA_P_SSM_STATE] = {"ssm_state", "recurrent", "recurrent", MEMRA_F32, 5, 4, 0},
    [MEMRA_P_SSM_STATE_ALT] = {"ssm_state_alt", "recurrent", "double_buffer", MEMRA_F32, 6, 7, 0},
    [MEMRA_P_POS_D] = {"pos_d", "device", "counters", MEMRA_I32, 1, 1, 0},
    [MEMRA_P_HEALTH] = {"health", "device", "counters", MEMRA_U8, 2, 2, 0},
    [MEMRA_P_TAPE] = {"tape", "round", "tape", MEMRA_F32, 8, 8, 0},
    [MEMRA_P_LOGITS] = {"logits", "logits", "logits", MEMRA_F32, 9, 9, 0},
    [MEMRA_P_TAPS] = {"taps", "taps", "taps", MEMRA_F32, 10, 10, 0},
};

const memra_plane *memra_plane_table(int32_t *n_planes) {
    if (n_planes) *n_planes = MEMRA_N_PLANES;
    return planes;
}

/* ---- The rows ---- */

/* base * factor + more, or false where an i64 does not hold it. */
static bool sized(int64_t *value, int64_t base, int64_t factor, int64_t more) {
    return !__builtin_mul_overflow(base, factor, value) && !__builtin_add_overflow(*value, more, value);
}

/* Elements of a plane of layer il; il counts for planes of layers only. False where an i64 does not hold them. */
static bool length(const memra_plan_own *own, enum memra_plane_id plane, int32_t il, int64_t *len) {
    const memra_config *config = own->config;
    const int64_t size = config->ssm_state_size, heads = config->ssm_time_step_rank;
    int64_t tok_bytes[2];
    switch (plane) {
        case MEMRA_P_K:
        case MEMRA_P_V:
            memra_plan_tok_bytes(own, il, tok_bytes);
            return sized(len, own->max_ctx, tok_bytes[plane == MEMRA_P_V], TAIL_PAD_BYTES);
        case MEMRA_P_CONV_STATE: return sized(len, (int64_t)memra_conv_dim(config), config->ssm_conv_kernel - 1, 0);
        case MEMRA_P_SSM_STATE:
        case MEMRA_P_SSM_STATE_ALT: return sized(len, size, size, 0) && sized(len, *len, heads, 0);
        case MEMRA_P_TAPE: /* per row: x of the convolution, then q, k, v and both gates of the scan */
            return sized(len, 3 * size + 2, heads, (int64_t)memra_conv_dim(config)) &&
                   sized(len, *len, own->options.round_width, 0);
        case MEMRA_P_LOGITS: return sized(len, config->n_vocab, 1, 0);
        case MEMRA_P_TAPS:
            return sized(len, own->options.tap_rows, own->options.n_tap_layers, 0) &&
                   sized(len, *len, config->n_embd, 0);
        case MEMRA_P_HEALTH: return sized(len, sizeof(memra_health), 1, 0);
        default: return sized(len, 1, 1, 0); /* counters */
    }
}

/* Adds the planes of one owner: a layer, a device, or what was asked for. */
static int add(memra_plan_own *own, const char *owner, int32_t device, int32_t il) {
    for (int32_t id = 0; id < MEMRA_N_PLANES; id++) {
        if (strcmp(planes[id].owner, owner)) continue;
        const bool mtp = il >= 0 && memra_plan_is_mtp(own, il);
        memra_planned row = {.plane = (enum memra_plane_id)id, .layer = il, .device = device,
                             .section = mtp ? planes[id].mtp_section : planes[id].section};
        if (!length(own, row.plane, il, &row.len) ||
            !sized(&row.n_bytes, row.len, planes[id].dtype == MEMRA_U8 ? 1 : 4, 0)) {
            char where[32] = "";
            if (il >= 0) snprintf(where, sizeof where, "layer%02d.", il);
            else if (own->plan.n_devices > 1) snprintf(where, sizeof where, "device%d.", device);
            return memra_fail(MEMRA_ERR_CONFIG, "%s%s needs more than %lld bytes", where, planes[id].name,
                              (long long)INT64_MAX);
        }
        own->planes[own->n_planes++] = row;
    }
    return MEMRA_OK;
}

/* Every plane in the order of the Rust walk, then what is ours. */
static int walk(memra_plan_own *own, int32_t last_device) {
    const memra_options *options = &own->options;
    const int32_t *device_of = own->plan.device_of;
    for (int32_t il = 0; il < own->plan.n_layer; il++) {
        if (memra_plan_has_kv(own, il)) MEMRA_TRY(add(own, "attention", device_of[il], il));
        if (memra_plan_has_state(own, il)) MEMRA_TRY(add(own, "recurrent", device_of[il], il));
    }
    for (int32_t device = 0; device < own->plan.n_devices; device++) MEMRA_TRY(add(own, "device", device, -1));
    for (int32_t il = 0; options->round_width && il < own->plan.n_layer; il++)
        if (memra_plan_has_state(own, il)) MEMRA_TRY(add(own, "round", device_of[il], il));
    if (options->reserve_logits) MEMRA_TRY(add(own, "logits", last_device, -1));
    if (options->n_tap_layers) MEMRA_TRY(add(own, "taps", device_of[options->tap_layers[0]], -1));
    return MEMRA_OK;
}

static int by_place(const void *a, const void *b) {
    const memra_planned *x = *(memra_planned *const *)a, *y = *(memra_planned *const *)b;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    if (x->section != y->section) return x->section < y->section ? -1 : 1;
    return x < y ? -1 : x > y; /* they stand in the order of the walk */
}

/* Offsets and padding rows; the counters of a device are packed, every other plane is aligned. */
static int place(memra_plan_own *own, memra_planned **sorted) {
    memra_plan *plan = &own->plan;
    for (int64_t i = 0; i < own->n_planes; i++) sorted[i] = &own->planes[i];
    qsort(sorted, (size_t)own->n_planes, sizeof *sorted, by_place);
    int64_t i = 0;
    for (int32_t device = 0; device < plan->n_devices; device++) {
        uint64_t offset = 0;
        int64_t begin = -1, end = -1;
        for (; i < own->n_planes && sorted[i]->device == device; i++) {
            memra_planned *row = sorted[i];
            const memra_plane *plane = &planes[row->plane];
            if (row->plane == MEMRA_P_CONV_STATE && begin < 0) begin = (int64_t)offset;
            if (row->plane == MEMRA_P_SSM_STATE_ALT && end < 0) end = (int64_t)offset;
            row->offset = (int64_t)offset;
            plan->rows[plan->n_rows++] = (memra_plan_row){plane->name, row->layer, device, plane->dtype, 0,
                                                          row->len, row->n_bytes, row->offset};
            /* The error record follows the counters, so that there is a next plane, of the same device. */
            const bool packed = plane->dtype == MEMRA_I32 && planes[sorted[i + 1]->plane].dtype == MEMRA_I32;
            const uint64_t behind = offset + (uint64_t)row->n_bytes;
            offset = packed ? behind : (behind + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
            if (offset > INT64_MAX)
                return memra_fail(MEMRA_ERR_CONFIG, "the arena of device %d needs more than %lld bytes", device,
                                  (long long)INT64_MAX);
            plan->plane_bytes[device] += row->n_bytes;
            const int64_t gap = (int64_t)(offset - behind);
            if (gap)
                plan->rows[plan->n_rows++] =
                    (memra_plan_row){"pad", row->layer, device, MEMRA_U8, 0, gap, gap, (int64_t)behind};
        }
        plan->arena_bytes[device] = (int64_t)offset;
        plan->states_offset[device] = begin < 0 ? (int64_t)offset : begin; /* empty where no recurrent layer lives */
        plan->states_bytes[device] = begin < 0 ? 0 : end - begin;
    }
    return MEMRA_OK;
}

/* ---- The plan ---- */

static int no_memory(void) {
    return memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "plan: no host memory");
}

static int place_stages(memra_plan *plan, const int32_t *fence, int32_t n_stages, const int32_t *placement,
                        int32_t *last_device) {
    const int32_t whole[] = {0, plan->n_layer};
    if (!fence) fence = whole, n_stages = 1;
    MEMRA_TRY(memra_check_placement(placement, n_stages));
    plan->device_of = calloc((size_t)plan->n_layer, sizeof *plan->device_of);
    if (!plan->device_of) return no_memory();
    for (int32_t s = 0; s < n_stages; s++) {
        const int32_t device = placement ? placement[s] : s;
        if (device >= plan->n_devices) plan->n_devices = device + 1;
        /* Layers past the fence's end belong to the last stage. */
        const int32_t end = s == n_stages - 1 ? plan->n_layer : fence[s + 1];
        for (int32_t il = fence[s]; il < end; il++) plan->device_of[il] = device;
        *last_device = device;
    }
    return MEMRA_OK;
}

static int fill(memra_plan_own *own, const int32_t *fence, int32_t n_stages, const int32_t *placement) {
    memra_plan *plan = &own->plan;
    int32_t last_device = 0;
    MEMRA_TRY(memra_check_fence(own->config, fence, n_stages));
    MEMRA_TRY(place_stages(plan, fence, n_stages, placement, &last_device));
    MEMRA_TRY(memra_check_geometry(own));
    const size_t devices = (size_t)plan->n_devices, most = 4 * (size_t)plan->n_layer + 2 * devices + 2;
    memra_planned **sorted = calloc(most, sizeof *sorted);
    own->planes = calloc(most, sizeof *own->planes);
    plan->rows = calloc(2 * most, sizeof *plan->rows); /* each may be followed by padding */
    plan->arena_bytes = calloc(devices, sizeof *plan->arena_bytes);
    plan->plane_bytes = calloc(devices, sizeof *plan->plane_bytes);
    plan->states_offset = calloc(devices, sizeof *plan->states_offset);
    plan->states_bytes = calloc(devices, sizeof *plan->states_bytes);
    const bool all = sorted && own->planes && plan->rows && plan->arena_bytes && plan->plane_bytes &&
                     plan->states_offset && plan->states_bytes;
    int status = all ? walk(own, last_device) : no_memory();
    if (status == MEMRA_OK) status = place(own, sorted);
    free(sorted);
    return status;
}

int memra_plan_new(
    const memra_config *config, int64_t max_ctx, const memra_policy *policy, const memra_options *options,
    const int32_t *fence, int32_t n_stages, const int32_t *placement, memra_plan **plan) {
    if (!plan) return memra_fail(MEMRA_ERR_ARRAY, "plan is NULL");
    *plan = NULL;
    MEMRA_TRY(memra_check_config(config));
    memra_plan_own found = {.config = config, .max_ctx = max_ctx, .plan = {.n_layer = (int32_t)config->n_layer}};
    if (policy) MEMRA_TRY(memra_check_policy(policy));
    if (options) MEMRA_TRY(memra_check_options(options));
    if (max_ctx < 0 || max_ctx > INT32_MAX)
        return memra_fail(MEMRA_ERR_CONFIG, "max_ctx is %lld; it must lie in 0 .. %d", (long long)max_ctx, INT32_MAX);
    memra_options_default(&found.options);
    if (policy) found.policy = *policy;
    else MEMRA_TRY(memra_policy_from_env(&found.policy));
    if (options) found.options = *options;
    memra_plan_own *own = malloc(sizeof *own);
    if (!own) return no_memory();
    *own = found;
    const int status = fill(own, fence, n_stages, placement);
    if (status == MEMRA_OK) *plan = &own->plan;
    else memra_plan_free(&own->plan);
    return status;
}

void memra_plan_free(memra_plan *plan) {
    if (!plan) return;
    free(((memra_plan_own *)plan)->planes);
    free(plan->rows);
    free(plan->arena_bytes);
    free(plan->plane_bytes);
    free(plan->states_offset);
    free(plan->states_bytes);
    free(plan->device_of);
    free(plan);
}
