// The tensors that Python observes, by the names that Horovod knows them by: it asks for the next reduction
// of one, and reads afterwards what that has found (reduce/observation.h).
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

// What the latest observed reduction of a tensor has found.
struct Observed {
  int64_t number = 0;          // of the observed reductions of this tensor, from 1; 0: there was none
  std::vector<int> sizes;      // Observation::sizes
  std::vector<double> rows;    // one per segment
  std::function<bool()> write; // to be called before the rows are read; false where a device is not so far
};

// The next reduction of the tensor is observed.
void Observe(const std::string& name);

// Whether it is to be observed now. Costs next to nothing where none is.
bool IsObserved(const std::string& name);

// Null where nothing was ever observed.
std::shared_ptr<const Observed> LatestObserved(const std::string& name);

// Gives the observed tensors their rows while it lives, and then to Python.
class Observing {
public:
  Observing(FusedTensors& fused, const std::vector<ReduceLevel>& levels);

  // When the reduction is done, or enqueued: then `write` writes the rows.
  void Keep(const std::function<bool()>& write);

private:
  std::vector<std::pair<std::string, std::shared_ptr<Observed>>> by_name_;
};

} // namespace adasum_hvd
