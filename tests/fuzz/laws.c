/* laws.c: one input from its first byte to its last, and what every call in it is held to:
 *
 * a status that the header knows, with a sentence; a refusal leaves every struct as it was and asks nothing of the
 * driver; a NULL is refused unless the header lets it be; answers are written on success and stay untouched or empty
 * else; behind the last call all of it can be freed, and the driver has nothing left and saw no misuse.
 */
#include "pool.h"

#include <elf.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The stand-in driver's own entries. */
extern void fake_reset(void), fake_trace_clear(void), fake_clear_failures(void), fake_errors_clear(void);
extern void fake_set_memory_left(int device, uint64_t bytes);
extern int fake_set_fail(const char *name, long nth, int code, int breaks);
extern int fake_pending_failures(void);
extern size_t fake_trace(void *out, size_t room), fake_errors(char *out, size_t room);
extern uint64_t fake_live_bytes(void), fake_live_graphs(void), fake_check_guards(void);
extern int cuInit(unsigned flags), cuDevicePrimaryCtxRetain(void **context, int device);

static tally own_tally;
tally *fuzz_tally = &own_tally;
bool fuzz_tells;
pool world;

_Noreturn void broken(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("law broken: ", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\n", stderr);
    va_end(arguments);
    abort();
}

static bool is_refusal(int status) {
    return status != MEMRA_OK && status != MEMRA_ERR_DRIVER && status != MEMRA_ERR_OUT_OF_MEMORY &&
           status != MEMRA_ERR_HEALTH && status != MEMRA_ERR_NO_DRIVER;
}

/* ---- Blocks that live as long as a call ---- */

static void *blocks[64];
static int n_blocks;

void *scratch(size_t n_bytes) {
    void *made = malloc(n_bytes);
    if (!made || n_blocks == 64) broken("the harness has no memory");
    return blocks[n_blocks++] = made;
}

void free_scratch(void) {
    while (n_blocks) free(blocks[--n_blocks]);
}

/* ---- A cubin with all kernels, and files that hold it ---- */

uint8_t *cubin;
size_t cubin_bytes;
static char folder[480], names[5][512], long_name[5000];
const char *paths[] = {
    names[0], folder, names[1], "", "/nowhere/at.all", names[2], "/dev/null", long_name, names[3], "."};
int n_paths = sizeof paths / sizeof *paths;

/* An ELF of sections that are named after kernels; the driver of these tests looks at nothing else. */
static void make_cubin(void) {
    char text[4096] = "";
    size_t used = 1; /* section 0 has no name */
    const size_t n = (size_t)n_kernel_names + 2;
    Elf64_Shdr *sections = calloc(n, sizeof *sections);
    for (int k = 0; k < n_kernel_names; k++) {
        sections[k + 1] = (Elf64_Shdr){.sh_name = (Elf64_Word)used, .sh_type = SHT_PROGBITS};
        used += (size_t)sprintf(text + used, ".text.%s", kernel_names[k]) + 1;
    }
    Elf64_Ehdr header = {.e_ident = {ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3}, .e_shoff = sizeof header,
                         .e_shentsize = sizeof *sections, .e_shnum = (Elf64_Half)n, .e_shstrndx = (Elf64_Half)(n - 1)};
    const size_t names_at = sizeof header + n * sizeof *sections;
    sections[n - 1] = (Elf64_Shdr){.sh_type = SHT_STRTAB, .sh_offset = names_at, .sh_size = used};
    cubin_bytes = names_at + used;
    cubin = malloc(cubin_bytes);
    memcpy(cubin, &header, sizeof header);
    memcpy(cubin + sizeof header, sections, n * sizeof *sections);
    memcpy(cubin + names_at, text, used);
    free(sections);
}

static void put_file(const char *path, const void *bytes, size_t n_bytes) {
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(bytes, 1, n_bytes, file) != n_bytes) broken("%s cannot be written", path);
    fclose(file);
}

static pid_t maker;

