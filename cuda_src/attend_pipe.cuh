// attend_pipe.cuh: what a block of attend_pipe works on: its shared memory, what its columns see, its way through the tiles.
#pragma once

#include "attend.cuh"
#include "pipe.cuh"

#define TEAM_WARPS 8                     // warps that compute; one more brings K and V
#define PIPE_THREADS (32 * TEAM_WARPS + 32)
#define PIPE_SHARED_BYTES (227 << 10)    // all that a block of sm_90 can have
#define FIXED_BYTES 768                  // of it for the pipes, and for what reads behind the last row
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
    uint8_t* at = bytes + 64 * sizeof(memra_pipe);
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
    unsigned reciprocal;        // 2^31 / gqa, rounded up: exact for any number of columns that a launch can have
    int first_column, columns;
    __device__ int row(int column) const {
        return (int)((unsigned long long)(unsigned)(first_column + column) * reciprocal >> 31);
    }
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
