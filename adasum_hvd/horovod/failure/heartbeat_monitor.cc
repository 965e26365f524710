#include "failure/heartbeat_monitor.h"

#include <algorithm>

#include <sys/prctl.h>

namespace adasum_hvd {
namespace {

constexpr std::chrono::milliseconds kHeartbeat{200};
// Over the network: the same period on ranks with different timeouts, except for short ones.
constexpr int kHeartbeatsPerTimeout = 8;
constexpr std::chrono::seconds kLongestPeriod{1};
constexpr std::chrono::seconds kShutDownLimit{5}; // for Horovod to shut down when this rank leaves

} // namespace

HeartbeatMonitor::HeartbeatMonitor(MonitoredLoop loop, std::chrono::seconds timeout,
                                   std::chrono::seconds stall, std::chrono::seconds checkpoint,
                                   std::weak_ptr<NetworkTransport> all_ranks)
    : loop_(std::move(loop)), timeout_(timeout), stall_(stall), checkpoint_(checkpoint),
      all_ranks_(std::move(all_ranks)), thread_([this] { Run(); }) {}

HeartbeatMonitor::~HeartbeatMonitor() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  if (group_ != nullptr) {
    group_->mine->header().heartbeats.store(kHasLeft, std::memory_order_relaxed);
  }
}

void HeartbeatMonitor::MonitorHost(std::shared_ptr<LocalGroup> group) {
  std::lock_guard<std::mutex> guard(mutex_);
  host_peers_ = std::vector<Liveness>(group->peers.size());
  group_ = std::move(group);
}

void HeartbeatMonitor::PollRegularly(std::weak_ptr<NetworkTransport> network) {
  std::lock_guard<std::mutex> guard(mutex_);
  networks_.push_back(std::move(network));
}

void HeartbeatMonitor::NoteFailure(const std::string& reason) {
  std::lock_guard<std::mutex> guard(mutex_);
  failure_ = reason;
}

void HeartbeatMonitor::Run() {
  prctl(PR_SET_NAME, "adasum", 0, 0, 0); // for top -H
  const auto stopped = [this] { return stop_; };
  std::unique_lock<std::mutex> lock(mutex_);
  for (bool reported = false; !wake_.wait_for(lock, kHeartbeat, stopped);) {
    ExchangeHeartbeats();
    PollNetworks();
    const bool stuck = LoopIsStuck();
    reported = reported && stuck;
    const std::string reason = stuck && !reported ? Reason() : "";
    if (reason.empty()) {
      continue;
    }
    loop_.report(reason);
    reported = true;
    const auto end = IdleClock::Clock::now() + checkpoint_;
    while (IdleClock::Clock::now() < end && !loop_.program_ended() && LoopIsStuck() &&
           !wake_.wait_for(lock, kHeartbeat, stopped)) {
      ExchangeHeartbeats();
    }
    if (!stop_ && LoopIsStuck()) {
      loop_.end_process();
      EndWaitsOfAProgramThatEnds();
    }
  }
}

// Gloo's own limit may be much longer, and a script that still runs may wait for it.
void HeartbeatMonitor::EndWaitsOfAProgramThatEnds() {
  std::vector<std::weak_ptr<NetworkTransport>> networks = networks_;
  networks.push_back(all_ranks_);
  for (const std::weak_ptr<NetworkTransport>& one : networks) {
    if (const auto network = one.lock(); network != nullptr && loop_.program_ended()) {
      network->EndWaits();
    }
  }
}

HeartbeatMonitor::Duration HeartbeatMonitor::Liveness::Update(int64_t now) {
  if (now != count || now == kHasLeft) {
    count = now;
    clock.Reset();
  }
  return idle = clock.Elapsed();
}

void HeartbeatMonitor::ExchangeHeartbeats() {
  for (size_t rank = 0; rank < host_peers_.size(); ++rank) {
    std::atomic<uint32_t>& heartbeats = group_->header(static_cast<int>(rank)).heartbeats;
    if (static_cast<int>(rank) == group_->rank) {
      heartbeats.fetch_add(1, std::memory_order_relaxed);
    }
    host_peers_[rank].Update(heartbeats.load(std::memory_order_relaxed));
  }
  ExchangeOverNetwork();
}

