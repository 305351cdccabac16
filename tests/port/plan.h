/* SPEC.md 2 and 3: what the layers of a model are, and every buffer of a cache for it. */
enum { K, V, LEN_D, CONV, SSM, ALT, POS_D, HEALTH, TAPE, LOGITS, TAPS, PAD, MAX_PLANES = 4096, MAX_DEVICES = 8 };
enum { T_KV, T_TAIL, T_RECURRENT, T_DOUBLE, T_COUNTERS, T_TAPE, T_LOGITS, T_TAPS, T_PADDING, N_TOTALS };
static const char *const TOTALS[N_TOTALS] = {"kv",   "tail_pad", "recurrent", "double_buffer", "counters",
                                             "tape", "logits",   "taps",      "padding"};
static const struct {
    int size, section, mtp_section, total;
} PLANES[] = {{1, 0, 0, T_KV},        {1, 0, 0, T_KV},       {4, 1, 1, T_COUNTERS}, {4, 3, 3, T_RECURRENT},
              {4, 5, 4, T_RECURRENT}, {4, 6, 7, T_DOUBLE},   {4, 1, 1, T_COUNTERS}, {1, 2, 2, T_COUNTERS},
              {4, 8, 8, T_TAPE},      {4, 9, 9, T_LOGITS},   {4, 10, 10, T_TAPS},   {1, 0, 0, T_PADDING}};
typedef struct {
    int64_t plane, layer, device, len, bytes, offset;
} row;
typedef struct {
    row rows[MAX_PLANES];
    int32_t n, order[MAX_PLANES], n_order, devices, unsupported;
    int64_t planes[MAX_DEVICES], arena[MAX_DEVICES], begin[MAX_DEVICES], end[MAX_DEVICES];
    int64_t mtp, totals[N_TOTALS], scratch;
} plan;

static int is_mtp(const json *m, int64_t il) {
    return il >= num(m, "n_layer") - num(m, "nextn_predict_layers");
}

static int is_linear(const json *m, int64_t il) {
    return num(m, "full_attention_interval") && (il + 1) % num(m, "full_attention_interval");
}

static int owns_kv(const json *m, int64_t il) {
    return !is_linear(m, il) && il < num(m, "n_layer") - num(get(m, "gemma4"), "shared_kv_layers");
}

static int windowed(const json *m, int64_t il) {
    if (get(m, "gemma4")->kind) return (int)item(get(get(m, "gemma4"), "swa_pattern"), il, 0);
    return get(m, "step35")->kind && item(get(get(m, "step35"), "swa_pattern"), il, 1);
}

/* The layer whose K/V layer il reads, or -1. */
static int64_t source(const json *m, int64_t il) {
    int64_t owner = is_linear(m, il) ? -1 : il;
    while (owner >= 0 && !(owns_kv(m, owner) && windowed(m, owner) == windowed(m, il))) owner--;
    return owner;
}

static int64_t kv_heads(const json *m, int64_t il) {
    return item(get(get(m, "gemma4"), "head_count_kv"), il, num(m, "n_head_kv"));
}

static int64_t q_heads(const json *m, int64_t il) {
    return item(get(get(m, "step35"), "head_count"), il, num(m, "n_head"));
}

static int64_t head_dim(const json *m, int64_t il, int side) {
    if (!get(m, "gemma4")->kind) return num(m, side ? "head_dim_v" : "head_dim_k");
    return num(get(m, "gemma4"), windowed(m, il) ? "key_length_swa" : "key_length_global");
}

static int format_of(const json *args, int64_t il, int side) {
    const json *p = get(args, "policy"), *m = get(args, "model");
    if (num(p, !get(m, "gemma4")->kind ? "kv_fp8" : windowed(m, il) ? "wkv" : "gkv") || is(p, side ? "v" : "k", "fp8"))
        return FP8;
    return !side ? Q8_0 : is(p, "v", "q5_1") ? Q5_1 : Q4_0;
}

