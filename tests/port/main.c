/* Runs a conformance kit on a port of the cache in C11: host memory only, written from the kit's SPEC.md alone.
 * The port is formats.h, ops.h, plan.h and cache.h; kit.h and this file read the kit and compare.
 *
 *     cc -std=c11 -O2 -ffp-contract=off main.c -o port -lm && ./port KIT
 */
#include "kit.h"

#include "formats.h"
#include "ops.h"
#include "plan.h"
#include "sha.h"

#include "cache.h"

/* Operations: a copy of each array, which the operation works on. */
static struct {
    const char *name;
    void *data;
} arrays[64];
static int n_arrays;
static const json *args;

static void *array(const char *name) {
    if (get(args, name)->kind == J_TEXT) name = get(args, name)->text;
    for (int i = 0; i < n_arrays; i++)
        if (!strcmp(arrays[i].name, name)) return arrays[i].data;
    return NULL;
}

static void dequant(const kv *c, const json *a, uint8_t *health) {
    int64_t start = num(a, "start"), rows = num(a, "rows");
    if (start < 0 || start + rows > c->max_ctx) {
        note(health, 3, num(a, "layer"), start, 1);
        return;
    }
    for (int side = 0; side < 2; side++)
        for (int64_t t = 0, dim = c->dim[side]; t < rows; t++) {
            float *x = malloc(sizeof(float) * (size_t)dim);
            void *out = array(side ? "v_out" : "k_out");
            read_row(c, side, start + t, x);
            for (int64_t i = 0; i < dim; i++) {
                uint16_t code = (uint16_t)code_of(x[i], 7, -126, 0x7F80, 0x8000, 0x7FFF);
                if (num(a, "out_bf16")) ((uint16_t *)out)[t * dim + i] = code;
                else ((float *)out)[t * dim + i] = x[i];
            }
            free(x);
        }
}

/* Calls the port's function with the arguments of a case. */
static void run_op(const char *op, const json *a) {
    uint8_t *health = array("health");
    int32_t *pos_d = array("pos_d"), *accept_d = array("accept_d");
    int64_t slot = pos_d ? *pos_d : num(a, "slot"), layer = num(a, "layer");
    int rows = (int)num(a, "rows"), n_head_kv = (int)num(a, "n_head_kv"), dim = (int)num(a, "conv_dim");
    int attends = !strcmp(op, "attend"), taps = (int)num(a, "d_conv");
    kv c = {{array("k"), array("v")}, {(int)num(a, "k_format"), (int)num(a, "v_format")}, {0, 0}, num(a, "max_ctx")};
    c.dim[0] = attends ? n_head_kv * (int)num(a, "head_dim_k") : (int)num(a, "kv_dim_k");
    c.dim[1] = attends ? n_head_kv * (int)num(a, "head_dim_v") : (int)num(a, "kv_dim_v");
    if (!strcmp(op, "append_kv")) {
        int32_t *len_d = array("len_d");
        float *in[2] = {array("k_rows"), array("v_rows")};
        if (append(&c, in, slot, rows, health, layer))
            *len_d = num(a, "len") >= 0 ? (int32_t)num(a, "len") : *len_d > slot + rows ? *len_d : (int32_t)slot + rows;
    } else if (!strcmp(op, "dequant_kv")) {
        dequant(&c, a, health);
    } else if (!strcmp(op, "conv_update")) {
        float *ring = array("conv_state"), *out = array("out");
        conv(array("x"), array("w"), ring, out, array("tape"), rows, dim, taps, health, layer, slot);
    } else if (!strcmp(op, "conv_ring_rebuild")) {
        int n = accept_d ? *accept_d : (int)num(a, "accept");
        if (n < 0 || n > rows) note(health, 4, layer, 0, 1);
        else ring_rebuild(array("x"), array("ring_old"), array("conv_state"), n, dim, taps);
    } else if (!strcmp(op, "gdn_prep")) {
        float *out[3] = {array("q"), array("k"), array("v")};
        prep(array("conv_out"), array("alpha"), array("beta_raw"), array("dt_bias"), array("a"), out, array("g_log"),
             array("beta"), rows, (int)num(a, "num_k"), (int)num(a, "num_v"), (int)num(a, "state_size"),
             (float)get(a, "eps")->d, health, layer, slot);
    } else if (!strcmp(op, "gdn_scan")) {
        float *in[5] = {array("q"), array("k"), array("v"), array("g_log"), array("beta")}, *tape = array("tape");
        int n = accept_d ? *accept_d : rows, heads = (int)num(a, "num_v"), size = (int)num(a, "state_size");
        if (n < 0 || n > rows) {
            note(health, 4, layer, 0, 1);
            return;
        }
        for (int i = 0, each; tape && i < 5; i++, tape += each)
            memcpy(tape, in[i], sizeof(float) * (size_t)(each = rows * heads * (i < 3 ? size : 1)));
        scan(in, array("state_in"), array("state_out"), array("out"), n, heads, size, (float)get(a, "scale")->d);
    } else if (attends) {
        attend(&c, array("q"), array("out"), slot, rows, (int)num(a, "n_head"), n_head_kv, (float)get(a, "scale")->d,
               num(a, "window"), health, layer);
    } else {
        differs(op, "is no operation");
    }
}

