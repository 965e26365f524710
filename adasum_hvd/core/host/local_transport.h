// Messages between the ranks of one host, through shared memory and without sockets.
//
// Every ordered pair of ranks has a ring of bytes, which transfers messages in pieces: two copies by two
// ranks that run at the same time, both in the cache if the ring fits there. If the ranks map one another's
// memory (LocalMode::kAuto), tensors are not sent in messages.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/abort_notice.h"
#include "host/bootstrap.h"
#include "host/idle_clock.h"
#include "host/transport.h"

namespace adasum_hvd {

// As LocalTransport::ShareOfProcessors, without shared memory: ranks share processors if they may use the
// same set. `host` has the ranks of this host, in the numbers of the process set. Collective over that set.
double ShareOfProcessors(const std::vector<int>& host, const AllgatherTwo& allgather);

class LocalTransport : public Transport {
public:
  explicit LocalTransport(std::shared_ptr<LocalGroup> group);

  int rank() const override { return group_->rank; }
  int size() const override { return static_cast<int>(group_->peers.size()); }
  const std::shared_ptr<LocalGroup>& group() const { return group_; }
  int global_rank() const { return group_->global_ranks[group_->rank]; }

  // This rank's number of processors; processors that several ranks may use, and quotas, are divided among
  // them.
  double ShareOfProcessors() const;

  // Counts a reduction; to be called on every rank, also before one that is refused. Messages have this
  // number, so that ranks in different reductions detect it.
  void BeginOperation() { ++operation_; }

  // Ends the transport after an error: the peers are notified at once, every later call throws.
  void Abort(const RootCause& cause);

  void Start(const std::vector<Message>& messages) override;

  // Throws UnresponsiveRank if a peer has aborted or ended, or if nothing has moved for
  // LocalSettings::timeout_seconds; every later call throws the same.
  void Wait() override { WaitAnd(nullptr); }

  // The same, and calls `meanwhile`, if not null, at least every few milliseconds.
  void WaitAnd(const std::function<void()>& meanwhile);

  bool shares_memory() const override { return group_->shares; }
  void Offer(int peer, const std::shared_ptr<const SharedRegion>& region) override;
  MemorySpan Reach(int peer, int64_t offset, int64_t bytes) override;
  void StopSharing(const std::string& why) override;
  const std::string& why_not_shared() const { return why_not_shared_; } // set by StopSharing

private:
  // Precedes every message.
  struct Tag {
    uint64_t operation;
    uint64_t bytes;
  };
  // The rest of a message in one direction.
  struct Part {
    char* at;
    int64_t left;
    uint64_t exchange;
    uint64_t operation;
    bool tagged; // the tag has been sent or received
  };
  struct Lane {
    std::deque<Part> outgoing;
    std::deque<Part> incoming;
  };

  bool Send(int peer);
  static bool SendTag(Ring& ring, Part& part);
  bool Receive(int peer);
  bool ReceiveTag(int peer, Ring& ring, Part& part);
  void Finish(uint64_t exchange) { --open_parts_[exchange - first_open_]; }
  bool AdvanceAll();
  void Moved();
  void SpreadOverProcessors();
  void Sleep(std::chrono::milliseconds most);

  // Handling of failures, in local_peers.cc.
  void CheckPeers();
  void CheckAborted(int peer);
  bool HasEnded(int peer) const;
  bool IsAwaited(int peer) const;
  std::vector<int> AwaitedBy(int peer) const; // global ranks
  void ShowAwaited(bool waits);
  [[noreturn]] void FailForTimeout();
  [[noreturn]] void Fail(int peer, const std::string& problem); // a predicate
  [[noreturn]] void Fail(const RootCause& cause);

  std::shared_ptr<LocalGroup> group_;
  std::vector<Lane> lanes_;
  std::vector<PeerMemory> memory_;   // by rank
  std::vector<uint32_t> heartbeats_; // per rank, when this one first showed whom it awaits
  int spins_;
  std::deque<int> open_parts_; // per exchange that was started and has not completed
  uint64_t first_open_ = 0;
  uint64_t operation_ = 0;
  IdleClock idle_;
  IdleClock::Clock::duration next_check_{}; // of the peers, when idle for so long
  bool shown_ = false;                      // for which ranks this one waits
  std::string why_not_shared_;
  std::optional<RootCause> aborted_;
};

} // namespace adasum_hvd
