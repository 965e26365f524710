#include "transport/local/watch.h"

#include <algorithm>

#include <sys/prctl.h>

namespace adasum_hvd {
namespace {

constexpr std::chrono::milliseconds kBeat{200};
// Over the network: the same on ranks whose timeouts differ, but for short ones.
constexpr int kBeatsPerTimeout = 8;
constexpr std::chrono::seconds kLongestPeriod{1};
constexpr std::chrono::seconds kToShutDown{5}; // what Horovod may take when a rank leaves

} // namespace

Watch::Watch(WatchedLoop loop, std::chrono::seconds timeout, std::chrono::seconds stall,
             std::chrono::seconds checkpoint)
    : loop_(std::move(loop)), timeout_(timeout), stall_(stall), checkpoint_(checkpoint),
      thread_([this] { Run(); }) {}

Watch::~Watch() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  if (group_ != nullptr) {
    group_->mine->header().beats.store(kHasLeft, std::memory_order_relaxed);
  }
}

void Watch::Include(std::shared_ptr<LocalGroup> group) {
  std::lock_guard<std::mutex> guard(mutex_);
  hearts_ = std::vector<Heart>(group->peers.size());
  group_ = std::move(group);
}

void Watch::ListenTo(std::weak_ptr<NetworkTransport> everyone) {
  std::lock_guard<std::mutex> guard(mutex_);
  everyone_ = std::move(everyone);
}

void Watch::Oversee(std::weak_ptr<NetworkTransport> network) {
  std::lock_guard<std::mutex> guard(mutex_);
  networks_.push_back(std::move(network));
}

void Watch::NoteFailure(const std::string& why) {
  std::lock_guard<std::mutex> guard(mutex_);
  failure_ = why;
}

void Watch::Run() {
  prctl(PR_SET_NAME, "adasum", 0, 0, 0); // for top -H
  const auto stopped = [this] { return stop_; };
  std::unique_lock<std::mutex> lock(mutex_);
  for (bool said = false; !wake_.wait_for(lock, kBeat, stopped);) {
    Beat();
    BeatOverNetwork();
    Look();
    const bool stuck = LoopIsStuck();
    said = said && stuck;
    const std::string reason = stuck && !said ? Reason() : "";
    if (reason.empty()) {
      continue;
    }
    loop_.say(reason);
    said = true;
    const auto end = IdleClock::Clock::now() + checkpoint_;
    while (IdleClock::Clock::now() < end && LoopIsStuck() && !wake_.wait_for(lock, kBeat, stopped)) {
      Beat();
      BeatOverNetwork();
    }
    if (!stop_ && LoopIsStuck()) {
      loop_.end();
    }
  }
}

void Watch::Heart::See(uint32_t now) {
  if (now != beats || now == kHasLeft) {
    beats = now;
    still.Moved();
  }
  silent = still.Elapsed();
}

void Watch::Beat() {
  for (size_t rank = 0; rank < hearts_.size(); ++rank) {
    std::atomic<uint32_t>& beats = group_->header(static_cast<int>(rank)).beats;
    if (static_cast<int>(rank) == group_->rank) {
      beats.fetch_add(1, std::memory_order_relaxed);
    }
    hearts_[rank].See(beats.load(std::memory_order_relaxed));
  }
}

// Where one rank makes Horovod's loop wait, it waits on all others, too: they say so, and it does not.
void Watch::BeatOverNetwork() {
  const Duration period = std::min<Duration>(Duration(timeout_) / kBeatsPerTimeout, kLongestPeriod);
  const std::shared_ptr<NetworkTransport> everyone = everyone_.lock();
  if (everyone == nullptr) {
    return;
  }
  if (turns_.SinceOther(loop_.turns()) < period) {
    far_hearts_.clear();
    return;
  }
  const bool begins = far_hearts_.empty();
  const bool say = begins || unsaid_.Elapsed() >= period;
  const std::vector<int> beats = everyone->ExchangeBeats(say);
  far_hearts_.resize(beats.size());
  for (size_t rank = 0; rank < beats.size(); ++rank) {
    far_hearts_[rank].See(static_cast<uint32_t>(beats[rank]));
  }
  if (say) {
    unsaid_.Moved();
  }
}

