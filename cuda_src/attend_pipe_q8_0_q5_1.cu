// attend_pipe_q8_0_q5_1: attend for GPUs that copy in bulk, K in q8_0 and V in q5_1, for geometries of many models.
#include "attend_pipe_block.cuh"

// H: K/V heads. D: dims of a head. WORDS: dims of V that a warp sums up / 64. NT: columns / 8. PIECES: of a launch.
#define ATTEND(name, H, D, WORDS, NT, SLABS, PIECES) \
    ATTEND_ENTRY(name, FIXED_BODY(H, D, MEMRA_Q8_0, MEMRA_Q5_1, WORDS, NT, SLABS, PIECES))
ATTEND(attend_pipe_q8_0_q5_1_2x256_8, 2, 256, 1, 1, 1, GROUPS)
ATTEND(attend_pipe_q8_0_q5_1_2x256_16, 2, 256, 1, 2, 1, GROUPS)
ATTEND(attend_pipe_q8_0_q5_1_2x256_32, 2, 256, 1, 4, 1, GROUPS)
ATTEND(attend_pipe_q8_0_q5_1_4x256_8, 4, 256, 2, 1, 1, GROUPS)
ATTEND(attend_pipe_q8_0_q5_1_4x256_16, 4, 256, 2, 2, 1, GROUPS)
ATTEND(attend_pipe_q8_0_q5_1_8x128_8, 8, 128, 2, 1, 2, GROUPS)
ATTEND(attend_pipe_q8_0_q5_1_8x128_16, 8, 128, 2, 2, 2, GROUPS)
ATTEND(attend_pipe_q8_0_q5_1_4x256_24, 4, 256, 2, 3, 1, GROUPS)
ATTEND(attend_pipe_q8_0_q5_1_2x256_8_folds, 2, 256, 1, 1, 1, FOLDS)
ATTEND(attend_pipe_q8_0_q5_1_4x256_8_folds, 4, 256, 2, 1, 1, FOLDS)
ATTEND(attend_pipe_q8_0_q5_1_8x128_8_folds, 8, 128, 2, 1, 2, FOLDS)
