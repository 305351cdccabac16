// append_kv: quantises rows of K and V into the cache, at slots slot .. slot+rows-1, and sets len_d.
//
// The rows of a plane are one run of blocks of 32 elements. A thread block takes tile i of K's run and tile i of V's,
// 32 blocks each: eight lanes encode a block, four elements a lane, into shared memory, from where the bytes of the
// tile leave in 16-byte pieces. The bytes are those of formats.py, special values included. A row outside the cache
// writes nothing at all.
#include "device.cuh"

enum {
    TILE = 32,                  // blocks of a plane that a thread block encodes
    LANES = 8,                  // that encode a block
    EACH = MEMRA_BLOCK / LANES, // elements of a lane
    PIECE = 16,                 // bytes of the widest store
    PIECES = TILE * 34 / PIECE + 1  // that hold the largest tile, wherever in a piece it begins
};

// A reduction over the lanes of a block, elements of this lane first: every lane gets the same bits.
#define OVER_BLOCK(combine, x)                                                                    \
    for (int apart = 1; apart < LANES; apart *= 2) x = combine(x, __shfl_xor_sync(MEMRA_ALL_LANES, x, apart))

// 1/d; 0 where d is 0, and where d is so small that 1/d overflows.
static __device__ float inverse(float d) {
    const float inv = __frcp_rn(d);
    return memra_finite(inv) || inv != inv ? inv : 0.0f;
}

static __device__ bool infinite(uint16_t half) { return (half & 0x7FFFu) == 0x7C00u; }

static __device__ float largest_magnitude(const float* x) {
    float amax = memra_max(memra_max(fabsf(x[0]), fabsf(x[1])), memra_max(fabsf(x[2]), fabsf(x[3])));
    OVER_BLOCK(memra_max, amax);
    return amax;
}

// Four codes as bytes, the first the lowest.
static __device__ uint32_t packed(const int* q) {
    return (uint32_t)(q[0] & 255) | (uint32_t)(q[1] & 255) << 8 | (uint32_t)(q[2] & 255) << 16 | (uint32_t)q[3] << 24;
}

// Four bytes to where two-byte alignment is all there is.
static __device__ void put_bytes(uint8_t* to, uint32_t bytes) {
    ((uint16_t*)to)[0] = (uint16_t)bytes;
    ((uint16_t*)to)[1] = (uint16_t)(bytes >> 16);
}

// Byte i of qs: bits 0-3 of code i, then those of code i + 16, which a lane four further has.
static __device__ void put_nibbles(uint8_t* qs, uint32_t codes, int lane) {
    const uint32_t low = codes & 0x0F0F0F0Fu, high = __shfl_xor_sync(MEMRA_ALL_LANES, low, LANES / 2);
    if (lane < LANES / 2) put_bytes(qs + EACH * lane, low | high << 4);
}

// Each encodes elements 4 * lane .. 4 * lane + 3 and returns whether f16 d or m became infinite, which is no fault
// where an input was infinite. A code is in range wherever 1/d is finite; where it is not, the product is 0 or NaN,
// and a NaN becomes code 0.
static __device__ bool encode_q8_0(memra_q8_0* block, const float* x, int lane) {
    const float d = __fdiv_rn(largest_magnitude(x), 127.0f), inv = inverse(d);
    const uint16_t half = memra_to_f16(d);
    int q[EACH];
    for (int i = 0; i < EACH; i++) q[i] = __float2int_rn(__fmul_rn(x[i], inv));
    put_bytes((uint8_t*)block->q + EACH * lane, packed(q));
    if (lane == 0) block->d = half;
    return infinite(half);
}

static __device__ bool encode_q5_1(memra_q5_1* block, const float* x, int lane) {
    float low = memra_min(memra_min(x[0], x[1]), memra_min(x[2], x[3]));
    float high = memra_max(memra_max(x[0], x[1]), memra_max(x[2], x[3]));
    OVER_BLOCK(memra_min, low);
    OVER_BLOCK(memra_max, high);
    const float d = __fdiv_rn(__fsub_rn(high, low), 31.0f), inv = inverse(d);
    const uint16_t half = memra_to_f16(d), half_low = memra_to_f16(low);
    int q[EACH];
    for (int i = 0; i < EACH; i++) q[i] = __float2int_rn(__fmul_rn(__fsub_rn(x[i], low), inv));
    put_nibbles(block->qs, packed(q), lane);
    const unsigned top = (unsigned)(q[0] >> 4 | q[1] >> 4 << 1 | q[2] >> 4 << 2 | q[3] >> 4 << 3);  // bit 4 of each
    const unsigned next = __shfl_xor_sync(MEMRA_ALL_LANES, top, 1);
    if (lane % 2 == 0) ((uint8_t*)&block->qh)[lane / 2] = (uint8_t)(top | next << 4);
    if (lane == 0) {
        block->d = half;
        block->m = half_low;
    }
    return infinite(half) || infinite(half_low);
}