/* Whether kernels serve a state size (of = 0) or a head dim (of = 1). */
static int served(int64_t size, int of) {
    static const int SIZES[2][6] = {{32, 64, 128, 256, 32, 32}, {64, 96, 128, 192, 256, 512}};
    for (int i = 0; i < 6; i++)
        if (size == SIZES[of][i]) return 1;
    return 0;
}

static int64_t device_of(const json *a, int64_t il) {
    int stages = (int)get(a, "fence")->i - 1, s = stages - 1;
    while (s > 0 && item(get(a, "fence"), s, 0) > il) s--;
    return item(get(a, "placement"), s < 0 ? 0 : s, s < 0 ? 0 : s);
}

static int refused(const json *a, const json *m) {
    const json *ssm = get(m, "ssm"), *fence = get(a, "fence"), *place = get(a, "placement"), *o = get(a, "options");
    const json *taps = get(o, "reserve_taps");
    int64_t layers = num(m, "n_layer"), last = item(fence, fence->i - 1, 0);
    int64_t trunk = layers - num(m, "nextn_predict_layers");
    if (num(a, "max_ctx") < 0 || num(a, "max_ctx") > INT32_MAX) return 1;
    if (fence->kind && (fence->i < 2 || item(fence, 0, 0) != 0 || (last != layers && last != trunk))) return 1;
    for (int i = 1; i < fence->i; i++)
        if (item(fence, i, 0) <= item(fence, i - 1, 0)) return 1;
    if (place->kind && place->i != fence->i - 1) return 1;
    for (int i = 0; i < place->i; i++)
        if (item(place, i, 0) >= fence->i - 1) return 1;
    for (int64_t il = 0; il < (num(o, "skip_mtp_state") ? trunk : layers); il++) {
        for (int side = 0; side < 2 && owns_kv(m, il); side++) {
            int64_t dim = head_dim(m, il, side);
            if (kv_heads(m, il) < 1 || dim < 1 || dim % 32 || dim * kv_heads(m, il) > INT32_MAX) return 1;
        }
        if (!is_linear(m, il)) continue;
        if (num(ssm, "conv_kernel") < 1 || num(ssm, "conv_kernel") > 8 || num(ssm, "state_size") < 1) return 1;
        if (num(ssm, "time_step_rank") < 1 || num(ssm, "group_count") < 1) return 1;
    }
    for (const json *tap = taps->kind ? taps->child->child : NULL; tap; tap = tap->next)
        if (tap->i >= layers || device_of(a, tap->i) != device_of(a, taps->child->child->i)) return 1;
    return (taps->kind && !num(m, "n_embd")) || (num(o, "reserve_logits") && !num(m, "n_vocab"));
}

static void add(plan *p, const json *m, int plane, int64_t il, int64_t device, int64_t len) {
    row *r = &p->rows[p->n++];
    *r = (row){plane, il, device, len, len * PLANES[plane].size, 0};
    p->planes[device] += plane == PAD ? 0 : r->bytes;
    p->totals[PLANES[plane].total] += r->bytes - (plane <= V ? 8 : 0);
    p->totals[T_TAIL] += plane <= V ? 8 : 0;
    p->mtp += plane != PAD && il >= 0 && is_mtp(m, il) ? r->bytes : 0;
}

static int section(const json *m, const row *r) {
    return r->layer >= 0 && is_mtp(m, r->layer) ? PLANES[r->plane].mtp_section : PLANES[r->plane].section;
}

