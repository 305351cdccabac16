// Lets g++ (C++20, -ffp-contract=off) compile the kernels of cuda_src and run them on the host.
//
// One block at a time, one fiber per CUDA thread. A fiber runs until it meets the others: __syncthreads waits for all
// threads of the block that have not returned, a named barrier for as many threads as it was told, a wait at a barrier
// in shared memory for the end of its phase, a warp intrinsic for the lanes that its mask names. What a GPU leaves
// undefined is a fault here: masks that name the wrong lanes, different intrinsics that meet, a shuffle from a lane
// outside the mask, a wait that nobody ends. A fault ends the launch with code 719; memra_cpu_fault() says why.
// Shared memory is filled with 0xA5 before each block. There is no memory model: memra_cpu_schedule(1) runs threads
// and blocks backwards, which shows some races, not all.
//
// A launch holds a lock, since shared memory exists once. Offered: what the kernels use, no more.
#pragma once
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fiber.h"

#define __device__
#define __host__
#define __global__
#define __constant__ static
#define __forceinline__ inline  // or each entry of a kernel would be compiled for itself
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) alignas(n)
// A section of its own, so that each block can begin with poisoned shared memory. Only in functions that are
// neither inline nor templates: a section cannot hold both kinds.
#define __shared__ static __attribute__((section("memra_smem")))
#define MEMRA_DYN_SHARED(T, name) T* name = reinterpret_cast<T*>(cpu::B.dynamic)
extern "C" {
extern char __start_memra_smem[] __attribute__((weak, visibility("hidden")));
extern char __stop_memra_smem[] __attribute__((weak, visibility("hidden")));
}

struct dim3 { unsigned x, y, z; };
using uint3 = dim3;

namespace cpu {

constexpr int LAUNCH_FAILED = 719;
constexpr uint32_t POISON = 0xA5A5A5A5u;

struct Gate {                 // what a fiber waits at
    uint64_t generation = 0;  // moves when the gate opens
};
struct Team : Gate {          // threads that meet at a named barrier
    unsigned arrived = 0, size = 0;
    bool any[2] = {};         // of the generation, alternating
};
struct Phases : Gate {        // a barrier in shared memory, while a block runs
    const void* at = nullptr;
    unsigned arrivals = 0, pending = 0;
    int64_t bytes = 0;        // announced and not yet there
};
struct Group : Gate {         // lanes of a warp that meet under one mask
    uint32_t mask = 0, arrived = 0;
    const char* intrinsic = nullptr;
    uint64_t value[2][32];    // alternating, so that a fast lane cannot overwrite what a slow one has yet to read
};
struct Warp {
    uint32_t lanes = 0, exited = 0;
    std::vector<Group*> groups;
};
struct Thread {
    fiber::Context context;
    dim3 index;
    unsigned lane, warp;
    const Gate* gate;         // null: can run
    uint64_t passed;          // the generation that it waits to see end
    bool done;
};
struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Gate barrier;
    Team teams[16];
    std::vector<Phases*> phases;
    unsigned size, live, waiting;
    char* dynamic;
    fiber::Context scheduler;
    void (*body)(void*);
    void* argument;
    bool backwards;
    char fault[512];
};
inline Block B;
inline Thread* self;
inline dim3 block_index, block_dim, grid_dim;
inline std::mutex launching;

inline void to_scheduler() { fiber::swap(self->context, B.scheduler); }

inline void fault(const char* format, auto... values) {
    if (!*B.fault) {
        int n = snprintf(B.fault, sizeof B.fault, format, values...);
        snprintf(B.fault + n, sizeof B.fault - n, " (block %u,%u,%u)", block_index.x, block_index.y, block_index.z);
    }
}
[[noreturn]] inline void fault_here(const char* format, auto... values) { // in a kernel: never resumed
    fault(format, values...);
    for (;;) to_scheduler();
}

inline void wait(Gate& gate) {
    self->gate = &gate;
    self->passed = gate.generation;
    to_scheduler();
}

inline void sync_block() {
    if (++B.waiting == B.live) {
        B.waiting = 0;
        B.barrier.generation++;
    } else {
        wait(B.barrier);
    }
}

// Counts the thread in at barrier `id`, which opens when `size` threads have come, and says whether it was the last.
inline bool arrive_at_team(unsigned id, unsigned size, bool value = false) {
    Team& team = B.teams[id];
    if (team.arrived && team.size != size) fault_here("barrier %u: for %u threads and for %u", id, team.size, size);
    bool& any = team.any[team.generation & 1];
    any = team.arrived++ ? any || value : value;
    team.size = size;
    if (team.arrived < size) return false;
    team.arrived = 0;
    team.generation++;
    return true;
}
// Waits at barrier `id`; whether any of its threads brought true.
inline bool meet_team(unsigned id, unsigned size, bool value) {
    Team& team = B.teams[id];
    const bool& any = team.any[team.generation & 1];
    if (!arrive_at_team(id, size, value)) wait(team);
    return any;
}