static void remove_files(void) {
    if (getpid() != maker) return;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unlink(names[i]);
    rmdir(folder);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    make_cubin();
    const char *root = getenv("TMPDIR");
    const int length = snprintf(folder, sizeof folder, "%s/memra-fuzz-XXXXXX", root && *root ? root : P_tmpdir);
    if (length >= (int)sizeof folder || !mkdtemp(folder)) broken("no folder");
    const char *const leaves[] = {"all.cubin", "bad.txt", "cut.txt", "pipe.txt", "none.cubin"};
    for (int i = 0; i < 5; i++) snprintf(names[i], sizeof names[i], "%s/%s", folder, leaves[i]);
    put_file(names[0], cubin, cubin_bytes);
    put_file(names[1], "no cubin at all", 15);
    put_file(names[2], cubin, cubin_bytes / 2);
    if (mkfifo(names[3], 0600)) broken("no pipe");
    memset(long_name, 'x', sizeof long_name - 1);
    maker = getpid();
    atexit(remove_files);
    return 0;
}

/* ---- Before and behind a call ---- */

static uint64_t hash(uint64_t h, const void *at, size_t n_bytes) {
    const uint8_t *bytes = at;
    for (size_t i = 0; i < n_bytes; i++) h = (h ^ bytes[i]) * 0x100000001b3;
    return h;
}

/* Everything that a refusal must leave alone. Who records a cache is noted with its first operation in a capture. */
static uint64_t state(void) {
    uint64_t h = 0xcbf29ce484222325;
    for (int i = 0; i < POOL; i++) {
        const memra_cache *cache = world.caches[i];
        if (!cache) continue;
        memra_cache copy = *cache;
        copy.recorder = 0;
        h = hash(h, &copy, sizeof copy);
        const size_t n = cache->n_layer > 16 ? 16 : (size_t)cache->n_layer;
        h = hash(h, cache->kv, n * sizeof *cache->kv);
        h = hash(h, cache->recur, n * sizeof *cache->recur);
        h = hash(h, cache->devices, (size_t)cache->n_devices * sizeof *cache->devices);
    }
    for (int i = 0; i < POOL; i++)
        if (world.snapshots[i]) h = hash(h, world.snapshots[i], sizeof *world.snapshots[i]);
    return h;
}

static uint64_t state_before;
static size_t trace_before;

static void begin_call(input *in, int function, uint8_t forced) {
    free_scratch();
    in->function = function;
    in->pointer = in->address = 0;
    in->nulled = false;
    const bool forces = forced >= 0xf0 && functions[function].n_pointers;
    in->forced_null = forces ? forced % 16 % functions[function].n_pointers : -1;
    state_before = state();
    trace_before = fake_trace(NULL, 0);
}

static function_tally *count(input *in) {
    function_tally *counted = &fuzz_tally->functions[in->function];
    counted->calls++;
    fuzz_tally->calls++;
    if (in->nulled) counted->nulls[in->forced_null]++;
    return counted;
}

void end_value(input *in) { count(in)->ok++; }

void end_status(input *in, int status, bool null_is_sound) {
    const function *called = &functions[in->function];
    function_tally *counted = count(in);
    if (fuzz_tells) fprintf(stderr, "%s %d %s\n", called->name, status, status ? memra_last_error() : "");
    *(status == MEMRA_OK ? &counted->ok : is_refusal(status) ? &counted->refused : &counted->failed) += 1;
    if (status < MEMRA_OK || status > MEMRA_ERR_DRIVER) broken("%s returned %d", called->name, status);
    if (in->nulled && status == MEMRA_OK && !null_is_sound)
        broken("%s took a NULL %s", called->name, called->pointers[in->forced_null]);
    if (status == MEMRA_OK) return;
    if (!*memra_last_error()) broken("%s returned %d without a sentence", called->name, status);
    if (!is_refusal(status)) return;
    if (!called->may_change && state() != state_before)
        broken("%s refused (%s), and a struct has changed", called->name, memra_last_error());
    if (!called->may_touch && fake_trace(NULL, 0) != trace_before)
        broken("%s refused (%s) behind calls of the driver", called->name, memra_last_error());
}

void check_out(const char *name, int status, const void *out, size_t n_bytes) {
    if (!out || status == MEMRA_OK) return;
    const uint8_t *bytes = out;
    bool untouched = true, empty = true;
    for (size_t i = 0; i < n_bytes; i++) untouched &= bytes[i] == 0xa5, empty &= bytes[i] == 0;
    if (n_bytes == 65) empty = bytes[0] == 0;
    if (!untouched && !empty && is_refusal(status)) broken("a refusal wrote to %s", name);
}

