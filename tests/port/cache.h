/* SPEC.md 11 to 13: a cache, its calls, and its digest. */
enum { LAYERS = 32, SLOTS = 4, READY = 0, UNSETTLED, PENDING, RAN_APPEND = 1, RAN_CONV = 2, RAN_SCAN = 4 };
static const char *const STATES[] = {"READY", "UNSETTLED", "PENDING_REPLAY"};
#define CAPACITY "CapacityError"
#define CONFIG "ConfigError"
#define SNAPSHOT "SnapshotError"
#define STATE "StateError"
#define UNSUPPORTED "UnsupportedError"
#define REFUSE(when, error) if (when) return error
typedef struct {
    kv c;
    int64_t len;
    int32_t *len_d;
    float *conv, *ssm, *alt, *tape;
    int ran;
} layer;
typedef struct {
    int taken, valid;
    int64_t pos, generation, len[LAYERS];
    float *conv[LAYERS], *ssm[LAYERS];
} snapshot;
static struct {
    plan p;
    const json *args, *model;
    layer at[LAYERS];
    snapshot kept[SLOTS];
    int32_t *pos_d;
    uint8_t *health, *unused;
    int64_t n, max_ctx, pos, step_rows, replay_to, generation, round;
    int state, heads, size, dim, taps;
} C;

static void cache_new(const json *args) {
    memset(&C, 0, sizeof C);
    C.args = args, C.model = get(args, "model"), C.n = num(C.model, "n_layer"), C.max_ctx = num(args, "max_ctx");
    const json *s = get(C.model, "ssm");
    C.heads = (int)num(s, "time_step_rank"), C.size = (int)num(s, "state_size"), C.taps = (int)num(s, "conv_kernel");
    C.dim = C.size * (2 * (int)num(s, "group_count") + C.heads);
    if (make_plan(args, &C.p) || C.p.devices > 1 || C.n > LAYERS) fail("this program runs caches of few layers only");
    uint8_t *arena = calloc((size_t)C.p.arena[0], 1);
    for (row *r = C.p.rows; r < C.p.rows + C.p.n; r++) {
        layer *l = &C.at[r->layer < 0 ? 0 : r->layer];
        void *slot[PAD + 1] = {&l->c.plane[0], &l->c.plane[1], &l->len_d, &l->conv,  &l->ssm,  &l->alt,
                               &C.pos_d,       &C.health,      &l->tape,  &C.unused, &C.unused, &C.unused};
        void *plane = arena + r->offset;
        memcpy(slot[r->plane], &plane, sizeof plane);
    }
    for (int64_t il = 0; il < C.n; il++)
        for (int side = 0; side < 2; side++) {
            C.at[il].c.max_ctx = C.max_ctx, C.at[il].c.format[side] = format_of(args, il, side);
            C.at[il].c.dim[side] = (int)(kv_heads(C.model, il) * head_dim(C.model, il, side));
        }
}

static int lengths_hold(void) {
    int ok = C.pos >= 0 && C.pos <= C.max_ctx;
    for (layer *l = C.at; l < C.at + C.n; l++) ok &= l->len >= 0 && l->len <= C.max_ctx;
    return ok;
}

static int settled(void) {
    return !C.round && C.state == READY && !C.step_rows && lengths_hold();
}

static int steppable(void) {
    return C.state != UNSETTLED || C.round;
}

static void give_up(int64_t stands) {
    for (int i = 0; i < SLOTS; i++) C.kept[i].valid &= C.kept[i].pos <= stands;
}

static void end_step(int64_t pos) {
    for (int64_t il = 0; il < C.n; il++) C.at[il].ran = 0;
    C.pos = pos, C.step_rows = 0;
}

/* Host and device agree on how many rows stand. */
static void stand(layer *l, int64_t len) {
    l->len = len;
    if (l->len_d) *l->len_d = (int32_t)len;
}

static void swap(layer *l) {
    float *other = l->alt;
    l->alt = l->ssm, l->ssm = other;
}

#define RING_BYTES (sizeof(float) * (size_t)(C.dim * (C.taps - 1)))
#define STATE_BYTES (sizeof(float) * (size_t)(C.size * C.size * C.heads))

/* Where a round keeps the operands of the scan; with `copy` they are put there. */
static void scan_tape(layer *l, int64_t rows, float *in[5], int copy) {
    float *to = l->tape + rows * C.dim;
    for (int64_t i = 0, n; i < 5; i++, to += n) {
        n = rows * C.heads * (i < 3 ? C.size : 1);
        if (copy) memcpy(to, in[i], sizeof(float) * (size_t)n);
        in[i] = to;
    }
}

