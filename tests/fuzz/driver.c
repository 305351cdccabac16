/* driver.c: runs inputs without libFuzzer: a corpus that grows by what reaches new code of the library, and mutations.
 *
 * fuzz --runs N | --seconds S [--seed X]   random inputs, in processes of a few hundred each, so that a crash is told
 *                                          with its input and the driver's books stay short
 * fuzz --nulls                             each function once as it should be called, and once for each NULL pointer
 * fuzz --input HEX                         one input
 *
 * What is instrumented with -fsanitize-coverage=trace-pc counts its edges here.
 */
#include "world.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

enum { LONGEST = 480, CORPUS = 8192, BATCH = 400, MAP = 1 << 16, SECONDS_EACH = 10 };

typedef struct one { uint16_t n; uint8_t bytes[LONGEST]; } one;

static struct shared {
    tally told;
    uint64_t random;
    uint32_t n_corpus, n_batch, edges;
    uint8_t seen[MAP];  /* bit i: an edge was taken 2^i times in one input */
    one batch[BATCH], corpus[CORPUS];
} *all;

/* ---- Coverage ---- */

static uint8_t taken[MAP];
static uintptr_t before;

void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) {
    /* From a place of the program, so that a seed does the same wherever that is loaded. */
    const uintptr_t here = ((uintptr_t)__builtin_return_address(0) - (uintptr_t)__sanitizer_cov_trace_pc) & (MAP - 1);
    uint8_t *edge = &taken[(here ^ before) & (MAP - 1)];
    *edge += *edge < 255;
    before = here >> 1;
}

static bool is_news(void) {
    bool news = false;
    for (int i = 0; i < MAP; i++) {
        if (!taken[i]) continue;
        const uint8_t bit = (uint8_t)(1u << (31 - __builtin_clz(taken[i])));
        if (all->seen[i] & bit) continue;
        all->edges += !all->seen[i];
        all->seen[i] |= bit;
        news = true;
    }
    return news;
}

static void run(const one *input) {
    memset(taken, 0, sizeof taken);
    before = 0;
    struct itimerval limit = {.it_value = {.tv_sec = SECONDS_EACH}}; /* a loop or a wait ends as a crash does */
    setitimer(ITIMER_PROF, &limit, NULL);
    alarm(6 * SECONDS_EACH);
    uint8_t *exact = malloc(input->n ? input->n : 1);
    memcpy(exact, input->bytes, input->n);
    LLVMFuzzerTestOneInput(exact, input->n);
    free(exact);
    limit.it_value.tv_sec = 0;
    setitimer(ITIMER_PROF, &limit, NULL);
    alarm(0);
    if (is_news() && all->n_corpus < CORPUS) all->corpus[all->n_corpus++] = *input;
}

/* ---- Inputs ---- */

static uint64_t chance(uint64_t n) { /* xorshift64* */
    all->random ^= all->random >> 12;
    all->random ^= all->random << 25;
    all->random ^= all->random >> 27;
    return (all->random * 0x2545f4914f6cdd1d >> 33) % n;
}

static void add(one *input, const void *bytes, size_t n) {
    if (input->n + n > LONGEST) return;
    memcpy(input->bytes + input->n, bytes, n);
    input->n = (uint16_t)(input->n + n);
}

static int number_of(const char *name, size_t n) {
    for (int f = 0; f < n_functions; f++)
        if (strlen(functions[f].name) == n + 6 && !strncmp(functions[f].name + 6, name, n)) return f;
    broken("there is no memra_%.*s", (int)n, name);
}

/* "append_kv advance": sound calls, one behind the other, in the first world. */
static one sequence(uint8_t what, uint8_t n_devices, const char *names) {
    one made = {.n = 2, .bytes = {what, (uint8_t)(n_devices - 1)}};
    for (const char *at = names; *at; at += strspn(at, " ")) {
        const size_t n = strcspn(at, " ");
        const uint8_t call[] = {(uint8_t)number_of(at, n), 0, 0};
        add(&made, call, sizeof call);
        at += n;
    }
    return made;
}

