// Fibers: a stack and a way to switch to it. A dozen instructions on x86-64, ucontext elsewhere.
#pragma once
#include <sys/mman.h>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#ifndef __x86_64__
#include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace fiber {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK = 256 << 10; // red zones make frames larger
#else
constexpr size_t STACK = 64 << 10;
#endif
constexpr size_t PAGE = 4096;

struct Context {
#ifdef __x86_64__
    void* sp;
#else
    ucontext_t state;
#endif
    unsigned slot; // which of the stacks
};

inline char* stacks;
inline size_t reserved;

// Room for n stacks, each above a page that must not be touched.
inline void reserve(size_t n) {
    if (n <= reserved) return;
    if (stacks) munmap(stacks, reserved * STACK);
    void* memory = mmap(nullptr, n * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("fiber stacks");
        abort();
    }
    stacks = static_cast<char*>(memory);
    reserved = n;
    for (size_t i = 0; i < n; i++) mprotect(stacks + i * STACK, PAGE, PROT_NONE);
}

inline char* fresh_stack(unsigned slot) {
    char* low = stacks + slot * STACK;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(low + PAGE, STACK - PAGE); // of frames that never returned
#endif
    return low;
}

#ifdef __x86_64__

extern "C" void memra_fiber_swap(void** save, void* to) __attribute__((visibility("hidden")));
#define MEMRA_FIBER_SWAP                                                                                             \
    asm(".text\n.globl memra_fiber_swap\n.hidden memra_fiber_swap\n.type memra_fiber_swap,@function\n"               \
        "memra_fiber_swap:\n"                                                                                        \
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"                                   \
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"                                                                       \
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"                                    \
        ".size memra_fiber_swap, .-memra_fiber_swap\n");

inline void swap(Context& from, Context& to) { memra_fiber_swap(&from.sp, to.sp); }

inline void start(Context& context, void (*entry)()) {
    void** sp = reinterpret_cast<void**>(fresh_stack(context.slot) + STACK - 64);
    *--sp = nullptr;                         // where entry would return to; keeps its frame aligned
    *--sp = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    context.sp = sp;
}

#else

#define MEMRA_FIBER_SWAP

inline void swap(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

inline void start(Context& context, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = fresh_stack(context.slot) + PAGE;
    context.state.uc_stack.ss_size = STACK - PAGE;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}

#endif

} // namespace fiber
