/* memra_ops.c: the operations of a step: ops.py in C. Every one checks all it can, launches, then notes what it did. */
#include "memra_internal.h"

#include <inttypes.h>
#include <math.h>

/* Where a launch for a layer finds its device, its position and its error record. */
typedef struct at {
    memra_device *device;
    const memra_device *entered;  /* the same where memra_check_cache entered it last; NULL: another is current */
    uint64_t pos_d;  /* 0: the position is slot */
    int64_t slot;
    uint64_t health;
} at;

static at at_device(const memra_cache *cache, int32_t d) {
    const uint64_t pos_d = memra_device_clock(cache) ? cache->devices[d].pos_d.ptr : 0;
    memra_device *const device = memra_device_at(cache, d);
    return (at){device, d == cache->n_devices - 1 ? device : NULL, pos_d, cache->pos, cache->devices[d].health.ptr};
}

static memra_range plane(const char *name, const memra_slice *slice) {
    const uint64_t item_bytes = slice->dtype == MEMRA_U8 ? 1 : 4;
    return (memra_range){name, slice->ptr, (uint64_t)slice->len * item_bytes};
}

static int f32_rows(const char *name, uint64_t ptr, int64_t rows, int64_t columns, memra_range *range) {
    return memra_range_of(name, ptr, rows, columns, 4, range);
}

static int check_number(const char *name, float value) {
    return isfinite(value) ? MEMRA_OK : memra_fail(MEMRA_ERR_CONFIG, "%s is %g; it is a finite f32", name, (double)value);
}

int memra_append_kv(memra_cache *cache, int32_t il, int64_t rows, uint64_t k_rows, uint64_t v_rows) {
    memra_kv_layer *layer = NULL;
    memra_range inputs[2];
    MEMRA_TRY(memra_check_cache(cache, "append_kv"));
    MEMRA_TRY(memra_kv_of(cache, il, &layer));
    MEMRA_TRY(memra_check_rows(rows));
    MEMRA_TRY(f32_rows("k_rows", k_rows, rows, layer->kv_dim_k, &inputs[0]));
    MEMRA_TRY(f32_rows("v_rows", v_rows, rows, layer->kv_dim_v, &inputs[1]));
    const memra_range planes[2] = {plane("k", &layer->k), plane("v", &layer->v)};
    MEMRA_TRY(memra_check_ranges(planes, 2, inputs, 2));
    if (rows == 0) return MEMRA_OK;
    MEMRA_TRY(memra_step_check(cache, il, MEMRA_OP_APPEND, rows));
    const at at = at_device(cache, layer->device_index);
    const int64_t end = cache->pos + rows, len = layer->len > end ? layer->len : end;
    MEMRA_TRY(MEMRA_ENTERED(at.entered, memra_launch_append_kv(
        at.device, k_rows, v_rows, layer->k.ptr, layer->v.ptr, layer->len_d.ptr, at.pos_d, at.slot, (int32_t)rows,
        at.pos_d ? -1 : (int32_t)len, /* -1: the device finds the length, which it knows better than the host */
        cache->max_ctx, (int32_t)layer->kv_dim_k, (int32_t)layer->kv_dim_v, layer->k_tok_bytes, layer->v_tok_bytes,
        layer->k_format, layer->v_format, 0, 1, at.health, il)));
    layer->len = len;
    memra_step_done(cache, il, MEMRA_OP_APPEND, rows);
    return MEMRA_OK;
}

