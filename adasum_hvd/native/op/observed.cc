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
std::atomic<bool> any{false};
std::mutex observed_mutex;
std::unordered_map<std::string, Asked> observed_by_name;

} // namespace

void Observe(const std::string& name) {
  std::lock_guard<std::mutex> guard(observed_mutex);
  observed_by_name[name].due = true;
  any = true;
}

void ForgetObserved(const std::string& name) {
  std::lock_guard<std::mutex> guard(observed_mutex);
  observed_by_name.erase(name);
  any = !observed_by_name.empty();
}

bool IsObserved(const std::string& name) {
  if (!any) {
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
    const auto found = observed_by_name.find(name);
    if (found != observed_by_name.end()) {
      const std::shared_ptr<Observed>& before = found->second.latest;
      observed->number = before == nullptr ? 1 : before->number + 1;
      found->second = {false, std::move(observed)};
    }
  }
}

} // namespace adasum_hvd