inline Phases& phases_at(const void* at) {
    for (Phases* phases : B.phases)
        if (phases->at == at) return *phases;
    fault_here("a barrier that nobody has set up");
}
inline void set_up_phases(const void* at, unsigned arrivals) {
    B.phases.push_back(new Phases);
    *B.phases.back() = {{}, at, arrivals, arrivals, 0};
}
// A phase ends when all have arrived and the bytes that were announced have come.
inline void move_phases(const void* at, unsigned arrived, int64_t bytes) {
    Phases& phases = phases_at(at);
    if (arrived > phases.pending) fault_here("a barrier in shared memory: more arrivals than its %u", phases.arrivals);
    phases.pending -= arrived;
    phases.bytes += bytes;
    if (phases.pending || phases.bytes) return;
    phases.pending = phases.arrivals;
    phases.generation++;
}
inline void wait_phase(const void* at, unsigned parity) {
    Phases& phases = phases_at(at);
    while ((phases.generation & 1) == parity) wait(phases);
}

inline Group& group_of(Warp& warp, uint32_t mask) {
    for (Group* group : warp.groups)
        if (group->mask == mask) return *group;
    warp.groups.push_back(new Group);
    warp.groups.back()->mask = mask;
    return *warp.groups.back();
}

// Waits for all lanes of the mask; returns what each of them brought.
inline const uint64_t* meet(const char* intrinsic, uint32_t mask, uint64_t value) {
    Warp& warp = B.warps[self->warp];
    const uint32_t bit = 1u << self->lane;
    mask &= ~0u >> (32 - warp.lanes); // a full mask in a short warp means its lanes
    if (!(mask & bit)) fault_here("%s: lane %u calls it but is not in its mask %08x", intrinsic, self->lane, mask);
    if (mask & warp.exited)
        fault_here("%s: mask %08x names lanes that have returned (%08x)", intrinsic, mask, mask & warp.exited);
    Group& group = group_of(warp, mask);
    uint64_t* values = group.value[group.generation & 1];
    if (!group.arrived) group.intrinsic = intrinsic;
    if (group.intrinsic != intrinsic) fault_here("%s meets %s in one warp", intrinsic, group.intrinsic);
    values[self->lane] = value;
    group.arrived |= bit;
    if (group.arrived == mask) {
        group.arrived = 0;
        group.generation++;
    } else {
        wait(group);
    }
    return values;
}

inline void leave() { // the running thread has returned
    Warp& warp = B.warps[self->warp];
    const uint32_t bit = 1u << self->lane;
    self->done = true;
    warp.exited |= bit;
    for (const Group* group : warp.groups)
        if (group->arrived && (group->mask & bit))
            fault("%s: mask %08x names lane %u, which has returned", group->intrinsic, group->mask, self->lane);
    if (--B.live && B.waiting == B.live) {
        B.waiting = 0;
        B.barrier.generation++;
    }
}

inline void thread_main() {
    B.body(B.argument);
    leave();
    for (;;) to_scheduler();
}

inline void report_deadlock() {
    unsigned at_barrier = 0, at_team = 0, at_phase = 0, in_warp = 0;
    const char* intrinsic = "";
    uint32_t mask = 0;
    for (const Thread& thread : B.threads) {
        if (thread.done) continue;
        if (thread.gate == &B.barrier) {
            at_barrier++;
        } else if (thread.gate >= B.teams && thread.gate < B.teams + 16) {
            at_team++;
        } else if (std::find(B.phases.begin(), B.phases.end(), thread.gate) != B.phases.end()) {
            at_phase++;
        } else {
            const Group* group = static_cast<const Group*>(thread.gate);
            in_warp++, intrinsic = group->intrinsic, mask = group->mask;
        }
    }
    if (at_team + at_phase)
        fault("deadlock: %u threads wait at named barriers, %u at barriers in shared memory, %u elsewhere", at_team,
              at_phase, at_barrier + in_warp);
    else if (in_warp)
        fault("deadlock: %u threads wait at __syncthreads, %u in %s (mask %08x)", at_barrier, in_warp, intrinsic, mask);
    else
        fault("deadlock: %u threads wait at __syncthreads", at_barrier);
}

// The red zones that the sanitizer puts between shared arrays are filled too, so this must not be checked itself.
__attribute__((no_sanitize("address", "undefined"), noinline)) inline void poison(char* from, char* to) {
    for (; from < to; from += 4) {
        uint32_t value = POISON;
        __builtin_memcpy(from, &value, 4);
        __asm__ volatile("" : : "r"(from) : "memory");
    }
}

