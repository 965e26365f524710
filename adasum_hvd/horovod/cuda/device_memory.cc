#include "cuda/device_memory.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

namespace adasum_hvd {
namespace {

constexpr int64_t kLeastPinned = 64 << 10; // bytes
constexpr int kPinnedAtOnce = 4;
constexpr std::chrono::milliseconds kPollPeriod{1}; // of a mark

} // namespace

void CheckCuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("AdaSum: CUDA could not ") + what + ": " +
                             cudaGetErrorString(error));
  }
}

int CurrentDevice() {
  int device = -1;
  CheckCuda(cudaGetDevice(&device), "tell the current device");
  return device;
}

DeviceGuard::DeviceGuard(int device) {
  if (device >= 0 && cudaGetDevice(&before_) == cudaSuccess) {
    cudaSetDevice(device);
  }
}

DeviceGuard::~DeviceGuard() {
  if (before_ >= 0) {
    cudaSetDevice(before_);
  }
}

// Destructors may run on any thread that makes the next list of ops, and must not start CUDA on another
// rank's device.
DeviceBuffer::~DeviceBuffer() {
  if (memory_ != nullptr) {
    DeviceGuard guard(device_);
    Free();
  }
}

// With memory pools, memory is freed in the order of the stream, and the host does not wait as in cudaFree.
cudaError_t DeviceBuffer::Free() {
  cudaError_t error = cudaSuccess;
  if (has_pools_) {
    error = cudaFreeAsync(memory_, stream_);
  } else if (error = cudaStreamSynchronize(stream_); error == cudaSuccess) {
    error = cudaFree(memory_);
  }
  memory_ = nullptr;
  bytes_ = 0;
  return error;
}

cudaError_t DeviceBuffer::Take(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  const cudaError_t error =
      has_pools_ ? cudaMallocAsync(&memory_, size, stream_) : cudaMalloc(&memory_, size);
  if (error == cudaSuccess) {
    bytes_ = bytes;
  } else {
    memory_ = nullptr;
    cudaGetLastError(); // clears the error, or the framework's next call would return it
  }
  return error;
}

char* DeviceBuffer::Reserve(int64_t bytes, cudaStream_t stream) {
  if (bytes > bytes_) {
    const int64_t roomy = bytes_ + bytes_ / 4; // a reserve, so that it rarely grows
    if (memory_ != nullptr) {
      CheckCuda(Free(), "free memory");
    }
    device_ = CurrentDevice();
    stream_ = stream;
    int pools = 0;
    CheckCuda(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device_),
              "tell whether the device has memory pools");
    has_pools_ = pools != 0;
    cudaError_t error = Take(std::max(bytes, roomy));
    if (error != cudaSuccess && roomy > bytes) {
      error = Take(bytes);
    }
    if (error != cudaSuccess) {
      const char* remedy = error == cudaErrorMemoryAllocation
                               ? "; leave the framework less memory (TensorFlow: set_memory_growth), lower "
                                 "HOROVOD_FUSION_THRESHOLD, or reduce in smaller buckets (bucket_bytes)"
                               : "";
      throw std::runtime_error(
          "AdaSum: expected " + std::to_string(bytes) +
          " bytes of device memory for a reduction, but got none: " + cudaGetErrorString(error) + remedy);
    }
  }
  return get();
}

Uploads::~Uploads() {
  if (!pinned_.empty()) {
    DeviceGuard guard(device_);
    for (const Pinned& pinned : pinned_) {
      cudaFreeHost(pinned.memory);
      cudaEventDestroy(pinned.copied);
    }
  }
}

Uploads::Pinned Uploads::Pin(int64_t bytes) {
  Pinned pinned = {nullptr, bytes, nullptr};
  CheckCuda(cudaHostAlloc(&pinned.memory, static_cast<size_t>(bytes), cudaHostAllocDefault),
            "pin host memory");
  const cudaError_t error = cudaEventCreateWithFlags(&pinned.copied, cudaEventDisableTiming);
  if (error != cudaSuccess) {
    cudaFreeHost(pinned.memory);
    CheckCuda(error, "create an event");
  }
  return pinned;
}

