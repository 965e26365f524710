// The op for tensors in host memory, for horovod_internals.h, and what both ops use of its monitor. Defined
// in adasum_op.cc.
#pragma once

#include <memory>

#include "horovod/common/ops/collective_operations.h"
#include "host/abort_notice.h"
#include "network/network.h"

namespace adasum_hvd {

namespace hvd = horovod::common;

std::shared_ptr<hvd::AllreduceOp> MakeAdasumOp(hvd::HorovodGlobalState* state);
bool IsLeftToHorovod(); // ADASUM_HVD_OP=off, at init
void NoteOperation();   // counts an operation of any kind that Horovod begins

// Only for Horovod's background thread: calls a network's Poll while this thread waits.
void PollRegularly(std::weak_ptr<NetworkTransport> network);

// The same: notifies all ranks of a failure, because some may have completed this reduction, or be in another
// process set. Returns the error.
hvd::Status Report(const UnresponsiveRank& error);

// Calls op->Release() when the calling thread ends: Horovod makes its ops on the background thread, which
// ends at shutdown(), and keeps them until the next init, with all memory, threads and descriptors.
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
