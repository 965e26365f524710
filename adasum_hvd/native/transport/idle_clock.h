// How long nothing has moved, by the clock.
#pragma once

#include <algorithm>
#include <chrono>

namespace adasum_hvd {

class IdleClock {
public:
  using Clock = std::chrono::steady_clock;

  void Moved() {
    idle_ = Clock::duration::zero();
    looked_ = Clock::now();
  }

  // To be asked many times a second. A look that comes late counts for no more than kMost: then this process
  // stood still itself, as one does that is suspended together with its peers.
  Clock::duration Elapsed() {
    const Clock::time_point now = Clock::now();
    idle_ += std::min<Clock::duration>(now - looked_, kMost);
    looked_ = now;
    return idle_;
  }

private:
  static constexpr std::chrono::milliseconds kMost{1000};

  Clock::duration idle_ = Clock::duration::zero();
  Clock::time_point looked_ = Clock::now();
};

} // namespace adasum_hvd
