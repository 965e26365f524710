// Connects the ranks of a host over unix sockets, and exchanges the descriptors of their shared memory.
//
// The kernel limits the number of a user's descriptors in unread messages to the number that one process may
// have open. So each rank calls only a few others at a time, reads messages before it sends more, and repeats
// later what the kernel refuses. No rank blocks another.
#pragma once

#include <array>
#include <chrono>
#include <utility>
#include <vector>

#include "host/bootstrap.h"
#include "host/descriptors.h"

namespace adasum_hvd {

constexpr int kNoName = -1;

// Listens on a free name, which is sent to the other ranks.
Descriptor Listen(int backlog, int& name);

class Handshake {
public:
  // `names` and `nonces` have one element per rank of the host.
  Handshake(LocalGroup& group, int listening, const std::vector<int>& names, const std::vector<int>& nonces);

  // Fills the group's peers; throws std::exception if not all have connected in time.
  void Run();

private:
  using Attached = std::array<Descriptor, kAttached>;
  struct Call {
    Call(int whom, Descriptor connected) : peer(whom), socket(std::move(connected)) {}

    int peer; // -1: not identified yet
    Descriptor socket;
    bool sent = false;     // this rank's own hello
    bool received = false; // the peer's
    Attached attached;     // to the peer's hello
  };

  void CallMore();
  void WaitForMore();
  void Accept();
  bool AdvanceAll();
  bool IsOver(Call& call);
  bool SendHello(Call& call);
  bool ReceiveHello(Call& call);
  void Keep(Call& call);
  void DropUnidentifiedCaller();

  LocalGroup& group_;
  const int listening_;
  const std::vector<int>& names_;
  const std::vector<int>& nonces_;
  const std::chrono::steady_clock::time_point until_;
  std::vector<int> to_call_; // the next one is the last
  int left_;                 // peers not connected yet
  int outgoing_ = 0;         // calls of this rank that have not completed
  bool refused_ = false;     // temporarily, by the kernel or a peer
  std::vector<Call> calls_;
};

} // namespace adasum_hvd
