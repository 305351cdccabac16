// attend_pipe_task.cuh: what a launch is about, and what of it a block does.
#pragma once

#include "attend_pipe.cuh"

// One piece of the keys, for a chunk of columns of one sequence; a View says which of them.
struct Task {
    int seq, pos, first_column, piece;
};

// Called, not inlined: it is rare, and a launch for one sequence is over before its instructions have all been fetched.
static __device__ __noinline__ void report_apart(memra_health* health, int kind, int layer, long long pos) {
    memra_report(health, kind, layer, pos, 1);
}

static __device__ unsigned reciprocal_of(int rows, int gqa) {
    return rows == 1 ? 0 : (0x7FFFFFFFu + (unsigned)gqa) / (unsigned)gqa;
}

// What a launch is about, as its entry got it. PIECES of the keys: GROUPS, or FOLDS.
template <int PIECES>
struct Launch {
    static constexpr int COUNT = GROUPS / PIECES;  // groups of a piece
    typedef Walk<COUNT> Stages;

    const float* q;
    const uint8_t *k, *v;
    const int* pos_d;
    long long slot, max_ctx;
    int rows, n_head, gqa;
    unsigned reciprocal;  // see View
    int window, layer, n_seqs;
    float* part;
    const memra_seq* seqs;
    memra_health* health;

    __device__ int first_seq() const { return COUNT == 1 ? 0 : (int)blockIdx.x / PIECES; }  // of a block
    __device__ int columns() const { return rows * gqa; }
    __device__ const uint8_t* k_of(int seq) const { return seqs ? (const uint8_t*)seqs[seq].k : k; }
    __device__ const uint8_t* v_of(int seq) const { return seqs ? (const uint8_t*)seqs[seq].v : v; }
    __device__ long long tokens_of(int seq) const { return seqs ? seqs[seq].max_ctx : max_ctx; }
    __device__ void report(int kind, int seq, long long pos) const {
        report_apart(seqs ? (memra_health*)seqs[seq].health : health, kind, layer, pos);
    }
    __device__ const float* queries(const Block& b, int seq) const {
        return q + (long long)seq * rows * n_head * b.head_dim_k;
    }
    // Partial sums of a task's piece, for a query head of a row.
    __device__ float* sums(const Block& b, const Task& task, int row, int head) const {
        const long long before = (long long)task.seq * rows * n_head + row * n_head + head;
        return part + (before * PIECES + task.piece) * (b.head_dim_v + TAIL);
    }
    __device__ View view(const Task& task, int width) const {
        const int left = columns() - task.first_column;
        View view;
        view.pos = task.pos;
        view.window = window;
        view.gqa = gqa;
        view.reciprocal = reciprocal;
        view.first_column = task.first_column;
        view.columns = left < width ? left : width;
        return view;
    }
    __device__ __forceinline__ Stages walk(const Block& b, const Task& task, const View& view) const {
        const int last = view.last(view.columns - 1);
        if (COUNT == 1 && window == 0) return walk_of<COUNT>(task.piece, 0, last, b);  // without a division
        return walk_of<COUNT>(task.piece, view.first(0), last, b);
    }
    // How many blocks work on a tile: where so few have keys that each 8 columns of each can have a block of their own, as many
    // as there are eights. Several sequences spread by themselves, and each block would decode their tiles once more.
    __device__ int eights(const Block& b, int tiles) const {
        const int all = ((columns() < b.columns ? columns() : b.columns) + 7) / 8;
        return COUNT == 1 && n_seqs == 1 && tiles * all <= GROUPS ? all : 1;
    }
    // Of one sequence in groups, whether half of the blocks or more have no key: attend_combine's blocks find a multiprocessor
    // each, while the others finish. Where all are busy, the first that ends would be given several of them. With more
    // sequences, chunks of columns, or folds, it is a guess.
    __device__ bool leaves_places(const Block& b, const View& view) const {
        const int tiles = (view.last(view.columns - 1) >> b.tile_shift) - (view.first(0) >> b.tile_shift) + 1;
        return tiles * eights(b, tiles) <= GROUPS / 2;
    }
    // Whether a task is the one of its columns that tells of queries that are not finite: whose piece has the first key.
    __device__ bool reports(const Block& b, const Task& task, const View& view) const {
        return (view.first(0) >> b.tile_shift) % GROUPS / COUNT == task.piece;
    }
};

