// What the transports over Horovod's own Gloo and MPI have in common.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "transport/idle_clock.h"
#include "transport/last_words.h"
#include "transport/transport.h"

namespace adasum_hvd {

struct NetworkSettings {
  int64_t max_message_bytes = 1 << 30; // the longest single MPI message: MPI counts are int
  std::chrono::seconds timeout{30};    // without any progress, before a wait ends in an error
  std::vector<int> global_ranks;       // by rank, as errors name them
};

// One per process set, as long as it exists. A wait without progress ends, and the rank that gives up tells
// all others for whom it waited: they give up at once, and each follows these words to the one to blame.
// After that nothing may be sent.
class NetworkTransport : public Transport {
public:
  explicit NetworkTransport(NetworkSettings settings) : settings_(std::move(settings)) {}

  // At the beginning of a reduction, on every rank.
  virtual void BeginOperation() {}

  // Tells the others something; the first words count. Does not block. Returns the global ranks that cannot
  // be reached any more, as far as that is known.
  virtual std::vector<int> Tell(const LastWords& words) = 0;

  // Tells the others that this rank takes part no more. Blocks for a second at most.
  virtual void GiveUp(const LastWords& words) = 0;

  // At the end of Horovod's loop, where the others have not agreed to it: lets go of those that wait for this
  // rank. Blocks for a second at most.
  virtual void Close() {}

  // Whether messages of an exchange that has failed may still arrive in its buffers.
  virtual bool may_still_receive() const { return false; }

  // What the others have said of why they take part no more.
  virtual const Heard& Listen() = 0;

  // Moves what is under way. Does not block.
  virtual void Progress() {}

  // On another thread, several times a second, while a reduction may wait.
  virtual void Look() {}

  // Says to all others that this process runs, and returns how many times each rank has said so, as far as
  // this one has looked: one time of each a call. On one other thread, while Horovod's loop waits.
  virtual std::vector<int> ExchangeBeats(bool say) = 0;

  const std::vector<int>& global_ranks() const { return settings_.global_ranks; }

  // Where other ranks of the host read which global rank this one waits for, plus one; or null.
  void ShowAwaitedIn(std::atomic<int32_t>* awaits) { awaits_ = awaits; }

protected:
  static constexpr std::chrono::milliseconds kToHear{1000}; // others who give up at about the same time

  void ShowAwaited(int rank) { Show(1 + settings_.global_ranks[rank]); }
  void ShowNoneAwaited() { Show(0); }
  int here() const { return settings_.global_ranks[rank()]; }
  std::string Silence() const {
    return "nothing came from it for " + std::to_string(settings_.timeout.count()) +
           " s (ADASUM_HVD_TIMEOUT_SECONDS); see what it does";
  }

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
