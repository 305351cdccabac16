// attend_pipe.cuh: what attend_pipe.cu works on: the shared memory of a block, its way through the tiles, and K and V
// as fragments of tensor-core instructions.
#pragma once

#include "attend.cuh"
#include "pipe.cuh"

#define TEAM_WARPS 8                     // warps that compute; one more brings K and V
#define PIPE_THREADS (32 * TEAM_WARPS + 32)
#define PIPE_SHARED_BYTES (227 << 10)    // all that a block of sm_90 can have
#define FIXED_BYTES 2048                 // of it for pipes, plan and tasks, and behind all
#define STAGE_BYTES (70 << 10)           // at most, where a stage can be smaller
#define QUARTERS 4                       // a stage arrives in so many copies, each further from its bank than the last

// A stage is what a block works on at once: `tokens` keys of all K/V heads, all of one tile. Lane (g, t) of a warp reads
// K rows of quarter g / 2 and V rows of quarter t, so the quarters are moved against each other until no two lie in
// the same banks.
struct Plane {
    int token_bytes, head_bytes;
    int quarter_bytes, quarter_stride;  // in memory, and apart in shared memory (without the shift)
    int stage_bytes, stages;
    int shift_low, shift_high;          // quarter c is shifted by shift_low * (c & 1) + shift_high * (c / 2)
    uint8_t* ring;
    memra_pipe *full, *empty;           // (stages)
    __device__ int quarter(int c) const { return c * quarter_stride + shift_low * (c & 1) + shift_high * (c >> 1); }
    __device__ void shape(long long tok_bytes, int bytes_of_head, int tokens) {
        token_bytes = (int)tok_bytes;
        head_bytes = bytes_of_head;
        quarter_bytes = tokens / QUARTERS * token_bytes;
        quarter_stride = (quarter_bytes + 127) / 128 * 128;
        stage_bytes = QUARTERS * quarter_stride + 128;
    }
};

// The plan of a block lies in shared memory too, as do the tasks: kept in registers they would leave too few for sums.
struct Block {
    Plane k, v;
    int tokens;          // of a stage
    int team_shift;      // 2^team_shift warps share a K/V head
    int query_bytes;     // of one K/V head and 8 columns
    uint8_t* query;      // (n_head_kv, NT, fragments of one head's k, 32 lanes, 16 bytes)
    float* factor;       // (n_head_kv, 8 NT): from a sum of codes to a power of two
    uint2* weight;       // (2, n_head_kv, tokens / 16, NT, 32 lanes): fragments of the weights
    float* most;         // (n_head_kv, team_warps, 8 NT)
};

static __device__ int block_bytes_of(int format) {
    return format == MEMRA_Q8_0 ? 34 : format == MEMRA_Q5_1 ? 24 : format == MEMRA_Q4_0 ? 18 : 32;
}

// The same numbers in kernels.py and memra_kernels.c decide whether a geometry is served here at all.
static __device__ void plan_block(Block& b, uint8_t* bytes, int nt, int n_head_kv, int head_dim_k, int head_dim_v,
                                  long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format) {
    const int team_shift = n_head_kv == 1 ? 3 : n_head_kv == 2 ? 2 : n_head_kv <= 4 ? 1 : 0;
    int tokens = team_shift >= 2 ? 64 : 16 << team_shift;
    while (tokens > 16 && tokens * (int)(k_tok_bytes + v_tok_bytes) > STAGE_BYTES) tokens /= 2;
    Plane k, v;
    k.shape(k_tok_bytes, head_dim_k / 32 * block_bytes_of(k_format), tokens);
    v.shape(v_tok_bytes, head_dim_v / 32 * block_bytes_of(v_format), tokens);
    const int lines = k.token_bytes / 16 & 7;  // where the next row of K begins, in 16 bytes of 128
    k.shift_low = lines & 1 ? 32 : 16;
    k.shift_high = lines == 4 ? 32 : 64;
    v.shift_low = 32;
    v.shift_high = 64;

    const int query_bytes = head_dim_k * (k_format == MEMRA_FP8 ? 32 : 16), query = n_head_kv * nt * query_bytes;
    const int weight = 2 * n_head_kv * (tokens / 16) * nt * 256, reals = 4 * 8 * nt * n_head_kv * (1 + (1 << team_shift));
    int room = PIPE_SHARED_BYTES - FIXED_BYTES - query - weight - reals;
    k.stages = v.stages = 0;
    for (; room >= k.stage_bytes + v.stage_bytes && k.stages < 15; room -= k.stage_bytes + v.stage_bytes) {
        k.stages++;
        v.stages++;
    }
    if (room >= k.stage_bytes) k.stages++;
    else if (room >= v.stage_bytes) v.stages++;

    k.full = (memra_pipe*)bytes;
    k.empty = k.full + 16;
    v.full = k.full + 32;
    v.empty = k.full + 48;
    uint8_t* at = bytes + FIXED_BYTES - 256;  // which are left for what reads behind the last row
    b.query = at;
    b.weight = (uint2*)(at += query);
    b.factor = (float*)(at += weight);
    b.most = b.factor + n_head_kv * 8 * nt;
    k.ring = at + (reals + 127) / 128 * 128;
    v.ring = k.ring + k.stages * k.stage_bytes;
    b.k = k;
    b.v = v;
    b.tokens = tokens;
    b.team_shift = team_shift;
    b.query_bytes = query_bytes;
}