int memra_dequant_kv(
    memra_cache *cache, int32_t il, int64_t start, int64_t stop, uint64_t k_out, uint64_t v_out, int32_t out_bf16) {
    memra_kv_layer *layer = NULL;
    memra_range outputs[2];
    MEMRA_TRY(memra_check_cache(cache, "dequant_kv"));
    MEMRA_TRY(memra_kv_of(cache, il, &layer));
    MEMRA_TRY(memra_check_readable(cache, "dequant_kv"));
    MEMRA_TRY(memra_check_not_recording(cache, "dequant_kv"));
    MEMRA_TRY(memra_check_state(cache, "dequant_kv", MEMRA_IN(MEMRA_READY) | MEMRA_IN(MEMRA_PENDING_REPLAY)));
    MEMRA_TRY(memra_check_layer_length(cache, il));
    if (start < 0 || start > stop || stop > layer->len)
        return memra_fail(
            MEMRA_ERR_CAPACITY, "layer %" PRId32 ": rows %" PRId64 " .. %" PRId64 "; 0 .. %" PRId64 " stand", il, start,
            stop, layer->len);
    const int64_t rows = stop - start;
    const int32_t item_bytes = out_bf16 ? 2 : 4;
    MEMRA_TRY(memra_range_of("k_out", k_out, rows, layer->kv_dim_k, item_bytes, &outputs[0]));
    MEMRA_TRY(memra_range_of("v_out", v_out, rows, layer->kv_dim_v, item_bytes, &outputs[1]));
    const memra_range planes[2] = {plane("k", &layer->k), plane("v", &layer->v)};
    MEMRA_TRY(memra_check_ranges(outputs, 2, planes, 2));
    if (rows == 0) return MEMRA_OK;
    const at at = at_device(cache, layer->device_index);
    return MEMRA_ENTERED(at.entered, memra_launch_dequant_kv(
        at.device, layer->k.ptr, layer->v.ptr, start, rows, cache->max_ctx, (int32_t)layer->kv_dim_k,
        (int32_t)layer->kv_dim_v, layer->k_tok_bytes, layer->v_tok_bytes, layer->k_format, layer->v_format, k_out,
        v_out, out_bf16 != 0, at.health, il));
}

int memra_conv_update(memra_cache *cache, int32_t il, int64_t rows, uint64_t x, uint64_t w, uint64_t out) {
    memra_recur_layer *layer = NULL;
    memra_range inputs[2], outputs[2];
    MEMRA_TRY(memra_check_cache(cache, "conv_update"));
    MEMRA_TRY(memra_recur_of(cache, il, &layer));
    MEMRA_TRY(memra_check_rows(rows));
    MEMRA_TRY(f32_rows("x", x, rows, layer->conv_dim, &inputs[0]));
    MEMRA_TRY(f32_rows("w", w, layer->conv_dim, layer->d_conv, &inputs[1]));
    MEMRA_TRY(f32_rows("out", out, rows, layer->conv_dim, &outputs[0]));
    outputs[1] = plane("conv_state", &layer->conv_state);
    MEMRA_TRY(memra_check_ranges(outputs, 2, inputs, 2));
    if (rows == 0) return MEMRA_OK;
    MEMRA_TRY(memra_step_check(cache, il, MEMRA_OP_CONV, rows));
    const at at = at_device(cache, layer->device_index);
    MEMRA_TRY(MEMRA_ENTERED(at.entered, memra_launch_conv_update(
        at.device, x, w, layer->conv_state.ptr, out, cache->round_width ? layer->tape.ptr : 0, at.pos_d, at.slot,
        (int32_t)rows, layer->conv_dim, layer->d_conv, 0, 1, at.health, il)));
    memra_step_done(cache, il, MEMRA_OP_CONV, rows);
    return MEMRA_OK;
}

static int check_state_size(const memra_recur_layer *layer, const char *name) {
    const int32_t size = layer->state_size;
    if (size == 32 || size == 64 || size == 128 || size == 256) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_UNSUPPORTED, "%s: state_size %" PRId32 " has no kernel; there are [32, 64, 128, 256]", name, size);
}