// The tasks of a block, in order: for each sequence it has one piece, of each chunk of columns; where few tiles have keys, at
// most one, of 8 columns of the chunk. Where a piece is a fold, of which a sequence has fewer than there are blocks, as many
// sequences are worked on at once as a fold has groups.
// A whole warp goes through them together.
template <int PIECES, int COLUMNS>
struct Tasks {
    Task task;        // that next() has found
    View view;        // and what its columns see, and its stages
    typename Launch<PIECES>::Stages walk;

    __device__ __forceinline__ explicit Tasks(const Launch<PIECES>& launch)
        : task{launch.first_seq() - launch.COUNT, -1, launch.columns(), 0}, number(piece_of_block() - STEP), turn(-1),
          counter(0) {
        ask(launch, launch.first_seq());
    }
    // Whether there is one more that has keys.
    __device__ __forceinline__ bool next(const Block& b, const Launch<PIECES>& launch) {
        const int width = b.columns;
        for (;;) {
            number += STEP;
            if (number >= PIECES) number -= PIECES;
            task.piece = number;
            task.first_column += width;
            const bool other = task.first_column >= launch.columns();  // sequence
            if (other) {
                task.first_column = 0;
                task.seq += launch.COUNT;
                if (task.seq >= launch.n_seqs) return false;
                if (++turn == 32) {
                    turn = 0;
                    ask(launch, task.seq);
                }
            }
            view = launch.view(task, width);
            // From here to the stages no branch, so that all that does not hang on the position is done when it arrives.
            const bool fits = counter >= 0 && counter <= tokens - launch.rows;
            const int own = fits ? counter : -1, pos = launch.seqs ? __shfl_sync(MEMRA_ALL_LANES, own, turn) : own;
            if (other) task.pos = pos;
            view.pos = task.pos;
            const bool works = task.pos >= 0 && (COLUMNS == 8 || PIECES == FOLDS || share(b, launch));
            walk = launch.walk(b, task, view);
            if (works && walk.more()) return true;
            if (other && !fits && (int)threadIdx.x == turn && number == 0) {
                launch.report(MEMRA_FAULT_SLOT_RANGE, task.seq, counted ? counter : launch.slot);
            }
        }
    }

private:
    // Of what several blocks have, this one's: tile after tile has its first 8 columns, and again the next ones. False for a
    // block that gets none. No bit depends on it.
    __device__ __forceinline__ bool share(const Block& b, const Launch<PIECES>& launch) {
        const int first_tile = view.first(0) >> b.tile_shift;
        const int tiles = (view.last(view.columns - 1) >> b.tile_shift) - first_tile + 1;
        if (launch.eights(b, tiles) == 1) return true;
        int tile = number;
        while (tile >= tiles && view.columns > 0) {
            tile -= tiles;
            view.first_column += 8;
            view.columns -= 8;
        }
        if (view.columns > 8) view.columns = 8;
        task.piece = (first_tile + tile) % GROUPS;
        return view.columns > 0;
    }
    // A launch has GROUPS blocks.
    static __device__ int piece_of_block() { return (int)(PIECES == GROUPS ? blockIdx.x : blockIdx.x % PIECES); }
    static constexpr int STEP = 53 % PIECES;  // another piece each time, so that short ones spread
    int number;  // of the piece, where a block has all columns of it
    // A table and a counter stand before a position, so each lane asks for that of one sequence; whose turn it is.
    int turn, counter;
    bool counted;
    long long tokens;
    __device__ __forceinline__ void ask(const Launch<PIECES>& launch, int first_seq) {
        const int of_slot = launch.slot >= 0 && launch.slot <= 0x7FFFFFFF ? (int)launch.slot : -1;
        if (!launch.seqs) {  // all lanes for the one that there is
            counted = launch.pos_d != nullptr;
            counter = counted ? *launch.pos_d : of_slot;  // nobody waits for it here
            tokens = launch.max_ctx;
            return;
        }
        const int seq = first_seq + (int)(threadIdx.x & 31) * launch.COUNT;
        const int* pos_d = nullptr;
        tokens = -1;
        if (seq < launch.n_seqs) {
            pos_d = (const int*)launch.seqs[seq].pos_d;
            tokens = launch.seqs[seq].max_ctx;
        }
        counted = pos_d != nullptr;
        counter = counted ? *pos_d : of_slot;
    }
};