/* append_kv, conv_update, gdn_scan. */
static const char *step_call(int op, const json *s, int64_t rows, float *in[5], float *out) {
    int64_t il = num(s, "layer"), slot = C.state == UNSETTLED ? *C.pos_d : C.pos;
    layer *l = &C.at[il < C.n ? il : 0];
    REFUSE(il >= C.n || !(op == RAN_APPEND ? (void *)l->len_d : (void *)l->conv), CONFIG);
    REFUSE(op == RAN_SCAN && !served(C.size, 0), UNSUPPORTED);
    if (!rows) return NULL;
    REFUSE(!steppable(), STATE);
    REFUSE(C.round && rows > C.round, CAPACITY);
    REFUSE((C.step_rows && rows != C.step_rows) || l->ran & op, STATE);
    REFUSE(C.state == PENDING && rows > C.replay_to - C.pos, STATE);
    REFUSE(C.pos < 0 || C.pos > C.max_ctx || l->len < 0 || l->len > C.max_ctx, STATE);
    REFUSE(C.pos + rows > C.max_ctx, CAPACITY);
    REFUSE(op == RAN_APPEND && (l->len < C.pos || (C.round && l->len > C.pos)), STATE);
    if (!C.step_rows && C.state == READY) give_up(C.pos);
    C.step_rows = rows, l->ran |= op;
    if (op == RAN_APPEND) {
        int64_t end = slot + rows;
        append(&l->c, in, slot, (int)rows, C.health, il);
        l->len = l->len > C.pos + rows ? l->len : C.pos + rows;
        *l->len_d = C.state != UNSETTLED ? (int32_t)l->len : *l->len_d > end ? *l->len_d : (int32_t)end;
    } else if (op == RAN_CONV) {
        conv(in[0], in[1], l->conv, out, C.round ? l->tape : NULL, (int)rows, C.dim, C.taps, C.health, il, slot);
    } else {
        if (C.round) scan_tape(l, rows, in, 1);
        scan(in, l->ssm, l->alt, out, (int)rows, C.heads, C.size, (float)get(s, "scale")->d);
        if (!C.round) swap(l);
    }
    return NULL;
}

static const char *attend_call(const json *s, int64_t rows, float *q, float *out) {
    int64_t il = num(s, "layer"), from = source(C.model, il), heads = q_heads(C.model, il), window = num(s, "window");
    layer *l = &C.at[from < 0 ? 0 : from];
    REFUSE(from < 0, CONFIG);
    REFUSE(!served(head_dim(C.model, il, 0), 1) || !served(head_dim(C.model, il, 1), 1), UNSUPPORTED);
    REFUSE(!heads || heads % kv_heads(C.model, from) || heads > 16 * kv_heads(C.model, from), UNSUPPORTED);
    REFUSE(rows > num(get(C.args, "options"), "max_rows"), CAPACITY);
    REFUSE(window < 0, CONFIG);
    REFUSE(!steppable() || C.pos < 0 || l->len > C.max_ctx || l->len < C.pos + rows, STATE);
    if (!get(s, "window")->kind && windowed(C.model, il))
        window = num(get(C.model, get(C.model, "gemma4")->kind ? "gemma4" : "step35"), "sliding_window");
    attend(&l->c, q, out, C.state == UNSETTLED ? *C.pos_d : C.pos, (int)rows, (int)heads, (int)kv_heads(C.model, from),
           (float)get(s, "scale")->d, window, C.health, il);
    return NULL;
}

static const char *reject(void) {
    REFUSE(!C.round, STATE);
    for (layer *l = C.at; l < C.at + C.n; l++)
        if (l->ran & RAN_APPEND) l->len = C.pos, *l->len_d = C.state == UNSETTLED ? *C.pos_d : (int32_t)C.pos;
    if (C.step_rows && C.state != UNSETTLED) *C.pos_d = (int32_t)C.pos;
    C.round = 0, end_step(C.pos);
    return NULL;
}

static const char *commit(int64_t accept, int on_device) {
    int64_t rows = C.step_rows, base = on_device || C.state == UNSETTLED ? *C.pos_d : C.pos;
    int bad = accept < 0 || accept > rows, n = bad ? 0 : (int)accept;
    REFUSE(!C.round || !rows || C.pos < 0 || C.pos + rows > C.max_ctx, STATE);
    REFUSE(bad && !on_device, CAPACITY);
    for (layer *l = C.at; l < C.at + C.n; l++) {
        float *in[5];
        if (l->ran & RAN_SCAN) scan_tape(l, rows, in, 0);
        if (l->ran & RAN_APPEND) *l->len_d = (int32_t)base + n, l->len = C.pos + (on_device ? rows : n);
        if (l->ran & RAN_CONV) ring_rebuild(l->tape, l->conv, l->conv, n, C.dim, C.taps);
        if (l->ran & RAN_SCAN && n == rows && !on_device) swap(l);
        else if (l->ran & RAN_SCAN) scan(in, l->ssm, l->ssm, NULL, n, C.heads, C.size, 1);
    }
    if (bad) note(C.health, 4, 0, base, 1);
    *C.pos_d = (int32_t)base + n, C.round = 0, C.state = on_device ? UNSETTLED : C.state;
    end_step(C.pos + (on_device ? rows : n));
    return NULL;
}

