/* draws.c: bytes become arguments. See world.h. */
#include "pool.h"

#include <stdlib.h>
#include <string.h>

/* ---- Scalars ---- */

uint8_t draw_byte(input *in) { return in->at < in->end ? *in->at++ : 0; }

static const int64_t wild_ints[] = {
    -1, -2, INT32_MAX, (int64_t)INT32_MAX + 1, INT32_MIN, UINT32_MAX, (int64_t)1 << 32, INT64_MAX, INT64_MIN,
    (int64_t)1 << 60, 65535, 65536, 65537, 4096, 256, INT64_MAX / 4, -MAX_CTX, 33, 128, 1000,
};

int64_t draw_int(input *in, int64_t sound) {
    const uint8_t b = draw_byte(in);
    if (b == 0) return sound;
    if (b < 112) return b % 9;
    if (b < 160) return b - 112 + 16; /* up to MAX_CTX - 1 */
    if (b < 176) return MAX_CTX + (b % 3) - 1;
    return wild_ints[b % (sizeof wild_ints / sizeof *wild_ints)];
}

int32_t draw_int32(input *in, int32_t sound) { return (int32_t)draw_int(in, sound); }

float draw_float(input *in) {
    static const float values[] = {0.125f, 0.0f, -1.0f, 1e-6f, 3.4e38f, -0.0f};
    const uint8_t b = draw_byte(in);
    return b == 255 ? (float)(0.0f / values[1]) : values[b % (sizeof values / sizeof *values)];
}

uint64_t draw_bytes(input *in) {
    static const uint64_t sizes[] = {
        64, 0, 1, 3, 4, 88, 4096, 1 << 20, 1 << 30, 1ull << 40, 1ull << 60, UINT64_MAX, INT64_MAX};
    const uint64_t size = sizes[draw_byte(in) % (sizeof sizes / sizeof *sizes)];
    world.wild |= size > 64; /* more than an address may have behind it */
    return size;
}

/* What stands at a slice of the first caches. */
static uint64_t plane(uint8_t b) {
    const memra_cache *cache = world.caches[b / 8 % POOL];
    if (!cache || cache->n_layer != N_LAYER) return 0;
    const memra_kv_layer *kv = &cache->kv[1];
    const memra_recur_layer *recur = &cache->recur[0];
    const uint64_t at[] = {kv->k.ptr, kv->v.ptr, kv->len_d.ptr, recur->conv_state.ptr, recur->ssm_state.ptr,
                           recur->tape.ptr, cache->devices[0].pos_d.ptr, cache->devices[0].health.ptr};
    return at[b % 8];
}

int64_t standing_rows(void) {
    for (int i = 0; i < POOL; i++) {
        const memra_cache *cache = world.caches[i];
        if (cache) return cache->kv && cache->n_layer > 1 ? cache->kv[1].len : 0;
    }
    return 0;
}

uint64_t draw_address(input *in) {
    static const uint64_t wild[] = {1, 4, 0xdeadbeef0, UINT64_MAX, UINT64_MAX - 3, 1ull << 63, 1ull << 47};
    const uint64_t apart = WORK_BYTES / 16;
    const uint8_t b = draw_byte(in);
    if (b == 0) return world.work ? world.work + apart * (uint64_t)(in->address++ % 16) : 0;
    world.wild = true; /* two of them may overlap */
    if (b < 96) return world.work ? world.work + apart * (b % 16) + 4 * (b / 16) : 0;
    if (b < 128) return plane(b);
    if (b < 176) return world.memory[b % POOL];
    if (b < 200) return 0;
    return b < 224 ? world.work + 1 : wild[b % (sizeof wild / sizeof *wild)];
}

/* ---- Objects ---- */

/* Counts a pointer; whether it is the one that is forced to NULL. */
static bool is_null(input *in) {
    const bool forced = in->pointer++ == in->forced_null;
    in->nulled |= forced;
    return forced;
}

/* One of the pool: with 0 the first there is, else mostly any that there is. NULL where there is none. */
static void *pick(input *in, void *const *pool) {
    void *found[POOL];
    int n = 0;
    const uint8_t b = draw_byte(in);
    if (b % 8 == 7) return pool[b / 8 % POOL];
    for (int i = 0; i < POOL; i++)
        if (pool[i]) found[n++] = pool[i];
    return n ? found[b % n] : NULL;
}

memra_device *draw_device(input *in) {
    if (is_null(in)) return NULL;
    if (in->at < in->end && *in->at == 255) return in->at++, world.closed;
    return pick(in, (void *const *)world.devices);
}

/* Structs of another version, size or state, or of zeroes, which the library has to know for what they are. */
static memra_cache *strange_cache(uint8_t kind) {
    memra_cache *made = scratch(sizeof *made);
    memset(made, 0, sizeof *made);
    if (kind % 5 == 0) return made;
    made->abi_version = kind % 5 == 1 ? MEMRA_ABI_VERSION + 1 : MEMRA_ABI_VERSION;
    made->struct_size = kind % 5 == 2 ? (uint32_t)sizeof *made - 8 : (uint32_t)sizeof *made;
    made->state = kind % 5 == 3 ? MEMRA_CLOSED : MEMRA_CLOSED + 1 + kind;
    return made;
}

