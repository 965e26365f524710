#include "reduce/workers.h"

#include <exception>

#include <sys/prctl.h>

#include "transport/pause.h"

namespace adasum_hvd {
namespace {

constexpr int64_t kWorthSharing = 4; // jobs; a job is a block of some 10 us, waking a thread costs as much
constexpr int kSpins = 20000;        // looks for the next round before a helper sleeps: some 100 us

} // namespace

Workers::Workers(int threads) {
  helpers_.reserve(threads);
  try {
    for (int worker = 1; worker < threads; ++worker) {
      helpers_.emplace_back([this, worker] { Help(worker); });
    }
  } catch (const std::exception&) {
    // No more are to be had (ulimit -u, a limit of the container): fewer do the same.
  }
}

Workers::~Workers() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stop_ = true;
    round_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) {
    helper.join();
  }
}

void Workers::Run(int64_t jobs, const Body& body) {
  if (helpers_.empty() || jobs < kWorthSharing) {
    for (int64_t job = 0; job < jobs; ++job) {
      body(job, 0);
    }
    return;
  }
  jobs_ = jobs;
  body_ = &body;
  next_.store(0);
  busy_.store(static_cast<int>(helpers_.size()));
  {
    std::lock_guard<std::mutex> guard(mutex_);
    round_.fetch_add(1);
  }
  wake_.notify_all();
  TakeJobs(0);
  while (busy_.load(std::memory_order_acquire) > 0) { // each is at its last job
    Pause();
  }
}

void Workers::TakeJobs(int worker) {
  for (int64_t job; (job = next_.fetch_add(1, std::memory_order_relaxed)) < jobs_;) {
    (*body_)(job, worker);
  }
}

void Workers::Help(int worker) {
  prctl(PR_SET_NAME, "adasum", 0, 0, 0); // for top -H
  for (uint64_t seen = 0;;) {
    for (int spin = 0; spin < kSpins && round_.load(std::memory_order_acquire) == seen; ++spin) {
      Pause();
    }
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
      if (stop_) {
        return;
      }
    }
    ++seen; // Run returns only when every helper is through, so no round is missed
    TakeJobs(worker);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

} // namespace adasum_hvd
