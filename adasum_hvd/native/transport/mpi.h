#pragma once

#include <atomic>
#include <deque>
#include <map>

#include "transport/idle_clock.h"
#include "transport/transport.h"

#define OMPI_SKIP_MPICXX
#include <mpi.h>

namespace adasum_hvd {

struct MpiSettings {
  int64_t max_message_bytes = 1 << 30; // the longest single message: MPI counts are int
  std::chrono::seconds timeout{60};    // without any progress, before a wait ends in an error
  std::vector<int> global_ranks;       // by rank of the communicator, as errors name them
  // Where other ranks of the host read which global rank this one waits for, plus one; or null.
  std::atomic<int32_t>* awaits = nullptr;
};

// Point-to-point messages over an MPI communicator.
//
// MPI itself waits for a silent rank for ever. Here a wait without progress ends, and the rank that gives up
// tells all others for whom it waited: they give up at once, and each follows these words to a rank that has
// said nothing. After that nothing may use the communicator for reductions.
class MpiTransport : public Transport {
public:
  MpiTransport(MPI_Comm communicator, MpiSettings settings);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void Start(const std::vector<Message>& messages) override;

  // Throws SilentRank.
  void Wait() override;

  void GiveUp(int blamed) override;

private:
  // What was started together: requests, and the rank at the other end of each.
  struct Exchange {
    std::vector<MPI_Request> requests;
    std::vector<int> peers;

    MPI_Request* Add(int peer);
    std::vector<int> Pending() const; // peers
  };

  void WaitPatiently(Exchange& exchange);
  bool HearOthersGiveUp();
  void Tell(const std::vector<int>& global_ranks);
  [[noreturn]] void Fail();
  void Cancel();

  MPI_Comm communicator_;
  MpiSettings settings_;
  int rank_;
  int size_;
  std::deque<Exchange> started_;
  std::map<int, std::vector<int>> gave_up_; // by global rank: whom those that gave up waited for
};

} // namespace adasum_hvd