memra_cache *draw_cache(input *in) {
    if (is_null(in)) return NULL;
    if (in->at < in->end && *in->at > 240) return strange_cache(*in->at++);
    return pick(in, (void *const *)world.caches);
}

memra_snapshot *draw_snapshot(input *in) {
    if (is_null(in)) return NULL;
    if (in->at < in->end && *in->at == 255) {
        in->at++;
        return memset(scratch(sizeof(memra_snapshot)), 0, sizeof(memra_snapshot));
    }
    return pick(in, (void *const *)world.snapshots);
}

memra_graph *draw_graph(input *in) { return is_null(in) ? NULL : pick(in, (void *const *)world.graphs); }

memra_plan *draw_plan(input *in) { return is_null(in) ? NULL : pick(in, (void *const *)world.plans); }

/* ---- Structs of options ---- */

/* Some fields of a struct become other numbers, but for those that point at something. */
static void mutate(input *in, const char *type, void *at) {
    int32_t n_rows;
    const memra_layout_row *rows = memra_layout_table(&n_rows);
    int first = 0, n = 0;
    while (strcmp(rows[first].type, type)) first++;
    first++; /* behind the struct itself */
    while (first + n < n_rows && !strcmp(rows[first + n].type, type)) n++;
    for (int left = draw_byte(in) % 4; left > 0; left--) {
        const memra_layout_row *row = &rows[first + draw_byte(in) % n];
        const int64_t value = draw_int(in, 1);
        const bool points = strstr(row->field, "tap_layers") == row->field || strstr(row->field, "gemma4_head_count") ||
                            !strcmp(row->field, "gemma4_swa_pattern") || !strcmp(row->field, "step35_head_count") ||
                            !strcmp(row->field, "step35_swa_pattern");
        if (!points) memcpy((char *)at + row->offset, &value, row->size); /* little-endian */
    }
}

/* An array of as many entries as are promised, but no more than MOST. */
static void *array(int64_t n, size_t entry_bytes, uint32_t value) {
    const size_t kept = n < 0 ? 0 : n > MOST ? MOST : (size_t)n;
    uint8_t *made = scratch(kept * entry_bytes);
    for (size_t i = 0; i < kept * entry_bytes; i++) made[i] = i % entry_bytes ? 0 : (uint8_t)value;
    return made;
}

memra_config *draw_config(input *in) {
    if (is_null(in)) return NULL;
    memra_config *made = scratch(sizeof *made);
    *made = (memra_config){
        .struct_size = sizeof *made, .n_layer = N_LAYER, .n_head = 2, .n_head_kv = 1, .head_dim_k = 64,
        .head_dim_v = 64, .n_embd = 8, .n_vocab = 16, .full_attention_interval = 2, .has_ssm = 1, .ssm_conv_kernel = 4,
        .ssm_state_size = 32, .ssm_time_step_rank = 2, .ssm_group_count = 1};
    const uint8_t kind = draw_byte(in) % 4;
    if (kind) made->full_attention_interval = made->has_ssm = 0;
    if (kind == 2) {
        made->has_gemma4 = 1;
        made->gemma4_n_head_count_kv = made->gemma4_n_swa_pattern = N_LAYER;
        made->gemma4_sliding_window = 8;
        made->gemma4_key_length_global = made->gemma4_key_length_swa = 64;
        made->gemma4_shared_kv_layers = 1;
    }
    if (kind == 3) {
        made->has_step35 = 1;
        made->step35_n_head_count = made->step35_n_swa_pattern = N_LAYER;
        made->step35_sliding_window = 8;
    }
    mutate(in, "memra_config", made);
    const uint8_t nulls = draw_byte(in);
    const uint32_t entry = draw_byte(in) ? 2 : 1; /* 2 is no flag */
    if (!(nulls & 1)) made->gemma4_head_count_kv = array(made->gemma4_n_head_count_kv, 4, entry);
    if (!(nulls & 2)) made->gemma4_swa_pattern = array(made->gemma4_n_swa_pattern, 1, entry - (nulls >> 7));
    if (!(nulls & 4)) made->step35_head_count = array(made->step35_n_head_count, 4, entry);
    if (!(nulls & 8)) made->step35_swa_pattern = array(made->step35_n_swa_pattern, 1, entry - (nulls >> 7));
    return made;
}

memra_policy *draw_policy(input *in) {
    if (is_null(in)) return NULL;
    memra_policy *made = scratch(sizeof *made);
    memra_policy_default(made);
    mutate(in, "memra_policy", made);
    return made;
}