static const char *take(snapshot *k) {
    REFUSE(!settled(), STATE);
    for (int64_t il = 0; il < C.n; il++) {
        layer *l = &C.at[il];
        k->len[il] = l->len;
        if (!l->conv) continue;
        if (!k->taken) k->conv[il] = malloc(RING_BYTES + 1), k->ssm[il] = malloc(STATE_BYTES);
        memcpy(k->conv[il], l->conv, RING_BYTES), memcpy(k->ssm[il], l->ssm, STATE_BYTES);
    }
    k->taken = k->valid = 1, k->pos = C.pos, k->generation = C.generation;
    return NULL;
}

static const char *rollback(snapshot *k, int64_t accept) {
    int64_t most = C.pos + (C.round ? 0 : C.step_rows);
    REFUSE(C.state == UNSETTLED, STATE);
    REFUSE(!k->valid || k->generation != C.generation, SNAPSHOT);
    most = most > C.replay_to ? most : C.replay_to;
    REFUSE(accept < 0 || accept > (most < C.max_ctx ? most : C.max_ctx) - k->pos, CAPACITY);
    reject();
    for (int64_t il = 0; il < C.n; il++) {
        layer *l = &C.at[il];
        int64_t saved = k->len[il], high = l->len > saved ? l->len : saved;
        stand(l, high < saved + accept ? high : saved + accept);
        if (l->conv) memcpy(l->conv, k->conv[il], RING_BYTES), memcpy(l->ssm, k->ssm[il], STATE_BYTES);
    }
    end_step(k->pos);
    *C.pos_d = (int32_t)k->pos, C.state = accept ? PENDING : READY, C.replay_to = accept ? k->pos + accept : 0;
    give_up(k->pos + accept);
    return NULL;
}

static const char *advance(int64_t n) {
    REFUSE(C.round || !steppable() || (C.step_rows && n != C.step_rows) || n < 0, STATE);
    REFUSE((C.state == PENDING && n > C.replay_to - C.pos) || C.pos < 0 || C.pos > C.max_ctx, STATE);
    REFUSE(C.pos + n > C.max_ctx, CAPACITY);
    if (!C.step_rows && C.state == READY && n) give_up(C.pos);
    if (n) end_step(C.pos + n), *C.pos_d = (int32_t)C.pos;
    if (n && C.state == PENDING && C.pos == C.replay_to) C.state = READY, C.replay_to = 0;
    return NULL;
}

static const char *truncate_to(int64_t to) {
    REFUSE(!settled(), STATE);
    for (int64_t il = 0; il < C.n; il++) REFUSE(C.at[il].conv, STATE);
    REFUSE(to < 0 || to > C.pos, CAPACITY);
    for (layer *l = C.at; l < C.at + C.n; l++) stand(l, l->len < to ? l->len : to);
    end_step(to), *C.pos_d = (int32_t)to, give_up(to);
    return NULL;
}

static const char *reset(void) {
    reject();
    for (layer *l = C.at; l < C.at + C.n; l++) {
        stand(l, 0);
        if (!l->conv) continue;
        memset(l->conv, 0, RING_BYTES), memset(l->ssm, 0, STATE_BYTES), memset(l->alt, 0, STATE_BYTES);
    }
    end_step(0), *C.pos_d = 0, C.replay_to = 0, C.state = READY, C.generation++;
    return NULL;
}

static const char *begin_round(int64_t width) {
    REFUSE(width < 1 || width > num(get(C.args, "options"), "round_width"), CONFIG);
    REFUSE(C.state == PENDING || C.step_rows || C.round || !lengths_hold(), STATE);
    C.round = width;
    return NULL;
}

static const char *settle(void) {
    REFUSE(C.round || C.state == PENDING, STATE);
    if (C.state == READY) return NULL;
    for (layer *l = C.at; l < C.at + C.n; l++)
        if (l->len_d) l->len = *l->len_d;
    end_step(*C.pos_d), C.state = READY;
    return NULL;
}

static const char *sync_d(void) {
    int64_t most = C.pos + C.step_rows;
    REFUSE(C.state == UNSETTLED || !lengths_hold(), STATE);
    for (layer *l = C.at; l < C.at + C.n; l++) stand(l, l->len);
    *C.pos_d = (int32_t)C.pos, give_up(most > C.replay_to ? most : C.replay_to);
    return NULL;
}

static const char *digest(uint8_t out[32]) {
    REFUSE(C.state == UNSETTLED || !lengths_hold(), STATE);
    sha_begin();
    for (layer *l = C.at; l < C.at + C.n; l++) {
        int64_t len_d = l->len_d ? *l->len_d : 0;
        sha_byte(l->len_d ? 1 : l->conv ? 2 : 0);
        for (int side = 0; side < 2 && l->len_d; side++) {
            uint32_t size = (uint32_t)strlen(FORMAT_NAMES[l->c.format[side]]);
            sha(&size, 4), sha(FORMAT_NAMES[l->c.format[side]], size);
        }
        if (l->len_d) sha(&l->len, 8), sha(&len_d, 8);
        for (int i = 0; i < 2 && l->len_d; i++) sha(l->c.plane[i], (size_t)(l->len * tok_bytes(&l->c, i)));
        if (l->conv) sha(l->conv, RING_BYTES), sha(l->ssm, STATE_BYTES);
    }
    sha(&C.pos, 8);
    sha_end(out);
    return NULL;
}
