/* memra_config.c: what a model's layers are, which formats they get, and what of it is refused.
 *
 * The twin of config.py, of FormatPolicy in formats.py and of CacheOptions in options.py: the same rules, the same
 * sentences.
 */
#include "memra_internal.h"

#include <stdio.h>

#define MAX_LAYERS 65536u /* the error record keeps a layer in 16 bits */

static const struct {
    const char *name;
    int32_t block_bytes;
    bool for_k, for_v;
} formats[] = {
    [MEMRA_Q8_0] = {"q8_0", (int32_t)sizeof(memra_q8_0), true, false},
    [MEMRA_Q5_1] = {"q5_1", (int32_t)sizeof(memra_q5_1), false, true},
    [MEMRA_Q4_0] = {"q4_0", (int32_t)sizeof(memra_q4_0), false, true},
    [MEMRA_FP8] = {"fp8", (int32_t)sizeof(memra_fp8), true, true},
};
#define N_FORMATS ((int32_t)(sizeof formats / sizeof *formats))

static const char *const k_formats = "q8_0, fp8", *const v_formats = "q5_1, q4_0, fp8";

int64_t memra_block_bytes(int32_t format) {
    return formats[format].block_bytes;
}

/* ---- What a layer is ---- */

int32_t memra_n_trunk(const memra_config *config) {
    return (int32_t)(config->n_layer - config->nextn_predict_layers);
}

bool memra_attends(const memra_config *config, int32_t il) {
    const uint32_t interval = config->full_attention_interval;
    return interval == 0 || ((uint32_t)il + 1) % interval == 0;
}

bool memra_is_windowed(const memra_config *config, int32_t il) {
    if (config->has_gemma4) return config->gemma4_swa_pattern[il] != 0;
    if (!config->has_step35) return false;
    return (uint32_t)il >= config->step35_n_swa_pattern || config->step35_swa_pattern[il] != 0;
}

uint32_t memra_window(const memra_config *config, int32_t il) {
    if (!memra_is_windowed(config, il)) return 0;
    return config->has_gemma4 ? config->gemma4_sliding_window : config->step35_sliding_window;
}

uint32_t memra_heads(const memra_config *config, int32_t il) {
    if (config->has_step35) return config->step35_head_count[il];
    return config->n_head ? config->n_head : config->n_head_kv;
}

uint32_t memra_kv_heads(const memra_config *config, int32_t il) {
    if (config->has_gemma4 && (uint32_t)il < config->gemma4_n_head_count_kv) return config->gemma4_head_count_kv[il];
    return config->n_head_kv;
}

void memra_head_dims(const memra_config *config, int32_t il, uint32_t dims[2]) {
    if (config->has_gemma4) {
        dims[0] = dims[1] =
            config->gemma4_swa_pattern[il] ? config->gemma4_key_length_swa : config->gemma4_key_length_global;
    } else {
        dims[0] = config->head_dim_k;
        dims[1] = config->head_dim_v;
    }
}

/* The first of the trailing layers that read an earlier layer's K/V. */
static int32_t first_borrower(const memra_config *config) {
    return (int32_t)(config->n_layer - (config->has_gemma4 ? config->gemma4_shared_kv_layers : 0));
}

bool memra_owns_kv(const memra_config *config, int32_t il) {
    return memra_attends(config, il) && il < first_borrower(config);
}

int32_t memra_kv_source(const memra_config *config, int32_t il) {
    if (!memra_attends(config, il)) return -1;
    const int32_t borrower = first_borrower(config);
    if (il < borrower) return il;
    const bool windowed = memra_is_windowed(config, il);
    for (int32_t owner = borrower - 1; owner >= 0; owner--)
        if (memra_attends(config, owner) && memra_is_windowed(config, owner) == windowed) return owner;
    return -1;
}

uint64_t memra_conv_dim(const memra_config *config) {
    const uint64_t size = config->ssm_state_size;
    const uint64_t heads = 2 * (uint64_t)config->ssm_group_count + config->ssm_time_step_rank;
    uint64_t channels;
    return __builtin_mul_overflow(size, heads, &channels) ? UINT64_MAX : channels;
}

