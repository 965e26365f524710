#include "transport_mpi.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace adasum_hvd {
namespace {

constexpr int kTag = 0xada;

void Check(int result, const char* what) {
  if (result != MPI_SUCCESS) {
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(result, text, &length);
    throw std::runtime_error(std::string("AdaSum: ") + what + " failed: " + std::string(text, length));
  }
}

} // namespace

MpiTransport::MpiTransport(MPI_Comm communicator, int64_t max_message_bytes)
    : communicator_(communicator), max_message_bytes_(max_message_bytes) {
  Check(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
  Check(MPI_Comm_size(communicator_, &size_), "MPI_Comm_size");
}

void MpiTransport::Start(const std::vector<Message>& messages) {
  // One tag is enough: MPI keeps messages between two ranks in order, and both cut at the same places.
  std::vector<MPI_Request> requests;
  auto for_each_part = [this](int64_t bytes, auto start) {
    for (int64_t offset = 0; offset < bytes; offset += max_message_bytes_) {
      start(offset, static_cast<int>(std::min(max_message_bytes_, bytes - offset)));
    }
  };
  for (int step = 1; step < size_; ++step) {
    const int to = (rank_ + step) % size_;
    const int from = (rank_ + size_ - step) % size_;
    for_each_part(messages[from].receive_bytes, [&](int64_t offset, int count) {
      requests.push_back(MPI_REQUEST_NULL);
      Check(MPI_Irecv(static_cast<char*>(messages[from].receive) + offset, count, MPI_BYTE, from, kTag,
                      communicator_, &requests.back()),
            "MPI_Irecv");
    });
    for_each_part(messages[to].send_bytes, [&](int64_t offset, int count) {
      requests.push_back(MPI_REQUEST_NULL);
      Check(MPI_Isend(static_cast<const char*>(messages[to].send) + offset, count, MPI_BYTE, to, kTag,
                      communicator_, &requests.back()),
            "MPI_Isend");
    });
  }
  started_.push_back(std::move(requests));
}

void MpiTransport::Wait() {
  std::vector<MPI_Request> oldest = std::move(started_.front());
  started_.pop_front();
  Check(MPI_Waitall(static_cast<int>(oldest.size()), oldest.data(), MPI_STATUSES_IGNORE), "MPI_Waitall");
}

} // namespace adasum_hvd
