#include "op/statistics.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace adasum_hvd {
namespace {

std::array<std::atomic<int64_t>, kCounters> counters;

std::mutex also_mutex;
std::function<int64_t()> also;

std::mutex paths_mutex;
std::unordered_map<int, std::array<std::string, 2>> paths; // by process set, of each Memory

} // namespace

void Count(Counter counter, int64_t more) { counters[counter] += more; }

void CountNanoseconds(Phase phase, int64_t more) { counters[kNanoseconds + static_cast<int>(phase)] += more; }

void ReadCounters(int64_t* values) {
  std::copy(counters.begin(), counters.end(), values);
  std::lock_guard<std::mutex> guard(also_mutex);
  values[kExplicitTensors] += also ? also() : 0;
}

void CountAlso(std::function<int64_t()> more) {
  std::lock_guard<std::mutex> guard(also_mutex);
  also = std::move(more);
}

void SetPath(int process_set_id, Memory memory, std::string path) {
  std::lock_guard<std::mutex> guard(paths_mutex);
  paths[process_set_id][static_cast<size_t>(memory)] = std::move(path);
}

void ForgetPaths() {
  std::lock_guard<std::mutex> guard(paths_mutex);
  paths.clear();
}

std::string PathOf(int process_set_id) {
  std::lock_guard<std::mutex> guard(paths_mutex);
  const auto& [host, device] = paths[process_set_id];
  return host + (host.empty() || device.empty() ? "" : "; devices: ") + device;
}

} // namespace adasum_hvd
