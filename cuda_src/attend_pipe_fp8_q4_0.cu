// attend_pipe_fp8_q4_0: attend for GPUs that copy in bulk, K in fp8 and V in q4_0, for geometries of many models.
#include "attend_pipe_block.cuh"

// H: K/V heads. D: dims of a head. WORDS: dims of V that a warp sums up / 64. NT: columns / 8. PIECES: of a launch.
#define ATTEND(name, H, D, WORDS, NT, SLABS, PIECES) \
    ATTEND_ENTRY(name, FIXED_BODY(H, D, MEMRA_FP8, MEMRA_Q4_0, WORDS, NT, SLABS, PIECES))
ATTEND(attend_pipe_fp8_q4_0_2x256_8, 2, 256, 1, 1, 1, GROUPS)
ATTEND(attend_pipe_fp8_q4_0_2x256_16, 2, 256, 1, 2, 1, GROUPS)
ATTEND(attend_pipe_fp8_q4_0_2x256_32, 2, 256, 1, 4, 1, GROUPS)
ATTEND(attend_pipe_fp8_q4_0_4x256_8, 4, 256, 2, 1, 1, GROUPS)
ATTEND(attend_pipe_fp8_q4_0_4x256_16, 4, 256, 2, 2, 1, GROUPS)
ATTEND(attend_pipe_fp8_q4_0_8x128_8, 8, 128, 2, 1, 2, GROUPS)
ATTEND(attend_pipe_fp8_q4_0_8x128_16, 8, 128, 2, 2, 2, GROUPS)
ATTEND(attend_pipe_fp8_q4_0_2x256_8_folds, 2, 256, 1, 1, 1, FOLDS)
ATTEND(attend_pipe_fp8_q4_0_4x256_8_folds, 4, 256, 2, 1, 1, FOLDS)
ATTEND(attend_pipe_fp8_q4_0_8x128_8_folds, 8, 128, 2, 1, 2, FOLDS)
