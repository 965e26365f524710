#pragma once

#include <deque>

#include "transport/network.h"

#define OMPI_SKIP_MPICXX
#include <mpi.h>

namespace adasum_hvd {

// Point-to-point messages over an MPI communicator. MPI itself waits for a silent rank for ever.
class MpiTransport : public NetworkTransport {
public:
  MpiTransport(MPI_Comm communicator, NetworkSettings settings);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void Start(const std::vector<Message>& messages) override;

  // Throws SilentRank.
  void Wait() override;

  std::vector<int> Tell(const LastWords& words) override;
  void GiveUp(const LastWords& words) override {
    Tell(words);
    Cancel();
  }
  const Heard& Listen() override;
  void Progress() override;
  std::vector<int> ExchangeBeats(bool say) override;
  bool may_still_receive() const override { return may_still_receive_; }

private:
  // What was started together: requests, and the rank at the other end of each.
  struct Exchange {
    std::vector<MPI_Request> requests;
    std::vector<int> peers;

    MPI_Request* Add(int peer);
    std::vector<int> Pending() const; // peers
  };

  void WaitPatiently(Exchange& exchange);
  [[noreturn]] void Fail();
  void Cancel();

  MPI_Comm communicator_;
  int rank_;
  int size_;
  std::deque<Exchange> started_;
  Heard heard_;
  bool told_ = false;
  bool may_still_receive_ = false;
  std::vector<int> beats_; // received, per peer
};

} // namespace adasum_hvd