static __device__ bool encode_q4_0(memra_q4_0* block, const float* x, int lane) {
    const float amax = largest_magnitude(x);
    int mine = EACH;  // the first of the largest magnitude
    for (int i = EACH - 1; i >= 0; i--) mine = fabsf(x[i]) == amax ? i : mine;
    const int group = (int)(threadIdx.x & 31) - lane;
    const unsigned owners = __ballot_sync(MEMRA_ALL_LANES, mine < EACH) >> group & 0xFFu;
    const float candidate = mine == 3 ? x[3] : mine == 2 ? x[2] : mine == 1 ? x[1] : x[0];
    const float extreme = __shfl_sync(MEMRA_ALL_LANES, candidate, group + memra_lowest_lane(owners));
    const float d = __fdiv_rn(extreme, -8.0f), inv = inverse(d);
    const uint16_t half = memra_to_f16(d);
    const bool overflowed = inv == 0.0f && d != 0.0f && memra_finite(d);
    int q[EACH];
    for (int i = 0; i < EACH; i++) {
        const int code = __float2int_rz(__fmaf_rn(x[i], inv, 8.5f));
        q[i] = overflowed ? 8 : code > 15 ? 15 : code;
    }
    put_nibbles(block->qs, packed(q), lane);
    if (lane == 0) block->d = half;
    return infinite(half);
}

static __device__ void encode_fp8(memra_fp8* block, const float* x, int lane) {
    for (int i = 0; i < EACH; i++) block->q[EACH * lane + i] = memra_to_e4m3(x[i]);
}

static __device__ int block_bytes(int format) {
    return format == MEMRA_Q8_0 ? 34 : format == MEMRA_Q5_1 ? 24 : format == MEMRA_Q4_0 ? 18 : 32;
}

// One plane of one sequence as a thread block sees it: the rows' blocks from `begin` on.
struct Tile {
    const float* x;         // of the run
    uint8_t* bytes;         // where the run's first row goes
    long long tok_bytes;
    int blocks;             // of a row
    int format;
    long long begin, end;   // blocks of the run
    bool apart;             // rows do not follow each other without a gap
    int skew;               // of the staged bytes, so that pieces lie in shared memory as in the plane
};

static __device__ Tile tile_of(const float* x, int kv_dim, int rows, int format, long long tok_bytes, unsigned index) {
    Tile t;
    t.x = x;
    t.blocks = kv_dim / MEMRA_BLOCK;
    t.format = format;
    t.tok_bytes = tok_bytes;
    t.begin = (long long)index * TILE;
    t.end = (long long)rows * t.blocks;
    if (t.end > t.begin + TILE) t.end = t.begin + TILE;
    if (t.end < t.begin) t.end = t.begin;
    t.apart = tok_bytes != (long long)t.blocks * block_bytes(format);
    return t;
}

// This lane's elements of the tile; zeros behind its end.
static __device__ void load(const Tile& t, float* x) {
    const long long block = t.begin + threadIdx.x / LANES;
    const float* from = t.x + block * MEMRA_BLOCK + threadIdx.x % LANES * EACH;
    if (block >= t.end) {
        x[0] = x[1] = x[2] = x[3] = 0.0f;
    } else if ((uint64_t)t.x % sizeof(float4) == 0) {
        const float4 four = *(const float4*)from;
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
        for (int i = 0; i < EACH; i++) x[i] = from[i];
    }
}

// Encodes this lane's elements into the stage, and reports what is wrong with them.
static __device__ void encode(const Tile& t, const float* x, uint8_t* stage, memra_health* health, int layer,
                              long long first) {
    const int lane = threadIdx.x % LANES, block = threadIdx.x / LANES;
    uint8_t* to = stage + t.skew + block * block_bytes(t.format);
    bool overflow = false, saturated = false;
    if (t.format == MEMRA_Q8_0) {
        overflow = encode_q8_0((memra_q8_0*)to, x, lane);
    } else if (t.format == MEMRA_Q5_1) {
        overflow = encode_q5_1((memra_q5_1*)to, x, lane);
    } else if (t.format == MEMRA_Q4_0) {
        overflow = encode_q4_0((memra_q4_0*)to, x, lane);
    } else {
        encode_fp8((memra_fp8*)to, x, lane);
        for (int i = 0; i < EACH; i++) saturated |= memra_finite(x[i]) && fabsf(x[i]) > 464.0f;  // 448 and half a step
    }
    bool nonfinite = false;
    for (int i = 0; i < EACH; i++) nonfinite |= !memra_finite(x[i]);
    if (!__any_sync(MEMRA_ALL_LANES, nonfinite | overflow | saturated)) return;
    const int group = (int)(threadIdx.x & 31) - lane;
    const bool any_nonfinite = __ballot_sync(MEMRA_ALL_LANES, nonfinite) >> group & 0xFFu;
    const bool any_saturated = __ballot_sync(MEMRA_ALL_LANES, saturated) >> group & 0xFFu;
    if (lane != 0) return;
    const long long slot = first + (t.begin + block) / t.blocks;
    if (any_nonfinite) memra_report(health, MEMRA_FAULT_NONFINITE, layer, slot, 1);
    if (overflow && !any_nonfinite) memra_report(health, MEMRA_FAULT_SCALE_OVERFLOW, layer, slot, 1);
    if (any_saturated) memra_report(health, MEMRA_FAULT_FP8_SATURATED, layer, slot, 1);
}

