/* What every port needs of a kit: a small reader of JSON, and the arrays. Everything stays until the program ends. */
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct json {
    enum { J_NULL, J_BOOL, J_NUMBER, J_TEXT, J_LIST, J_MAP } kind;
    int64_t i; /* a number's whole part, a bool as 0 or 1, or how many entries a list or map has */
    double d;
    const char *text, *key;
    struct json *child, *next;
} json;

static _Noreturn void fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    exit(1);
}

static char *json_at;

static int json_next(void) {
    return *(json_at += strspn(json_at, " \n\r\t"));
}

/* A string in place; escapes stay as they are. */
static const char *json_text(void) {
    char *start = ++json_at;
    for (; *json_at != '"'; json_at++)
        if (!*json_at || (*json_at == '\\' && !*++json_at)) fail("the manifest ends in a string");
    *json_at++ = 0;
    return start;
}

static json *json_value(void) {
    json *v = calloc(1, sizeof *v), **last = &v->child;
    char *end = NULL;
    if (json_next() == '{' || *json_at == '[') {
        v->kind = *json_at++ == '{' ? J_MAP : J_LIST;
        for (; json_next() != '}' && *json_at != ']'; last = &(*last)->next, v->i++) {
            const char *key = v->kind == J_MAP ? json_text() : NULL;
            if (key && json_next() != ':') fail("no colon behind %s", key);
            json_at += key != NULL;
            *last = json_value(), (*last)->key = key;
            json_at += json_next() == ',';
        }
        json_at++;
    } else if (*json_at == '"') {
        v->kind = J_TEXT, v->text = json_text();
    } else if (*json_at == 't' || *json_at == 'f' || *json_at == 'n') {
        v->kind = *json_at == 'n' ? J_NULL : J_BOOL, v->i = *json_at == 't';
        json_at += *json_at == 'f' ? 5 : 4;
    } else {
        v->kind = J_NUMBER, v->i = strtoll(json_at, NULL, 10), v->d = strtod(json_at, &end);
        if (end == json_at) fail("no value of JSON at %.20s", json_at);
        json_at = end;
    }
    return v;
}

/* The value of a key; a null where there is none. */
static const json *get(const json *map, const char *key) {
    static const json none = {J_NULL, 0, 0, "", "", NULL, NULL};
    for (const json *each = map->child; each; each = each->next)
        if (!strcmp(each->key, key)) return each->kind == J_NULL ? &none : each;
    return &none;
}

static int64_t num(const json *map, const char *key) {
    return get(map, key)->i;
}

/* Entry i of a list of numbers or bools. */
static int64_t item(const json *list, int64_t i, int64_t otherwise) {
    const json *each = list->child;
    while (each && i-- > 0) each = each->next;
    return each ? each->i : otherwise;
}

static int is(const json *map, const char *key, const char *text) {
    return get(map, key)->kind == J_TEXT && !strcmp(get(map, key)->text, text);
}

/* A whole file, with a 0 behind it. */
static char *file_of(const char *folder, const char *name, size_t *n) {
    char path[4096], *data = NULL;
    long size = -1;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (file && !fseek(file, 0, SEEK_END)) size = ftell(file), rewind(file);
    if (size >= 0) data = calloc((size_t)size + 1, 1);
    if (!data || fread(data, 1, (size_t)size, file) != (size_t)size) fail("%s cannot be read", path);
    fclose(file);
    *n = (size_t)size;
    return data;
}

static const char *folder, *title = "the manifest";
static int call_number = -1;

static _Noreturn void differs(const char *what, const char *how) {
    if (call_number < 0) fail("%s: %s %s", title, what, how);
    fail("%s, call %d: %s %s", title, call_number, what, how);
}

static uint64_t fnv(const void *data, size_t n) {
    uint64_t h = 0xCBF29CE484222325;
    for (const uint8_t *each = data; n--; each++) h = (h ^ *each) * 0x100000001B3;
    return h;
}

static size_t bytes_of(const json *entry) {
    return (size_t)num(entry, "bytes");
}

/* An array as it lies in its file, its digest checked. */
static const void *stored(const json *entry) {
    static struct {
        const char *name;
        uint8_t *data;
        size_t n;
    } files[64];
    int i = 0;
    while (files[i].name && strcmp(files[i].name, get(entry, "file")->text)) i++;
    if (!files[i].name) {
        files[i].name = get(entry, "file")->text;
        files[i].data = (uint8_t *)file_of(folder, files[i].name, &files[i].n);
    }
    size_t offset = (size_t)num(entry, "offset"), n = bytes_of(entry);
    if (offset > files[i].n || n > files[i].n - offset) differs(get(entry, "name")->text, "lies outside its file");
    if (fnv(files[i].data + offset, n) != strtoull(get(entry, "fnv1a64")->text, NULL, 16))
        differs(get(entry, "name")->text, "has another digest");
    return files[i].data + offset;
}

static const json *entry_of(const json *holder, const char *name, const char *role) {
    for (const json *each = get(holder, "arrays")->child; each; each = each->next)
        if (is(each, "name", name) && is(each, "role", role)) return each;
    return NULL;
}

/* Whether `got` is what an output entry says. */
static void compare(const json *entry, const void *got) {
    const void *want = stored(entry);
    double tolerance = get(entry, "tolerance")->d, largest = 0;
    size_t n = bytes_of(entry);
    if (!memcmp(got, want, n)) return;
    if (!is(entry, "dtype", "f32")) differs(get(entry, "name")->text, "differs");
    const float *a = got, *b = want;
    for (size_t i = 0; i < n / 4; i++)
        if (isfinite(b[i]) && fabs(b[i]) > largest) largest = fabs(b[i]);
    for (size_t i = 0; i < n / 4; i++) {
        int same = !memcmp(a + i, b + i, 4) || (isnan(a[i]) && isnan(b[i]));
        double allowed = tolerance * (largest > 0 ? largest : 1);
        int near = isfinite(a[i]) && isfinite(b[i]) && fabs((double)a[i] - b[i]) <= allowed;
        if (!same && !(tolerance > 0 && near)) {
            char how[200];
            snprintf(how, sizeof how, "[%zu] is %.9g, not %.9g (%g is allowed)", i, a[i], b[i], allowed);
            differs(get(entry, "name")->text, how);
        }
    }
}
