// Ends this process where nothing else can: Horovod's own waits over MPI have no end.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/idle_clock.h"
#include "transport/local/bootstrap.h"
#include "transport/network.h"

namespace adasum_hvd {

// What a Watch sees and does of the loop that handles everything in Horovod.
struct WatchedLoop {
  std::function<int64_t()> turns; // another value after every turn
  std::function<bool()> leaving;  // whether this rank wants to shut down
  std::function<void(const std::string& why)> say;
  std::function<void()> end; // the process
};

// A thread that shows the other ranks of the host that this process runs, and looks whether theirs do, and
// after waits over the network. Ends
// the process when the loop has not turned for the timeout, or for some seconds where this rank is to shut
// down, and there is a reason: a reduction has failed, or a rank of the host does not run.
class Watch {
public:
  // `stall` ends what has no other end, for whatever reason; 0 does not.
  Watch(WatchedLoop loop, std::chrono::seconds timeout, std::chrono::seconds stall);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // The ranks of the host, which must all include one another, until the end.
  void Include(std::shared_ptr<LocalGroup> group);
  void NoteFailure(const std::string& why);
  std::string RankThatDoesNotRun();                      // on this host, and for how long; or empty
  void Oversee(std::weak_ptr<NetworkTransport> network); // calls its Look

private:
  // Of a rank, as this one sees it.
  struct Heart {
    uint32_t beats = 0;
    IdleClock still;
    IdleClock::Clock::duration silent{};
  };

  void Run();
  void Beat();
  void Look();
  std::string Reason();
  std::string SilentHeart() const;
  bool LoopIsStuck();

  const WatchedLoop loop_;
  const std::chrono::seconds timeout_;
  const std::chrono::seconds stall_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::shared_ptr<LocalGroup> group_;
  std::vector<Heart> hearts_; // by rank on the host
  std::string failure_;
  std::vector<std::weak_ptr<NetworkTransport>> networks_;
  int64_t turns_ = 0;
  IdleClock without_turn_;
  std::thread thread_;
};

} // namespace adasum_hvd
