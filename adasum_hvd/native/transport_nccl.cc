#include "transport_nccl.h"

#include <stdexcept>
#include <string>

namespace adasum_hvd {
namespace {

void Check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) {
    throw std::runtime_error(std::string("AdaSum: NCCL could not ") + what + ": " +
                             ncclGetErrorString(result));
  }
}

} // namespace

void NcclTransport::Start(const std::vector<Message>& messages) {
  Check(ncclGroupStart(), "start an exchange");
  for (int distance = 1; distance < size_; ++distance) {
    const int to = (rank_ + distance) % size_, from = (rank_ + size_ - distance) % size_;
    if (messages[to].send_bytes > 0) {
      Check(ncclSend(messages[to].send, static_cast<size_t>(messages[to].send_bytes), ncclInt8, to,
                     communicator_, stream_),
            "send");
    }
    if (messages[from].receive_bytes > 0) {
      Check(ncclRecv(messages[from].receive, static_cast<size_t>(messages[from].receive_bytes), ncclInt8,
                     from, communicator_, stream_),
            "receive");
    }
  }
  Check(ncclGroupEnd(), "exchange");
}

} // namespace adasum_hvd
