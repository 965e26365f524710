// The base of the transports over Horovod's own Gloo and MPI.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "host/hybrid.h"
#include "host/idle_clock.h"

namespace adasum_hvd {

struct NetworkSettings {
  int64_t max_message_bytes = 1 << 30; // the longest single MPI message: MPI counts are int
  std::chrono::seconds timeout{30};    // without any progress, before a wait ends in an error
  std::vector<int> global_ranks;       // by rank, as errors name them
};

// One per process set, as long as it exists. A wait without progress times out. The rank then sends an abort
// notice to all others, which abort at once; each follows the notices to the root cause. After that nothing
// may be sent.
class NetworkTransport : public Network {
public:
  explicit NetworkTransport(NetworkSettings settings) : settings_(std::move(settings)) {}

  // To be called at the beginning of a reduction, on every rank.
  virtual void BeginOperation() {}

  // Sends a notice to the other ranks; later ones are ignored. Does not block. Returns the global ranks whose
  // connections are known to be closed.
  virtual std::vector<int> Notify(const AbortNotice& notice) = 0;

  // At the end of Horovod's loop, if the ranks have not agreed on it: ends the waits of other ranks for this
  // one. Blocks for a second at most.
  virtual void Close() {}

  // Whether messages of an exchange that has failed may still arrive in its buffers.
  virtual bool may_still_receive() const { return false; }

  // The notices received so far.
  virtual const AbortNotices& Notices() = 0;

  // Ends a wait that has timed out or failed. Called on another thread, several times a second.
  virtual void Poll() {}

  // Closes the connections, which ends Horovod's own waits, too; not MPI's. Called on another thread.
  virtual void EndWaits() {}

  // Sends heartbeats to all others, if `send`, and returns by rank how many have been received; a call
  // receives at least one of each rank that has sent any. Called on one other thread, while Horovod's loop
  // waits. Empty if heartbeats cannot be sent.
  virtual std::vector<int> ExchangeHeartbeats(bool send) = 0;

  const std::vector<int>& global_ranks() const { return settings_.global_ranks; }

  // Other ranks of the host read there for which global rank this one waits, plus one. Null: nowhere.
  void ShowAwaitedIn(std::atomic<int32_t>* awaits) { awaits_ = awaits; }

protected:
  static constexpr std::chrono::milliseconds kAbortGrace{1000}; // for notices of ranks that abort, too

  void ShowAwaited(int rank) { Show(1 + settings_.global_ranks[rank]); }
  void ShowNoneAwaited() { Show(0); }
  int here() const { return settings_.global_ranks[rank()]; }
  std::string TimedOut() const { return DidNotRespond(settings_.timeout.count()); }

  const NetworkSettings settings_;

private:
  void Show(int32_t value) {
    if (awaits_ != nullptr) {
      awaits_->store(value, std::memory_order_relaxed);
    }
  }

  std::atomic<int32_t>* awaits_ = nullptr;
};

} // namespace adasum_hvd
