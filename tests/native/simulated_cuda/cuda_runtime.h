// The part of CUDA that adasum_hvd/horovod and Horovod use, on the host: kernels run as written, their
// threads one after the other, on memory that any tool can watch. For machines without a device;
// test_reduce.cc says which tests run on it.
//
// A stream is a thread that works off what is enqueued, so that a host that does not wait is seen not to; the
// threads of a block are fibers that meet at barriers and shuffles, and a kernel that one of them does not
// reach ends the program with a message.
#pragma once

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Of the thread that is running of the kernel that is running; without the call that a thread_local costs.
extern __thread dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simulated_cuda {

// Waits until every thread of the block, or of the warp, is here.
void WaitForBlock();
void WaitForWarp();
// Gives every lane of the warp the bytes of lane `from`.
void Shuffle(void* value, size_t bytes, unsigned from);

// Runs all blocks of a kernel, whose body is called for every thread.
void RunKernel(dim3 blocks, dim3 threads, const std::function<void()>& body);

// Before the first launch of a kernel the driver loads it, and may wait for all that the device does.
void Load(const void* kernel);

// Until all streams have nothing more to do, as CUDA does where it frees memory.
void WaitForDevice();

// NCCL has enqueued a group.
void CountGroup();

// Runs `body` for every thread of every block.
void RunKernel(dim3 blocks, dim3 threads, const std::function<void()>& body);

class Stream {
public:
  Stream();
  ~Stream();
  void Enqueue(std::function<void()> work);
  void Synchronize();
  bool IsBusy();

private:
  void Work();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool working_ = false;
  bool ended_ = false;
  std::thread thread_;
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t recorded = 0;
  int64_t done = 0;
};

} // namespace simulated_cuda

inline void __syncthreads() { simulated_cuda::WaitForBlock(); }
inline void __syncwarp() { simulated_cuda::WaitForWarp(); }
template <class T> T __shfl_sync(unsigned, T value, int from) {
  simulated_cuda::Shuffle(&value, sizeof value, static_cast<unsigned>(from));
  return value;
}
template <class T> T __shfl_xor_sync(unsigned lanes, T value, int with) {
  return __shfl_sync(lanes, value, static_cast<int>(threadIdx.x % 32) ^ with);
}
// The blocks of a kernel run one after the other.
inline void __threadfence() {}
template <class T> T __ldcg(const T* at) { return *at; }
template <class T> T atomicAdd(T* at, T more) {
  const T before = *at;
  *at += more;
  return before;
}
using std::fabs;
using std::fma;
using std::fmax;
using std::frexp;
using std::ldexp;
using std::min;

using cudaStream_t = simulated_cuda::Stream*;
using cudaEvent_t = simulated_cuda::Event*;
enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorMemoryAllocation,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNotReady = 600,
  cudaErrorNotSupported = 801
};
enum cudaDeviceAttr { cudaDevAttrMemoryPoolsSupported = 115 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
constexpr unsigned cudaEventDisableTiming = 2, cudaStreamNonBlocking = 1;
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;

struct cudaPointerAttributes {};

struct cudaFuncAttributes {};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMalloc(void** memory, size_t bytes); // filled with NaNs
// Waits for all streams, but not where the memory is of a pool; then it ends the program if one is busy.
cudaError_t cudaFree(void* memory);
void SimulatedMemoryLimit(size_t bytes);   // that a single allocation of this process gets
void SimulatedMemoryPools(bool supported); // a device has them, unless this says that it has not
cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t stream);
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream);
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);

// What has been enqueued in this process: kernels, copies to the device, groups of NCCL.
struct SimulatedCounts {
  int64_t kernels, uploads, groups;
};
SimulatedCounts SimulatedEnqueued();

template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*kernel)(Parameters...)) {
  simulated_cuda::Load(reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}

namespace simulated_cuda {
cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> body);
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  simulated_cuda::Load(reinterpret_cast<const void*>(kernel));
  // Arguments are taken by value now, as CUDA does.
  return simulated_cuda::Launch(*config, [=] { kernel(arguments...); });
}
