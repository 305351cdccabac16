// attend_pipe: attend for GPUs that copy in bulk, for any geometry that fits: an entry per dims of V that a warp sums up
// and number of columns.
#include "attend_pipe_block.cuh"

#define ATTEND(name, WORDS, NT, PIECES) ATTEND_ENTRY(name, BODY(WORDS, NT, PIECES))
ATTEND(attend_pipe_64_8, 1, 1, GROUPS)
ATTEND(attend_pipe_64_16, 1, 2, GROUPS)
ATTEND(attend_pipe_64_32, 1, 4, GROUPS)
ATTEND(attend_pipe_128_8, 2, 1, GROUPS)
ATTEND(attend_pipe_128_16, 2, 2, GROUPS)
ATTEND(attend_pipe_128_24, 2, 3, GROUPS)
ATTEND(attend_pipe_256_8, 4, 1, GROUPS)
ATTEND(attend_pipe_64_8_folds, 1, 1, FOLDS)
ATTEND(attend_pipe_128_8_folds, 2, 1, FOLDS)
ATTEND(attend_pipe_256_8_folds, 4, 1, FOLDS)