static void run_operation(const json *test) {
    n_arrays = 0, args = get(test, "args");
    for (const json *each = get(test, "arrays")->child; each; each = each->next) {
        const char *name = get(each, "name")->text;
        if (is(each, "role", "out") && entry_of(test, name, "in")) continue;
        arrays[n_arrays].name = name, arrays[n_arrays].data = malloc(bytes_of(each) + 1);
        if (is(each, "role", "in")) memcpy(arrays[n_arrays].data, stored(each), bytes_of(each));
        else memset(arrays[n_arrays].data, 0xA5, bytes_of(each));
        n_arrays++;
    }
    void *scratch = NULL;
    if (is(test, "op", "attend") && !array("out")) {
        scratch = malloc(sizeof(float) * (size_t)(num(args, "rows") * num(args, "n_head") * num(args, "head_dim_v")));
        arrays[n_arrays].name = "out", arrays[n_arrays++].data = scratch;
    }
    run_op(get(test, "op")->text, args);
    for (const json *each = get(test, "arrays")->child; each; each = each->next)
        if (is(each, "role", "out") || !entry_of(test, get(each, "name")->text, "out"))
            compare(each, array(get(each, "name")->text));
    while (n_arrays) free(arrays[--n_arrays].data);
}

static void same_number(const char *what, int64_t got, const json *want) {
    char how[99];
    snprintf(how, sizeof how, "is %lld, not %lld", (long long)got, (long long)want->i);
    if (got != want->i) differs(what, how);
}

static void run_plan(const json *test) {
    static plan p;
    const json *result = get(test, "result"), *later = get(result, "first_use");
    const char *error = make_plan(get(test, "args"), &p);
    if (error || get(result, "error")->kind) {
        if (!error || !is(result, "error", error)) differs("the plan", error ? error : "was not refused");
        return;
    }
    int64_t planes = 0, arena = 0, kept = 0;
    for (int d = 0; d < p.devices; d++) {
        const json *device = get(result, "per_device")->child;
        for (int i = 0; i < d; i++) device = device->next;
        same_number("plane_bytes of a device", p.planes[d], get(device, "plane_bytes"));
        same_number("arena_bytes of a device", p.arena[d], get(device, "arena_bytes"));
        same_number("begin of a snapshot", p.begin[d], get(device, "snapshot")->child);
        same_number("end of a snapshot", p.end[d], get(device, "snapshot")->child->next);
        planes += p.planes[d], arena += p.arena[d], kept += p.end[d] - p.begin[d];
    }
    same_number("devices", p.devices, &(json){.i = get(result, "per_device")->i});
    same_number("plane_bytes", planes, get(result, "plane_bytes"));
    same_number("arena_bytes", arena, get(result, "arena_bytes"));
    same_number("mtp_bytes", p.mtp, get(result, "mtp_bytes"));
    same_number("unsupported", p.unsupported, get(result, "unsupported"));
    for (int i = 0; i < N_TOTALS; i++) same_number(TOTALS[i], p.totals[i], get(get(result, "totals"), TOTALS[i]));
    same_number("snapshot", kept, get(later, "snapshot"));
    same_number("attend_scratch", p.scratch, get(later, "attend_scratch"));
    const json *model = get(get(test, "args"), "model"), *options = get(get(test, "args"), "options");
    same_number("logits", num(options, "reserve_logits") ? 0 : 4 * num(model, "n_vocab"), get(later, "logits"));
    same_number("tap_row", get(options, "reserve_taps")->kind ? 0 : 4 * num(model, "n_embd"), get(later, "tap_row"));
    same_number("rows", p.n, get(entry_of(test, "rows", "out"), "shape")->child);
    same_number("order", p.n_order, get(entry_of(test, "order", "out"), "shape")->child);
    compare(entry_of(test, "rows", "out"), p.rows);
    compare(entry_of(test, "order", "out"), p.order);
}