// Pinning memory may wait for the device, so several pieces are made at once, and none is freed.
Uploads::Pinned Uploads::Take(int64_t bytes) {
  for (auto pinned = pinned_.begin(); pinned != pinned_.end(); ++pinned) {
    if (pinned->bytes < bytes) {
      continue;
    }
    if (cudaEventQuery(pinned->copied) == cudaSuccess) {
      const Pinned found = *pinned;
      pinned_.erase(pinned);
      return found;
    }
    cudaGetLastError(); // clears "not ready", which is not an error
  }
  device_ = CurrentDevice();
  int64_t rounded = kLeastPinned;
  while (rounded < bytes) {
    rounded *= 2;
  }
  for (int more = 1; more < kPinnedAtOnce; ++more) {
    pinned_.push_back(Pin(rounded));
  }
  return Pin(rounded);
}

void Uploads::Copy(const std::vector<char>& bytes, char* to, cudaStream_t stream) {
  const Pinned pinned = Take(static_cast<int64_t>(bytes.size()));
  pinned_.push_back(pinned);
  std::memcpy(pinned.memory, bytes.data(), bytes.size());
  CheckCuda(cudaMemcpyAsync(to, pinned.memory, bytes.size(), cudaMemcpyHostToDevice, stream), "copy");
  CheckCuda(cudaEventRecord(pinned.copied, stream), "record an event");
}

std::shared_ptr<char> Downloads::Take(int64_t bytes) {
  for (const Pinned& pinned : pinned_) {
    if (pinned.memory.use_count() == 1 && pinned.bytes >= bytes) {
      return pinned.memory;
    }
  }
  void* memory = nullptr;
  const int64_t rounded = std::max(bytes, kLeastPinned);
  CheckCuda(cudaHostAlloc(&memory, static_cast<size_t>(rounded), cudaHostAllocDefault), "pin host memory");
  const auto unpin = [device = CurrentDevice()](char* pinned) {
    DeviceGuard guard(device);
    cudaFreeHost(pinned);
  };
  return pinned_.emplace_back(Pinned{{static_cast<char*>(memory), unpin}, rounded}).memory;
}

StreamMark::~StreamMark() {
  if (event_ != nullptr) {
    DeviceGuard guard(device_);
    cudaEventDestroy(event_);
  }
}

void StreamMark::Set(cudaStream_t stream) {
  if (event_ == nullptr) {
    device_ = CurrentDevice();
    CheckCuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "create an event");
  }
  CheckCuda(cudaEventRecord(event_, stream), "record an event");
}

bool StreamMark::WaitFor(int seconds) const {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  cudaError_t reached;
  while ((reached = cudaEventQuery(event_)) == cudaErrorNotReady &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(kPollPeriod);
  }
  if (reached != cudaSuccess) {
    cudaGetLastError(); // clears "not ready", which is not an error
  }
  return reached == cudaSuccess;
}

DeviceCounter::~DeviceCounter() {
  if (number_ != nullptr) {
    DeviceGuard guard(device_);
    cudaFreeHost(number_);
  }
}

int64_t* DeviceCounter::OnDevice() {
  if (number_ == nullptr) {
    void* memory = nullptr;
    device_ = CurrentDevice();
    CheckCuda(cudaHostAlloc(&memory, sizeof(int64_t), cudaHostAllocMapped | cudaHostAllocPortable),
              "pin host memory");
    number_ = new (memory) int64_t(0);
  }
  return number_; // addresses are the same on the device
}

int64_t DeviceCounter::Read() const {
  const volatile int64_t* number = number_;
  return number == nullptr ? 0 : *number;
}

} // namespace adasum_hvd