// Which keys the columns of a block see: column c is row (first_column + c) / gqa, query head (first_column + c) % gqa.
// Positions are below 2^31.
struct View {
    int pos, window, gqa;       // of row 0
    int reciprocal;             // 2^16 / gqa, rounded up: exact for the up to 256 columns that there are
    int first_column, columns;
    __device__ int row(int column) const { return (first_column + column) * reciprocal >> 16; }
    __device__ int last(int column) const { return pos + row(column); }
    __device__ int first(int column) const { return (int)first_key(last(column), window); }
    __device__ bool sees(int column, int key) const { return key <= last(column) && key >= first(column); }
};

// The stages of one block, in order: a group's tiles ascending, of each the stages that hold a key that a column sees.
struct Walk {
    int tile, part;           // part: stage of the tile
    int last_tile, last_part, parts;
    __device__ bool more() const { return tile < last_tile || (tile == last_tile && part <= last_part); }
    __device__ void next() {
        if (++part == parts) {
            part = 0;
            tile += GROUPS;
        }
    }
    __device__ int first_token(int tokens) const { return tile * TILE + part * tokens; }
};

// From the first key of the first row to the last key of the last one; both below 2^31.
static __device__ Walk walk_of(int group, int first, int last, int tokens) {
    Walk walk;
    const int first_tile = first / TILE;
    walk.parts = TILE / tokens;
    walk.tile = first_tile + (group + GROUPS - first_tile % GROUPS) % GROUPS;
    walk.part = walk.tile == first_tile ? first % TILE / tokens : 0;
    walk.last_tile = last / TILE;
    walk.last_part = last % TILE / tokens;
    return walk;
}

// Where the ring stands: the stage to use next and the parity of its phase.
struct Turn {
    int stage;
    unsigned parity;
    __device__ void next(int stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// ---------------------------------------------------------------- K

// Elements of a block of q8_0 that lane column t of fragment register reg holds, byte by byte. Two blocks are 17 aligned
// words: the even one's codes lie across them, and its two last are in the word of the odd one's d.
static __device__ int q8_element(int odd, int reg, int t, int byte) {
    if (odd) return 16 * reg + 4 * t + byte;
    if (reg) return 14 + 4 * t + byte;
    return t ? 4 * t - 2 + byte : byte < 2 ? byte : 28 + byte;
}

// score += two blocks of q8_0 times the queries, whose integers are 256 high + low.
template <int NT>
static __device__ void score_q8(const uint8_t* upper, const uint8_t* lower, const uint4* query, int query_stride,
                                float score[NT][4]) {
    const int t = threadIdx.x & 3;
    const uint32_t *x = (const uint32_t*)upper, *y = (const uint32_t*)lower;
    const uint32_t mixed = t == 0 ? 0x5432u : 0x3210u, x0 = x[0], y0 = y[0], x8 = x[8], y8 = y[8];
    const uint32_t even[4] = {__byte_perm(x[t], x8, mixed), __byte_perm(y[t], y8, mixed), x[4 + t], y[4 + t]};
    const uint32_t odd[4] = {x[9 + t], y[9 + t], x[13 + t], y[13 + t]};
    const float d[4] = {memra_from_f16((uint16_t)x0), memra_from_f16((uint16_t)y0), memra_from_f16((uint16_t)(x8 >> 16)),
                        memra_from_f16((uint16_t)(y8 >> 16))};
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int block = 0; block < 2; block++) {
            const uint4 q = query[n * query_stride + 32 * block];
            int high[4], low[4];
            memra_mma_s8(high, block ? odd : even, q.x, q.y);
            memra_mma_s8(low, block ? odd : even, q.z, q.w);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                score[n][i] = __fmaf_rn((float)(high[i] * 256 + low[i]), d[2 * block + i / 2], score[n][i]);
            }
        }
    }
}

