#pragma once

#include <deque>

#include "transport.h"

#define OMPI_SKIP_MPICXX
#include "mpi.h"

namespace adasum_hvd {

// Point-to-point messages over an MPI communicator, cut so that no count exceeds `max_message_bytes`
// (MPI counts are int).
class MpiTransport : public Transport {
public:
  MpiTransport(MPI_Comm communicator, int64_t max_message_bytes);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void Start(const std::vector<Message>& messages) override;
  void Wait() override;

private:
  MPI_Comm communicator_;
  int64_t max_message_bytes_;
  int rank_;
  int size_;
  std::deque<std::vector<MPI_Request>> started_;
};

} // namespace adasum_hvd
