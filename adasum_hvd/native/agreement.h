// What the ranks of a process set have agreed on before they first reduce something in it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "horovod/common/controller.h"
#include "plan.h"
#include "reduce.h"
#include "settings.h"

namespace adasum_hvd {

struct Agreement {
  // Horovod recycles the ids of process sets and rebuilds controllers at every init, so the controller is
  // what identifies one.
  std::weak_ptr<horovod::common::Controller> controller;
  std::vector<PlannedLevel> levels;
  ReduceSettings reduce;
  std::string disagreement; // why nothing can be reduced, or empty
  std::vector<int> host;    // the ranks of this host
  bool one_host = false;    // they are all there are

  bool IsOf(const std::shared_ptr<horovod::common::Controller>& other) const {
    return controller.lock() == other;
  }
};

// Collective over the process set. `off` ranks only learn whether others are, too.
Agreement Agree(const std::shared_ptr<horovod::common::Controller>& controller, const Settings& settings);

} // namespace adasum_hvd
