#include "network/nccl.h"

#include <stdexcept>
#include <string>

namespace adasum_hvd {

// The group is ended also after an error: an open group would delay every later call of NCCL on this thread,
// including Horovod's.
void NcclTransport::Start(const std::vector<Message>& messages) {
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
      note(ncclRecv(messages[from].receive, static_cast<size_t>(messages[from].receive_bytes), ncclInt8, from,
                    communicator_, stream_));
    }
  }
  if (started) {
    note(ncclGroupEnd());
  }
  if (first != ncclSuccess) {
    throw std::runtime_error(std::string("AdaSum: NCCL could not exchange: ") + ncclGetErrorString(first));
  }
}

} // namespace adasum_hvd
