#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"
#include "kernels/kernels.h"

namespace simulated_cuda {
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
float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
__nv_bfloat16 __double2bfloat16(double value) {
  __nv_bfloat16 narrow;
  adasum_hvd::kPortableKernels.narrow[adasum_hvd::kBfloat16](&value, 1, 1.0, &narrow);
  return narrow;
}
