// attend_pipe.cuh: what a block of attend_pipe works on: its shared memory, what its columns see, its way through tiles.
#pragma once

#include "attend.cuh"
#include "pipe.cuh"

#define TEAM_WARPS 8                     // warps that compute
#define PIPE_THREADS (32 * (TEAM_WARPS + QUARTERS))
#define PIPE_SHARED_BYTES (227 << 10)    // all that a block of sm_90 can have
#define FIXED_BYTES 768                  // of it for the pipes, and for what reads behind the last row
#define STAGE_BYTES (70 << 10)           // at most, where a stage can be smaller
#define RING_BYTES (128 << 10)           // of both rings at most, where two stages are no more: what one block has asked for
                                         // beyond need, others wait for
#define QUARTERS 4                       // a stage arrives in so many copies, each by a warp that does nothing else, and
                                         // each further from its bank than the last

// A stage is what a block works on at once: `tokens` keys of all K/V heads, all of one tile. Lane (g, t) of a warp reads
// K rows of quarter g / 2 and V rows of quarter t, so the quarters are moved against each other until no two lie in
// the same banks. Offsets are bytes of the block's shared memory.
struct Plane {
    int token_bytes, head_bytes;
    int quarter_stride, shift_low, shift_high;  // quarter c lies at quarter(c) of a stage
    int stage_bytes, stages, ring;
    int full, empty;                            // offsets of `stages` pipes each
    __device__ constexpr int quarter(int c) const {
        return c * quarter_stride + shift_low * (c & 1) + shift_high * (c >> 1);
    }
    __device__ uint8_t* stage(uint8_t* bytes, int i) const { return bytes + ring + i * stage_bytes; }
    __device__ memra_pipe* full_pipe(uint8_t* bytes, int i) const { return (memra_pipe*)(bytes + full) + i; }
    __device__ memra_pipe* empty_pipe(uint8_t* bytes, int i) const { return (memra_pipe*)(bytes + empty) + i; }
};

// How a block works. All of it follows from the arguments of block_of: an entry for one geometry has it as constants.
struct Block {
    Plane k, v;
    int n_head_kv, head_dim_k, head_dim_v, k_format, v_format, columns;
    int tile_shift;  // 2^tile_shift keys are a tile, see tile_shift_of
    int tokens;      // of a stage
    int team_shift;  // 2^team_shift warps share a K/V head
    int query;       // (n_head_kv, NT, fragments of one head's k, 32 lanes, 16 bytes)
    int query_bytes; // of one K/V head and 8 columns
    int weight;      // (2, n_head_kv, tokens / 16, NT, 32 lanes) of 8 bytes: fragments of the weights
    int factor;      // (n_head_kv, 1 + pairs of blocks, 8 NT) f32: from a sum of all pairs to a power of two, and from that of a
                     // pair to what all are summed up in
    int most;        // (n_head_kv, team_warps, 8 NT) f32: the largest scores of a warp's keys,
    int sum;         // and as many: the sums of what its keys weigh
    __device__ constexpr int tile_keys() const { return 1 << tile_shift; }
    __device__ constexpr int team_warps() const { return 1 << team_shift; }
    __device__ constexpr int slabs() const { return tokens / 16; }
};

static __device__ constexpr int block_bytes_of(int format) {
    return format == MEMRA_Q8_0 ? 34 : format == MEMRA_Q5_1 ? 24 : format == MEMRA_Q4_0 ? 18 : 32;
}

static __device__ constexpr Plane plane_of(long long tok_bytes, int head_dim, int format, int tokens) {
    Plane p = {};
    p.token_bytes = (int)tok_bytes;
    p.head_bytes = head_dim / 32 * block_bytes_of(format);
    p.quarter_stride = (tokens / QUARTERS * p.token_bytes + 127) / 128 * 128;
    p.stage_bytes = QUARTERS * p.quarter_stride + 128;
    return p;
}

