// set_counters: writes the device counters of a cache in stream order, the values riding in the launch.
#include "device.cuh"

// counters[i] = a where bit i of (a_hi:a_lo) is set, else b where bit i of (b_hi:b_lo) is set; i < 128.
extern "C" __global__ void __launch_bounds__(128) set_counters(
        int* counters, int a, int b, long long a_lo, long long a_hi, long long b_lo, long long b_hi,
        memra_health* health, int layer) {
    const int i = threadIdx.x, bit = i & 63;
    const unsigned long long in_a = (unsigned long long)(i < 64 ? a_lo : a_hi) >> bit & 1;
    const unsigned long long in_b = (unsigned long long)(i < 64 ? b_lo : b_hi) >> bit & 1;
    if (in_a) {
        counters[i] = a;
    } else if (in_b) {
        counters[i] = b;
    }
}
MEMRA_EXPORT(set_counters)