/* ---- Refusals ---- */

static int check_array(const char *name, const void *entries, uint32_t n) {
    if (n && !entries) return memra_fail(MEMRA_ERR_ARRAY, "memra_config.%s is NULL, but has %u entries", name, n);
    return MEMRA_OK;
}

/* Of those that stand for a layer: what is behind them is not read, whatever n claims. */
static int check_flags(const memra_config *config, const char *field, const uint8_t *flags, uint32_t n) {
    for (uint32_t i = 0; i < n && i < config->n_layer && i < MAX_LAYERS; i++)
        if (flags[i] > 1) return memra_fail(MEMRA_ERR_CONFIG, "%s[%u]: needs true or false", field, i);
    return MEMRA_OK;
}

static int check_length(const memra_config *config, const char *field, uint32_t n) {
    if (n < config->n_layer)
        return memra_fail(MEMRA_ERR_CONFIG, "%s: %u entries for %u layers", field, n, config->n_layer);
    return MEMRA_OK;
}

static int check_window(const memra_config *config, const char *field, uint32_t window) {
    for (uint32_t il = 0; window == 0 && il < config->n_layer; il++)
        if (memra_is_windowed(config, (int32_t)il))
            return memra_fail(MEMRA_ERR_CONFIG, "%s: 0 tokens, but there are windowed layers", field);
    return MEMRA_OK;
}

static int check_gemma4(const memra_config *config) {
    const uint32_t shared = config->gemma4_shared_kv_layers, n_layer = config->n_layer;
    MEMRA_TRY(check_length(config, "gemma4.swa_pattern", config->gemma4_n_swa_pattern));
    MEMRA_TRY(check_window(config, "gemma4.sliding_window", config->gemma4_sliding_window));
    if (shared > n_layer)
        return memra_fail(MEMRA_ERR_CONFIG, "gemma4.shared_kv_layers: %u of only %u layers", shared, n_layer);
    for (uint32_t il = n_layer - shared; il < n_layer; il++)
        if (!memra_attends(config, (int32_t)il))
            return memra_fail(MEMRA_ERR_CONFIG,
                              "gemma4.shared_kv_layers: %u includes layer %u, which has no K/V to borrow", shared, il);
    return MEMRA_OK;
}

int memra_check_config(const memra_config *config) {
    if (!config) return memra_fail(MEMRA_ERR_ARRAY, "config is NULL");
    MEMRA_TRY(memra_check_size("memra_config", config->struct_size, sizeof *config));
    if (config->has_gemma4) {
        MEMRA_TRY(check_array("gemma4_head_count_kv", config->gemma4_head_count_kv, config->gemma4_n_head_count_kv));
        MEMRA_TRY(check_array("gemma4_swa_pattern", config->gemma4_swa_pattern, config->gemma4_n_swa_pattern));
        MEMRA_TRY(check_flags(config, "gemma4.swa_pattern", config->gemma4_swa_pattern, config->gemma4_n_swa_pattern));
    }
    if (config->has_step35) {
        MEMRA_TRY(check_array("step35_head_count", config->step35_head_count, config->step35_n_head_count));
        MEMRA_TRY(check_array("step35_swa_pattern", config->step35_swa_pattern, config->step35_n_swa_pattern));
        MEMRA_TRY(check_flags(config, "step35.swa_pattern", config->step35_swa_pattern, config->step35_n_swa_pattern));
    }
    if (config->n_layer < 1 || config->n_layer > MAX_LAYERS)
        return memra_fail(MEMRA_ERR_CONFIG, "n_layer: %u is outside 1 .. %u", config->n_layer, MAX_LAYERS);
    if (config->nextn_predict_layers > config->n_layer)
        return memra_fail(MEMRA_ERR_CONFIG, "nextn_predict_layers: %u of only %u layers", config->nextn_predict_layers,
                          config->n_layer);
    if (config->has_gemma4) MEMRA_TRY(check_gemma4(config));
    if (config->has_step35) {
        MEMRA_TRY(check_length(config, "step35.head_count", config->step35_n_head_count));
        MEMRA_TRY(check_window(config, "step35.sliding_window", config->step35_sliding_window));
    }
    return MEMRA_OK;
}