void Watch::Look() {
  for (auto one = networks_.begin(); one != networks_.end();) {
    const std::shared_ptr<NetworkTransport> network = one->lock();
    if (network != nullptr) {
      network->Look();
    }
    one = network == nullptr ? networks_.erase(one) : one + 1;
  }
}

Watch::Duration Watch::Count::SinceOther(int64_t now) {
  if (now != value) {
    value = now;
    still.Moved();
  }
  return still.Elapsed();
}

bool Watch::LoopIsStuck() {
  operations_.SinceOther(loop_.operations());
  return turns_.SinceOther(loop_.turns()) >= (loop_.leaving() ? std::min(timeout_, kToShutDown) : timeout_);
}

std::string Watch::Reason() {
  const std::string silent = SilentHeart(timeout_);
  const Duration idle = std::min(turns_.still.Elapsed(), operations_.still.Elapsed());
  if (!silent.empty() || !failure_.empty() || stall_.count() == 0 || idle < stall_ || HearsAll()) {
    return silent.empty() ? failure_ : silent;
  }
  return "required Horovod's ranks to go on, got nothing of some rank for " + std::to_string(stall_.count()) +
         " s (ADASUM_HVD_STALL_SECONDS)";
}

// Whether the heartbeats of all ranks arrive while the loop waits; none does from ranks whose MPI has no
// threads.
bool Watch::HearsAll() const {
  const std::shared_ptr<NetworkTransport> everyone = everyone_.lock();
  const size_t ranks = everyone == nullptr ? hearts_.size() : everyone->global_ranks().size();
  return ranks > 0 && (far_hearts_.size() == ranks || hearts_.size() == ranks);
}

std::string Watch::Conclude(bool agreed) {
  std::lock_guard<std::mutex> guard(mutex_);
  const std::string silent = SilentHeart(Duration(timeout_) / 2); // Gloo's own wait may have ended first
  everyone_.reset();
  if (!agreed && failure_.empty()) {
    failure_ = "Horovod's loop has ended on this rank, and not on all";
  }
  return silent;
}

// Of ranks of other hosts, those that have said nothing for `far_away`.
std::string Watch::SilentHeart(Duration far_away) const {
  if (const std::string near = SilentNeighbour(); !near.empty()) {
    return near;
  }
  const std::shared_ptr<NetworkTransport> everyone = everyone_.lock();
  std::string silent;
  Duration longest{};
  for (size_t rank = 0; everyone != nullptr && rank < far_hearts_.size(); ++rank) {
    if (static_cast<int>(rank) != everyone->rank() && far_hearts_[rank].silent >= far_away) {
      silent += (silent.empty() ? "" : ", ") + std::to_string(everyone->global_ranks()[rank]);
      longest = std::max(longest, far_hearts_[rank].silent);
    }
  }
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest).count();
  return silent.empty() ? ""
                        : "required every rank to run, got nothing of ranks " + silent + " on rank " +
                              std::to_string(everyone->global_ranks()[everyone->rank()]) + " for " +
                              std::to_string(seconds) + " s, while Horovod waits";
}

std::string Watch::SilentNeighbour() const {
  for (size_t rank = 0; rank < hearts_.size(); ++rank) {
    if (hearts_[rank].silent >= timeout_) {
      return "required every rank of this host to run, got none of rank " +
             std::to_string(group_->global_ranks[rank]) + " on rank " +
             std::to_string(group_->global_ranks[group_->rank]) + ": its process does not run for " +
             std::to_string(timeout_.count()) + " s (ADASUM_HVD_TIMEOUT_SECONDS)";
    }
  }
  return "";
}

} // namespace adasum_hvd