/* Into the arenas: sections in their order, gaps as rows of their own; `found` is in order of allocation. */
static void place(plan *p, const json *m, const row *found, int n) {
    p->n = 0, p->n_order = n;
    for (int d = 0; d < p->devices; d++) {
        int64_t offset = 0, first[PAD] = {0};
        const row *before = NULL;
        for (int at = 0; at < 11 * n + 1; at++) { /* the last turn is the end of the arena */
            const row *r = at < 11 * n ? &found[at % n] : NULL;
            if (r && (r->device != d || section(m, r) != at / n)) continue;
            int packed = r && before && before->plane == LEN_D && (r->plane == LEN_D || r->plane == POS_D);
            int64_t gap = packed ? 0 : (256 - offset % 256) % 256;
            if (gap) add(p, m, PAD, before->layer, d, gap), p->rows[p->n - 1].offset = offset, offset += gap;
            if (!r) break;
            if (!first[r->plane]) first[r->plane] = offset + 1;
            before = r, p->order[at % n] = p->n, p->rows[p->n] = *r, p->rows[p->n++].offset = offset;
            offset += r->bytes;
        }
        p->arena[d] = offset;
        p->begin[d] = first[CONV] ? first[CONV] - 1 : offset, p->end[d] = first[ALT] ? first[ALT] - 1 : offset;
    }
}

/* NULL, or the name of the refusal. */
static const char *make_plan(const json *a, plan *p) {
    const json *m = get(a, "model"), *ssm = get(m, "ssm"), *o = get(a, "options"), *taps = get(o, "reserve_taps");
    int64_t size = num(ssm, "state_size"), heads = num(ssm, "time_step_rank"), most[MAX_DEVICES] = {0};
    int64_t layers = num(m, "n_layer") - (num(o, "skip_mtp_state") ? num(m, "nextn_predict_layers") : 0);
    int64_t conv_dim = 2 * size * num(ssm, "group_count") + size * heads, d, states = 0;
    memset(p, 0, sizeof *p);
    if (refused(a, m)) return "ConfigError";
    for (int64_t il = 0; il < layers; il++) {
        d = device_of(a, il);
        for (int side = 0; side < 2 && owns_kv(m, il); side++) {
            int64_t blocks = kv_heads(m, il) * head_dim(m, il, side) / 32;
            add(p, m, side, il, d, num(a, "max_ctx") * blocks * BLOCK_BYTES[format_of(a, il, side)] + 8);
        }
        if (owns_kv(m, il)) add(p, m, LEN_D, il, d, 1);
        if (source(m, il) >= 0) {
            int64_t q = q_heads(m, il), hv = head_dim(m, il, 1), need = 4 * num(o, "max_rows") * q * 132 * (hv + 8);
            p->unsupported += !served(head_dim(m, il, 0), 1) + !served(hv, 1) + (device_of(a, source(m, il)) != d);
            p->unsupported += !q || q % kv_heads(m, source(m, il)) || q > 16 * kv_heads(m, source(m, il));
            most[d] = need > most[d] ? need : most[d];
        }
        if (!is_linear(m, il)) continue;
        states++;
        add(p, m, CONV, il, d, conv_dim * (num(ssm, "conv_kernel") - 1));
        add(p, m, SSM, il, d, size * size * heads), add(p, m, ALT, il, d, size * size * heads);
    }
    for (int64_t s = 0; s < (get(a, "fence")->kind ? get(a, "fence")->i - 1 : 1); s++) {
        d = item(get(a, "placement"), s, s);
        p->devices = d >= p->devices ? (int32_t)d + 1 : p->devices;
    }
    for (d = 0; d < p->devices; d++) add(p, m, POS_D, -1, d, 1), add(p, m, HEALTH, -1, d, 88), p->scratch += most[d];
    int64_t tape = num(o, "round_width") * (conv_dim + heads * (3 * size + 2));
    for (int64_t il = 0; il < layers && tape; il++)
        if (is_linear(m, il)) add(p, m, TAPE, il, device_of(a, il), tape);
    if (num(o, "reserve_logits")) add(p, m, LOGITS, -1, device_of(a, INT32_MAX), num(m, "n_vocab"));
    const json *of = taps->child;
    if (of) add(p, m, TAPS, -1, device_of(a, of->child->i), of->next->i * of->i * num(m, "n_embd"));
    p->unsupported += states && !served(size, 0);
    static row found[MAX_PLANES];
    memcpy(found, p->rows, sizeof found);
    place(p, m, found, p->n);
    return NULL;
}
