#include "op/observations.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace adasum_hvd {
namespace {

struct State {
  bool requested = false;
  std::shared_ptr<ObservationRecord> latest;
};
std::atomic<int> requests{0};
std::mutex state_mutex;
std::unordered_map<std::string, State> state_by_name;

} // namespace

void RequestObservation(const std::string& name) {
  std::lock_guard<std::mutex> guard(state_mutex);
  requests += std::exchange(state_by_name[name].requested, true) ? 0 : 1;
}

bool ObservationRequested(const std::string& name) {
  if (requests == 0) {
    return false;
  }
  std::lock_guard<std::mutex> guard(state_mutex);
  const auto found = state_by_name.find(name);
  return found != state_by_name.end() && found->second.requested;
}

std::shared_ptr<const ObservationRecord> LatestObservation(const std::string& name) {
  std::lock_guard<std::mutex> guard(state_mutex);
  const auto found = state_by_name.find(name);
  return found == state_by_name.end() ? nullptr : found->second.latest;
}

ObservationScope::ObservationScope(FusedTensors& fused, const std::vector<ReduceLevel>& levels) {
  if (fused.observations.empty()) {
    return;
  }
  const Observation observation({}, levels, false);
  for (const FusedTensors::Range& range : fused.observations) {
    auto record = std::make_shared<ObservationRecord>();
    record->sizes = observation.sizes();
    record->rows.resize(range.count * observation.width());
    for (size_t k = 0; k < range.count; ++k) {
      fused.tensors[range.first + k].observation = record->rows.data() + k * observation.width();
    }
    by_name_.emplace_back(range.name, std::move(record));
  }
}

void ObservationScope::Publish(const std::function<bool()>& write) {
  for (auto& [name, record] : by_name_) {
    record->write = write;
    std::lock_guard<std::mutex> guard(state_mutex);
    State& state = state_by_name[name];
    requests -= std::exchange(state.requested, false) ? 1 : 0;
    record->number = state.latest == nullptr ? 1 : state.latest->number + 1;
    state.latest = std::move(record);
  }
}

} // namespace adasum_hvd
