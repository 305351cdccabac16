/* SPEC.md 5 to 10: appending, convolution, gates, scan, attention, and the error record. Side 0 is K, side 1 is V. */
typedef struct {
    uint8_t *plane[2];
    int format[2], dim[2]; /* elements per token */
    int64_t max_ctx;
} kv;

static int64_t tok_bytes(const kv *c, int side) {
    return (int64_t)c->dim[side] / 32 * BLOCK_BYTES[c->format[side]];
}

static void note(uint8_t *health, int kind, int64_t layer, int64_t slot, int64_t count) {
    uint64_t *words = (uint64_t *)(void *)health, key;
    if (!health || !count) return;
    key = UINT64_MAX - ((uint64_t)(slot < 0 ? 0 : slot) << 16 | (uint64_t)layer);
    words[kind] += (uint64_t)count;
    if (words[5 + kind] < key) words[5 + kind] = key;
    words[10] |= 1u << kind;
}

static int wild(const float *x, int n) {
    for (int i = 0; i < n; i++)
        if (!isfinite(x[i])) return 1;
    return 0;
}

/* Notes each run of 32 among n neighbours with a value that is not finite. */
static void note_wild(const float *x, int n, uint8_t *health, int64_t layer, int64_t slot) {
    for (int i = 0; i < n; i += 32) note(health, 0, layer, slot, wild(x + i, n - i < 32 ? n - i : 32));
}

static void note_block(int format, const float *x, const uint8_t *block, uint8_t *health, int64_t layer, int64_t slot) {
    int infinite = 0, beyond = 0;
    for (int at = 0; format != 3 && at < (format == 1 ? 4 : 2); at += 2)
        infinite |= block[at] == 0 && (block[at + 1] & 0x7F) == 0x7C;
    for (int j = 0; j < 32; j++) beyond |= isfinite(x[j]) && fabsf(x[j]) > 464;
    note_wild(x, 32, health, layer, slot);
    if (format == 3) note(health, 2, layer, slot, beyond);
    else note(health, 1, layer, slot, infinite && !wild(x, 32));
}

static int append(kv *c, float *const rows[2], int64_t slot, int n, uint8_t *health, int64_t layer) {
    if (slot < 0 || slot + n > c->max_ctx) return note(health, 3, layer, slot, 1), 0;
    for (int side = 0; side < 2; side++)
        for (int64_t b = 0, per = c->dim[side] / 32; b < n * per; b++) {
            int size = BLOCK_BYTES[c->format[side]];
            uint8_t *block = c->plane[side] + slot * tok_bytes(c, side) + b * size;
            encode(c->format[side], rows[side] + 32 * b, block);
            note_block(c->format[side], rows[side] + 32 * b, block, health, layer, slot + b / per);
        }
    return 1;
}

static void read_row(const kv *c, int side, int64_t t, float *x) {
    for (int b = 0; b < c->dim[side] / 32; b++)
        decode(c->format[side], c->plane[side] + t * tok_bytes(c, side) + b * BLOCK_BYTES[c->format[side]], x + 32 * b);
}

static float entry(const float *ring, const float *x, int64_t i, int c, int dim, int pad) {
    return i < pad ? ring[c * pad + i] : x[(i - pad) * dim + c];
}

static void ring_rebuild(const float *x, const float *old, float *ring, int n, int dim, int taps) {
    float kept[8];
    for (int c = 0; c < dim; c++) {
        for (int j = 0; j < taps - 1; j++) kept[j] = entry(old, x, n + j, c, dim, taps - 1);
        memcpy(ring + c * (taps - 1), kept, sizeof(float) * (size_t)(taps - 1));
    }
}

static void conv(const float *x, const float *w, float *ring, float *out, float *tape, int rows, int dim, int taps,
          uint8_t *health, int64_t layer, int64_t slot) {
    for (int t = 0; t < rows; t++) {
        for (int c = 0; c < dim; c++) {
            float y = 0;
            for (int j = 0; j < taps; j++) y += entry(ring, x, t + j, c, dim, taps - 1) * w[c * taps + j];
            out[t * dim + c] = y / (1 + expf(-y));
        }
        note_wild(x + t * dim, dim, health, layer, slot + t);
    }
    if (tape) memcpy(tape, x, sizeof(float) * (size_t)rows * (size_t)dim);
    else ring_rebuild(x, ring, ring, rows, dim, taps);
}

