// Exchanges between devices over NCCL, enqueued on a stream.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <nccl.h>

#include "host/transport.h"

namespace adasum_hvd {

// All ranks of one communicator, which it does not own. Buffers are device memory. An exchange is enqueued on
// the stream, and later work on the stream runs after it, so Wait does nothing.
class NcclTransport : public Transport {
public:
  NcclTransport(ncclComm_t communicator, int rank, int size, cudaStream_t stream)
      : communicator_(communicator), rank_(rank), size_(size), stream_(stream) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void Wait() override {}

  // The group is ended also after an error: an open group would delay every later call of NCCL on this
  // thread, including Horovod's.
  void Start(const std::vector<Message>& messages) override {
    ncclResult_t first = ncclGroupStart();
    auto note = [&](ncclResult_t result) { first = first == ncclSuccess ? result : first; };
    const bool started = first == ncclSuccess;
    for (int distance = 1; first == ncclSuccess && distance < size_; ++distance) {
      const int to = (rank_ + distance) % size_, from = (rank_ + size_ - distance) % size_;
      if (messages[to].send_bytes > 0) {
        note(ncclSend(messages[to].send, static_cast<size_t>(messages[to].send_bytes), ncclInt8, to,
                      communicator_, stream_));
      }
      if (messages[from].receive_bytes > 0) {
        note(ncclRecv(messages[from].receive, static_cast<size_t>(messages[from].receive_bytes), ncclInt8,
                      from, communicator_, stream_));
      }
    }
    if (started) {
      note(ncclGroupEnd());
    }
    if (first != ncclSuccess) {
      throw std::runtime_error(std::string("AdaSum: NCCL could not exchange: ") + ncclGetErrorString(first));
    }
  }

private:
  ncclComm_t communicator_;
  int rank_;
  int size_;
  cudaStream_t stream_;
};

} // namespace adasum_hvd
