/* engine.c: a speculative session over the cache from C alone: no Python, no CUDA headers, libcuda found at run time.
 *
 *     engine CUBINS        a folder with the cubins of the GPU's architecture
 *
 * The model is a stand-in for one: what it feeds the cache with is a function of layer, position and token. A draft
 * gets some tokens wrong; whatever was drafted and taken back, the digest is that of decoding the true tokens one by
 * one. Prints the digest after each part.
 */
#include <memra_driver.h>

#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 4, MAX_CTX = 64, WIDTH = 4, HEAD_DIM = 64, HEADS = 2, STATE = 32, V_HEADS = 2, K_HEADS = 1, TAPS = 4 };
enum { CHANNELS = STATE * (2 * K_HEADS + V_HEADS), VECTOR = V_HEADS * STATE, HIDDEN = 8, VOCAB = 16 };
enum { K, V, Q, X, ALPHA, BETA, RESIDUAL, LOGITS, INPUTS };
static const int columns_of[INPUTS] = {HEAD_DIM, HEAD_DIM, HEADS * HEAD_DIM, CHANNELS, V_HEADS, V_HEADS, HIDDEN, VOCAB};

static void check(int status, const char *call) {
    if (status == MEMRA_OK) return;
    fprintf(stderr, "%s: %s\n", call, memra_last_error());
    exit(1);
}
#define CHECK(call) check(call, #call)

/* The numbers of the model: -1 .. 1, exact in f32, the same for the same arguments. */
static float number(uint32_t layer, uint32_t name, uint32_t position, uint32_t token, uint32_t column) {
    uint32_t x = layer * 0x9e3779b1u ^ name * 0x85ebca77u ^ position * 0xc2b2ae3du ^ token * 0x27d4eb2fu ^ column;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    x = (x ^ x >> 12) * 0x297a2d39u;
    x ^= x >> 15;
    return (float)((int32_t)(x >> 8) - (1 << 23)) / (float)(1 << 23);
}

typedef struct engine {
    memra_device *device;
    memra_cache *cache;
    uint64_t inputs[LAYERS][INPUTS], weights, dt_bias, a;
    uint64_t convolved, q, k, v, g_log, beta, scanned, attended, accept;
    uint64_t rooms[64]; /* all that was allocated */
    int n_rooms;
} engine;

static uint64_t room(engine *e, int64_t n) {
    uint64_t ptr = 0;
    CHECK(memra_alloc(e->device, 4 * (uint64_t)n, &ptr));
    CHECK(memra_clear(e->device, ptr, 4 * (uint64_t)n));
    e->rooms[e->n_rooms++] = ptr;
    return ptr;
}

static uint64_t constant(engine *e, uint32_t name, int n, float scale) {
    float values[CHANNELS * TAPS];
    const uint64_t ptr = room(e, n);
    for (int i = 0; i < n; i++) values[i] = scale * number(99, name, 0, 0, (uint32_t)i);
    CHECK(memra_upload(e->device, ptr, values, 4 * (uint64_t)n));
    return ptr;
}

static void open_engine(engine *e, const char *cubins) {
    const memra_device_options where = {.struct_size = sizeof where, .ordinal = 0};
    CHECK(memra_device_open(&where, &e->device));
    CHECK(memra_device_load_folder(e->device, cubins));
    const memra_config model = {
        .struct_size = sizeof model, .n_layer = LAYERS, .n_head = HEADS, .n_head_kv = 1, .head_dim_k = HEAD_DIM,
        .head_dim_v = HEAD_DIM, .n_embd = HIDDEN, .n_vocab = VOCAB, .full_attention_interval = 2, .has_ssm = 1,
        .ssm_conv_kernel = TAPS, .ssm_state_size = STATE, .ssm_time_step_rank = V_HEADS, .ssm_group_count = K_HEADS};
    const memra_policy formats = {
        .struct_size = sizeof formats, .k = MEMRA_Q8_0, .v = MEMRA_Q5_1, .gkv = 1, .wkv = 1};
    memra_options options;
    memra_options_default(&options);
    options.round_width = WIDTH;
    CHECK(memra_cache_new(&model, MAX_CTX, &formats, &options, &e->device, NULL, 1, &e->cache));
    for (int il = 0; il < LAYERS; il++)
        for (int name = 0; name < INPUTS; name++) e->inputs[il][name] = room(e, WIDTH * columns_of[name]);
    e->weights = constant(e, 0, CHANNELS * TAPS, 0.4f);
    e->dt_bias = constant(e, 1, V_HEADS, 1.0f);
    e->a = constant(e, 2, V_HEADS, 1.0f);
    e->convolved = room(e, WIDTH * CHANNELS);
    e->q = room(e, WIDTH * VECTOR), e->k = room(e, WIDTH * VECTOR), e->v = room(e, WIDTH * VECTOR);
    e->g_log = room(e, WIDTH * V_HEADS), e->beta = room(e, WIDTH * V_HEADS), e->scanned = room(e, WIDTH * VECTOR);
    e->attended = room(e, WIDTH * HEADS * HEAD_DIM), e->accept = room(e, 1);
}

/* What the layers before would have computed for these tokens. */
static void fill(engine *e, int64_t pos, const int32_t *tokens, int rows) {
    float values[WIDTH * CHANNELS];
    for (int il = 0; il < LAYERS; il++)
        for (int name = 0; name < INPUTS; name++) {
            const int n = columns_of[name];
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < n; i++)
                    values[r * n + i] = number(
                        (uint32_t)il, (uint32_t)name, (uint32_t)(pos + r), (uint32_t)tokens[r], (uint32_t)i);
            CHECK(memra_upload(e->device, e->inputs[il][name], values, 4 * (uint64_t)(rows * n)));
        }
}

