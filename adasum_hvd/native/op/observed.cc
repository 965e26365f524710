#include "op/observed.h"

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace adasum_hvd {
namespace {

struct Asked {
  bool due = false;
  std::shared_ptr<Observed> latest;
};
std::atomic<int> due_tensors{0};
std::mutex observed_mutex;
std::unordered_map<std::string, Asked> observed_by_name;

} // namespace

void Observe(const std::string& name) {
  std::lock_guard<std::mutex> guard(observed_mutex);
  due_tensors += std::exchange(observed_by_name[name].due, true) ? 0 : 1;
}

bool IsObserved(const std::string& name) {
  if (due_tensors == 0) {
    return false;
  }
  std::lock_guard<std::mutex> guard(observed_mutex);
  const auto found = observed_by_name.find(name);
  return found != observed_by_name.end() && found->second.due;
}

std::shared_ptr<const Observed> LatestObserved(const std::string& name) {
  std::lock_guard<std::mutex> guard(observed_mutex);
  const auto found = observed_by_name.find(name);
  return found == observed_by_name.end() ? nullptr : found->second.latest;
}

Observing::Observing(FusedTensors& fused, const std::vector<ReduceLevel>& levels) {
  if (fused.observed.empty()) {
    return;
  }
  const Observation observation({}, levels, false);
  for (const FusedTensors::Range& range : fused.observed) {
    auto observed = std::make_shared<Observed>();
    observed->sizes = observation.sizes();
    observed->rows.resize(range.count * observation.width());
    for (size_t k = 0; k < range.count; ++k) {
      fused.tensors[range.first + k].observed = observed->rows.data() + k * observation.width();
    }
    by_name_.emplace_back(range.name, std::move(observed));
  }
}

void Observing::Keep(const std::function<bool()>& write) {
  for (auto& [name, observed] : by_name_) {
    observed->write = write;
    std::lock_guard<std::mutex> guard(observed_mutex);
    Asked& asked = observed_by_name[name];
    due_tensors -= std::exchange(asked.due, false) ? 1 : 0;
    observed->number = asked.latest == nullptr ? 1 : asked.latest->number + 1;
    asked.latest = std::move(observed);
  }
}

} // namespace adasum_hvd
