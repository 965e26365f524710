// Ranks as threads with a stream each, on the devices there are; several may share one (NCCL >= 2.32 with
// NCCL_MULTI_RANK_GPU_ENABLE=1). Built with simulated_cuda or, where there is a device, with CUDA and NCCL.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <nccl.h>

#include "reduce_device.h"
#include "testing.h"
#include "transport_nccl.h"

namespace adasum_hvd {

// Device memory that holds a copy of some bytes.
class OnDevice {
public:
  OnDevice(const std::vector<char>& bytes, cudaStream_t stream) : bytes_(bytes.size()), stream_(stream) {
    CheckCuda(cudaMalloc(&memory_, bytes.size() + 16), "allocate");
    CheckCuda(cudaMemcpyAsync(memory_, bytes.data(), bytes_, cudaMemcpyHostToDevice, stream), "copy");
    CheckCuda(cudaStreamSynchronize(stream), "copy");
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(memory_); }

  char* get() const { return static_cast<char*>(memory_); }
  std::vector<char> Read() const {
    std::vector<char> bytes(bytes_);
    CheckCuda(cudaMemcpyAsync(bytes.data(), memory_, bytes_, cudaMemcpyDeviceToHost, stream_), "copy");
    CheckCuda(cudaStreamSynchronize(stream_), "copy");
    return bytes;
  }

private:
  void* memory_ = nullptr;
  size_t bytes_;
  cudaStream_t stream_;
};

struct RankOnDevice {
  cudaStream_t stream = nullptr;
  ncclComm_t communicator = nullptr;
  std::unique_ptr<NcclTransport> transport;
  DeviceScratch scratch;
};

inline int DeviceOf(int rank) {
  int devices = 0;
  CheckCuda(cudaGetDeviceCount(&devices), "count devices");
  return rank % devices;
}

// The ranks of a job of `size`, made once. Memory for reductions of `bytes` is there afterwards: where ranks
// share a device, one of them must not allocate while another waits for it.
inline std::vector<std::unique_ptr<RankOnDevice>>& RanksOnDevice(int size, int64_t bytes) {
  // Never destroyed: at exit CUDA may be gone.
  static auto& jobs = *new std::map<int, std::vector<std::unique_ptr<RankOnDevice>>>();
  std::vector<std::unique_ptr<RankOnDevice>>& job = jobs[size];
  ncclUniqueId id;
  const bool fresh = job.empty();
  job.resize(size);
  if (fresh && ncclGetUniqueId(&id) != ncclSuccess) {
    throw std::runtime_error("ncclGetUniqueId");
  }
  InThreads(size, [&](int rank) {
    CheckCuda(cudaSetDevice(DeviceOf(rank)), "choose a device");
    if (fresh) {
      job[rank] = std::make_unique<RankOnDevice>();
      CheckCuda(cudaStreamCreate(&job[rank]->stream), "create a stream");
      const ncclResult_t result = ncclCommInitRank(&job[rank]->communicator, size, id, rank);
      if (result != ncclSuccess) {
        throw std::runtime_error(std::string("ncclCommInitRank: ") + ncclGetErrorString(result));
      }
      job[rank]->transport =
          std::make_unique<NcclTransport>(job[rank]->communicator, rank, size, job[rank]->stream);
    }
    job[rank]->scratch.staging.Reserve(bytes);
    job[rank]->scratch.received.Reserve(2 * bytes + (1 << 20));
    job[rank]->scratch.work.Reserve(bytes + (4 << 20));
    job[rank]->scratch.counter(job[rank]->stream);
    CheckCuda(cudaStreamSynchronize(job[rank]->stream), "prepare");
  });
  return job;
}

// Holds a stream until it is opened.
class Gate {
public:
  void Close(cudaStream_t stream) { CheckCuda(cudaLaunchHostFunc(stream, Wait, this), "hold a stream"); }
  void Open() {
    std::lock_guard<std::mutex> guard(mutex_);
    open_ = true;
    opened_.notify_all();
  }

private:
  static void Wait(void* gate) {
    Gate& self = *static_cast<Gate*>(gate);
    std::unique_lock<std::mutex> lock(self.mutex_);
    self.opened_.wait(lock, [&] { return self.open_; });
  }

  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

} // namespace adasum_hvd