int memra_gdn_prep(
    memra_cache *cache, int32_t il, int64_t rows, uint64_t conv_out, uint64_t alpha, uint64_t beta_raw,
    uint64_t dt_bias, uint64_t a, uint64_t q, uint64_t k, uint64_t v, uint64_t g_log, uint64_t beta, float eps) {
    memra_recur_layer *layer = NULL;
    memra_range inputs[5], outputs[5];
    MEMRA_TRY(memra_check_cache(cache, "gdn_prep"));
    MEMRA_TRY(memra_recur_of(cache, il, &layer));
    MEMRA_TRY(memra_check_readable(cache, "gdn_prep"));
    MEMRA_TRY(check_state_size(layer, "gdn_prep"));
    MEMRA_TRY(memra_check_rows(rows));
    const int64_t heads = layer->num_v, vectors = heads * layer->state_size;
    MEMRA_TRY(f32_rows("conv_out", conv_out, rows, layer->conv_dim, &inputs[0]));
    MEMRA_TRY(f32_rows("alpha", alpha, rows, heads, &inputs[1]));
    MEMRA_TRY(f32_rows("beta_raw", beta_raw, rows, heads, &inputs[2]));
    MEMRA_TRY(f32_rows("dt_bias", dt_bias, 1, heads, &inputs[3]));
    MEMRA_TRY(f32_rows("a", a, 1, heads, &inputs[4]));
    MEMRA_TRY(f32_rows("q", q, rows, vectors, &outputs[0]));
    MEMRA_TRY(f32_rows("k", k, rows, vectors, &outputs[1]));
    MEMRA_TRY(f32_rows("v", v, rows, vectors, &outputs[2]));
    MEMRA_TRY(f32_rows("g_log", g_log, rows, heads, &outputs[3]));
    MEMRA_TRY(f32_rows("beta", beta, rows, heads, &outputs[4]));
    MEMRA_TRY(memra_check_ranges(outputs, 5, inputs, 5));
    MEMRA_TRY(check_number("eps", eps));
    if (rows == 0) return MEMRA_OK;
    const at at = at_device(cache, layer->device_index);
    return MEMRA_ENTERED(at.entered, memra_launch_gdn_prep(
        at.device, conv_out, alpha, beta_raw, dt_bias, a, q, k, v, g_log, beta, at.pos_d, at.slot, (int32_t)rows,
        layer->num_k, layer->num_v, layer->state_size, eps, 0, 1, at.health, il));
}

/* What the scan of a step reads and writes, and whether the two change places behind it. */
typedef struct states {
    uint64_t before, after;
    bool swap;
} states;

static states states_of(const memra_cache *cache, const memra_recur_layer *layer) {
    const bool recording = memra_recording(cache) != NULL, in_round = cache->round_width != 0;
    states found = {layer->ssm_state.ptr, layer->ssm_state_alt.ptr, !recording && !in_round};
    if (recording) found.before = found.after = layer->home;
    if (in_round) found.after = found.before == layer->home ? layer->away : layer->home;
    return found;
}

int memra_gdn_scan(
    memra_cache *cache, int32_t il, int64_t rows, uint64_t q, uint64_t k, uint64_t v, uint64_t g_log, uint64_t beta,
    uint64_t out, float scale) {
    memra_recur_layer *layer = NULL;
    memra_range inputs[5], outputs[3];
    MEMRA_TRY(memra_check_cache(cache, "gdn_scan"));
    MEMRA_TRY(memra_recur_of(cache, il, &layer));
    MEMRA_TRY(check_state_size(layer, "gdn_scan"));
    MEMRA_TRY(memra_check_rows(rows));
    const int64_t heads = layer->num_v, vectors = heads * layer->state_size;
    MEMRA_TRY(f32_rows("q", q, rows, vectors, &inputs[0]));
    MEMRA_TRY(f32_rows("k", k, rows, vectors, &inputs[1]));
    MEMRA_TRY(f32_rows("v", v, rows, vectors, &inputs[2]));
    MEMRA_TRY(f32_rows("g_log", g_log, rows, heads, &inputs[3]));
    MEMRA_TRY(f32_rows("beta", beta, rows, heads, &inputs[4]));
    MEMRA_TRY(f32_rows("out", out, rows, vectors, &outputs[0]));
    outputs[1] = plane("ssm_state", &layer->ssm_state);
    outputs[2] = plane("ssm_state_alt", &layer->ssm_state_alt);
    MEMRA_TRY(memra_check_ranges(outputs, 3, inputs, 5));
    MEMRA_TRY(check_number("scale", scale));
    if (rows == 0) return MEMRA_OK;
    MEMRA_TRY(memra_step_check(cache, il, MEMRA_OP_SCAN, rows));
    const at at = at_device(cache, layer->device_index);
    const uint64_t tape = cache->round_width ? layer->tape.ptr + 4 * (uint64_t)rows * (uint64_t)layer->conv_dim : 0;
    const states states = states_of(cache, layer);
    MEMRA_TRY(MEMRA_ENTERED(at.entered, memra_launch_gdn_scan(
        at.device, q, k, v, g_log, beta, states.before, states.after, out, tape, 0, (int32_t)rows, layer->num_v,
        layer->state_size, scale, 0, 1, at.health, il)));
    if (states.swap) memra_swap_states(layer);
    memra_step_done(cache, il, MEMRA_OP_SCAN, rows);
    return MEMRA_OK;
}