// If one rank blocks Horovod's loop, it blocks the loops of all ranks: the others then send heartbeats.
void HeartbeatMonitor::ExchangeOverNetwork() {
  const Duration period = std::min<Duration>(Duration(timeout_) / kHeartbeatsPerTimeout, kLongestPeriod);
  const std::shared_ptr<NetworkTransport> all_ranks = all_ranks_.lock();
  if (all_ranks == nullptr) {
    return;
  }
  if (cycles_.Update(loop_.cycles()) < period) {
    network_peers_.clear();
    return;
  }
  const bool send = network_peers_.empty() || unsent_.Elapsed() >= period;
  const std::vector<int> counts = all_ranks->ExchangeHeartbeats(send);
  network_peers_.resize(counts.size());
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    network_peers_[rank].Update(counts[rank]);
  }
  if (send) {
    unsent_.Reset();
  }
}

void HeartbeatMonitor::PollNetworks() {
  const auto expired = [](const auto& network) { return network.expired(); };
  networks_.erase(std::remove_if(networks_.begin(), networks_.end(), expired), networks_.end());
  for (const std::weak_ptr<NetworkTransport>& one : networks_) {
    if (const std::shared_ptr<NetworkTransport> network = one.lock()) {
      network->Poll();
    }
  }
}

bool HeartbeatMonitor::LoopIsStuck() {
  operations_.Update(loop_.operations());
  return cycles_.Update(loop_.cycles()) >= (loop_.leaving() ? std::min(timeout_, kShutDownLimit) : timeout_);
}

std::string HeartbeatMonitor::Reason() {
  const std::string unresponsive = Unresponsive(timeout_);
  const Duration idle = std::min(cycles_.idle, operations_.idle);
  if (!unresponsive.empty() || !failure_.empty() || stall_.count() == 0 || idle < stall_ ||
      AllHeartbeatsArrive()) {
    return unresponsive.empty() ? failure_ : unresponsive;
  }
  return "expected Horovod to begin or end an operation within " + std::to_string(stall_.count()) +
         " s (ADASUM_HVD_STALL_SECONDS), but got none";
}

// No heartbeats arrive over the network from ranks whose MPI does not support threads.
bool HeartbeatMonitor::AllHeartbeatsArrive() const {
  const std::shared_ptr<NetworkTransport> all_ranks = all_ranks_.lock();
  const size_t ranks = all_ranks == nullptr ? host_peers_.size() : all_ranks->global_ranks().size();
  return ranks > 0 && (network_peers_.size() == ranks || host_peers_.size() == ranks);
}

std::string HeartbeatMonitor::Finish(bool agreed) {
  std::lock_guard<std::mutex> guard(mutex_);
  const std::string unresponsive = Unresponsive(Duration(timeout_) / 2); // Gloo's timeout may be shorter
  all_ranks_.reset();
  if (!agreed && failure_.empty()) {
    failure_ = "Horovod's loop has ended on this rank, and not on all";
  }
  return unresponsive;
}

// Peers on this host have precedence: their heartbeats never pause.
std::string HeartbeatMonitor::Unresponsive(Duration network_limit) const {
  const auto describe = [](const std::vector<Liveness>& peers, const std::vector<int>& global_ranks, int here,
                           Duration limit) -> std::string {
    std::vector<int> unresponsive;
    Duration longest{};
    for (size_t peer = 0; peer < peers.size(); ++peer) {
      if (static_cast<int>(peer) != here && peers[peer].idle >= limit) {
        unresponsive.push_back(global_ranks[peer]);
        longest = std::max(longest, peers[peer].idle);
      }
    }
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest).count();
    return unresponsive.empty()
               ? ""
               : RankList(unresponsive) + " did not respond for " + std::to_string(seconds) + " s (" +
                     RankList({global_ranks[here]}) + " reported it, while Horovod waited)";
  };
  std::string text =
      group_ == nullptr ? "" : describe(host_peers_, group_->global_ranks, group_->rank, timeout_);
  if (const auto all_ranks = all_ranks_.lock(); text.empty() && all_ranks != nullptr) {
    text = describe(network_peers_, all_ranks->global_ranks(), all_ranks->rank(), network_limit);
  }
  return text;
}

} // namespace adasum_hvd
