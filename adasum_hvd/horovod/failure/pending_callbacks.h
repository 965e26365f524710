// The callbacks of reductions on devices that have not completed.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "horovod/common/common.h"

namespace adasum_hvd {

namespace hvd = horovod::common;

// Horovod calls each tensor's callback when its reduction has completed. Two cases need a correction: a
// reduction that ends after NCCL's communicators were aborted has no valid result, and Horovod's finalizer
// threads, if ended early, never call the callback.
class PendingCallbacks {
public:
  PendingCallbacks() = default;
  PendingCallbacks(const PendingCallbacks&) = delete;
  PendingCallbacks& operator=(const PendingCallbacks&) = delete;

  // Replaces the entries' callbacks by ones that go through this object, which `owner` keeps alive.
  void Add(std::vector<hvd::TensorTableEntry>& entries, const std::shared_ptr<void>& owner) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (hvd::TensorTableEntry& entry : entries) {
      if (entry.callback != nullptr) { // a rank that has joined has none
        const auto pending = std::make_shared<Callback>(std::move(entry.callback));
        pending_.push_back(pending);
        entry.callback = [this, owner, pending](const Status& status) { Call(pending, status); };
      }
    }
  }

  // From now on every callback gets an error; the first reason counts.
  void Fail(const std::string& reason) {
    std::lock_guard<std::mutex> guard(mutex_);
    failure_ = failure_.empty() ? reason : failure_;
  }

  // Calls all pending callbacks with an error. Horovod may still call them later, without effect.
  void FailAll(const std::string& reason) {
    Fail(reason);
    std::list<std::shared_ptr<Callback>> left;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      left = pending_;
    }
    for (const std::shared_ptr<Callback>& pending : left) {
      Call(pending, Status::OK());
    }
  }

private:
  using Status = hvd::Status;
  using Callback = hvd::StatusCallback;

  void Call(const std::shared_ptr<Callback>& pending, const Status& status) {
    Callback callback;
    std::string reason;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      callback = std::exchange(*pending, nullptr);
      pending_.remove(pending);
      reason = failure_;
    }
    if (callback != nullptr) {
      callback(status.ok() && !reason.empty() ? Status::UnknownError(reason) : status);
    }
  }

  std::mutex mutex_;
  std::list<std::shared_ptr<Callback>> pending_;
  std::string failure_; // or empty
};

} // namespace adasum_hvd
