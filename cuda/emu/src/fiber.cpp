// Fibers: a hand-written context switch (8 ns; ucontext makes system calls), stacks with a guard page, and the
// annotations that AddressSanitizer needs to follow the switches.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "internal.h"

#ifdef CUEMU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the callee-saved registers and the stack pointer, and loads another context's.
extern "C" void cuemu_switch(void** save_sp, void* load_sp);
extern "C" void cuemu_entry() { cuemu::fiber_main(); }

#if !defined(__x86_64__)
#error "the emulator has a context switch for x86-64 only"
#endif
asm(R"(
.text
.p2align 4
.globl cuemu_switch
.type cuemu_switch,@function
cuemu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuemu_switch,.-cuemu_switch
)");

namespace cuemu {

Fiber* g_fiber;
Fiber g_main_fiber;

namespace {

std::vector<Fiber*>& free_fibers = *new std::vector<Fiber*>;  // never destroyed: kernels may run until the end
std::vector<Fiber*>& all_fibers = *new std::vector<Fiber*>;

// A stack from which cuemu_switch "returns" into cuemu_entry.
void* initial_sp(char* top) {
  auto** sp = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
  *--sp = nullptr;                                // entry's (absent) return address
  *--sp = reinterpret_cast<void*>(&cuemu_entry);  // popped by ret
  for (int i = 0; i < 6; i++) *--sp = nullptr;    // the saved registers
  return sp;
}

// The first thing on every arrival in a fiber.
void arrived([[maybe_unused]] Fiber* fiber) {
#ifdef CUEMU_ASAN
  const void* stack;
  size_t size;
  __sanitizer_finish_switch_fiber(fiber->fake, &stack, &size);
  if (fiber != &g_main_fiber && !g_main_fiber.stack) {  // the first switch away from the caller tells us its stack
    g_main_fiber.stack = const_cast<char*>(static_cast<const char*>(stack));
    g_main_fiber.size = size;
  }
#endif
}

}  // namespace

void switch_fiber(Fiber* to) {
  Fiber* from = g_fiber;
  g_fiber = to;
#ifdef CUEMU_ASAN
  __sanitizer_start_switch_fiber(&from->fake, to->stack, to->size);
#endif
  cuemu_switch(&from->sp, to->sp);
  arrived(from);
}

void fiber_started() { arrived(g_fiber); }

Fiber* get_fiber() {
  if (!free_fibers.empty()) {
    Fiber* f = free_fibers.back();
    free_fibers.pop_back();
    return f;
  }
#ifdef CUEMU_ASAN
  const size_t size = 256 * 1024;
#else
  const size_t size = 64 * 1024;
#endif
  const size_t guard = 4096;
  void* m = mmap(nullptr, size + guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED || mprotect(m, guard, PROT_NONE)) {
    std::perror("cuemu: the stack of a CUDA thread");
    std::abort();
  }
  auto* f = new Fiber{.stack = static_cast<char*>(m) + guard, .size = size};
  f->sp = initial_sp(f->stack + size);
  all_fibers.push_back(f);
  return f;
}

void put_fiber(Fiber* finished) { free_fibers.push_back(finished); }

void reset_fibers() {
  free_fibers = all_fibers;
  for (Fiber* f : all_fibers) {
#ifdef CUEMU_ASAN
    __asan_unpoison_memory_region(f->stack, f->size);
#endif
    f->sp = initial_sp(f->stack + f->size);
    f->fake = nullptr;
  }
}

}  // namespace cuemu