static const char *const prelude = "plan_new snapshot_new capture_begin append_kv advance capture_end";
static const char *const stories[] = {
    "append_kv conv_update gdn_prep gdn_scan attend advance snapshot_new recur_step append_kv advance rollback"
    " recur_step append_kv advance digest",
    "round_begin append_kv recur_step round_commit round_begin append_kv recur_step round_commit_from_device settle"
    " digest snapshot_free cache_free",
    "attend_scratch append_kv attend advance capture_begin append_kv recur_step attend advance capture_end graph_launch"
    " graph_launch sync prepare_replay replayed graph_close",
    "park_logits take_logits arm_taps tap_write disarm_taps health_read clear_health reset truncate",
    "cache_new cache_free plan_new plan_free device_open device_load device_close alloc copy_table upload download"
    " free",
    "snapshot_new snapshot_into device_close snapshot_free cache_free",
    "capture_begin cache_free snapshot_new append_kv device_close capture_abandon round_begin append_kv round_reject",
};

/* The bytes of calls as calls: an offset for each, and one for the end. */
static int calls_of(const one *input, uint16_t at[LONGEST]) {
    int n = 0;
    for (size_t i = 2; i < input->n; i += 3u + (i + 2 < input->n ? input->bytes[i + 2] % 64 : 0)) at[n++] = (uint16_t)i;
    at[n] = input->n;
    return n;
}

static void insert_call(one *input) {
    uint16_t at[LONGEST];
    const int n = calls_of(input, at), where = n ? (int)chance((uint64_t)n + 1) : 0;
    one made = {.n = 0};
    const size_t head = n ? at[where] : input->n;
    add(&made, input->bytes, head);
    const uint64_t function = chance(10) ? chance((uint64_t)n_functions) : (uint64_t)n_functions; /* or none of them */
    uint8_t call[3 + 63] = {(uint8_t)function, chance(6) ? 0 : (uint8_t)(0xf0 + chance(8)),
                            (uint8_t)chance(24)};
    for (int i = 0; i < call[2]; i++) call[3 + i] = chance(3) ? 0 : (uint8_t)chance(256);
    add(&made, call, 3u + call[2]);
    add(&made, input->bytes + head, input->n - head);
    *input = made;
}

static void remove_call(one *input) {
    uint16_t at[LONGEST];
    const int n = calls_of(input, at), gone = n ? (int)chance((uint64_t)n) : 0;
    if (!n || at[gone + 1] > input->n) return;
    memmove(input->bytes + at[gone], input->bytes + at[gone + 1], input->n - at[gone + 1]);
    input->n = (uint16_t)(input->n - (at[gone + 1] - at[gone]));
}

static void splice(one *input) {
    const one *other = &all->corpus[chance(all->n_corpus)];
    uint16_t at[LONGEST];
    const int n = calls_of(other, at);
    if (!n) return;
    const int from = (int)chance((uint64_t)n), to = from + 1 + (int)chance((uint64_t)(n - from));
    if (at[to] <= other->n) add(input, other->bytes + at[from], at[to] - at[from]);
}

static void mutate(one *input) {
    for (uint64_t left = 1 + chance(5); left > 0; left--) {
        switch (chance(6)) {
            case 0: case 1: insert_call(input); break;
            case 2: splice(input); break;
            case 3: remove_call(input); break;
            default: if (input->n) input->bytes[chance(input->n)] = (uint8_t)chance(256); break;
        }
    }
}

/* ---- Processes ---- */

static void show(const one *input) {
    for (int i = 0; i < input->n; i++) fprintf(stderr, "%02x", input->bytes[i]);
    fputs("\n", stderr);
}