// slabs: those of 16 keys that a warp scores of each stage, where it has a head for itself.
// The same numbers in kernels.py and memra_kernels.c decide whether a geometry is served here at all.
static __device__ constexpr Block block_of(int nt, int slabs, int n_head_kv, int head_dim_k, int head_dim_v,
                                           long long k_tok_bytes, long long v_tok_bytes, int k_format, int v_format) {
    Block b = {};
    b.n_head_kv = n_head_kv;
    b.head_dim_k = head_dim_k;
    b.head_dim_v = head_dim_v;
    b.k_format = k_format;
    b.v_format = v_format;
    b.columns = 8 * nt;
    b.team_shift = n_head_kv == 1 ? 3 : n_head_kv == 2 ? 2 : n_head_kv <= 4 ? 1 : 0;
    b.tile_shift = tile_shift_of(n_head_kv);
    b.tokens = slabs * 16 << b.team_shift;
    if (b.tokens > b.tile_keys()) b.tokens = b.tile_keys();
    while (b.tokens > 16 && b.tokens * (int)(k_tok_bytes + v_tok_bytes) > STAGE_BYTES) b.tokens /= 2;
    b.k = plane_of(k_tok_bytes, head_dim_k, k_format, b.tokens);
    b.v = plane_of(v_tok_bytes, head_dim_v, v_format, b.tokens);
    const int lines = b.k.token_bytes / 16 & 7;  // where the next row of K begins, in 16 bytes of 128
    b.k.shift_low = lines & 1 ? 32 : 16;
    b.k.shift_high = lines == 4 ? 32 : 64;
    b.v.shift_low = 32;
    b.v.shift_high = 64;

    b.query_bytes = head_dim_k * (k_format == MEMRA_FP8 ? 32 : 16);
    const int query = n_head_kv * nt * b.query_bytes, weight = 2 * n_head_kv * b.slabs() * nt * 256;
    const int factors = 4 * 8 * nt * n_head_kv * (1 + head_dim_k / 64), of_warps = 4 * 8 * nt * n_head_kv * b.team_warps();
    const int reals = factors + 2 * of_warps;
    const int both = b.k.stage_bytes + b.v.stage_bytes, most = 2 * both > RING_BYTES ? 2 * both : RING_BYTES;
    int room = PIPE_SHARED_BYTES - FIXED_BYTES - query - weight - reals;
    if (room > most) room = most;
    const int pairs = room / both < 15 ? room / both : 15;
    room -= pairs * both;
    b.k.stages = pairs + (room >= b.k.stage_bytes ? 1 : 0);
    b.v.stages = pairs + (room < b.k.stage_bytes && room >= b.v.stage_bytes ? 1 : 0);

    const int pipes = 16 * (int)sizeof(memra_pipe);
    b.k.full = 0;
    b.k.empty = pipes;
    b.v.full = 2 * pipes;
    b.v.empty = 3 * pipes;
    b.query = 4 * pipes;
    b.weight = b.query + query;
    b.factor = b.weight + weight;
    b.most = b.factor + factors;
    b.sum = b.most + of_warps;
    b.k.ring = b.factor + (reals + 127) / 128 * 128;
    b.v.ring = b.k.ring + b.k.stages * b.k.stage_bytes;
    return b;
}

// Which keys the columns of a block see: column c is row (first_column + c) / gqa, query head (first_column + c) % gqa.
// Positions are below 2^31.
struct View {
    int pos, window, gqa;       // pos: of row 0
    unsigned reciprocal;        // 2^31 / gqa, rounded up: exact for the columns that a launch can have; 0 for one row
    int first_column, columns;
    __device__ int row(int column) const {
        return (int)((unsigned long long)(unsigned)(first_column + column) * reciprocal >> 31);
    }
    __device__ int last(int column) const { return pos + row(column); }
    __device__ int first(int column) const { return (int)first_key(last(column), window); }
    __device__ bool sees(int column, int key) const { return key <= last(column) && key >= first(column); }
};

// The stages of a task, in order: the groups of its piece ascending, of each its tiles ascending, of a tile the stages that
// hold a key that a column sees. A stage is named by its first key.
template <int COUNT>  // groups of a piece
struct Walk {
    unsigned token, last;  // the stage, and the last key that a column sees
    bool starts;           // the first stage of its group
    int begin, groups;     // the group's first tile; groups to go, this one among them
    int first_tile;
    unsigned first_token;  // the first stage of that tile which has a key
    __device__ bool more() const { return COUNT == 1 ? token <= last : groups > 0; }
    __device__ void next(const Block& b) {
        starts = false;
        token += (unsigned)b.tokens;
        const unsigned within = (unsigned)b.tile_keys() - 1;
        if (b.tokens == b.tile_keys() || (token & within) == 0) token += (unsigned)(GROUPS - 1) << b.tile_shift;
        if (COUNT == 1 || token <= last) return;
        begin++;
        groups--;
        enter(b);
    }
    // To the group that begins at tile `begin`; where that has no key, to the next one that has.
    __device__ void enter(const Block& b) {
        const int around = first_tile + GROUPS - begin;  // groups from this one to that of the first tile
        if (COUNT > 1 && (around == 0 || (unsigned)begin << b.tile_shift > last)) {
            begin = first_tile;
            groups -= around;
        }
        token = begin == first_tile ? first_token : (unsigned)begin << b.tile_shift;
        starts = true;
    }
};

// Of the piece `piece`: from the first key of the first row to the last key of the last one; both below 2^31.
template <int COUNT>
static __device__ Walk<COUNT> walk_of(int piece, int first, int last, const Block& b) {
    Walk<COUNT> walk;
    walk.groups = COUNT;
    walk.last = (unsigned)last;
    walk.first_tile = first >> b.tile_shift;
    walk.first_token = (unsigned)first & -(unsigned)b.tokens;
    const int after = piece * COUNT - walk.first_tile % GROUPS;  // tiles from the first one to the group's
    walk.begin = walk.first_tile + after + (after < 0 ? GROUPS : 0);
    walk.enter(b);
    return walk;
}

// Where the ring stands: the stage to use next and the parity of its phase.
struct Turn {
    int stage;
    unsigned parity;
    bool fresh;  // no stage has been used before
    __device__ void next(int stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
            fresh = false;
        }
    }
};
