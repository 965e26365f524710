// Monitors whether Horovod's loop and the processes of all ranks run, on a thread of its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "host/bootstrap.h"
#include "host/idle_clock.h"
#include "network/network.h"

namespace adasum_hvd {

// Horovod's loop, in which one thread negotiates and executes all operations.
struct MonitoredLoop {
  std::function<int64_t()> cycles;     // changes with every cycle
  std::function<int64_t()> operations; // changes with every operation; a cycle may have many
  std::function<bool()> leaving;       // whether this rank is about to shut down
  std::function<bool()> program_ended; // whether the script has asked for that, and has nothing left to save
  std::function<void(const std::string& reason)> report;
  std::function<void()> end_process; // returns if waits end without it
};

// Exchanges heartbeats with the other ranks: on a host always, in shared memory; over the
// network only while Horovod's loop waits. Horovod's own waits over MPI have no timeout. So the monitor ends
// the process if the loop has completed no cycle for the timeout (a few seconds if this rank is leaving), and
// there is a reason: a reduction has failed, or a rank is unresponsive. It reports the reason at once; the
// script then has `checkpoint` to save its state, or less if it ends before.
class HeartbeatMonitor {
public:
  // `stall` limits an operation if heartbeats cannot be sent; 0 is no limit. While all heartbeats arrive, an
  // operation may take any time. `all_ranks` connects the ranks of the job.
  HeartbeatMonitor(MonitoredLoop loop, std::chrono::seconds timeout, std::chrono::seconds stall,
                   std::chrono::seconds checkpoint, std::weak_ptr<NetworkTransport> all_ranks = {});
  ~HeartbeatMonitor();
  HeartbeatMonitor(const HeartbeatMonitor&) = delete;
  HeartbeatMonitor& operator=(const HeartbeatMonitor&) = delete;

  void MonitorHost(std::shared_ptr<LocalGroup> group);         // on all ranks of the host
  void PollRegularly(std::weak_ptr<NetworkTransport> network); // calls its Poll
  void NoteFailure(const std::string& reason);

  // For the end of Horovod's loop: returns the unresponsive ranks as a sentence, or "", and sends no more
  // heartbeats over the network. If the ranks have not `agreed` on the end, the rest of Horovod's shutdown
  // may wait for other ranks without a timeout, so the monitor goes on with this as the reason.
  std::string Finish(bool agreed);

private:
  using Duration = IdleClock::Clock::duration;

  // Of a peer's heartbeats, or of the loop's cycles: how long the counter has not changed.
  struct Liveness {
    int64_t count = 0;
    IdleClock clock;
    Duration idle{};

    Duration Update(int64_t now);
  };

  void Run();
  void ExchangeHeartbeats();
  void ExchangeOverNetwork();
  void PollNetworks();
  void EndWaitsOfAProgramThatEnds();
  bool LoopIsStuck();
  std::string Reason();
  std::string Unresponsive(Duration network_limit) const;
  bool AllHeartbeatsArrive() const;

  const MonitoredLoop loop_;
  const std::chrono::seconds timeout_;
  const std::chrono::seconds stall_;
  const std::chrono::seconds checkpoint_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::shared_ptr<LocalGroup> group_;
  std::vector<Liveness> host_peers_; // by rank on the host
  std::weak_ptr<NetworkTransport> all_ranks_;
  std::vector<Liveness> network_peers_; // by rank; empty while the loop runs
  IdleClock unsent_;                    // since the last heartbeat over the network
  std::string failure_;
  std::vector<std::weak_ptr<NetworkTransport>> networks_;
  Liveness cycles_, operations_;
  std::thread thread_;
};

} // namespace adasum_hvd
