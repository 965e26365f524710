// Which processors the ranks of a host run on.
#include <algorithm>
#include <array>

#include <sched.h>

#include "transport/local/transport.h"

namespace adasum_hvd {

double LocalTransport::ShareOfProcessors() const {
  const SegmentHeader& mine = group_->header(rank());
  double share = 0;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &mine.allowed)) {
      int users = 0;
      for (int one = 0; one < size(); ++one) {
        users += CPU_ISSET(processor, &group_->header(one).allowed) ? 1 : 0;
      }
      share += 1.0 / users;
    }
  }
  share = std::min(share, mine.quota.processors / group_->RanksUnder(mine.quota));
  return share + 1e-9; // a third three times is one
}

// A rank that wakes another draws it to its own processor, and the two then take turns there for a second
// while the next processor is idle (Linux 6.18, as many ranks as processors: twice the time). A rank that is
// beside more lower ranks than its share moves to the emptiest processor it may use. It is not bound there.
void LocalTransport::KeepApart() {
  const auto processor = [this](int one) -> std::atomic<int32_t>& { return group_->header(one).processor; };
  const int here = sched_getcpu();
  processor(rank()).store(here, std::memory_order_relaxed);
  if (here < 0 || here >= CPU_SETSIZE) { // not to be had, or more processors than a cpu_set_t has
    return;
  }
  int lower = 0;
  for (int peer = 0; peer < rank(); ++peer) {
    lower += processor(peer).load(std::memory_order_relaxed) == here ? 1 : 0;
  }
  cpu_set_t allowed;
  if (lower == 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0 ||
      lower < (size() + CPU_COUNT(&allowed) - 1) / CPU_COUNT(&allowed)) {
    return;
  }
  std::array<int, CPU_SETSIZE> ranks_on = {};
  for (int peer = 0; peer < size(); ++peer) {
    const int32_t there = processor(peer).load(std::memory_order_relaxed);
    if (there >= 0 && there < CPU_SETSIZE) {
      ++ranks_on[there];
    }
  }
  int emptiest = here;
  for (int one = 0; one < CPU_SETSIZE; ++one) {
    if (CPU_ISSET(one, &allowed) && ranks_on[one] < ranks_on[emptiest]) {
      emptiest = one;
    }
  }
  cpu_set_t target;
  CPU_ZERO(&target);
  CPU_SET(emptiest, &target);
  if (sched_setaffinity(0, sizeof target, &target) == 0) {
    processor(rank()).store(emptiest, std::memory_order_relaxed);
    sched_setaffinity(0, sizeof allowed, &allowed);
  }
}

} // namespace adasum_hvd
