/* Host time of calls as a program in C makes them: loops for the bench, which hands over the functions and arguments.
 * All return nanoseconds for all calls, or -status of the first that failed. */
#define _POSIX_C_SOURCE 199309L
#include <stdint.h>
#include <time.h>

typedef int (*append_function)(void *cache, int32_t layer, int64_t rows, uint64_t k_rows, uint64_t v_rows);
typedef int (*conv_function)(void *cache, int32_t layer, int64_t rows, uint64_t x, uint64_t w, uint64_t out);
typedef int (*scan_function)(void *cache, int32_t layer, int64_t rows, uint64_t q, uint64_t k, uint64_t v,
                             uint64_t g_log, uint64_t beta, uint64_t out, float scale);
typedef int (*launch_function)(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **params,
                               void **extra);

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

int64_t bench_append(append_function append, void *cache, const int32_t *layers, int count, int64_t rows,
                     const uint64_t *at, float unused) {
    (void)unused;
    const int64_t begin = now();
    for (int i = 0; i < count; i++) {
        const int status = append(cache, layers[i], rows, at[0], at[1]);
        if (status) return -status;
    }
    return now() - begin;
}

int64_t bench_conv(conv_function conv, void *cache, const int32_t *layers, int count, int64_t rows, const uint64_t *at,
                   float unused) {
    (void)unused;
    const int64_t begin = now();
    for (int i = 0; i < count; i++) {
        const int status = conv(cache, layers[i], rows, at[0], at[1], at[2]);
        if (status) return -status;
    }
    return now() - begin;
}

int64_t bench_scan(scan_function scan, void *cache, const int32_t *layers, int count, int64_t rows, const uint64_t *at,
                   float scale) {
    const int64_t begin = now();
    for (int i = 0; i < count; i++) {
        const int status = scan(cache, layers[i], rows, at[0], at[1], at[2], at[3], at[4], at[5], scale);
        if (status) return -status;
    }
    return now() - begin;
}

int64_t bench_launch(launch_function launch, void *kernel, const unsigned shape[7], void *stream, void **params,
                     int count) {
    const int64_t begin = now();
    for (int i = 0; i < count; i++) {
        const int status = launch(kernel, shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], stream,
                                  params, 0);
        if (status) return -status;
    }
    return now() - begin;
}