inline void run_block() {
    if (__start_memra_smem) poison(__start_memra_smem, __stop_memra_smem);
    B.live = B.size;
    B.waiting = 0;
    for (Team& team : B.teams) team.arrived = 0;
    for (Phases* phases : B.phases) delete phases;
    B.phases.clear();
    for (Warp& warp : B.warps) {
        warp.exited = 0;
        for (Group* group : warp.groups) group->arrived = 0;
    }
    for (Thread& thread : B.threads) {
        thread.done = false;
        thread.gate = nullptr;
        fiber::start(thread.context, &thread_main);
    }
    while (B.live && !*B.fault) {
        bool moved = false;
        // A warp runs until none of its lanes can go on, then the next one.
        for (unsigned w = 0; w < B.warps.size(); w++) {
            const unsigned first = (B.backwards ? B.warps.size() - 1 - w : w) * 32, n = B.warps[first / 32].lanes;
            for (bool again = true; again && !*B.fault;) {
                again = false;
                for (unsigned i = 0; i < n && !*B.fault; i++) {
                    Thread& thread = B.threads[first + (B.backwards ? n - 1 - i : i)];
                    if (thread.done || (thread.gate && thread.gate->generation == thread.passed)) continue;
                    thread.gate = nullptr;
                    self = &thread;
                    fiber::swap(B.scheduler, thread.context);
                    moved = again = true;
                }
            }
        }
        if (!moved) report_deadlock();
    }
    self = nullptr;
}

inline void resize_block(const unsigned block[3]) {
    B.size = block[0] * block[1] * block[2];
    for (Warp& warp : B.warps)
        for (Group* group : warp.groups) delete group;
    B.warps.assign((B.size + 31) / 32, {});
    for (unsigned w = 0; w < B.warps.size(); w++) B.warps[w].lanes = std::min(32u, B.size - 32 * w);
    B.threads.resize(B.size);
    fiber::reserve(B.size);
    for (unsigned i = 0; i < B.size; i++) {
        Thread& thread = B.threads[i];
        thread.index = {i % block[0], i / block[0] % block[1], i / block[0] / block[1]};
        thread.lane = i % 32;
        thread.warp = i / 32;
        thread.context.slot = i;
    }
}

template <class... A>
int launch(void (*kernel)(A...), const unsigned grid[3], const unsigned block[3], unsigned dynamic_bytes, void** params) {
    const std::lock_guard<std::mutex> guard(launching);
    auto read = [&]<size_t... I>(std::index_sequence<I...>) {
        return std::tuple<A...>(*static_cast<A*>(params[I])...);
    };
    auto arguments = read(std::index_sequence_for<A...>{});
    auto body = [&] { std::apply(kernel, arguments); };
    B.body = [](void* f) { (*static_cast<decltype(body)*>(f))(); };
    B.argument = &body;
    *B.fault = 0;
    grid_dim = {grid[0], grid[1], grid[2]};
    block_dim = {block[0], block[1], block[2]};
    resize_block(block);
    void* dynamic = nullptr;
    if (dynamic_bytes && posix_memalign(&dynamic, 128, dynamic_bytes)) return 2;
    B.dynamic = static_cast<char*>(dynamic);
    const uint64_t blocks = uint64_t{grid[0]} * grid[1] * grid[2];
    for (uint64_t n = 0; n < blocks && !*B.fault; n++) {
        const uint64_t i = B.backwards ? blocks - 1 - n : n;
        block_index = {unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]), unsigned(i / grid[0] / grid[1])};
        if (dynamic) memset(dynamic, int(POISON & 0xff), dynamic_bytes);
        run_block();
    }
    free(dynamic);
    return *B.fault ? LAUNCH_FAILED : 0;
}

struct Params { // tests/fake_cuda/fake.h reads this
    static constexpr int ROOM = 40;
    int32_t count;
    int32_t is_pointer[ROOM];
    size_t offset[ROOM], size[ROOM];
};
template <class... A>
constexpr Params describe(void (*)(A...)) {
    static_assert(sizeof...(A) <= Params::ROOM);
    Params params{};
    size_t end = 0;
    auto add = [&]<class T>(T*) {
        end = (end + alignof(T) - 1) / alignof(T) * alignof(T);
        params.offset[params.count] = end;
        params.size[params.count] = sizeof(T);
        params.is_pointer[params.count++] = std::is_pointer_v<T>;
        end += sizeof(T);
    };
    (add(static_cast<std::remove_cv_t<A>*>(nullptr)), ...);
    return params;
}

} // namespace cpu

#define MEMRA_CPU_VISIBLE __attribute__((visibility("default"), used))

// Put after a kernel's definition: exports its launcher and the description of its parameters.
#define MEMRA_CPU_EXPORT(kernel)                                                                                    \
    extern "C" MEMRA_CPU_VISIBLE int memra_cpu_launch_##kernel(const unsigned grid[3], const unsigned block[3],      \
                                                               unsigned dynamic_bytes, void** params) {              \
        return cpu::launch(kernel, grid, block, dynamic_bytes, params);                                              \
    }                                                                                                                \
    extern "C" MEMRA_CPU_VISIBLE const cpu::Params memra_cpu_params_##kernel = cpu::describe(kernel);

extern "C" {
MEMRA_CPU_VISIBLE inline const char* memra_cpu_fault() { return cpu::B.fault; }
MEMRA_CPU_VISIBLE inline void memra_cpu_schedule(int backwards) { cpu::B.backwards = backwards != 0; }
}

#define threadIdx (cpu::self->index)
#define blockIdx cpu::block_index
#define blockDim cpu::block_dim
#define gridDim cpu::grid_dim
#define warpSize 32

#include "intrinsics.h"