/* ---- What was made and what has ended ---- */

static void keep(void **pool, void *made, void (*end)(void *)) {
    for (int i = 0; i < POOL; i++)
        if (!pool[i]) {
            pool[i] = made;
            return;
        }
    end(made);
}

static void drop(void **pool, const void *ended) {
    for (int i = 0; i < POOL; i++)
        if (pool[i] == ended) pool[i] = NULL;
}

static void must(const char *what, int status) {
    const bool excused = (world.wild || world.orphans) && !is_refusal(status);
    if (status != MEMRA_OK && !excused) broken("%s at the end: %s", what, memra_last_error());
    world.orphans |= status != MEMRA_OK;
}

static void end_device(void *at) { must("memra_device_close", memra_device_close(at)); }
static void end_cache(void *at) {
    must("memra_cache_free", memra_cache_free(at));
}
static void end_snapshot(void *at) { must("memra_snapshot_free", memra_snapshot_free(at)); }
static void end_graph(void *at) { must("memra_graph_close", memra_graph_close(at)); }
static void end_plan(void *at) { memra_plan_free(at); }

/* Whether an object is gone: also where the driver failed, but not where the call was refused. */
static bool is_gone(int status) { return !is_refusal(status); }

#define KEEPS(kind)                                                                    \
    void keep_##kind(memra_##kind *const *made, int status) {                          \
        if (status == MEMRA_OK) keep((void **)world.kind##s, *made, end_##kind);       \
    }
#define DROPS(kind)                                                                    \
    void drop_##kind(const memra_##kind *ended, int status) {                          \
        if (ended && is_gone(status)) drop((void **)world.kind##s, ended);             \
    }
KEEPS(device)
KEEPS(cache)
KEEPS(snapshot)
KEEPS(graph)
KEEPS(plan)
DROPS(cache)
DROPS(snapshot)
DROPS(graph)

void drop_plan(const memra_plan *ended) { drop((void **)world.plans, ended); }

void drop_device(const memra_device *ended, int status) {
    if (!ended || !is_gone(status)) return;
    if (ended == world.devices[0]) world.work = 0;
    drop((void **)world.devices, ended);
    world.closed = (memra_device *)ended;
    world.orphans = true;
    for (int i = 0; i < POOL; i++)
        if (world.memory_of[i] == ended) world.memory[i] = 0;
}

void keep_memory(const memra_device *device, const uint64_t *ptr, int status) {
    for (int i = 0; status == MEMRA_OK && i < POOL; i++)
        if (!world.memory[i] && *ptr) {
            world.memory[i] = *ptr;
            world.memory_of[i] = (memra_device *)device;
            return;
        }
    if (status == MEMRA_OK && *ptr) must("memra_free", memra_free((memra_device *)device, *ptr));
}

/* A free that was asked for by an address of something else's leaves that without its memory. */
void drop_memory(const memra_device *device, uint64_t ptr, int status) {
    (void)device;
    if (status != MEMRA_OK || !ptr) {
        world.orphans |= status == MEMRA_ERR_DRIVER;
        return;
    }
    bool ours = false;
    for (int i = 0; i < POOL; i++)
        if (world.memory[i] == ptr) world.memory[i] = 0, ours = true;
    if (ptr == world.work) world.work = 0, ours = true;
    if (!ours) world.orphans = true;
}

/* ---- An input ---- */

