/* memra_geometry.c: what the layers of a planned cache are, and which geometries, stages and reserves are refused.
 *
 * The part of plan.py that asks, before any size is summed. What is said of a layer holds once its plan passed.
 */
#include "memra_internal.h"

#include <stdio.h>

enum { MAX_D_CONV = 8 };

/* ---- What the layers are ---- */

bool memra_plan_is_mtp(const memra_plan_own *own, int32_t il) {
    return il >= memra_n_trunk(own->config);
}

static bool is_skipped(const memra_plan_own *own, int32_t il) {
    return own->options.skip_mtp_state && memra_plan_is_mtp(own, il);
}

bool memra_plan_has_kv(const memra_plan_own *own, int32_t il) {
    return memra_owns_kv(own->config, il) && !is_skipped(own, il);
}

bool memra_plan_has_state(const memra_plan_own *own, int32_t il) {
    return !memra_attends(own->config, il) && !is_skipped(own, il);
}

int32_t memra_plan_kv_source(const memra_plan_own *own, int32_t il) {
    return is_skipped(own, il) ? -1 : memra_kv_source(own->config, il);
}

void memra_plan_formats(const memra_plan_own *own, int32_t il, int32_t formats[2]) {
    const memra_policy *policy = &own->policy;
    const uint32_t of_gemma = memra_is_windowed(own->config, il) ? policy->wkv : policy->gkv;
    const bool fp8 = own->config->has_gemma4 ? of_gemma : policy->kv_fp8;
    formats[0] = fp8 ? MEMRA_FP8 : policy->k;
    formats[1] = fp8 ? MEMRA_FP8 : policy->v;
}

void memra_plan_kv_dims(const memra_plan_own *own, int32_t il, int64_t dims[2]) {
    uint32_t head_dims[2];
    memra_head_dims(own->config, il, head_dims);
    for (int i = 0; i < 2; i++) dims[i] = (int64_t)memra_kv_heads(own->config, il) * head_dims[i];
}

void memra_plan_tok_bytes(const memra_plan_own *own, int32_t il, int64_t n_bytes[2]) {
    int32_t formats[2];
    int64_t dims[2];
    memra_plan_formats(own, il, formats);
    memra_plan_kv_dims(own, il, dims);
    for (int i = 0; i < 2; i++) n_bytes[i] = dims[i] / MEMRA_BLOCK * memra_block_bytes(formats[i]);
}

/* ---- Refusals ---- */

/* "[0, 4, 8]", cut where the room ends. */
static const char *list(char room[512], const int32_t *values, int64_t n) {
    int at = snprintf(room, 512, "[");
    for (int64_t i = 0; i < n && at < 480; i++)
        at += snprintf(room + at, 512 - (size_t)at, i ? ", %d" : "%d", values[i]);
    snprintf(room + at, 512 - (size_t)at, at < 480 ? "]" : ", ...]");
    return room;
}

int memra_check_fence(const memra_config *config, const int32_t *fence, int32_t n_stages) {
    const int32_t n_layer = (int32_t)config->n_layer, n_trunk = memra_n_trunk(config);
    char text[512], ends[32];
    if (!fence && n_stages <= 1) return MEMRA_OK;
    if (!fence)
        return memra_fail(MEMRA_ERR_CONFIG, "%d devices for the 1 stages of fence [0, %d]", n_stages, n_layer);
    if (n_stages < 1)
        return memra_fail(MEMRA_ERR_CONFIG, "fence %s must be at least two layer numbers",
                          list(text, fence, (int64_t)n_stages + 1));
    if (n_stages > n_layer) /* said without a look at the fence, which is as long as n_stages claims */
        return memra_fail(MEMRA_ERR_CONFIG, "%d stages for %d layers: every stage owns at least one layer", n_stages,
                          n_layer);
    const int32_t last = fence[n_stages];
    list(text, fence, (int64_t)n_stages + 1);
    if (fence[0] != 0)
        return memra_fail(MEMRA_ERR_CONFIG, "fence %s starts at %d; it must start at 0", text, fence[0]);
    if (last != n_layer && last != n_trunk) {
        snprintf(ends, sizeof ends, n_trunk == n_layer ? "%d" : "%d or %d", n_layer, n_trunk);
        return memra_fail(MEMRA_ERR_CONFIG, "fence %s ends at %d; it must end at %s", text, last, ends);
    }
    for (int32_t s = 0; s < n_stages; s++)
        if (fence[s] >= fence[s + 1])
            return memra_fail(MEMRA_ERR_CONFIG,
                              "fence %s must be strictly increasing: every stage owns at least one layer", text);
    return MEMRA_OK;
}

