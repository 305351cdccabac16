// The part of the shim that a shared object holds once.
#include "cuda_cpu.h"

MEMRA_FIBER_SWAP
