#pragma once

#include <deque>

#include "network/network.h"

#define OMPI_SKIP_MPICXX
#include <mpi.h>

namespace adasum_hvd {

// Point-to-point messages over an MPI communicator. MPI's own waits have no timeout.
class MpiTransport : public NetworkTransport {
public:
  MpiTransport(MPI_Comm communicator, NetworkSettings settings);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void Start(const std::vector<Message>& messages) override;

  // Throws UnresponsiveRank.
  void Wait() override;

  std::vector<int> Notify(const AbortNotice& notice) override;
  void Abort(const AbortNotice& notice) override {
    Notify(notice);
    Cancel();
  }
  const AbortNotices& Notices() override;
  void Progress() override;
  std::vector<int> ExchangeHeartbeats(bool send) override;
  bool may_still_receive() const override { return may_still_receive_; }

private:
  // The requests of one Start, and the peer of each.
  struct Exchange {
    std::vector<MPI_Request> requests;
    std::vector<int> peers;

    MPI_Request* Add(int peer);
    std::vector<int> Pending() const; // peers
  };

  void SendToOthers(const void* bytes, int count, int tag);
  [[noreturn]] void Fail();
  void Cancel();

  MPI_Comm communicator_;
  int rank_;
  int size_;
  std::deque<Exchange> started_;
  AbortNotices notices_;
  bool notified_ = false; // the other ranks
  bool may_still_receive_ = false;
  std::vector<int> heartbeats_; // received, per peer
};

} // namespace adasum_hvd