// Stores piece `index` of the staged tile: 16 bytes at once, or those that are the tile's own.
static __device__ void store(const Tile& t, const uint8_t* stage, int index) {
    const int at = index * PIECE, end = t.skew + (int)(t.end - t.begin) * block_bytes(t.format);
    uint8_t* to = t.bytes + t.begin * block_bytes(t.format) - t.skew;
    if (at >= t.skew && at + PIECE <= end) {
        *(uint4*)(to + at) = *(const uint4*)(stage + at);
        return;
    }
    for (int i = at < t.skew ? t.skew : at; i < at + PIECE && i < end; i++) to[i] = stage[i];
}

// The same for rows that lie apart, block by block.
static __device__ void store_apart(const Tile& t, const uint8_t* stage) {
    const long long block = t.begin + threadIdx.x / LANES, row = block / t.blocks;
    const int size = block_bytes(t.format);
    if (block >= t.end) return;
    uint8_t* to = t.bytes + row * t.tok_bytes + (block - row * t.blocks) * size;
    for (int i = threadIdx.x % LANES; i < size; i += LANES) to[i] = stage[threadIdx.x / LANES * size + i];
}

// k_rows (n_seqs, rows, kv_dim_k), v_rows (n_seqs, rows, kv_dim_v); k, v: token t at byte t * tok_bytes.
// len >= 0: the length to store; -1: the larger of the old one and slot + rows.
extern "C" __global__ void __launch_bounds__(256) append_kv(
        const float* k_rows, const float* v_rows, uint8_t* k, uint8_t* v, int* len_d, const int* pos_d,
        long long slot, int rows, int len, long long max_ctx, int kv_dim_k, int kv_dim_v,
        long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format, const memra_seq* seqs, int n_seqs,
        memra_health* health, int layer) {
    __shared__ uint4 stages[2][PIECES];
    uint8_t *const stage_k = (uint8_t*)stages[0], *const stage_v = (uint8_t*)stages[1];
    const long long run = (long long)rows * (kv_dim_k > kv_dim_v ? kv_dim_k : kv_dim_v) / MEMRA_BLOCK;
    const unsigned tiles = (unsigned)((run + TILE - 1) / TILE), seq = blockIdx.x / tiles, index = blockIdx.x % tiles;
    if ((int)seq >= n_seqs) return;
    const long long before = (long long)seq * rows;
    Tile tk = tile_of(k_rows + before * kv_dim_k, kv_dim_k, rows, k_format, k_tok_bytes, index);
    Tile tv = tile_of(v_rows + before * kv_dim_v, kv_dim_v, rows, v_format, v_tok_bytes, index);
    float xk[EACH], xv[EACH];
    load(tk, xk);
    load(tv, xv);
    if (seqs) {
        k = (uint8_t*)seqs[seq].k;
        v = (uint8_t*)seqs[seq].v;
        len_d = (int*)seqs[seq].len_d;
        pos_d = (const int*)seqs[seq].pos_d;
        health = (memra_health*)seqs[seq].health;
        max_ctx = seqs[seq].max_ctx;
    }
    const long long first = memra_slot(pos_d, slot);
    const bool leader = index == 0 && threadIdx.x == 0;
    if (first < 0 || first + rows > max_ctx) {
        if (leader) memra_report(health, MEMRA_FAULT_SLOT_RANGE, layer, first, 1);
        return;
    }
    if (leader) {
        const int end = (int)(first + rows);
        *len_d = len >= 0 ? len : *len_d > end ? *len_d : end;
    }
    tk.bytes = k + first * k_tok_bytes;
    tv.bytes = v + first * v_tok_bytes;
    tk.skew = tk.apart ? 0 : (int)((uint64_t)(tk.bytes + tk.begin * block_bytes(k_format)) % PIECE);
    tv.skew = tv.apart ? 0 : (int)((uint64_t)(tv.bytes + tv.begin * block_bytes(v_format)) % PIECE);
    if (tk.begin < tk.end) encode(tk, xk, stage_k, health, layer, first);
    if (tv.begin < tv.end) encode(tv, xv, stage_v, health, layer, first);
    __syncthreads();
    if (tk.apart) store_apart(tk, stage_k);
    if (tv.apart) store_apart(tv, stage_v);
    const int piece = threadIdx.x;  // of K, then of V
    if (piece < PIECES && !tk.apart) store(tk, stage_k, piece);
    if (piece >= PIECES && piece < 2 * PIECES && !tv.apart) store(tv, stage_v, piece - PIECES);
}
MEMRA_EXPORT(append_kv)