static bool is_allowed(int32_t code, bool for_k) {
    return for_k ? formats[code].for_k : formats[code].for_v;
}

static int check_format(const char *name, int32_t code, bool for_k) {
    const char *allowed = for_k ? k_formats : v_formats;
    if (code < 0 || code >= N_FORMATS)
        return memra_fail(MEMRA_ERR_CONFIG, "FormatPolicy.%s=%d: use one of %s", name, code, allowed);
    if (!is_allowed(code, for_k))
        return memra_fail(MEMRA_ERR_CONFIG, "FormatPolicy.%s='%s': use one of %s", name, formats[code].name, allowed);
    return MEMRA_OK;
}

int memra_check_policy(const memra_policy *policy) {
    MEMRA_TRY(memra_check_size("memra_policy", policy->struct_size, sizeof *policy));
    MEMRA_TRY(check_format("k", policy->k, true));
    return check_format("v", policy->v, false);
}

/* The format that a variable names; the fallback where it is unset or empty. */
static int format_from_env(const char *variable, int32_t fallback, bool for_k, int32_t *code) {
    const char *value = getenv(variable);
    *code = fallback;
    if (!value || !*value) return MEMRA_OK;
    for (*code = 0; *code < N_FORMATS; ++*code)
        if (is_allowed(*code, for_k) && !strcmp(value, formats[*code].name)) return MEMRA_OK;
    return memra_fail(MEMRA_ERR_CONFIG, "%s='%s': use one of %s, or unset it", variable, value,
                      for_k ? k_formats : v_formats);
}

int memra_policy_from_env(memra_policy *policy) {
    if (!policy) return memra_fail(MEMRA_ERR_ARRAY, "policy is NULL");
    memra_policy found = {.struct_size = sizeof found};
    MEMRA_TRY(format_from_env("MEMRA_KV_K", MEMRA_Q8_0, true, &found.k));
    MEMRA_TRY(format_from_env("MEMRA_KV_V", MEMRA_Q5_1, false, &found.v));
    const char *gkv = getenv("MEMRA_GEMMA_GKV"), *wkv = getenv("MEMRA_GEMMA_WKV"), *fp8 = getenv("MEMRA_KV_FP8");
    if (!wkv) wkv = getenv("MEMRA_DRAFT") ? "0" : "1";
    found.gkv = !gkv || strcmp(gkv, "0") != 0;
    found.wkv = strcmp(wkv, "0") != 0;
    found.kv_fp8 = fp8 && !strcmp(fp8, "1");
    *policy = found;
    return MEMRA_OK;
}

void memra_policy_default(memra_policy *policy) {
    if (policy)
        *policy = (memra_policy){.struct_size = sizeof *policy, .k = MEMRA_Q8_0, .v = MEMRA_Q5_1, .gkv = 1, .wkv = 1};
}

void memra_options_default(memra_options *options) {
    if (options) *options = (memra_options){.struct_size = sizeof *options, .max_rows = 16};
}

static int check_count(const char *name, int64_t value, int64_t least) {
    if (value < least)
        return memra_fail(MEMRA_ERR_CONFIG, "CacheOptions.%s is %lld; it must be at least %lld", name, (long long)value,
                          (long long)least);
    if (value > INT32_MAX)
        return memra_fail(MEMRA_ERR_CONFIG, "CacheOptions.%s is %lld; at most %d", name, (long long)value, INT32_MAX);
    return MEMRA_OK;
}

int memra_check_options(const memra_options *options) {
    MEMRA_TRY(memra_check_size("memra_options", options->struct_size, sizeof *options));
    MEMRA_TRY(check_count("max_rows", options->max_rows, 1));
    MEMRA_TRY(check_count("round_width", options->round_width, 0));
    if (!options->n_tap_layers) return MEMRA_OK;
    if (!options->tap_layers)
        return memra_fail(MEMRA_ERR_ARRAY, "memra_options.tap_layers is NULL, but has %u entries",
                          options->n_tap_layers);
    return check_count("reserve_taps rows", options->tap_rows, 1);
}
