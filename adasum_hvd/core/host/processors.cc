// The processors on which the ranks of a host run, and the quotas of their time.
#include <algorithm>
#include <array>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <sched.h>
#include <sys/stat.h>

#include "host/local_transport.h"

namespace adasum_hvd {
namespace {

constexpr double kRounding = 1e-9; // three thirds are one

// The two numbers of v2's "200000 100000" ("max 100000": no limit), or of v1's two files (-1: no limit).
double ProcessorsOf(const std::string& folder) {
  double quota = 0, period = 0;
  std::ifstream both(folder + "/cpu.max");
  if (!(both >> quota >> period)) {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : ProcessorQuota().processors;
}

void Tighten(ProcessorQuota& quota, const std::string& folder) {
  const double processors = ProcessorsOf(folder);
  struct stat status;
  if (processors < quota.processors && stat(folder.c_str(), &status) == 0) {
    quota = {processors, static_cast<uint64_t>(status.st_ino)};
  }
}

bool NamesProcessors(const std::string& controllers) {
  std::istringstream in(controllers);
  for (std::string one; std::getline(in, one, ',');) {
    if (one == "cpu") {
      return true;
    }
  }
  return false;
}

} // namespace

ProcessorQuota ReadProcessorQuota(const std::string& membership, const std::string& mount) {
  ProcessorQuota quota;
  std::ifstream lines(membership);
  for (std::string line; std::getline(lines, line);) { // number:controllers:path, without controllers in v2
    const size_t first = line.find(':');
    const size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::vector<std::string> bases;
    if (controllers.empty()) {
      bases = {mount, mount + "/unified"};
    } else if (NamesProcessors(controllers)) {
      bases = {mount + "/" + controllers, mount + "/cpu"};
    }
    // In a container the group is mounted as the root, but the path may be that of the host.
    for (const std::string& base : bases) {
      for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
        Tighten(quota, base + path);
        if (path.find('/') == std::string::npos) {
          break;
        }
      }
    }
  }
  return quota;
}

double ShareOfProcessors(const std::vector<int>& host, const AllgatherTwo& allgather) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  const std::string_view bytes(reinterpret_cast<const char*>(&allowed), sizeof allowed);
  const ProcessorQuota quota = ReadProcessorQuota();
  const int set = static_cast<int>(std::hash<std::string_view>()(bytes));
  const int group = static_cast<int>(quota.group);
  const std::vector<int> all = allgather(set, group);
  double sharing = 0, under = 0;
  for (int rank : host) {
    sharing += all[2 * rank] == set ? 1 : 0;
    under += all[2 * rank + 1] == group ? 1 : 0;
  }
  return std::min(CPU_COUNT(&allowed) / sharing, quota.processors / under) + kRounding;
}

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
  return share + kRounding;
}

// Linux moves a rank that is woken to the processor of the rank that wakes it. The two then share it for up
// to a second while other processors are idle, and a reduction takes twice the time (Linux 6.18, as many
// ranks as processors; this function stays for that factor). So a rank on a processor with more lower ranks
// than its share moves to the processor with the fewest ranks. It is not bound there.
void LocalTransport::SpreadOverProcessors() {
  if (!group_->settings.moves_threads) {
    return;
  }
  const auto processor = [this](int one) -> std::atomic<int32_t>& { return group_->header(one).processor; };
  const int here = sched_getcpu();
  processor(rank()).store(here, std::memory_order_relaxed);
  if (here < 0 || here >= CPU_SETSIZE) { // unknown, or more processors than a cpu_set_t has
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