int memra_recur_step(
    memra_cache *cache, int32_t il, int64_t rows, uint64_t x, uint64_t w, uint64_t alpha, uint64_t beta_raw,
    uint64_t dt_bias, uint64_t a, uint64_t out, float eps, float scale) {
    memra_recur_layer *layer = NULL;
    memra_range inputs[6], outputs[4];
    MEMRA_TRY(memra_check_cache(cache, "recur_step"));
    MEMRA_TRY(memra_recur_of(cache, il, &layer));
    MEMRA_TRY(check_state_size(layer, "recur_step"));
    MEMRA_TRY(memra_check_rows(rows));
    const int64_t heads = layer->num_v;
    MEMRA_TRY(f32_rows("x", x, rows, layer->conv_dim, &inputs[0]));
    MEMRA_TRY(f32_rows("w", w, layer->conv_dim, layer->d_conv, &inputs[1]));
    MEMRA_TRY(f32_rows("alpha", alpha, rows, heads, &inputs[2]));
    MEMRA_TRY(f32_rows("beta_raw", beta_raw, rows, heads, &inputs[3]));
    MEMRA_TRY(f32_rows("dt_bias", dt_bias, 1, heads, &inputs[4]));
    MEMRA_TRY(f32_rows("a", a, 1, heads, &inputs[5]));
    MEMRA_TRY(f32_rows("out", out, rows, heads * layer->state_size, &outputs[0]));
    outputs[1] = plane("conv_state", &layer->conv_state);
    outputs[2] = plane("ssm_state", &layer->ssm_state);
    outputs[3] = plane("ssm_state_alt", &layer->ssm_state_alt);
    MEMRA_TRY(memra_check_ranges(outputs, 4, inputs, 6));
    MEMRA_TRY(check_number("eps", eps));
    MEMRA_TRY(check_number("scale", scale));
    if (rows == 0) return MEMRA_OK;
    MEMRA_TRY(memra_step_check(cache, il, MEMRA_OP_CONV | MEMRA_OP_SCAN, rows));
    const at at = at_device(cache, layer->device_index);
    const states states = states_of(cache, layer);
    int32_t columns = 0, blocks = 0;
    MEMRA_TRY(memra_recur_split(1, layer->num_k, layer->num_v, layer->state_size, &columns, &blocks));
    MEMRA_TRY(MEMRA_ENTERED(at.entered, memra_launch_recur_step(
        at.device, x, w, alpha, beta_raw, dt_bias, a, layer->conv_state.ptr, states.before, states.after, out,
        cache->round_width ? layer->tape.ptr : 0, at.pos_d, at.slot, (int32_t)rows, layer->d_conv, layer->num_k,
        layer->num_v, layer->state_size, columns, blocks, eps, scale, 0, 1, at.health, il)));
    if (states.swap) memra_swap_states(layer);
    memra_step_done(cache, il, MEMRA_OP_CONV | MEMRA_OP_SCAN, rows);
    return MEMRA_OK;
}

static int check_head_dim(const char *name, int32_t dim) {
    if (dim == 64 || dim == 96 || dim == 128 || dim == 192 || dim == 256 || dim == 512) return MEMRA_OK;
    return memra_fail(
        MEMRA_ERR_UNSUPPORTED, "attend: %s %" PRId32 " has no kernel; there are [64, 96, 128, 192, 256, 512]", name,
        dim);
}

