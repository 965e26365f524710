// What a reduction on a CUDA device keeps between calls: memory there, and pinned memory on the host.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include <cuda_runtime.h>

namespace adasum_hvd {

// Throws std::runtime_error, saying `what` failed, where a call of CUDA did.
void CheckCuda(cudaError_t error, const char* what);

// The device of the calling thread, while this lives. Does nothing for a negative one.
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

// Memory on the device that was current when it was first reserved. It grows and goes in the order of the
// stream that reserved it last, the same for all calls: what is enqueued keeps what it has, and nothing waits
// but on devices without memory pools (virtual ones), for the stream.
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

// Pinned host memory for what a reduction tells the device: a copy is enqueued, and the memory taken again
// when that copy has been made.
class Uploads {
public:
  Uploads() = default;
  Uploads(const Uploads&) = delete;
  Uploads& operator=(const Uploads&) = delete;
  ~Uploads();

  void Copy(const std::vector<char>& bytes, char* to, cudaStream_t stream);

private:
  struct Pinned {
    void* memory;
    int64_t bytes;
    cudaEvent_t copied;
  };
  Pinned Take(int64_t bytes);
  static Pinned Pin(int64_t bytes);

  int device_ = -1;
  std::deque<Pinned> pinned_; // the one used longest ago first
};

// Pinned host memory for what a device tells: taken again when nobody holds it any more.
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

// A place in what has been enqueued on a stream.
class StreamMark {
public:
  StreamMark() = default;
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;
  ~StreamMark();

  void Set(cudaStream_t stream); // behind all that is enqueued now
  // False where the stream has not come to the place set last after so long, or has failed.
  bool WaitFor(int seconds) const;

private:
  int device_ = -1;
  cudaEvent_t event_ = nullptr;
};

// A number that kernels add to and the host reads at any time: it lies in host memory.
class DeviceCounter {
public:
  DeviceCounter() = default;
  DeviceCounter(const DeviceCounter&) = delete;
  DeviceCounter& operator=(const DeviceCounter&) = delete;
  ~DeviceCounter();

  int64_t* OnDevice(); // made by the first call
  int64_t Read() const;

private:
  int device_ = -1;
  std::atomic<int64_t*> number_{nullptr};
};

} // namespace adasum_hvd
