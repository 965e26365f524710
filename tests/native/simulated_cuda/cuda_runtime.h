// The part of CUDA that adasum_hvd/native and Horovod use, on the host: kernels run as written, their threads
// one after the other, on memory that any tool can watch. For machines without a device; test_reduce.cc says
// which tests run on it.
//
// A stream is a thread that works off what is enqueued, so that a host that does not wait is seen not to; the
// threads of a block are fibers that meet at barriers and shuffles, and a kernel that one of them does not
// reach ends the program with a message.
#pragma once

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
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Of the thread that is running of the kernel that is running.
extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simulated_cuda {

// Waits until every thread of the block, or of the warp, is here.
void WaitForBlock();
void WaitForWarp();
// Gives every lane of the warp the bytes of the lane with `lane` exclusive-or'ed.
void Shuffle(void* value, size_t bytes, unsigned lane);

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
template <class T> T __shfl_xor_sync(unsigned, T value, int lanes) {
  simulated_cuda::Shuffle(&value, sizeof value, static_cast<unsigned>(lanes));
  return value;
}
using std::fabs;
using std::fma;
using std::fmax;
using std::frexp;
using std::ldexp;

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
constexpr unsigned cudaEventDisableTiming = 2, cudaHostAllocDefault = 0, cudaStreamNonBlocking = 1;

struct cudaPointerAttributes {};

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

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const dim3 blocks = config->gridDim, threads = config->blockDim;
  config->stream->Enqueue([=] { // arguments are taken by value now, as CUDA does
    simulated_cuda::RunKernel(blocks, threads, [&] { kernel(arguments...); });
  });
  return cudaSuccess;
}