static void set_up(input *in) {
    const uint8_t what = draw_byte(in), n_devices = 1 + draw_byte(in) % 2;
    world.wild = n_devices > 1; /* addresses are drawn on the first, whatever they are for */
    for (int d = 0; d < n_devices; d++) {
        const memra_device_options options = {
            .struct_size = sizeof options, .ordinal = d, .flags = what & 1 ? MEMRA_NO_ARENA : 0};
        must("memra_device_open", memra_device_open(&options, &world.devices[d]));
        if (!(what & 2)) must("memra_device_load", memra_device_load(world.devices[d], cubin, cubin_bytes));
    }
    must("memra_alloc", memra_alloc(world.devices[0], WORK_BYTES, &world.work));
    must("memra_clear", memra_clear(world.devices[0], world.work, WORK_BYTES));
    if (what & 4) return;
    in->forced_null = -1;
    memra_config *config = draw_config(&(input){.forced_null = -1});
    if (what & 8) config->full_attention_interval = config->has_ssm = 0;
    memra_options options;
    memra_options_default(&options);
    options.round_width = 4;
    options.strict = what >> 4 & 1;
    memra_policy policy;
    memra_policy_default(&policy);
    const int32_t fence[] = {0, 2, N_LAYER};
    must("memra_cache_new", memra_cache_new(config, MAX_CTX, &policy, &options, world.devices,
                                            n_devices > 1 ? fence : NULL, n_devices, &world.caches[0]));
}

/* What an engine may do beside the library's calls. */
static void other(input *in) {
    in->forced_null = -1;
    memra_cache *cache = draw_cache(in);
    const uint8_t what = draw_byte(in);
    if (what % 4 == 0) {
        static const int codes[] = {719, 2, 999, 1};
        fake_set_fail("*", 1 + draw_byte(in) % 8, codes[what / 4 % 4], 0);
        world.orphans = true;
        return;
    }
    for (int i = 0; i < POOL; i++)
        if (world.caches[i] && world.caches[i] == cache && cache->n_layer) {
            if (what % 4 == 1) cache->pos = draw_int(in, 0);
            else cache->kv[what % cache->n_layer].len = draw_int(in, 0);
        }
}

static void check_driver(void) {
    char told[2048] = "";
    fake_check_guards();
    const size_t n = fake_errors(told, sizeof told - 1);
    if (n && !world.wild && !world.orphans) broken("the driver was misused: %s", told);
    if (strstr(told, "guard")) broken("the driver's memory: %s", told);
}

static void tear_down(void) {
    fake_clear_failures();
    for (int i = 0; i < POOL; i++)
        if (world.devices[i]) must("memra_capture_abandon", memra_capture_abandon(world.devices[i]));
    for (int i = 0; i < POOL; i++) {
        if (world.graphs[i]) end_graph(world.graphs[i]);
        if (world.snapshots[i]) end_snapshot(world.snapshots[i]);
        if (world.plans[i]) end_plan(world.plans[i]);
        if (world.caches[i]) end_cache(world.caches[i]);
        if (world.memory[i]) (void)memra_free(world.memory_of[i], world.memory[i]);
    }
    if (world.work) (void)memra_free(world.devices[0], world.work);
    check_driver();
    for (int i = POOL - 1; i >= 0; i--) { /* the later ones may have been opened on the stream of an earlier one */
        if (world.devices[i]) must("memra_device_close", memra_device_close(world.devices[i]));
    }
    free_scratch();
    if (world.orphans) return;
    if (fake_live_bytes()) broken("%llu bytes are left on the device", (unsigned long long)fake_live_bytes());
    if (fake_live_graphs()) broken("%llu graphs are left", (unsigned long long)fake_live_graphs());
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static void *kept[2]; /* contexts that outlive the devices, so that what is not freed is seen */
    input in = {.at = data, .end = data + size, .forced_null = -1};
    if (!kept[0]) {
        cuInit(0);
        for (int d = 0; d < 2; d++) cuDevicePrimaryCtxRetain(&kept[d], d);
    }
    memset(&world, 0, sizeof world);
    fake_reset();
    for (int d = 0; d < 2; d++) fake_set_memory_left(d, DEVICE_BYTES);
    set_up(&in);
    fuzz_tally->inputs++;
    for (int n = 0; in.at < in.end && n < 64; n++) {
        const int function = draw_byte(&in) % (n_functions + 1), forced = draw_byte(&in);
        const size_t wanted = draw_byte(&in) % 64, left = (size_t)(in.end - in.at);
        const uint8_t *const end = in.end, *const behind = in.at + (wanted < left ? wanted : left);
        in.end = behind;
        if (function == n_functions) {
            other(&in);
        } else {
            begin_call(&in, function, forced);
            functions[function].call(&in);
        }
        in.at = behind;
        in.end = end;
    }
    tear_down();
    return 0;
}