/* Runs the inputs of the batch in a process of its own; whether they kept all laws. */
static bool passes(uint32_t first, uint32_t n, bool keeps) {
    fflush(NULL);
    const pid_t child = fork();
    if (child < 0) broken("no process");
    if (!child) {
        static tally nobody;
        fuzz_tally = keeps ? &all->told : &nobody;
        for (all->n_batch = first; all->n_batch < first + n; all->n_batch++) run(&all->batch[all->n_batch]);
        exit(0); /* and the sanitizer looks for leaks */
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status == 0;
}

/* Names the input that broke something: the one that ended its process, perhaps only behind another, or that which
 * leaks. */
static int blame(uint32_t n) {
    if (all->n_batch < n) {
        const uint32_t last = all->n_batch;
        const one culprit = all->batch[last];
        fputs("input: ", stderr);
        show(&culprit);
        if (!passes(last, 1, false)) return 1;
        fputs("which passes alone\n", stderr);
        for (uint32_t i = 0; i < last; i++) {
            const one next = all->batch[i + 1];
            all->batch[i + 1] = culprit;
            if (!passes(i, 2, false)) {
                fputs("and not behind: ", stderr);
                show(&all->batch[i]);
                return 1;
            }
            all->batch[i + 1] = next;
        }
        return 1;
    }
    for (uint32_t i = 0; i < n; i++)
        if (!passes(i, 1, false)) {
            fputs("input that leaks: ", stderr);
            show(&all->batch[i]);
            return 1;
        }
    fputs("a batch of inputs leaks, none of them alone\n", stderr);
    return 1;
}

static int run_batch(uint32_t n) { return passes(0, n, true) ? 0 : blame(n); }

static int run_seeds(bool only_nulls) {
    uint32_t n = 0;
    int status = 0;
    for (int f = 0; f < n_functions && !status; f++)
        for (int p = -1; p < functions[f].n_pointers && !status; p++) {
            one made = sequence(0, 1, prelude);
            const uint8_t call[] = {(uint8_t)f, p < 0 ? 0 : (uint8_t)(0xf0 + p), 0};
            add(&made, call, sizeof call);
            all->batch[n++] = made;
            if (n == BATCH) status = run_batch(n), n = 0;
        }
    for (uint8_t what = 0; what < 8 && !only_nulls; what++)
        for (size_t i = 0; i < sizeof stories / sizeof *stories && !status; i++) {
            if (n == BATCH) status = run_batch(n), n = 0;
            all->batch[n++] = sequence(what & 1 ? 8 : what & 2, 1 + what / 4, stories[i]);
        }
    return status ? status : run_batch(n);
}

static int run_random(uint64_t runs, uint64_t seconds) {
    const time_t end = time(NULL) + (time_t)seconds;
    for (uint64_t done = 0; seconds ? time(NULL) < end : done < runs; done += BATCH) {
        for (int i = 0; i < BATCH; i++) {
            /* The newer half of the corpus twice as often. */
            const uint64_t from = chance(3) ? all->n_corpus / 2 : 0;
            all->batch[i] = all->corpus[from + chance(all->n_corpus - from)];
            mutate(&all->batch[i]);
        }
        const int status = run_batch(BATCH);
        if (status) return status;
    }
    return 0;
}

static one input_of(const char *hex) {
    one made = {.n = 0};
    unsigned byte;
    for (; made.n < LONGEST && sscanf(hex + 2 * made.n, "%2x", &byte) == 1; made.n++)
        made.bytes[made.n] = (uint8_t)byte;
    return made;
}

int main(int argc, char **argv) {
    uint64_t runs = 0, seconds = 0;
    bool nulls = false;
    int status = 0;
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) broken("no shared memory");
    all->random = 1;
    fuzz_tally = &all->told;
    LLVMFuzzerInitialize(&argc, &argv);
    const time_t begin = time(NULL);
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--nulls")) nulls = true;
        else if (!strcmp(argv[i], "--runs")) runs = strtoull(value, NULL, 10), i++;
        else if (!strcmp(argv[i], "--seconds")) seconds = strtoull(value, NULL, 10), i++;
        else if (!strcmp(argv[i], "--seed")) all->random = 2 * strtoull(value, NULL, 10) + 1, i++;
        else if (!strcmp(argv[i], "--input")) return fuzz_tells = true, all->batch[0] = input_of(value), run_batch(1);
        else broken("unknown argument %s", argv[i]);
    }
    status = run_seeds(nulls);
    if (!status && !nulls) status = run_random(runs, seconds);
    for (int f = 0; f < n_functions; f++) {
        const function_tally *told = &all->told.functions[f];
        printf("%s calls=%llu ok=%llu refused=%llu failed=%llu", functions[f].name, (unsigned long long)told->calls,
               (unsigned long long)told->ok, (unsigned long long)told->refused, (unsigned long long)told->failed);
        for (int p = 0; p < functions[f].n_pointers; p++)
            printf(" %s=%llu", functions[f].pointers[p], (unsigned long long)told->nulls[p]);
        puts("");
    }
    printf("inputs %llu, calls %llu, edges %u, corpus %u, seconds %lld\n", (unsigned long long)all->told.inputs,
           (unsigned long long)all->told.calls, all->edges, all->n_corpus, (long long)(time(NULL) - begin));
    return status;
}
