#include "op/under_way.h"

#include <utility>

namespace adasum_hvd {

namespace hvd = horovod::common;

void UnderWay::Add(std::vector<hvd::TensorTableEntry>& entries, const std::shared_ptr<void>& owner) {
  std::lock_guard<std::mutex> guard(mutex_);
  for (hvd::TensorTableEntry& entry : entries) {
    if (entry.callback != nullptr) { // a rank that has joined has none
      const auto waiting = std::make_shared<Callback>(std::move(entry.callback));
      waiting_.push_back(waiting);
      entry.callback = [this, owner, waiting](const hvd::Status& status) { Finish(waiting, status); };
    }
  }
}

void UnderWay::CutShort(const std::string& why) {
  std::lock_guard<std::mutex> guard(mutex_);
  cut_short_ = cut_short_.empty() ? why : cut_short_;
}

void UnderWay::Finish(const std::shared_ptr<Callback>& waiting, const hvd::Status& status) {
  Callback callback;
  std::string why;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    callback = std::exchange(*waiting, nullptr);
    waiting_.remove(waiting);
    why = cut_short_;
  }
  if (callback != nullptr) {
    callback(status.ok() && !why.empty() ? hvd::Status::UnknownError(why) : status);
  }
}

void UnderWay::End(const std::string& why) {
  CutShort(why);
  std::list<std::shared_ptr<Callback>> left;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    left = waiting_;
  }
  for (const std::shared_ptr<Callback>& waiting : left) {
    Finish(waiting, hvd::Status::OK());
  }
}

} // namespace adasum_hvd
