#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"
#include "kernels/kernels.h"

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

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

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

// ---- streams ----

namespace {

struct Streams {
  std::mutex mutex;
  std::set<Stream*> all;
};
Streams& streams() {
  static Streams everywhere;
  return everywhere;
}

std::atomic<int64_t> kernels, uploads, groups; // enqueued

struct Kernels {
  std::mutex mutex;
  std::set<const void*> loaded;
};
Kernels& loaded_kernels() {
  static Kernels everywhere;
  return everywhere;
}

} // namespace

// Other threads that want the kernel, too, wait until it is there.
void Load(const void* kernel) {
  std::lock_guard<std::mutex> guard(loaded_kernels().mutex);
  if (loaded_kernels().loaded.insert(kernel).second) {
    WaitForDevice();
  }
}

void WaitForDevice() {
  std::lock_guard<std::mutex> guard(streams().mutex);
  for (Stream* stream : streams().all) {
    stream->Synchronize();
  }
}

void CountGroup() { groups += 1; }

cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> body) {
  constexpr unsigned kMostAcross = 65535, kMostThreads = 1024;
  const dim3 blocks = config.gridDim, threads = config.blockDim;
  if (blocks.x == 0 || blocks.x > 0x7fffffff || blocks.y == 0 || blocks.y > kMostAcross || blocks.z != 1 ||
      threads.x == 0 || threads.x > kMostThreads) {
    return cudaErrorInvalidConfiguration;
  }
  kernels += 1;
  config.stream->Enqueue([=] { RunKernel(blocks, threads, body); });
  return cudaSuccess;
}

Stream::Stream() : thread_([this] { Work(); }) {}

Stream::~Stream() {
  Synchronize();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Stream::Enqueue(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void Stream::Synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !working_; });
}

bool Stream::IsBusy() {
  std::lock_guard<std::mutex> guard(mutex_);
  return working_ || !queue_.empty();
}

void Stream::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ended_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    working_ = true;
    lock.unlock();
    work();
    lock.lock();
    working_ = false;
    changed_.notify_all();
  }
}

} // namespace simulated_cuda

using simulated_cuda::streams;

SimulatedCounts SimulatedEnqueued() {
  return {simulated_cuda::kernels, simulated_cuda::uploads, simulated_cuda::groups};
}

// ---- the functions of CUDA ----

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return "no error";
  case cudaErrorInvalidValue: return "invalid argument";
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorInvalidConfiguration: return "invalid configuration argument";
  case cudaErrorNotReady: return "device not ready";
  case cudaErrorNotSupported: return "operation not supported";
  }
  return "unknown error";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace {

std::atomic<size_t> memory_limit{SIZE_MAX};
std::atomic<bool> has_pools{true};

struct Pool {
  std::mutex mutex;
  std::set<void*> memory;
};
Pool& pool() {
  static Pool one;
  return one;
}

bool IsOfPool(void* memory) {
  std::lock_guard<std::mutex> guard(pool().mutex);
  return pool().memory.count(memory) != 0;
}

} // namespace

void SimulatedMemoryLimit(size_t bytes) { memory_limit = bytes; }
void SimulatedMemoryPools(bool supported) { has_pools = supported; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = has_pools ? 1 : 0;
  return attribute == cudaDevAttrMemoryPoolsSupported ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (bytes > memory_limit) {
    return cudaErrorMemoryAllocation;
  }
  *memory = std::malloc(bytes);
  if (*memory == nullptr && bytes > 0) {
    return cudaErrorMemoryAllocation;
  }
  std::memset(*memory, 0xff, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) {
    return cudaSuccess;
  }
  const bool waits = !IsOfPool(memory);
  {
    std::lock_guard<std::mutex> guard(streams().mutex);
    for (simulated_cuda::Stream* stream : streams().all) {
      if (waits) {
        stream->Synchronize();
      } else if (stream->IsBusy()) {
        std::fprintf(stderr, "cudaFree of a pool's memory while a stream works: nothing waits\n");
        std::abort();
      }
    }
  }
  {
    std::lock_guard<std::mutex> guard(pool().mutex);
    pool().memory.erase(memory);
  }
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
  if (!has_pools) {
    return cudaErrorNotSupported;
  }
  const cudaError_t error = cudaMalloc(memory, bytes);
  if (error == cudaSuccess) {
    std::lock_guard<std::mutex> guard(pool().mutex);
    pool().memory.insert(*memory);
  }
  return error;
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  if (!IsOfPool(memory)) {
    return cudaErrorInvalidValue;
  }
  stream->Enqueue([=] {
    {
      std::lock_guard<std::mutex> guard(pool().mutex);
      pool().memory.erase(memory);
    }
    std::free(memory);
  });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  simulated_cuda::uploads += kind == cudaMemcpyHostToDevice ? 1 : 0;
  stream->Enqueue([=] { std::copy_n(static_cast<const char*>(from), bytes, static_cast<char*>(to)); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  stream->Enqueue([=] { std::memset(at, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new simulated_cuda::Stream();
  std::lock_guard<std::mutex> guard(streams().mutex);
  streams().all.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    std::lock_guard<std::mutex> guard(streams().mutex);
    streams().all.erase(stream);
  }
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream->Synchronize();
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data) {
  stream->Enqueue([=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new simulated_cuda::Event();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  int64_t number;
  {
    std::lock_guard<std::mutex> guard(event->mutex);
    number = ++event->recorded;
  }
  stream->Enqueue([=] {
    std::lock_guard<std::mutex> guard(event->mutex);
    event->done = number;
    event->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard<std::mutex> guard(event->mutex);
  return event->done == event->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::unique_lock<std::mutex> lock(event->mutex);
  const int64_t wanted = event->recorded;
  event->changed.wait(lock, [=] { return event->done >= wanted; });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard<std::mutex> guard(event->mutex);
  stream->Enqueue([event, wanted = event->recorded] {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [=] { return event->done >= wanted; });
  });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) {
    *least = 0;
  }
  *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }

namespace {

float Widened(const void* value, adasum_hvd::ElementType type) {
  double wide;
  adasum_hvd::kPortableKernels.widen[type](value, 1, 1.0, &wide);
  return static_cast<float>(wide);
}

} // namespace

float __half2float(__half value) { return Widened(&value, adasum_hvd::kFloat16); }
__half __double2half(double value) {
  __half half;
  adasum_hvd::kPortableKernels.narrow[adasum_hvd::kFloat16](&value, 1, 1.0, &half);
  return half;
}
float __bfloat162float(__nv_bfloat16 value) { return Widened(&value, adasum_hvd::kBfloat16); }
__nv_bfloat16 __double2bfloat16(double value) {
  __nv_bfloat16 narrow;
  adasum_hvd::kPortableKernels.narrow[adasum_hvd::kBfloat16](&value, 1, 1.0, &narrow);
  return narrow;
}
