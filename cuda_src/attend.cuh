// attend.cuh: what one block of attend works on, and how it brings queries and tiles of K and V into shared memory.
#pragma once

#include "mma.cuh"

#define MOST_KEYS 64  // of a tile
#define GROUPS 132
#define FOLD 11   // groups that are folded into one first, by fold_sum() one after the other
#define FOLDS 12  // and the number of those
#define TAIL 8    // f32 behind the values of a partial sum: reference, weight, and six unused, for sectors of 32 bytes
#define THREADS 128
#define PAD 8    // f16 behind each row in shared memory, so that rows start in different banks

static __device__ float exp2_of(float x) {
#if MEMRA_PTX
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// A tile is 2^tile_shift_of keys. The more K/V heads, the fewer keys a block of attend_pipe works on at a time: with four
// heads of 256 and eight of 128 it is a whole tile of 32. Every order of sums follows from it, so nothing but the geometry
// of a cache decides it.
static __device__ constexpr int tile_shift_of(int n_head_kv) { return n_head_kv > 2 ? 5 : 6; }

static __device__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// Which keys a row sees: first .. last. window 0: all up to its own position.
static __device__ long long first_key(long long last, int window) {
    return window > 0 && last >= window ? last - window + 1 : 0;
}

// What two sums are to be multiplied by, so that both stand against the larger of their references.
struct Worth {
    float before, own;
};

// `reference` is that of the sums so far, minus infinity before the first, and becomes the larger of the two.
static __device__ Worth fold_reference(float& reference, float own) {
    const float now = memra_max(reference, own), base = now == minus_infinity() ? 0.0f : now;
    const Worth worth = {exp2_of(__fsub_rn(reference, base)), exp2_of(__fsub_rn(own, base))};
    reference = now;
    return worth;
}

// The next group's sum, of values or of weights, on top of that of the fold's groups before: whoever folds does it so.
// Never a negative zero, so that a group whose keys a column does not see, a sum of 0 against minus infinity, changes no bit.
static __device__ float fold_sum(float before, float own, Worth worth) {
    return __fadd_rn(__fmaf_rn(own, worth.own, __fmul_rn(before, worth.before)), 0.0f);
}

// Bytes of a block that may start at any even address, as words.
static __device__ uint32_t word_at(const uint8_t* bytes, int i) {
    const uint8_t* at = bytes + 4 * i;
    return ((unsigned long long)at & 2) ? (uint32_t)*(const uint16_t*)at | (uint32_t)*(const uint16_t*)(at + 2) << 16
                                        : *(const uint32_t*)at;
}

// Four signed bytes as f16.
static __device__ void s8_to_f16(uint32_t four, uint32_t out[2]) {
    for (int i = 0; i < 2; i++) {
        const float low = (float)(int8_t)(four >> 16 * i), high = (float)(int8_t)(four >> (16 * i + 8));
        out[i] = memra_pack_f16(low, high);
    }
}

static __device__ void e4m3_to_f16(uint32_t four, uint32_t out[2]) {
    for (int i = 0; i < 2; i++) {
        out[i] = memra_pack_f16(memra_from_e4m3((uint8_t)(four >> 16 * i)), memra_from_e4m3((uint8_t)(four >> (16 * i + 8))));
    }
}

// The codes of one block of K as 32 f16, and its d.
static __device__ float decode_k(const uint8_t* bytes, int index, int format, uint32_t out[16]) {
    if (format == MEMRA_Q8_0) {
        const memra_q8_0* block = (const memra_q8_0*)bytes + index;
        for (int i = 0; i < 8; i++) s8_to_f16(word_at((const uint8_t*)block->q, i), out + 2 * i);
        return memra_from_f16(block->d);
    }
    const memra_fp8* block = (const memra_fp8*)bytes + index;
    for (int i = 0; i < 8; i++) e4m3_to_f16(word_at(block->q, i), out + 2 * i);
    return 1.0f;
}

// One block of V as 32 f16.
static __device__ void decode_v(const uint8_t* bytes, int index, int format, uint32_t out[16]) {
    if (format == MEMRA_FP8) {
        const memra_fp8* block = (const memra_fp8*)bytes + index;
        for (int i = 0; i < 8; i++) e4m3_to_f16(word_at(block->q, i), out + 2 * i);
        return;
    }
    const bool five = format == MEMRA_Q5_1;
    const memra_q5_1* q5 = (const memra_q5_1*)bytes + index;
    const memra_q4_0* q4 = (const memra_q4_0*)bytes + index;
    const float d = memra_from_f16(five ? q5->d : q4->d);
    const float m = five ? memra_from_f16(q5->m) : 0.0f;
    const uint32_t high = five ? q5->qh : 0;
    const uint8_t* qs = five ? q5->qs : q4->qs;
    for (int i = 0; i < 4; i++) {
        const uint32_t four = word_at(qs, i);
        for (int half = 0; half < 2; half++) {  // the low nibbles are elements 4i .., the high ones 16 + 4i ..
            float x[4];
            for (int j = 0; j < 4; j++) {
                const int element = 16 * half + 4 * i + j;
                const uint32_t q = (four >> (8 * j + 4 * half) & 15u) | (high >> element & 1u) << 4;
                x[j] = five ? __fmaf_rn(d, (float)q, m) : __fmul_rn(d, (float)((int)q - 8));
            }
            out[8 * half + 2 * i] = memra_pack_f16(x[0], x[1]);
            out[8 * half + 2 * i + 1] = memra_pack_f16(x[2], x[3]);
        }
    }
}

// Shared memory of a block, carved from one run of bytes; attend_shared_bytes in kernels.py is its size.
struct Shared {
    uint16_t* tile;   // (tile_keys, widest head + PAD): codes of K, then V
    uint16_t* query;  // (2, columns, head_dim_k + PAD): high and low part
    uint16_t* weight; // (columns, MOST_KEYS + PAD)
    float* d;         // (tile_keys, head_dim_k / 32)
    float* score;     // (columns, MOST_KEYS)
    float* factor;    // (columns): from the sum of codes to a power of two
    float* rescale;   // (columns): what the old sums are worth,
    float* own;       // (columns): and those of a group that is folded
    int* odd;         // whether V holds something that 0 does not silence
};

static __device__ Shared carve(uint8_t* bytes, int tile_keys, int columns, int head_dim_k, int head_dim_v) {
    Shared s;
    const int widest = head_dim_k > head_dim_v ? head_dim_k : head_dim_v;
    s.tile = (uint16_t*)bytes;
    s.query = s.tile + tile_keys * (widest + PAD);
    s.weight = s.query + 2 * columns * (head_dim_k + PAD);
    s.d = (float*)(s.weight + columns * (MOST_KEYS + PAD));
    s.score = s.d + tile_keys * (head_dim_k / 32);
    s.factor = s.score + columns * MOST_KEYS;
    s.rescale = s.factor + columns;
    s.own = s.rescale + columns;
    s.odd = (int*)(s.own + columns);
    return s;
}

// What a block works on, and for whom.
struct Work {
    long long pos;            // position of row 0
    int rows, gqa, window, tile_shift;
    int first_column, columns;  // columns of this block: column c is row c / gqa, query head c % gqa
    __device__ int tile_keys() const { return 1 << tile_shift; }
    __device__ long long last_key(int column) const { return pos + (first_column + column) / gqa; }
    __device__ bool sees(int column, long long key) const {
        const long long last = last_key(column);
        return key <= last && key >= first_key(last, window);
    }
    __device__ bool all_see(long long key) const { return sees(0, key) && sees(columns - 1, key); }
    __device__ bool none_sees(long long key) const {
        return key > last_key(columns - 1) || key < first_key(last_key(0), window);
    }
};

// Splits the queries of a block into two f16 each, scaled by a power of two that suits f16.
static __device__ void load_query(const Shared& s, const Work& work, const float* q, int n_head, int head, int dim,
                                  float scale, int width, memra_health* health, int layer) {
    const int lane = threadIdx.x & 31, stride = dim + PAD;
    for (int c = threadIdx.x / 32; c < width; c += THREADS / 32) {
        const bool used = c < work.columns;
        const int row = (work.first_column + c) / work.gqa, of_head = head * work.gqa + (work.first_column + c) % work.gqa;
        const float* x = q + ((long long)row * n_head + of_head) * dim;
        float most = 0.0f;
        bool bad = false;
        for (int i = lane; used && i < dim; i += 32) {
            most = memra_max(most, fabsf(x[i]));
            bad |= !memra_finite(x[i]);
        }
        memra_report_any(bad, health, MEMRA_FAULT_NONFINITE, layer, work.pos + row);
        most = memra_warp_max(most);
        // 2^13 / 2^exponent(most), within what an f32 holds.
        int exponent = (int)(__float_as_uint(most) >> 23 & 255u) - 127;
        exponent = exponent < -100 ? -100 : exponent > 127 ? 127 : exponent;  // 128: not finite
        const float up = __uint_as_float((unsigned)(127 + 13 - exponent) << 23);
        const float down = __uint_as_float((unsigned)(127 - 13 + exponent) << 23);
        for (int i = lane; i < dim; i += 32) {
            const float value = used ? __fmul_rn(x[i], up) : 0.0f;
            const uint16_t high = memra_to_f16(value);
            s.query[c * stride + i] = high;
            s.query[(width + c) * stride + i] = memra_to_f16(__fsub_rn(value, memra_from_f16(high)));
        }
        if (lane == 0) s.factor[c] = __fmul_rn(__fmul_rn(scale, 1.4426950408889634f), down);
    }
}

// Codes and scales of K, or V, of one tile; rows that nobody sees are 0.
static __device__ void load_tile(const Shared& s, const Work& work, const uint8_t* bytes, long long tok_bytes, int format,
                                 int head, int dim, int stride, long long start, bool is_v) {
    const int blocks = dim / 32;
    if (is_v && threadIdx.x == 0) *s.odd = 0;
    if (is_v) __syncthreads();
    for (int i = threadIdx.x; i < blocks << work.tile_shift; i += THREADS) {
        const int row = i / blocks, block = i - row * blocks;
        const long long key = start + row;
        uint32_t x[16] = {};
        float d = 0.0f;
        if (!work.none_sees(key)) {
            const uint8_t* token = bytes + key * tok_bytes;
            if (is_v) {
                decode_v(token, head * blocks + block, format, x);
            } else {
                d = decode_k(token, head * blocks + block, format, x);
            }
        }
        uint32_t* to = (uint32_t*)(s.tile + row * stride + block * 32);
        bool odd = false;
        for (int j = 0; j < 16; j++) {
            to[j] = x[j];
            odd |= (x[j] & 0x7C00u) == 0x7C00u || (x[j] & 0x7C000000u) == 0x7C000000u;
        }
        if (!is_v) s.d[row * blocks + block] = d;
        if (is_v && odd && !work.all_see(key)) *s.odd = 1;
    }
}