memra_options *draw_options(input *in) {
    if (is_null(in)) return NULL;
    memra_options *made = scratch(sizeof *made);
    memra_options_default(made);
    made->round_width = 4;
    mutate(in, "memra_options", made);
    const uint8_t b = draw_byte(in);
    if (b % 4) {
        made->n_tap_layers = (uint32_t)draw_int(in, 1);
        made->tap_rows = draw_int(in, 2);
        made->tap_layers = b % 4 == 3 ? NULL : array(made->n_tap_layers, 4, b / 4);
        for (uint32_t i = 0; made->tap_layers && i < made->n_tap_layers && i < MOST; i++)
            ((int32_t *)made->tap_layers)[i] += b > 127 ? (int32_t)i : 0;
    } else {
        made->n_tap_layers = 0;
    }
    return made;
}

memra_device_options *draw_device_options(input *in) {
    if (is_null(in)) return NULL;
    memra_device_options *made = scratch(sizeof *made);
    *made = (memra_device_options){.struct_size = sizeof *made};
    if (draw_byte(in) % 4 == 1 && world.devices[0]) made->stream = memra_device_stream(world.devices[0]);
    mutate(in, "memra_device_options", made);
    if (made->context || made->stream) world.wild = true;
    return made;
}

/* ---- Arrays ---- */

memra_device **draw_devices(input *in, int64_t n) {
    if (is_null(in)) return NULL;
    memra_device **made = scratch((n < 1 ? 1 : n > MOST ? MOST : (size_t)n) * sizeof *made);
    memra_device *const first = pick(in, (void *const *)world.devices);
    made[0] = first;
    for (int64_t i = 1; i < n && i < MOST; i++) made[i] = i < 3 ? pick(in, (void *const *)world.devices) : first;
    return made;
}

int32_t *draw_fence(input *in, int64_t n_stages) {
    if (is_null(in)) return NULL;
    const uint8_t b = draw_byte(in);
    if (b == 0 && n_stages <= 1) return NULL; /* one stage is the sound one */
    const int64_t n = n_stages < 0 ? 0 : n_stages > MOST ? MOST : n_stages;
    int32_t *made = scratch((size_t)(n + 1) * sizeof *made);
    for (int64_t i = 0; i <= n; i++) made[i] = (int32_t)i;
    made[n] = b % 8 == 7 ? draw_int32(in, N_LAYER) : N_LAYER;
    if (b % 8 > 4) made[0] = draw_int32(in, 0);
    return made;
}

int32_t *draw_placement(input *in, int64_t n_stages) {
    if (is_null(in)) return NULL;
    const uint8_t b = draw_byte(in);
    if (b == 0) return NULL;
    int32_t *made = array(n_stages < 1 ? 1 : n_stages, sizeof *made, 0);
    for (int64_t i = 0; i < n_stages && i < 3; i++) made[i] = draw_int32(in, (int32_t)i);
    return made;
}

int32_t *draw_layer_ids(input *in, int64_t n) {
    if (is_null(in)) return NULL;
    int32_t *made = array(n, sizeof *made, 0);
    for (int64_t i = 0; i < n && i < MOST; i++) made[i] = i < 4 ? draw_int32(in, (int32_t)i) : (int32_t)i;
    return made;
}

memra_copy *draw_entries(input *in, int64_t n) {
    if (is_null(in)) return NULL;
    memra_copy *made = scratch((n < 0 ? 0 : n > MOST ? MOST : (size_t)n) * sizeof *made);
    for (int64_t i = 0; i < n && i < MOST; i++) {
        made[i] = (memra_copy){world.work, world.work + 256, 16};
        if (i < 3) made[i] = (memra_copy){draw_address(in), draw_address(in), 16};
    }
    return made;
}

uint8_t *draw_host(input *in, uint64_t n_bytes) {
    if (is_null(in)) return NULL;
    return memset(scratch(n_bytes > DEVICE_BYTES ? DEVICE_BYTES : (size_t)n_bytes), 1,
                  n_bytes > DEVICE_BYTES ? DEVICE_BYTES : (size_t)n_bytes);
}

/* ---- Files ---- */

uint8_t *draw_cubin(input *in, uint64_t *n_bytes) {
    if (is_null(in)) return NULL;
    const uint8_t b = draw_byte(in);
    const size_t kept = b < 192 ? cubin_bytes : cubin_bytes * (b - 192) / 64;
    *n_bytes = kept;
    uint8_t *made = scratch(kept);
    memcpy(made, cubin, kept);
    for (int left = b % 8; left > 0 && kept; left--) {
        const size_t at = (size_t)(draw_byte(in) << 8 | draw_byte(in)) % (left % 2 ? kept : kept < 64 ? kept : 64);
        made[at] = draw_byte(in);
    }
    return made;
}

const char *draw_path(input *in, bool folder) {
    if (is_null(in)) return NULL;
    const uint8_t b = draw_byte(in);
    const char *path = paths[b ? b % n_paths : folder];
    return strcpy(scratch(strlen(path) + 1), path);
}

void *draw_out(input *in, size_t n_bytes) { return is_null(in) ? NULL : memset(scratch(n_bytes), 0xa5, n_bytes); }
