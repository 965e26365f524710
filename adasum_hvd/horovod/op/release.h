// Horovod keeps an op after shutdown() until the next init, with all its memory, threads and descriptors.
#pragma once

#include <memory>

namespace adasum_hvd {

// Calls op->Release() when the calling thread ends. Horovod makes its ops on the background thread, which
// ends at shutdown().
template <class Op> void ReleaseWithThisThread(const std::shared_ptr<Op>& op) {
  struct Held {
    std::weak_ptr<Op> op;
    ~Held() {
      if (const std::shared_ptr<Op> living = op.lock()) {
        living->Release();
      }
    }
  };
  static thread_local Held held;
  held.op = op;
}

} // namespace adasum_hvd
