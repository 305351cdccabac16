// pipe.cuh: how one thread brings bytes into shared memory while the other warps work (sm_90 and newer).
//
// A memra_pipe is a barrier in shared memory. Its phase ends when `arrivals` threads have arrived and as many bytes have
// come as were announced; waiting names the parity of the phase, 0 for the first. Elsewhere a copy is made at once.
#pragma once

#include "device.cuh"

typedef unsigned long long memra_pipe;

#if MEMRA_PTX
__device__ inline uint32_t memra_shared_address(const void* at) { return (uint32_t)__cvta_generic_to_shared(at); }
#endif

#if !MEMRA_PTX || __CUDA_ARCH__ >= 900

__device__ inline void memra_pipe_init(memra_pipe* pipe, int arrivals) {
#if MEMRA_PTX
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(memra_shared_address(pipe)), "r"(arrivals) : "memory");
#else
    cpu::set_up_phases(pipe, (unsigned)arrivals);
#endif
}

// Behind the inits and before the __syncthreads that shows them to all.
__device__ inline void memra_pipe_init_done() {
#if MEMRA_PTX
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void memra_pipe_arrive(memra_pipe* pipe) {
#if MEMRA_PTX
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(memra_shared_address(pipe)) : "memory");
#else
    cpu::move_phases(pipe, 1, 0);
#endif
}

// Arrives, and announces bytes.
__device__ inline void memra_pipe_expect(memra_pipe* pipe, int n_bytes) {
#if MEMRA_PTX
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(memra_shared_address(pipe)), "r"(n_bytes)
                 : "memory");
#else
    cpu::move_phases(pipe, 1, n_bytes);
#endif
}

__device__ inline void memra_pipe_wait(memra_pipe* pipe, unsigned parity) {
#if MEMRA_PTX
    asm volatile(
        "{\n.reg .pred done;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT_%=;\n}" ::"r"(memra_shared_address(pipe)), "r"(parity)
        : "memory");
#else
    cpu::wait_phase(pipe, parity);
#endif
}

// Copies n_bytes, a multiple of 16 between addresses that are multiples of 16, and tells the pipe.
__device__ inline void memra_pipe_copy(void* to, const void* from, int n_bytes, memra_pipe* pipe) {
#if MEMRA_PTX
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     memra_shared_address(to)),
                 "l"(from), "r"(n_bytes), "r"(memra_shared_address(pipe))
                 : "memory");
#else
    if (((uintptr_t)to | (uintptr_t)from | (unsigned)n_bytes) & 15) cpu::fault_here("a bulk copy that is not aligned");
    memcpy(to, from, (size_t)n_bytes);
    cpu::move_phases(pipe, 0, -(int64_t)n_bytes);
#endif
}

// What this thread wrote to shared memory comes before copies into it that are enqueued behind a later barrier.
__device__ inline void memra_pipe_fence() {
#if MEMRA_PTX
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A pointer to shared memory that is worked out here, not at each use.
template <class T>
__device__ inline T* memra_settled_shared(T* pointer) {
#if MEMRA_PTX
    uint32_t address = memra_shared_address(pointer);
    asm volatile("" : "+r"(address));
    return (T*)__cvta_shared_to_generic(address);
#else
    return pointer;
#endif
}

// Four warps that begin at a multiple of four give registers away, or wait for such and take them: N of a thread from now
// on, a multiple of 8. Compilers for a plain sm_90 know no such thing, and all keep what they have.
template <int N>
__device__ inline void memra_give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

template <int N>
__device__ inline void memra_take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

#endif

// Barrier `id` (1 to 15) for whole warps of `threads` threads in all.
__device__ inline void memra_team_sync(int id, int threads) {
#if MEMRA_PTX
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
    cpu::meet_team((unsigned)id, (unsigned)threads, false);
#endif
}

// memra_team_sync; whether the predicate holds in any of them.
__device__ inline bool memra_team_any(int id, int threads, bool predicate) {
#if MEMRA_PTX
    int any;
    asm volatile(
        "{\n.reg .pred in, out;\nsetp.ne.s32 in, %1, 0;\nbarrier.red.or.pred out, %2, %3, in;\nselp.s32 %0, 1, 0, out;\n}"
        : "=r"(any)
        : "r"((int)predicate), "r"(id), "r"(threads)
        : "memory");
    return any != 0;
#else
    return cpu::meet_team((unsigned)id, (unsigned)threads, predicate);
#endif
}
