// Exchanges between devices over NCCL, enqueued on a stream.
#pragma once

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
  void Start(const std::vector<Message>& messages) override;
  void Wait() override {}

private:
  ncclComm_t communicator_;
  int rank_;
  int size_;
  cudaStream_t stream_;
};

} // namespace adasum_hvd
