// Both ops, for horovod_internals.h, and what they share. Defined in adasum_op.cc and adasum_device_op.cc.
#pragma once

#include <memory>

#include "horovod/common/ops/collective_operations.h"
#include "host/abort_notice.h"
#include "network/network.h"
#include "op/settings.h"
#if ADASUM_ON_DEVICES
#include "horovod/common/ops/nccl_operations.h"
#endif

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

#if ADASUM_ON_DEVICES
std::shared_ptr<hvd::AllreduceOp> MakeAdasumDeviceOp(hvd::NCCLContext* nccl_context,
                                                     hvd::GPUContext* gpu_context,
                                                     hvd::HorovodGlobalState* state);

// To be called on the background thread, before its communicators are destroyed or aborted.
void NoteCommunicatorsEnd();

// Horovod: aborts its communicators one after the other, which hangs if several wait for a rank: each frees
// memory, for which CUDA waits for the kernels of the others.
// We need: a notification before, and all aborts in one group. operations.cc constructs this class in place
// of Horovod's (op/horovod_internals.h).
struct NcclContextWithAbort : hvd::NCCLContext {
  void ShutDown() {
    NoteCommunicatorsEnd();
    if (elastic) {
      AbortAll();
    }
    NCCLContext::ShutDown();
  }

private:
  void AbortAll() {
    ncclGroupStart();
    for (auto& of_stream : nccl_comms) {
      for (auto& [ranks, communicator] : of_stream) {
        if (communicator != nullptr) {
          ncclCommAbort(communicator);
        }
      }
      of_stream.clear();
    }
    ncclGroupEnd();
  }
};
#endif

} // namespace adasum_hvd