int memra_check_placement(const int32_t *placement, int32_t n_stages) {
    char text[512];
    for (int32_t s = 0; placement && s < n_stages; s++)
        if (placement[s] < 0 || placement[s] >= n_stages)
            return memra_fail(MEMRA_ERR_CONFIG, "placement %s: devices are 0 .. %d, at most one a stage",
                              list(text, placement, n_stages), n_stages - 1);
    return MEMRA_OK;
}

static int check_kv_layer(const memra_plan_own *own, int32_t il) {
    static const char *const head_names[] = {"head_dim_k", "head_dim_v"}, *const kv_names[] = {"kv_dim_k", "kv_dim_v"};
    const uint64_t heads = memra_kv_heads(own->config, il);
    uint32_t head_dims[2];
    if (heads < 1)
        return memra_fail(MEMRA_ERR_CONFIG, "layer %d: n_head_kv is 0; a layer with K/V needs at least 1", il);
    memra_head_dims(own->config, il, head_dims);
    for (int i = 0; i < 2; i++)
        if (head_dims[i] == 0 || head_dims[i] % MEMRA_BLOCK)
            return memra_fail(MEMRA_ERR_CONFIG, "layer %d: %s is %u; it must be a positive multiple of %d", il,
                              head_names[i], head_dims[i], MEMRA_BLOCK);
    for (int i = 0; i < 2; i++)
        if (heads * head_dims[i] > INT32_MAX)
            return memra_fail(MEMRA_ERR_CONFIG, "layer %d: %s is %llu elements per token; at most %d", il, kv_names[i],
                              (unsigned long long)(heads * head_dims[i]), INT32_MAX);
    return MEMRA_OK;
}

static int check_recurrent_layer(const memra_config *config, int32_t il) {
    const struct {
        const char *name;
        uint32_t value;
    } sizes[] = {{"state_size", config->ssm_state_size}, {"time_step_rank", config->ssm_time_step_rank},
                 {"group_count", config->ssm_group_count}};
    if (!config->has_ssm)
        return memra_fail(MEMRA_ERR_CONFIG, "layer %d is recurrent, but the model has no ssm description", il);
    if (config->ssm_conv_kernel < 1 || config->ssm_conv_kernel > MAX_D_CONV)
        return memra_fail(MEMRA_ERR_CONFIG, "layer %d: conv_kernel is %u; it must lie in 1 .. %d", il,
                          config->ssm_conv_kernel, MAX_D_CONV);
    for (int i = 0; i < 3; i++)
        if (sizes[i].value < 1)
            return memra_fail(MEMRA_ERR_CONFIG, "layer %d: %s is 0; a recurrent layer needs at least 1", il,
                              sizes[i].name);
    if (memra_conv_dim(config) > INT32_MAX)
        return memra_fail(MEMRA_ERR_CONFIG, "layer %d: conv_dim is %llu channels; at most %d", il,
                          (unsigned long long)memra_conv_dim(config), INT32_MAX);
    return MEMRA_OK;
}

static int check_reserved(const memra_plan_own *own) {
    const memra_options *options = &own->options;
    const int32_t n_layer = own->plan.n_layer, *ids = options->tap_layers;
    const uint32_t n = options->n_tap_layers;
    char text[512];
    if (n > (uint32_t)n_layer)
        return memra_fail(MEMRA_ERR_CONFIG, "reserve_taps names %u layers; the model has %d", n, n_layer);
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= n_layer)
            return memra_fail(MEMRA_ERR_CONFIG, "reserve_taps names layer %d; layers are 0 .. %d", ids[i], n_layer - 1);
    for (uint32_t i = 1; i < n; i++)
        if (own->plan.device_of[ids[i]] != own->plan.device_of[ids[0]])
            return memra_fail(MEMRA_ERR_CONFIG, "reserve_taps names layers %s of several devices; tap layers share one",
                              list(text, ids, n));
    if (n && own->config->n_embd < 1)
        return memra_fail(MEMRA_ERR_CONFIG, "reserve_taps needs n_embd, which this model description lacks");
    if (options->reserve_logits && own->config->n_vocab < 1)
        return memra_fail(MEMRA_ERR_CONFIG, "reserve_logits needs n_vocab, which this model description lacks");
    return MEMRA_OK;
}

int memra_check_geometry(const memra_plan_own *own) {
    for (int32_t il = 0; il < own->plan.n_layer; il++) {
        const uint32_t heads = memra_heads(own->config, il);
        if (heads > INT32_MAX && memra_plan_kv_source(own, il) >= 0)
            return memra_fail(MEMRA_ERR_CONFIG, "layer %d: n_head is %u query heads; at most %d", il, heads, INT32_MAX);
        if (memra_plan_has_kv(own, il)) MEMRA_TRY(check_kv_layer(own, il));
        if (memra_plan_has_state(own, il)) MEMRA_TRY(check_recurrent_layer(own->config, il));
    }
    return check_reserved(own);
}
