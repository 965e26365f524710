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
  std::function<int64_t()> turns;      // another value after every turn
  std::function<int64_t()> operations; // another value with every operation, of which a turn may have many
  std::function<bool()> leaving;       // whether this rank wants to shut down
  std::function<void(const std::string& why)> say;
  std::function<void()> end; // the process
};

// A thread that shows the other ranks that this process runs, and looks whether theirs do, and after waits
// over the network. On a host they see it in shared memory, at any time; over the network they say so while
// Horovod's loop waits. Ends the process when the loop has not turned for the timeout, or for some seconds
// where this rank is to shut down, and there is a reason: a reduction has failed, or a rank does not run. It
// reports the reason at once; until the end the script has `checkpoint` to save what it has.
class Watch {
public:
  // `stall` ends what has no other end, where heartbeats cannot be sent; 0 does not. While all heartbeats
  // arrive, an operation may take as long as it does.
  Watch(WatchedLoop loop, std::chrono::seconds timeout, std::chrono::seconds stall,
        std::chrono::seconds checkpoint);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // The ranks of the host, which must all include one another, until the end.
  void Include(std::shared_ptr<LocalGroup> group);
  // All ranks of the job, which must do so too, before any can wait.
  void ListenTo(std::weak_ptr<NetworkTransport> everyone);

  void NoteFailure(const std::string& why);

  // The loop has ended: which ranks do not run, and for how long; or empty. Nothing is sent any more. If the
  // ranks have not `agreed` on it, what Horovod still does may wait for the others without an end.
  std::string Conclude(bool agreed);

  void Oversee(std::weak_ptr<NetworkTransport> network); // calls its Look

private:
  using Duration = IdleClock::Clock::duration;

  // Of a rank, as this one sees it.
  struct Heart {
    uint32_t beats = 0;
    IdleClock still;
    Duration silent{};

    void See(uint32_t now);
  };
  struct Count {
    int64_t value = 0;
    IdleClock still;

    Duration SinceOther(int64_t now); // that the value was another than now
  };

  void Run();
  void Beat();
  void BeatOverNetwork();
  void Look();
  std::string Reason();
  std::string SilentHeart(Duration far_away) const;
  std::string SilentNeighbour() const;
  bool LoopIsStuck();
  bool HearsAll() const;

  const WatchedLoop loop_;
  const std::chrono::seconds timeout_;
  const std::chrono::seconds stall_;
  const std::chrono::seconds checkpoint_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::shared_ptr<LocalGroup> group_;
  std::vector<Heart> hearts_; // by rank on the host
  std::weak_ptr<NetworkTransport> everyone_;
  std::vector<Heart> far_hearts_; // by rank, while the loop waits
  IdleClock unsaid_;              // since this rank said that it runs
  std::string failure_;
  std::vector<std::weak_ptr<NetworkTransport>> networks_;
  Count turns_, operations_;
  std::thread thread_;
};

} // namespace adasum_hvd
