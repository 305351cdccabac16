// What a kernel that only reads can do: the ceiling that the bench holds reading operations against. n: 16-byte words.
extern "C" __global__ void bench_read(const uint4* __restrict__ src, long long n, unsigned* never) {
    const long long step = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned seen = 0;
    for (; i + 3 * step < n; i += 4 * step) { // four loads in flight
        const uint4 a = src[i], b = src[i + step], c = src[i + 2 * step], d = src[i + 3 * step];
        seen ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < n; i += step) seen ^= src[i].x;
    if (seen == 0x9e3779b9u) *never = seen; // so that the loads stay
}
