// Measures how long nothing has changed.
#pragma once

#include <algorithm>
#include <chrono>

namespace adasum_hvd {

class IdleClock {
public:
  using Clock = std::chrono::steady_clock;

  void Reset() {
    idle_ = Clock::duration::zero();
    last_call_ = Clock::now();
  }

  // To be called many times a second. An interval between two calls counts as kLongest at most: if it was
  // longer, this process did not run either, for example because a job was suspended as a whole.
  Clock::duration Elapsed() {
    const Clock::time_point now = Clock::now();
    idle_ += std::min<Clock::duration>(now - last_call_, kLongest);
    last_call_ = now;
    return idle_;
  }

private:
  static constexpr std::chrono::milliseconds kLongest{1000};

  Clock::duration idle_ = Clock::duration::zero();
  Clock::time_point last_call_ = Clock::now();
};

} // namespace adasum_hvd