static float dot(const float *a, const float *b, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static void scan(float *const in[5], const float *old, float *after, float *out, int n, int heads, int size, float by) {
    memmove(after, old, sizeof(float) * (size_t)(heads * size * size));
    for (int t = 0; t < n; t++)
        for (int h = 0; h < heads; h++) {
            const float *q = in[0] + (t * heads + h) * size, *k = in[1] + (t * heads + h) * size;
            float g = expf(in[3][t * heads + h]), beta = in[4][t * heads + h];
            for (int c = 0; c < size; c++) {
                float *s = after + (h * size + c) * size;
                float dl = beta * (in[2][(t * heads + h) * size + c] - g * dot(s, k, size));
                for (int r = 0; r < size; r++) s[r] = g * s[r] + dl * k[r];
                if (out) out[(t * heads + h) * size + c] = by * dot(s, q, size);
            }
        }
}

/* One head of one row. */
static void look(const kv *c, const float *q, float *out, int64_t from, int64_t to, int at, int hk, int hv, float by) {
    float *x = malloc(sizeof(float) * (size_t)(c->dim[0] > c->dim[1] ? c->dim[0] : c->dim[1]));
    float *score = malloc(sizeof(float) * (size_t)(to - from)), most = -INFINITY, sum = 0;
    for (int64_t t = from; t < to; t++) {
        read_row(c, 0, t, x);
        score[t - from] = by * dot(q, x + at * hk, hk);
        most = fmaxf(most, score[t - from]);
    }
    memset(out, 0, sizeof(float) * (size_t)hv);
    for (int64_t t = from; t < to; t++) {
        float weight = expf(score[t - from] - most);
        read_row(c, 1, t, x);
        sum += weight;
        for (int i = 0; i < hv; i++) out[i] += weight * x[at * hv + i];
    }
    for (int i = 0; i < hv; i++) out[i] /= sum;
    free(x), free(score);
}

static void attend(const kv *c, const float *q, float *out, int64_t slot, int rows, int n_head, int n_head_kv, float by,
                   int64_t window, uint8_t *health, int64_t layer) {
    int hk = c->dim[0] / n_head_kv, hv = c->dim[1] / n_head_kv;
    if (slot < 0 || slot + rows > c->max_ctx) {
        note(health, 3, layer, slot, 1);
        return;
    }
    for (int i = 0; i < rows * n_head; i++) {
        int64_t to = slot + i / n_head + 1, from = window && to > window ? to - window : 0;
        look(c, q + i * hk, out + i * hv, from, to, i % n_head / (n_head / n_head_kv), hk, hv, by);
        note(health, 0, layer, to - 1, wild(q + i * hk, hk));
    }
}

static void prep(const float *mixed, const float *alpha, const float *raw, const float *bias, const float *a,
                 float *out[3], float *g_log, float *beta, int rows, int keys, int heads, int size, float eps,
                 uint8_t *health, int64_t layer, int64_t slot) {
    for (int t = 0; t < rows; t++, mixed += (2 * keys + heads) * size)
        for (int h = 0, g = t * heads; h < heads; h++, g++) {
            float z = alpha[g] + bias[h];
            for (int which = 0; which < 3; which++) {
                const float *x = mixed + (which * keys + (which < 2 ? h % keys : h)) * size;
                float scale = which < 2 ? 1 / sqrtf(dot(x, x, size) + eps) : 1;
                for (int i = 0; i < size; i++) out[which][g * size + i] = which < 2 ? x[i] * scale : x[i];
                if (which == 2 || h < keys) note_wild(x, size, health, layer, slot + t);
            }
            g_log[g] = a[h] * (z > 20 ? z : log1pf(expf(z)));
            beta[g] = 1 / (1 + expf(-raw[g]));
            note(health, 0, layer, slot + t, !isfinite(alpha[g]) || !isfinite(bias[h]) || !isfinite(a[h]));
            note(health, 0, layer, slot + t, !isfinite(raw[g]));
        }
}