int memra_attend(
    memra_cache *cache, int32_t il, int64_t rows, uint64_t q, uint64_t out, float scale, int32_t window) {
    memra_kv_layer *layer = NULL;
    memra_range inputs[3], output;
    MEMRA_TRY(memra_check_cache(cache, "attend"));
    if (il < 0 || il >= cache->n_layer || cache->kv[il].kv_source < 0) return memra_kv_of(cache, il, &layer);
    const int32_t source = cache->kv[il].kv_source, heads = cache->kv[il].n_head;
    MEMRA_TRY(memra_kv_of(cache, source, &layer));
    if (cache->kv[il].device_index != layer->device_index)
        return memra_fail(
            MEMRA_ERR_UNSUPPORTED, "layer %" PRId32 " reads the K/V of layer %" PRId32
            ", which lives on another device", il, source);
    const int32_t gqa = layer->n_head_kv > 0 ? heads / layer->n_head_kv : 0;
    if (gqa < 1 || gqa > 16 || heads % layer->n_head_kv)
        return memra_fail(
            MEMRA_ERR_UNSUPPORTED, "attend: %" PRId32 " query heads over %" PRId32 " K/V heads; 1 to 16 each", heads,
            layer->n_head_kv);
    MEMRA_TRY(check_head_dim("head_dim_k", layer->head_dim_k));
    MEMRA_TRY(check_head_dim("head_dim_v", layer->head_dim_v));
    MEMRA_TRY(memra_check_rows(rows));
    MEMRA_TRY(f32_rows("q", q, rows, (int64_t)heads * layer->head_dim_k, &inputs[0]));
    MEMRA_TRY(f32_rows("out", out, rows, (int64_t)heads * layer->head_dim_v, &output));
    inputs[1] = plane("k", &layer->k);
    inputs[2] = plane("v", &layer->v);
    MEMRA_TRY(memra_check_ranges(&output, 1, inputs, 3));
    MEMRA_TRY(check_number("scale", scale));
    if (rows > cache->max_rows)
        return memra_fail(
            MEMRA_ERR_CAPACITY, "attend of %" PRId64 " rows; the cache was built with CacheOptions(max_rows=%" PRId64
            ")", rows, cache->max_rows);
    if (window < -1)
        return memra_fail(
            MEMRA_ERR_CONFIG, "attend: window %" PRId32 "; it is the number of keys that a row sees, 0 for all", window);
    MEMRA_TRY(memra_check_readable(cache, "attend"));
    MEMRA_TRY(memra_check_length(cache, "pos", cache->pos));
    MEMRA_TRY(memra_check_layer_length(cache, source));
    if (layer->len < cache->pos + rows)
        return memra_fail(
            MEMRA_ERR_STATE, "layer %" PRId32 ": attend of %" PRId64 " rows at position %" PRId64 ", but only %" PRId64
            " rows stand", source, rows, cache->pos, layer->len);
    if (rows == 0) return MEMRA_OK;
    const at at = at_device(cache, layer->device_index);
    const int32_t width = window < 0 ? layer->window : window;
    MEMRA_TRY(memra_kernel_loaded(at.device, MEMRA_K_ATTEND_COMBINE)); /* before the first of the two is launched */
    const int32_t pieces = memra_attend_pieces(1, rows * gqa);
    uint64_t part = 0;
    MEMRA_TRY(memra_device_scratch(at.device, memra_attend_part_bytes(1, rows, heads, layer->head_dim_v), &part));
    MEMRA_TRY(MEMRA_ENTERED(at.entered, memra_launch_attend(
        at.device, q, layer->k.ptr, layer->v.ptr, at.pos_d, at.slot, (int32_t)rows, cache->max_ctx, heads,
        layer->n_head_kv, layer->head_dim_k, layer->head_dim_v, layer->k_tok_bytes, layer->v_tok_bytes, layer->k_format,
        layer->v_format, scale, width, part, pieces, 0, 1, at.health, il)));
    return MEMRA_ENTERED(at.entered, memra_launch_attend_combine(
        at.device, part, out, at.pos_d, at.slot, (int32_t)rows, cache->max_ctx, heads, layer->n_head_kv,
        layer->head_dim_v, width, pieces, 0, 1, at.health, il));
}
