// Memory of reductions on a CUDA device, kept between calls: device memory, and pinned host memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <type_traits>
#include <vector>

#include <cuda_runtime.h>

namespace adasum_hvd {

// Throws std::runtime_error with `what` if a call of CUDA has failed.
void CheckCuda(cudaError_t error, const char* what);

// Sets the device of the calling thread during its lifetime. A negative one changes nothing.
class DeviceGuard {
public:
  explicit DeviceGuard(int device);
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

private:
  int before_ = -1;
};

int CurrentDevice();

// Memory on the device that is current at the first reservation. It is allocated and freed in the order of
// one stream, so enqueued work keeps its memory, and the host does not wait; except on devices without memory
// pools (virtual ones), for the stream.
class DeviceBuffer {
public:
  DeviceBuffer() = default;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer();

  char* Reserve(int64_t bytes, cudaStream_t stream);
  char* get() const { return static_cast<char*>(memory_); }

private:
  cudaError_t Take(int64_t bytes);
  cudaError_t Free();

  int device_ = -1;
  cudaStream_t stream_ = nullptr;
  bool has_pools_ = true;
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

// A position in the work enqueued on a stream.
class StreamMark {
public:
  void Set(cudaStream_t stream); // after all work that is enqueued now
  // Returns false if the stream has not reached the last mark within the timeout, or has failed.
  bool WaitFor(int seconds) const;

private:
  std::shared_ptr<std::remove_pointer_t<cudaEvent_t>> event_;
};

// Pinned host memory for tables that are copied to the device; reused when the enqueued copy has completed.
class Uploads {
public:
  void Copy(const std::vector<char>& bytes, char* to, cudaStream_t stream);

private:
  struct Pinned {
    std::shared_ptr<char> memory;
    int64_t bytes;
    StreamMark copied;
  };
  std::list<Pinned> pinned_; // least recently used first
};

// Pinned host memory for results of a device; reused when no object holds it.
class Downloads {
public:
  std::shared_ptr<char> Take(int64_t bytes);

private:
  struct Pinned {
    std::shared_ptr<char> memory;
    int64_t bytes;
  };
  std::vector<Pinned> pinned_;
};

// A counter in host memory, to which kernels add, and which the host may read at any time.
class DeviceCounter {
public:
  int64_t* OnDevice(); // allocated by the first call
  int64_t Read() const;

private:
  std::shared_ptr<char> memory_;
  std::atomic<int64_t*> number_{nullptr};
};

} // namespace adasum_hvd