/* Caches. */

static void fill(layer *l, const json *s) {
    int side = is(s, "plane", "v"), bytes = side || is(s, "plane", "k");
    float *plane = is(s, "plane", "conv_state") ? l->conv : is(s, "plane", "ssm_state") ? l->ssm : l->alt;
    for (int64_t i = num(s, "start"), end = i + num(s, "count"); i < end; i++) {
        uint32_t h = (uint32_t)(num(s, "tag") * 0x9E3779B1 + num(s, "layer") * 0x85EBCA77 + i * 0xC2B2AE3D);
        h = (h ^ h >> 16) * 0x85EBCA6B, h = (h ^ h >> 13) * 0xC2B2AE35, h ^= h >> 16;
        if (bytes) l->c.plane[side][i] = (uint8_t)(h >> 24);
        else plane[i] = (float)((int32_t)(h >> 8) - 8388608);
    }
}

/* One call: its inputs are looked up, its outputs compared. */
static const char *call(const json *s) {
    static const char *const NAMES[3][5] = {{"k_rows", "v_rows"}, {"x", "w"}, {"q", "k", "v", "g_log", "beta"}};
    int64_t il = num(s, "layer"), rows = 0, slot = num(s, "slot");
    layer *l = &C.at[il < C.n ? il : 0];
    float *in[5] = {NULL}, *out = NULL;
    uint8_t hash[32];
    const char *error = NULL;
    int op = is(s, "op", "append_kv") ? 0 : is(s, "op", "conv_update") ? 1 : 2;
    for (int i = 0; i < 5 && get(s, "arrays")->i; i++) {
        const json *each = NAMES[op][i] ? entry_of(s, NAMES[op][i], "in") : NULL;
        if (each) in[i] = (float *)stored(each);
        if (each && !i) rows = get(each, "shape")->child->i;
    }
    const json *want = entry_of(s, "out", "out");
    out = malloc(want ? bytes_of(want) : 1 << 20); /* a call that is to be refused could be allowed */
    if (!op) error = step_call(RAN_APPEND, s, rows, in, NULL);
    else if (op == 1) error = step_call(RAN_CONV, s, rows, in, out);
    else if (is(s, "op", "gdn_scan")) error = step_call(RAN_SCAN, s, rows, in, out);
    else if (is(s, "op", "attend")) error = attend_call(s, rows, in[0], out);
    else if (is(s, "op", "advance")) error = advance(num(s, "n"));
    else if (is(s, "op", "snapshot") || is(s, "op", "snapshot_into")) error = take(&C.kept[slot]);
    else if (is(s, "op", "rollback")) error = rollback(&C.kept[slot], num(s, "accept"));
    else if (is(s, "op", "truncate")) error = truncate_to(num(s, "to"));
    else if (is(s, "op", "reset")) error = reset();
    else if (is(s, "op", "round")) error = begin_round(num(s, "width"));
    else if (is(s, "op", "commit")) error = commit(num(s, "accept"), 0);
    else if (is(s, "op", "commit_device")) error = commit(num(s, "count"), 1);
    else if (is(s, "op", "reject")) error = reject();
    else if (is(s, "op", "settle")) error = settle();
    else if (is(s, "op", "sync_d")) error = sync_d();
    else if (is(s, "op", "digest")) error = digest(hash);
    else if (is(s, "op", "fill")) fill(l, s);
    else if (is(s, "op", "swap")) swap(l);
    else if (is(s, "op", "assign")) {
        C.pos = num(s, "pos");
        for (int64_t i = 0; i < C.n; i++)
            if (C.at[i].len_d && item(get(s, "len"), i, -1) >= 0) C.at[i].len = item(get(s, "len"), i, -1);
    } else differs(get(s, "op")->text, "is no call");
    if (want && !error) compare(want, out);
    if (entry_of(s, "sha256", "out") && !error) compare(entry_of(s, "sha256", "out"), hash);
    for (il = 0; il < C.n && !error; il++) {
        char name[40];
        snprintf(name, sizeof name, "layer%02d.ssm_state", (int)il);
        if (entry_of(s, name, "out")) compare(entry_of(s, name, "out"), C.at[il].ssm);
    }
    free(out);
    return error;
}

