// The reductions whose results their callers still wait for.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "horovod/common/common.h"

namespace adasum_hvd {

// Stands between Horovod, which says that a reduction has ended, and the callers: what ends after NCCL's
// communicators were aborted holds anything, and must not pass for a result; and Horovod's finalizer threads,
// ended early, leave tensors of which nobody is told.
class UnderWay {
public:
  UnderWay() = default;
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

  // From here on the callers of `entries` are told by way of this, which `owner` keeps alive.
  void Add(std::vector<horovod::common::TensorTableEntry>& entries, const std::shared_ptr<void>& owner);

  // Everything that has not ended yet fails; the first reason counts.
  void CutShort(const std::string& why);

  // Tells all callers that still wait that it was cut short; who tells them later tells nobody.
  void End(const std::string& why);

private:
  using Callback = horovod::common::StatusCallback;

  void Finish(const std::shared_ptr<Callback>& waiting, const horovod::common::Status& status);

  std::mutex mutex_;
  std::list<std::shared_ptr<Callback>> waiting_;
  std::string cut_short_; // why, or empty
};

} // namespace adasum_hvd
