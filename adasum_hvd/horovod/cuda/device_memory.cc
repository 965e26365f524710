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

// Destructors may run on any thread that makes the next list of ops, and must not start CUDA on another
// rank's device.
template <class T, class Free> std::shared_ptr<T> FreedOnItsDevice(T* made, Free free) {
  return {made, [device = CurrentDevice(), free](T* object) {
            DeviceGuard guard(device);
            free(object);
          }};
}

std::shared_ptr<char> Pin(int64_t bytes, unsigned flags = cudaHostAllocDefault) {
  void* memory = nullptr;
  CheckCuda(cudaHostAlloc(&memory, static_cast<size_t>(bytes), flags), "pin host memory");
  return FreedOnItsDevice(static_cast<char*>(memory), cudaFreeHost);
}

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

// Pinning memory may wait for the device, so several pieces are made at once, and none is freed.
void Uploads::Copy(const std::vector<char>& bytes, char* to, cudaStream_t stream) {
  const auto size = static_cast<int64_t>(bytes.size());
  auto pinned = std::find_if(pinned_.begin(), pinned_.end(),
                             [&](const Pinned& one) { return one.bytes >= size && one.copied.WaitFor(0); });
  if (pinned == pinned_.end()) {
    int64_t rounded = kLeastPinned;
    while (rounded < size) {
      rounded *= 2;
    }
    for (int piece = 0; piece < kPinnedAtOnce; ++piece) {
      pinned_.push_back({Pin(rounded), rounded, {}});
    }
    --pinned;
  }
  pinned_.splice(pinned_.end(), pinned_, pinned);
  std::memcpy(pinned->memory.get(), bytes.data(), bytes.size());
  CheckCuda(cudaMemcpyAsync(to, pinned->memory.get(), bytes.size(), cudaMemcpyHostToDevice, stream), "copy");
  pinned->copied.Set(stream);
}

std::shared_ptr<char> Downloads::Take(int64_t bytes) {
  for (const Pinned& pinned : pinned_) {
    if (pinned.memory.use_count() == 1 && pinned.bytes >= bytes) {
      return pinned.memory;
    }
  }
  const int64_t rounded = std::max(bytes, kLeastPinned);
  return pinned_.emplace_back(Pinned{Pin(rounded), rounded}).memory;
}

void StreamMark::Set(cudaStream_t stream) {
  if (event_ == nullptr) {
    cudaEvent_t event = nullptr;
    CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "create an event");
    event_ = FreedOnItsDevice(event, cudaEventDestroy);
  }
  CheckCuda(cudaEventRecord(event_.get(), stream), "record an event");
}

bool StreamMark::WaitFor(int seconds) const {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  cudaError_t reached = cudaSuccess; // without a mark
  while (event_ != nullptr && (reached = cudaEventQuery(event_.get())) == cudaErrorNotReady &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(kPollPeriod);
  }
  if (reached != cudaSuccess) {
    cudaGetLastError(); // clears "not ready", which is not an error
  }
  return reached == cudaSuccess;
}

int64_t* DeviceCounter::OnDevice() {
  if (number_ == nullptr) {
    memory_ = Pin(sizeof(int64_t), cudaHostAllocMapped | cudaHostAllocPortable);
    number_ = new (memory_.get()) int64_t(0);
  }
  return number_; // addresses are the same on the device
}

int64_t DeviceCounter::Read() const {
  const volatile int64_t* number = number_;
  return number == nullptr ? 0 : *number;
}

} // namespace adasum_hvd
