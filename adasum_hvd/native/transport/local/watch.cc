#include "transport/local/watch.h"

#include <algorithm>

#include <sys/prctl.h>

namespace adasum_hvd {
namespace {

constexpr std::chrono::milliseconds kBeat{200};
constexpr std::chrono::seconds kToShutDown{5}; // what Horovod may take when a rank leaves
constexpr std::chrono::seconds kToBeRead{2};   // between what is said and the end, for others to say it too

} // namespace

Watch::Watch(WatchedLoop loop, std::chrono::seconds timeout, std::chrono::seconds stall)
    : loop_(std::move(loop)), timeout_(timeout), stall_(stall), thread_([this] { Run(); }) {}

Watch::~Watch() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Watch::Include(std::shared_ptr<LocalGroup> group) {
  std::lock_guard<std::mutex> guard(mutex_);
  hearts_ = std::vector<Heart>(group->peers.size());
  group_ = std::move(group);
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
    Look();
    const std::string reason = LoopIsStuck() && !said ? Reason() : "";
    if (reason.empty()) {
      continue;
    }
    loop_.say(reason);
    said = true;
    const auto end = IdleClock::Clock::now() + kToBeRead;
    while (IdleClock::Clock::now() < end && !wake_.wait_for(lock, kBeat, stopped)) {
      Beat();
    }
    if (!stop_ && LoopIsStuck()) {
      loop_.end();
    }
  }
}

void Watch::Beat() {
  for (size_t rank = 0; rank < hearts_.size(); ++rank) {
    Heart& heart = hearts_[rank];
    std::atomic<uint32_t>& beats = group_->header(static_cast<int>(rank)).beats;
    if (static_cast<int>(rank) == group_->rank) {
      beats.fetch_add(1, std::memory_order_relaxed);
    }
    if (const uint32_t now = beats.load(std::memory_order_relaxed); now != heart.beats) {
      heart.beats = now;
      heart.still.Moved();
    }
    heart.silent = heart.still.Elapsed();
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

bool Watch::LoopIsStuck() {
  if (const int64_t turns = loop_.turns(); turns != turns_) {
    turns_ = turns;
    without_turn_.Moved();
  }
  return without_turn_.Elapsed() >= (loop_.leaving() ? std::min(timeout_, kToShutDown) : timeout_);
}

std::string Watch::Reason() {
  const std::string silent = SilentHeart();
  if (!silent.empty() || !failure_.empty() || stall_.count() == 0 || without_turn_.Elapsed() < stall_) {
    return silent.empty() ? failure_ : silent;
  }
  return "required Horovod's ranks to go on, got nothing of some rank for " + std::to_string(stall_.count()) +
         " s (ADASUM_HVD_STALL_SECONDS)";
}

std::string Watch::RankThatDoesNotRun() {
  std::lock_guard<std::mutex> guard(mutex_);
  return SilentHeart();
}

std::string Watch::SilentHeart() const {
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
