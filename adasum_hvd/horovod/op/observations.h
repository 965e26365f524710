// Observations that Python requests, by tensor name: it requests one of the next reduction of a tensor, and
// reads the record afterwards (reduce/observation.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "op/fused_tensors.h"
#include "reduce/observation.h"

namespace adasum_hvd {

// The latest observation of a tensor.
struct ObservationRecord {
  int64_t number = 0;          // of this tensor's observations, from 1
  std::vector<int> sizes;      // Observation::sizes
  std::vector<double> rows;    // one per segment
  std::function<bool()> write; // to be called before the rows are read; false if a device has not completed
};

// The next reduction of the tensor is observed.
void RequestObservation(const std::string& name);

// Whether an observation of the tensor is requested. Almost free if none is of any tensor.
bool ObservationRequested(const std::string& name);

// Null if the tensor was never observed.
std::shared_ptr<const ObservationRecord> LatestObservation(const std::string& name);

// The observations of one reduction.
class ObservationScope {
public:
  // Gives rows to the tensors whose observation is requested.
  ObservationScope(FusedTensors& fused, const std::vector<ReduceLevel>& levels);

  // Makes the records available to Python, after the reduction is done or enqueued; `write` writes the rows.
  void Publish(const std::function<bool()>& write);

private:
  std::vector<std::pair<std::string, std::shared_ptr<ObservationRecord>>> by_name_;
};

} // namespace adasum_hvd
