// Runs a kernel's threads as fibers of one thread of the host, a block at a time.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "cuda_runtime.h"

#if !defined(__x86_64__)
#error "fibers are switched in x86-64 assembly"
#endif

// Saves the callee-saved registers on the running stack, leaves its top in *from and goes on with `to`.
extern "C" void simulated_cuda_switch(void** from, void* to);
asm(R"(
.text
.globl simulated_cuda_switch
.type simulated_cuda_switch, @function
simulated_cuda_switch:
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
.size simulated_cuda_switch, .-simulated_cuda_switch
)");

__thread dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simulated_cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kMostShuffled = 16; // bytes

struct Barrier {
  unsigned arrived = 0;
  uint64_t passed = 0;
};

struct Warp {
  Barrier barrier;
  char values[2][kWarp][kMostShuffled]; // written for the next shuffle while the last is still read
};

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* top = nullptr;
  bool ended = false;
  unsigned shuffles = 0;
};

struct Processor {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Barrier block;
  void* scheduler = nullptr;
  Fiber* running = nullptr;
  const std::function<void()>* body = nullptr;
  bool progress = false;

  void Yield() { simulated_cuda_switch(&running->top, scheduler); }

  void Wait(Barrier& barrier, unsigned expected) {
    const uint64_t mine = barrier.passed;
    if (++barrier.arrived == expected) {
      barrier.arrived = 0;
      barrier.passed += 1;
      progress = true;
    }
    while (barrier.passed == mine) {
      Yield();
    }
  }
};

Processor& processor() {
  static thread_local Processor one;
  return one;
}

void RunFiber() {
  Processor& here = processor();
  (*here.body)();
  here.running->ended = true;
  here.progress = true;
  here.Yield();
  std::abort(); // an ended fiber is not run again
}

void Prepare(Fiber& fiber) {
  fiber.ended = false;
  fiber.shuffles = 0;
  // Where `ret` finds RunFiber, with the stack as after a call: 16-byte aligned but for the return address.
  uintptr_t end = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStackBytes) & ~uintptr_t{15};
  void** at = reinterpret_cast<void**>(end) - 2;
  *at = reinterpret_cast<void*>(&RunFiber);
  at[1] = nullptr;
  for (int saved = 0; saved < 6; ++saved) {
    *--at = nullptr;
  }
  fiber.top = at;
}

} // namespace

void WaitForBlock() { processor().Wait(processor().block, blockDim.x); }

void WaitForWarp() {
  Processor& here = processor();
  here.Wait(here.warps[threadIdx.x / kWarp].barrier, kWarp);
}

void Shuffle(void* value, size_t bytes, unsigned from) {
  Processor& here = processor();
  Warp& warp = here.warps[threadIdx.x / kWarp];
  const unsigned lane = threadIdx.x % kWarp, parity = here.running->shuffles++ % 2;
  std::memcpy(warp.values[parity][lane], value, bytes);
  WaitForWarp();
  std::memcpy(value, warp.values[parity][from], bytes);
}

void RunKernel(dim3 blocks, dim3 threads, const std::function<void()>& body) {
  Processor& here = processor();
  while (here.fibers.size() < threads.x) {
    here.fibers.push_back(std::make_unique<Fiber>());
  }
  here.warps.resize((threads.x + kWarp - 1) / kWarp);
  here.body = &body;
  blockDim = threads;
  gridDim = blocks;
  for (unsigned block = 0; block < blocks.x * blocks.y; ++block) {
    blockIdx = dim3(block % blocks.x, block / blocks.x);
    here.block = Barrier();
    for (Warp& warp : here.warps) {
      warp.barrier = Barrier();
    }
    for (unsigned thread = 0; thread < threads.x; ++thread) {
      Prepare(*here.fibers[thread]);
    }
    for (unsigned live = threads.x; live > 0;) {
      here.progress = false;
      for (unsigned thread = 0; thread < threads.x; ++thread) {
        Fiber& fiber = *here.fibers[thread];
        if (!fiber.ended) {
          threadIdx = dim3(thread);
          here.running = &fiber;
          simulated_cuda_switch(&here.scheduler, fiber.top);
          live -= fiber.ended ? 1 : 0;
        }
      }
      if (!here.progress) {
        std::fprintf(stderr, "a kernel hangs: some threads of a block never reach a barrier\n");
        std::abort();
      }
    }
  }
}

} // namespace simulated_cuda
