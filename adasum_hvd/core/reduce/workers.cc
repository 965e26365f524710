#include "reduce/workers.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include <pthread.h>
#include <sched.h>

#include "host/pause.h"
#include "reduce/float_mode.h"

namespace adasum_hvd {
namespace {

constexpr int64_t kWorthSharing = 4;                // jobs; each is a block of about 10 us
constexpr int64_t kWorthWaking = 8;                 // jobs that take as long as waking a thread
constexpr int kSpins = 64;                          // between two readings of the clock
constexpr std::chrono::microseconds kSpinTime{500}; // of a helper without a job, before it sleeps

} // namespace

Workers::Workers(int threads) { UseThreads(threads); }

void Workers::UseThreads(int threads) {
  try {
    while (static_cast<int>(helpers_.size()) < threads - 1) {
      const int worker = static_cast<int>(helpers_.size()) + 1;
      helpers_.emplace_back([this, worker] { Help(worker); });
      pthread_setname_np(helpers_.back().native_handle(), "adasum"); // for top -H
    }
  } catch (const std::exception&) {
    // The system refuses more (ulimit -u, a limit of the container): fewer threads give the same results.
  }
  threads_ = std::min(threads, static_cast<int>(helpers_.size()) + 1);
}

Workers::~Workers() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) {
    helper.join();
  }
}

void Workers::Run(int64_t jobs, const Body& body) {
  if (threads_ == 1 || jobs < kWorthSharing) {
    for (int64_t job = 0; job < jobs; ++job) {
      body(job, 0);
    }
    return;
  }
  jobs_ = jobs;
  body_ = &body;
  next_.store(0, std::memory_order_relaxed);
  gate_.store((gate_.load(std::memory_order_relaxed) & -kRound) + kRound + kOpen);
  if (jobs >= kWorthWaking && asleep_.load() > 0) {
    std::lock_guard<std::mutex> guard(mutex_); // a helper checks the round under this lock before it sleeps
    wake_.notify_all();
  }
  TakeJobs(0);
  gate_.fetch_and(~kOpen, std::memory_order_acquire);
  // Each helper is at its last job, unless it has lost its processor.
  for (int looks = 0; (gate_.load(std::memory_order_acquire) & (kRound - 1)) != 0; ++looks) {
    if (looks < kSpins) {
      Pause();
    } else {
      sched_yield();
    }
  }
}

void Workers::TakeJobs(int worker) {
  for (int64_t job; (job = next_.fetch_add(1, std::memory_order_relaxed)) < jobs_;) {
    (*body_)(job, worker);
  }
}

// Returns the gate's round as soon as it differs from `seen`, or at the end.
uint64_t Workers::AwaitRound(uint64_t seen) {
  const auto changed = [&] { return stop_.load() || (gate_.load() & -kRound) != seen; };
  const auto until = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int look = 0; look < kSpins; ++look) {
      if (changed()) {
        return gate_.load() & -kRound;
      }
      Pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock<std::mutex> lock(mutex_);
  asleep_.fetch_add(1);
  wake_.wait(lock, changed);
  asleep_.fetch_sub(1);
  return gate_.load() & -kRound;
}

// Returns false if the round is over.
bool Workers::Enter(uint64_t round) {
  uint64_t gate = gate_.load(std::memory_order_relaxed);
  while ((gate & -kRound) == round && (gate & kOpen) != 0) {
    if (gate_.compare_exchange_weak(gate, gate + kHelper, std::memory_order_acquire)) {
      return true;
    }
  }
  return false;
}

void Workers::Help(int worker) {
  const DefaultFloatMode mode; // a thread inherits the mode of the thread that makes it
  for (uint64_t round = 0;;) {
    round = AwaitRound(round);
    if (stop_.load()) {
      return;
    }
    if (Enter(round)) {
      if (worker < threads_) {
        TakeJobs(worker);
      }
      gate_.fetch_sub(kHelper, std::memory_order_release);
    }
  }
}

} // namespace adasum_hvd