// score += 64 elements of e4m3 times the queries, high and low part.
template <int NT>
static __device__ void score_fp8(const uint8_t* upper, const uint8_t* lower, const uint4* query, int query_stride,
                                 float score[NT][4]) {
    const int t = threadIdx.x & 3;
    const uint4 x = ((const uint4*)upper)[t], y = ((const uint4*)lower)[t];
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const uint32_t a[4] = {memra_e4m3_pair(xs[step]), memra_e4m3_pair(ys[step]), memra_e4m3_pair(xs[step] >> 16),
                               memra_e4m3_pair(ys[step] >> 16)};
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint4 q = query[n * query_stride + 32 * step];
            const uint32_t high[2] = {q.x, q.y}, low[2] = {q.z, q.w};
            memra_mma(score[n], a, high);
            memra_mma(score[n], a, low);
        }
    }
}

// ---------------------------------------------------------------- V
//
// A lane decodes four keys (fragment columns 2t, 2t + 1, 2t + 8, 2t + 9) of the dims that row g stands for: WORDS times
// 4 dims, and 4 more that lie `apart` further. Fragment (w, j): dims first + step * w + j, and + apart.

// 1024 as two f16, in a register: an instruction that masks and merges has room for one constant only.
static __device__ uint32_t f16_1024() {
    uint32_t pair = 0x64006400u;
#if MEMRA_PTX
    asm volatile("mov.u32 %0, 0x64006400;" : "=r"(pair));
#endif
    return pair;
}

// Codes of two keys as f16 above 1024: nibbles at bit 0 or 4 of each half, and their fifth bit.
static __device__ uint32_t code_pair(uint32_t nibbles, uint32_t fifth, bool high, int bit, uint32_t base) {
    const int by = (high ? 8 : 4) - bit;
    const uint32_t top = ((by >= 0 ? fifth << by : fifth >> -by) & (high ? 0x01000100u : 0x00100010u)) | base;
    return (nibbles & (high ? 0x00F000F0u : 0x000F000Fu)) | top;
}

template <int WORDS>
struct VQ5 {
    uint32_t d[2], m[2], low[2], high[2];   // of keys 0, 1 and of keys 2, 3: f16 pairs, fifth bits
    uint32_t word[4][WORDS];
    __device__ static int head_dim_bytes(int dims) { return dims / 32 * 24; }
    __device__ static int first_dim(int g) { return 32 * (g * WORDS / 4) + 4 * (g * WORDS % 4); }
    static constexpr int step = 4, apart = 16;
    __device__ void load(const uint8_t* row, int stride, int g) {
        const int first = g * WORDS % 4;
        uint2 head[4];
#pragma unroll
        for (int key = 0; key < 4; key++) {
            const uint8_t* block = row + key * stride + 24 * (g * WORDS / 4);
            head[key] = *(const uint2*)block;
            if constexpr (WORDS == 1) {
                word[key][0] = ((const uint32_t*)block)[2 + first];
            } else {
#pragma unroll
                for (int w = 0; w < WORDS; w += 2) {
                    const uint2 two = *(const uint2*)(block + 8 + 4 * (first + w));
                    word[key][w] = two.x;
                    word[key][w + 1] = two.y;
                }
            }
        }
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint2 a = head[2 * pair], b = head[2 * pair + 1];
            d[pair] = __byte_perm(a.x, b.x, 0x5410);
            m[pair] = __byte_perm(a.x, b.x, 0x7632);
            low[pair] = __byte_perm(a.y >> 4 * first, b.y >> 4 * first, 0x5410);
            high[pair] = __byte_perm(a.y >> 4 * first, b.y >> 4 * first, 0x7632);
        }
    }
    __device__ void fragment(int w, int j, uint32_t base, uint32_t a[4]) const {
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint32_t bytes = __byte_perm(word[2 * pair][w], word[2 * pair + 1][w], j < 2 ? 0x5410 : 0x7632);
            const uint32_t nibbles = j & 1 ? bytes >> 8 : bytes;
            const uint32_t x = code_pair(nibbles, low[pair], false, 4 * w + j, base);   // 1024 + code
            const uint32_t y = code_pair(nibbles, high[pair], true, 4 * w + j, base);   // 1024 + 16 code
            a[2 * pair] = memra_fma_f16(memra_fma_f16(x, 0x3C003C00u, 0xE400E400u), d[pair], m[pair]);
            a[2 * pair + 1] = memra_fma_f16(memra_fma_f16(y, 0x2C002C00u, 0xD400D400u), d[pair], m[pair]);
        }
    }
};

