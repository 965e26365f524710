// Connects the ranks of a host over unix sockets, and exchanges the descriptors of their shared memory.
//
// The kernel limits how many descriptors of a user are on their way at a time: to as many as one process may
// have open. Hence each rank calls only a few others at a time, reads what comes before it sends more, and
// sends again later what the kernel refuses. No rank blocks another.
#pragma once

#include <array>
#include <chrono>
#include <utility>
#include <vector>

#include "transport/descriptors.h"
#include "transport/local/bootstrap.h"

namespace adasum_hvd {

constexpr int kNoName = -1;

// Listens at a free name, which the others need.
Descriptor Listen(int backlog, int& name);

class Handshake {
public:
  // Of the rank `group.rank`; names and nonces are those of all ranks of the host.
  Handshake(LocalGroup& group, int listening, const std::vector<int>& names, const std::vector<int>& nonces);

  // Fills the group's peers; throws std::exception when they have not all come in time.
  void Run();

private:
  using Attached = std::array<Descriptor, kAttached>;
  struct Call {
    Call(int whom, Descriptor connected) : peer(whom), socket(std::move(connected)) {}

    int peer; // -1: has yet to say so
    Descriptor socket;
    bool sent = false;     // this rank's own hello
    bool received = false; // the peer's
    Attached attached;     // to it
  };

  void CallMore();
  void WaitForMore();
  void Accept();
  bool AdvanceAll();
  bool IsOver(Call& call);
  bool SendHello(Call& call);
  bool ReceiveHello(Call& call);
  void Keep(Call& call);
  void DropSilentCaller();

  LocalGroup& group_;
  const int listening_;
  const std::vector<int>& names_;
  const std::vector<int>& nonces_;
  const std::chrono::steady_clock::time_point until_;
  int next_;             // peer to call, downwards
  int left_;             // peers
  int under_way_ = 0;    // calls of this rank
  bool refused_ = false; // for now, by the kernel
  std::vector<Call> calls_;
};

} // namespace adasum_hvd