static uint64_t plane_digest(const char *name) {
    int il = 0, slot = 0, kept = sscanf(name, "snapshot%d.layer%d", &slot, &il) == 2;
    const char *plane = strrchr(name, '.');
    if (!strcmp(name, "health")) return fnv(C.health, 88);
    if (!kept) sscanf(name, "layer%d", &il);
    layer *l = &C.at[il];
    if (kept && !strcmp(plane, ".conv")) return fnv(C.kept[slot].conv[il], RING_BYTES);
    if (kept) return fnv(C.kept[slot].ssm[il], STATE_BYTES);
    if (!strcmp(plane, ".conv_state")) return fnv(l->conv, RING_BYTES);
    if (!strcmp(plane, ".ssm_state")) return fnv(l->ssm, STATE_BYTES);
    if (!strcmp(plane, ".ssm_state_alt")) return fnv(l->alt, STATE_BYTES);
    int side = !strcmp(plane, ".v");
    return fnv(l->c.plane[side], (size_t)(C.max_ctx * tok_bytes(&l->c, side) + 8));
}

/* Whether the cache stands where `after` says, and every plane holds what was last said of it. */
static void check_cache(const json *after) {
    static struct {
        const char *name;
        uint64_t digest;
    } known[256];
    static int n_known;
    if (call_number < 0) n_known = 0;
    if (!is(after, "state", STATES[C.state])) differs("the state is", STATES[C.state]);
    same_number("pos", C.pos, get(after, "pos"));
    same_number("pos_d", *C.pos_d, get(after, "pos_d"));
    same_number("step_rows", C.step_rows, get(after, "step_rows"));
    same_number("replay_to", C.replay_to, get(after, "replay_to"));
    same_number("generation", C.generation, get(after, "generation"));
    for (int64_t il = 0; il < C.n; il++) {
        layer *l = &C.at[il];
        same_number("len", l->len_d ? l->len : -1, &(json){.i = item(get(after, "len"), il, -2)});
        same_number("len_d", l->len_d ? *l->len_d : -1, &(json){.i = item(get(after, "len_d"), il, -2)});
    }
    for (const json *each = get(after, "snapshots")->child; each; each = each->next) {
        snapshot *k = &C.kept[num(each, "slot")];
        same_number("a snapshot's pos", k->pos, get(each, "pos"));
        same_number("a snapshot's validity", k->valid, get(each, "valid"));
        for (int64_t il = 0; il < C.n; il++) {
            json want = {.i = item(get(each, "len"), il, -2)};
            same_number("a snapshot's len", C.at[il].len_d ? k->len[il] : -1, &want);
        }
    }
    for (const json *each = get(after, "planes")->child; each; each = each->next) {
        int i = 0;
        while (i < n_known && strcmp(known[i].name, each->key)) i++;
        n_known += i == n_known;
        known[i].name = each->key, known[i].digest = strtoull(each->text, NULL, 16);
    }
    for (int i = 0; i < n_known; i++)
        if (plane_digest(known[i].name) != known[i].digest) differs(known[i].name, "has another digest");
}

static void run_cache(const json *test) {
    static struct {
        const char *name;
        uint8_t digest[32];
    } ends[256];
    static int n_ends;
    const json *after = get(test, "start");
    cache_new(get(test, "args"));
    check_cache(after);
    for (const json *s = get(test, "steps")->child; s; s = s->next) {
        call_number++;
        const char *error = call(s), *want = get(s, "error")->kind ? get(s, "error")->text : NULL;
        if (strcmp(error ? error : "", want ? want : "")) differs(get(s, "op")->text, error ? error : "is allowed");
        after = error ? after : get(s, "after");
        check_cache(after);
    }
    ends[n_ends].name = title;
    if (digest(ends[n_ends].digest)) return;
    for (int i = 0; i < n_ends; i++)
        if (is(test, "same_as", ends[i].name) && memcmp(ends[i].digest, ends[n_ends].digest, 32))
            differs("the end is not that of", ends[i].name);
    n_ends++;
}

int main(int argc, char **argv) {
    size_t n;
    int done = 0;
    if (argc != 2) fail("usage: port KIT");
    folder = argv[1], json_at = file_of(folder, "manifest.json", &n);
    const json *manifest = json_value();
    if (!is(manifest, "format", "memra-kit-1")) fail("this is no kit that the port knows");
    for (const json *test = get(manifest, "cases")->child; test; test = test->next, done++, call_number = -1) {
        title = get(test, "id")->text;
        if (is(test, "op", "plan")) run_plan(test);
        else if (is(test, "op", "cache")) run_cache(test);
        else run_operation(test);
    }
    if (!done) fail("the kit has no cases");
    printf("all %d cases\n", done);
    return 0;
}