template <int WORDS>
struct VQ4 {
    uint32_t d[2], word[4][WORDS];
    __device__ static int head_dim_bytes(int dims) { return dims / 32 * 18; }
    __device__ static int first_dim(int g) { return VQ5<WORDS>::first_dim(g); }
    static constexpr int step = 4, apart = 16;
    // Two blocks are 9 aligned words; the codes of the even one lie across them.
    __device__ void load(const uint8_t* row, int stride, int g) {
        const int block = g * WORDS / 4, first = g * WORDS % 4, odd = block & 1;
        const uint32_t whole = odd ? 0x3210u : 0x5432u;
        uint32_t head[4];
#pragma unroll
        for (int key = 0; key < 4; key++) {
            const uint32_t* pair = (const uint32_t*)(row + key * stride + 36 * (block / 2));
            head[key] = pair[odd ? 4 : 0] >> (odd ? 16 : 0);
            uint32_t x = pair[first + (odd ? 5 : 0)];
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                const uint32_t y = pair[first + w + (odd ? (first + w == 3 ? 5 : 6) : 1)];  // the odd block ends with the pair
                word[key][w] = __byte_perm(x, y, whole);
                x = y;
            }
        }
#pragma unroll
        for (int pair = 0; pair < 2; pair++) d[pair] = __byte_perm(head[2 * pair], head[2 * pair + 1], 0x5410);
    }
    __device__ void fragment(int w, int j, uint32_t base, uint32_t a[4]) const {
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint32_t bytes = __byte_perm(word[2 * pair][w], word[2 * pair + 1][w], j < 2 ? 0x5410 : 0x7632);
            const uint32_t nibbles = j & 1 ? bytes >> 8 : bytes;
            const uint32_t x = (nibbles & 0x000F000Fu) | base, y = (nibbles & 0x00F000F0u) | base;
            a[2 * pair] = memra_fma_f16(memra_fma_f16(x, 0x3C003C00u, 0xE408E408u), d[pair], 0x80008000u);
            a[2 * pair + 1] = memra_fma_f16(memra_fma_f16(y, 0x2C002C00u, 0xD480D480u), d[pair], 0x80008000u);
        }
    }
};

template <int WORDS>
struct VFp8 {
    uint2 word[4][WORDS];
    __device__ static int head_dim_bytes(int dims) { return dims; }
    __device__ static int first_dim(int g) { return 8 * g; }
    static constexpr int step = 64, apart = 4;
    __device__ void load(const uint8_t* row, int stride, int g) {
#pragma unroll
        for (int key = 0; key < 4; key++) {
#pragma unroll
            for (int w = 0; w < WORDS; w++) word[key][w] = *(const uint2*)(row + key * stride + 64 * w + 8 * g);
        }
    }
    __device__ void fragment(int w, int j, uint32_t base, uint32_t a[4]) const {
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint32_t how = j == 0 ? 0x0040u : j == 1 ? 0x0051u : j == 2 ? 0x0062u : 0x0073u;
            a[2 * pair] = memra_e4m3_pair(__byte_perm(word[2 * pair][w].x, word[2 * pair + 1][w].x, how));
            a[2 * pair + 1] = memra_e4m3_pair(__byte_perm(word[2 * pair][w].y, word[2 * pair + 1][w].y, how));
        }
    }
};

// One element of V as f16, as the fragments above have it.
static __device__ uint32_t v_element(const uint8_t* row, int format, int dim) {
    const int j = dim % 32;
    if (format == MEMRA_FP8) return memra_e4m3_pair(row[dim]) & 0xFFFFu;
    const bool five = format == MEMRA_Q5_1;
    const memra_q5_1* q5 = (const memra_q5_1*)row + dim / 32;
    const memra_q4_0* q4 = (const memra_q4_0*)row + dim / 32;
    const uint32_t nibble = (five ? q5->qs : q4->qs)[j % 16] >> (j / 16 * 4) & 15u;
    const int code = five ? (int)(nibble | (q5->qh >> j & 1u) << 4) : (int)nibble - 8;
    return memra_fma_f16(memra_to_f16((float)code), five ? q5->d : q4->d, five ? q5->m : 0x8000u) & 0xFFFFu;
}
