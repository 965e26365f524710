// Messages between the ranks of one host, through shared memory and without sockets.
//
// Every ordered pair of ranks has a ring of bytes, through which messages go in pieces: two copies, both in
// the cache as long as a ring fits there, by two ranks that run at the same time. Tensors take no messages
// where the ranks map one another's memory (LocalMode::kAuto).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "transport/idle_clock.h"
#include "transport/local/bootstrap.h"
#include "transport/local/peer_memory.h"
#include "transport/transport.h"

namespace adasum_hvd {

class LocalTransport : public Transport {
public:
  explicit LocalTransport(std::shared_ptr<LocalGroup> group);

  int rank() const override { return group_->rank; }
  int size() const override { return static_cast<int>(group_->peers.size()); }
  const std::shared_ptr<LocalGroup>& group() const { return group_; }

  // How many processors are this rank's, where those that several ranks may use are divided among them, and
  // so is a quota.
  double ShareOfProcessors() const;

  // Counts a reduction, on every rank also where one is refused: messages carry the number, so that ranks
  // which do not agree on where they are find out.
  void BeginOperation() { ++operation_; }

  // Ends the transport after an error, for which a global rank is to blame, which may be this one: its peers
  // learn of it at once, every later call throws.
  void Break(int blamed, const std::string& why);

  void Start(const std::vector<Message>& messages) override;

  // Throws SilentRank when a peer has ended, or nothing has moved for LocalSettings::timeout_seconds; every
  // later call throws the same. Of ranks that wait for one another it names the one that waits for nobody.
  void Wait() override { WaitAnd(nullptr); }

  // The same, and calls `meanwhile` at least every few milliseconds, where it is not null.
  void WaitAnd(const std::function<void()>& meanwhile);

  bool shares_memory() const override { return group_->shares; }
  void Offer(int peer, const std::shared_ptr<const SharedRegion>& region) override;
  MemorySpan Reach(int peer, int64_t offset, int64_t bytes) override;
  void StopSharing(const std::string& why) override;
  const std::string& why_not_shared() const { return why_not_shared_; } // since StopSharing

private:
  // In front of every message.
  struct Tag {
    uint64_t operation;
    uint64_t bytes;
  };
  // What is left of a message in one direction.
  struct Part {
    char* at;
    int64_t left;
    uint64_t exchange;
    uint64_t operation;
    bool tagged; // the tag has been sent, or was received
  };
  struct Lane {
    std::deque<Part> outgoing;
    std::deque<Part> incoming;
  };

  bool Advance(int peer);
  bool Send(int peer);
  static bool SendTag(Ring& ring, Part& part);
  bool Receive(int peer);
  bool ReceiveTag(int peer, Ring& ring, Part& part);
  void Finish(uint64_t exchange) { --open_parts_[exchange - first_open_]; }
  bool AdvanceAll();
  void Moved();
  void KeepApart();
  void Sleep(std::chrono::milliseconds most);
  void CheckPeers();
  void CheckStopped(int peer);
  bool HasEnded(int peer) const;
  bool IsDue(int peer) const;
  void ShowWhomIAwait(bool show);
  [[noreturn]] void FailForSilence();
  [[noreturn]] void Fail(int peer, const std::string& what);
  [[noreturn]] void FailForRank(int global_rank, const std::string& what);
  void Stop(const SilentRank& error, const std::string& reason);

  std::shared_ptr<LocalGroup> group_;
  std::vector<Lane> lanes_;
  std::vector<PeerMemory> memory_; // by rank
  std::vector<uint32_t> beats_;    // per rank, when this one first showed whom it awaits
  int spins_;
  std::deque<int> open_parts_; // per exchange that was started and not yet waited for
  uint64_t first_open_ = 0;
  uint64_t operation_ = 0;
  IdleClock idle_;
  IdleClock::Clock::duration next_look_{}; // at whether the peers live, when idle for so long
  bool shown_ = false;                     // whom this rank awaits
  std::string why_not_shared_;
  std::string broken_;
  int blamed_ = 0; // global rank
};

} // namespace adasum_hvd
