// Ranks as threads with a stream each, on the devices there are; several may share one. Built with
// simulated_cuda or, where there is a device, with CUDA. Ranks copy from each other; built with
// ADASUM_WITH_NCCL, ADASUM_TEST_TRANSPORT=nccl takes NCCL (from 2.32 on, with NCCL_MULTI_RANK_GPU_ENABLE=1,
// where ranks share a device).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "cuda/reduce_device.h"
#include "host/transport.h"
#include "testing.h"
#if defined(ADASUM_WITH_NCCL)
#include "network/nccl.h"
#endif

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

// Where the threads of a job leave each other things, in order and by pair.
template <class T> class Post {
public:
  void Put(int from, int to, T thing) {
    std::lock_guard<std::mutex> guard(mutex_);
    boxes_[{from, to}].push_back(thing);
    arrived_.notify_all();
  }
  T Take(int from, int to) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::deque<T>& box = boxes_[{from, to}];
    Check(arrived_.wait_for(lock, std::chrono::seconds(60), [&] { return !box.empty(); }),
          "no message from rank " + std::to_string(from));
    const T thing = box.front();
    box.pop_front();
    return thing;
  }

private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::pair<int, int>, std::deque<T>> boxes_;
};

struct DeviceOffer {
  const void* from;
  int64_t bytes;
  cudaEvent_t ready;
};

struct Meeting {
  Post<DeviceOffer> offers;
  Post<cudaEvent_t> taken; // by the receiver
};

// Every rank copies what the others have for it, when their streams have come so far. Host threads wait for
// each other's offers, and nobody for the device.
class CopyTransport : public Transport {
public:
  CopyTransport(Meeting& meeting, int rank, int size, cudaStream_t stream)
      : meeting_(meeting), rank_(rank), size_(size), stream_(stream) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void Start(const std::vector<Message>& messages) override {
    const cudaEvent_t ready = Event();
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && messages[peer].send_bytes > 0) {
        meeting_.offers.Put(rank_, peer, {messages[peer].send, messages[peer].send_bytes, ready});
      }
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && messages[peer].receive_bytes > 0) {
        const DeviceOffer offer = meeting_.offers.Take(peer, rank_);
        Check(offer.bytes == messages[peer].receive_bytes, "message of another length than expected");
        CheckCuda(cudaStreamWaitEvent(stream_, offer.ready, 0), "wait for a rank");
        CheckCuda(cudaMemcpyAsync(messages[peer].receive, offer.from, static_cast<size_t>(offer.bytes),
                                  cudaMemcpyDeviceToDevice, stream_),
                  "copy");
        meeting_.taken.Put(rank_, peer, Event());
      }
    }
    for (int peer = 0; peer < size_; ++peer) { // or this rank would change what others still copy
      if (peer != rank_ && messages[peer].send_bytes > 0) {
        CheckCuda(cudaStreamWaitEvent(stream_, meeting_.taken.Take(peer, rank_), 0), "wait for a rank");
      }
    }
  }
  void Wait() override {}

private:
  cudaEvent_t Event() { // that lives as long as the job: some stream may still have to come to it
    cudaEvent_t event = nullptr;
    CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "create an event");
    events_.push_back(event);
    CheckCuda(cudaEventRecord(event, stream_), "record an event");
    return event;
  }

  Meeting& meeting_;
  int rank_;
  int size_;
  cudaStream_t stream_;
  std::deque<cudaEvent_t> events_;
};

struct RankOnDevice {
  cudaStream_t stream = nullptr;
  std::unique_ptr<Transport> transport;
  DeviceScratch scratch;
};

struct JobOnDevice {
  explicit JobOnDevice(int size) : ranks(size) {}
  Meeting meeting;
  std::vector<std::unique_ptr<RankOnDevice>> ranks;
};

inline bool OverNccl() {
  const char* expected = std::getenv("ADASUM_TEST_TRANSPORT");
  return expected != nullptr && std::string(expected) == "nccl";
}

inline int DeviceOf(int rank) {
  int devices = 0;
  CheckCuda(cudaGetDeviceCount(&devices), "count devices");
  return rank % devices;
}

#if defined(ADASUM_WITH_NCCL)
inline std::unique_ptr<Transport> Nccl(ncclUniqueId id, int rank, int size, cudaStream_t stream) {
  ncclComm_t communicator = nullptr; // never destroyed, like the job
  const ncclResult_t result = ncclCommInitRank(&communicator, size, id, rank);
  if (result != ncclSuccess) {
    throw std::runtime_error(std::string("ncclCommInitRank: ") + ncclGetErrorString(result));
  }
  return std::make_unique<NcclTransport>(communicator, rank, size, stream);
}
#endif

// The ranks of a job of `size`, made once. Memory for reductions of `bytes` is there afterwards: where ranks
// share a device, one of them must not allocate while another waits for it.
inline std::vector<std::unique_ptr<RankOnDevice>>& RanksOnDevice(int size, int64_t bytes) {
  // Never destroyed: at exit CUDA may be gone.
  static auto& jobs = *new std::map<int, std::unique_ptr<JobOnDevice>>();
  std::unique_ptr<JobOnDevice>& job = jobs[size];
  const bool fresh = job == nullptr;
  if (fresh) {
    job = std::make_unique<JobOnDevice>(size);
  }
#if defined(ADASUM_WITH_NCCL)
  ncclUniqueId id = {};
  Check(!fresh || !OverNccl() || ncclGetUniqueId(&id) == ncclSuccess, "ncclGetUniqueId");
#else
  Check(!OverNccl(), "built without NCCL");
#endif
  InThreads(size, [&](int rank) {
    CheckCuda(cudaSetDevice(DeviceOf(rank)), "choose a device");
    std::unique_ptr<RankOnDevice>& mine = job->ranks[rank];
    if (fresh) {
      mine = std::make_unique<RankOnDevice>();
      CheckCuda(cudaStreamCreate(&mine->stream), "create a stream");
      mine->transport = std::make_unique<CopyTransport>(job->meeting, rank, size, mine->stream);
#if defined(ADASUM_WITH_NCCL)
      if (OverNccl()) {
        mine->transport = Nccl(id, rank, size, mine->stream);
      }
#endif
    }
    mine->scratch.staging.Reserve(bytes, mine->stream);
    mine->scratch.received.Reserve(2 * bytes + (1 << 20), mine->stream);
    CheckCuda(cudaStreamSynchronize(mine->stream), "prepare");
  });
  return job->ranks;
}

// Holds a stream until it is opened, or for a minute.
class Gate {
public:
  void Close(cudaStream_t stream) { CheckCuda(cudaLaunchHostFunc(stream, Wait, this), "hold a stream"); }
  // Returns whether it has been closed until now.
  bool Open() {
    std::lock_guard<std::mutex> guard(mutex_);
    open_ = true;
    opened_.notify_all();
    return !given_up_;
  }

private:
  static void Wait(void* gate) {
    Gate& self = *static_cast<Gate*>(gate);
    std::unique_lock<std::mutex> lock(self.mutex_);
    if (!self.opened_.wait_for(lock, std::chrono::seconds(60), [&] { return self.open_; })) {
      self.given_up_ = true;
    }
  }

  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
  bool given_up_ = false;
};

} // namespace adasum_hvd