/* The cache's part of a forward pass; the step stays open. */
static void forward(engine *e, int rows) {
    for (int il = 0; il < LAYERS; il++) {
        const uint64_t *in = e->inputs[il];
        if (e->cache->kv[il].present) {
            CHECK(memra_append_kv(e->cache, il, rows, in[K], in[V]));
            CHECK(memra_attend(e->cache, il, rows, in[Q], e->attended, 0.125f, -1));
        } else {
            CHECK(memra_conv_update(e->cache, il, rows, in[X], e->weights, e->convolved));
            CHECK(memra_gdn_prep(
                e->cache, il, rows, e->convolved, in[ALPHA], in[BETA], e->dt_bias, e->a, e->q, e->k, e->v, e->g_log,
                e->beta, 1e-6f));
            CHECK(memra_gdn_scan(
                e->cache, il, rows, e->q, e->k, e->v, e->g_log, e->beta, e->scanned, 0.2f));
        }
        if (e->cache->dflash_taps.present && il == LAYERS - 1)
            CHECK(memra_tap_write(e->cache, il, rows, in[RESIDUAL]));
    }
}

static void step(engine *e, const int32_t *tokens, int rows) {
    fill(e, e->cache->pos, tokens, rows);
    forward(e, rows);
    CHECK(memra_advance(e->cache, rows));
}

/* `accept` right tokens, then wrong ones. */
static void draft(int32_t *tokens, int64_t pos, int rows, int accept) {
    for (int r = 0; r < rows; r++) tokens[r] = (int32_t)(pos + r) % 7 + (r < accept ? 0 : 100);
}

static void say(engine *e, const char *part) {
    char hex[65];
    CHECK(memra_digest(e->cache, hex));
    printf("%s %lld %s\n", part, (long long)e->cache->pos, hex);
}

int main(int argc, char **argv) {
    static engine e;
    int32_t tokens[WIDTH];
    if (argc != 2) {
        fprintf(stderr, "usage: %s CUBINS\n", argv[0]);
        return 2;
    }
    open_engine(&e, argv[1]);
    draft(tokens, 0, 3, 3);
    step(&e, tokens, 3);
    say(&e, "prompt");

    /* The Rust protocol: snapshot, run ahead, roll back, run the accepted rows again. */
    memra_snapshot *snapshot = NULL;
    CHECK(memra_snapshot_new(e.cache, &snapshot));
    for (int accept = WIDTH; accept >= 0; accept--) {
        CHECK(memra_snapshot_into(e.cache, snapshot));
        draft(tokens, e.cache->pos, WIDTH, accept);
        step(&e, tokens, WIDTH);
        CHECK(memra_rollback(e.cache, snapshot, accept));
        if (accept) step(&e, tokens, accept);
    }
    say(&e, "rollback");

    /* Rounds: nothing is copied to begin one; the count may stay on the device. */
    const int32_t layer = LAYERS - 1;
    CHECK(memra_arm_taps(e.cache, &layer, 1, WIDTH, HIDDEN));
    for (int accept = 0; accept <= WIDTH; accept++) {
        const int32_t count = accept;
        draft(tokens, e.cache->pos, WIDTH, accept);
        CHECK(memra_round_begin(e.cache, WIDTH));
        fill(&e, e.cache->pos, tokens, WIDTH);
        forward(&e, WIDTH);
        if (accept % 2) {
            CHECK(memra_round_commit(e.cache, accept));
        } else {
            CHECK(memra_upload(e.device, e.accept, &count, sizeof count));
            CHECK(memra_round_commit_from_device(e.cache, e.accept));
            CHECK(memra_settle(e.cache));
        }
    }
    say(&e, "rounds");

    /* One decode step as a CUDA graph. */
    memra_graph *graph = NULL;
    CHECK(memra_park_logits(e.cache, e.inputs[0][LOGITS]));
    CHECK(memra_capture_begin(e.device, 0));
    forward(&e, 1);
    CHECK(memra_park_logits(e.cache, e.inputs[0][LOGITS]));
    CHECK(memra_advance(e.cache, 1));
    CHECK(memra_capture_end(e.device, &graph));
    for (int i = 0; i < 3; i++) {
        draft(tokens, e.cache->pos, 1, 1);
        fill(&e, e.cache->pos, tokens, 1);
        CHECK(memra_graph_launch(graph));
    }
    say(&e, "graph");

    uint64_t logits = 0;
    float row[VOCAB];
    memra_health health;
    CHECK(memra_take_logits(e.cache, &logits));
    CHECK(memra_download(e.device, row, logits, sizeof row));
    CHECK(memra_health_read(e.cache, &health));
    const uint32_t last = (uint32_t)e.cache->pos - 1;
    for (uint32_t i = 0; i < VOCAB; i++)
        if (row[i] != number(0, LOGITS, last, last % 7, i)) return fprintf(stderr, "the logits are others\n"), 1;
    if (health.flags) return fprintf(stderr, "faults 0x%x\n", health.flags), 1;

    CHECK(memra_graph_close(graph));
    CHECK(memra_snapshot_free(snapshot));
    CHECK(memra_cache_free(e.cache));
    while (e.n_rooms) CHECK(memra_free(e.device, e.rooms[--e.n_rooms]));
    CHECK(memra_device_close(e.device));
    return 0;
}
