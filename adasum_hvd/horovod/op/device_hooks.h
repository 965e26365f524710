// The op for tensors on devices, for horovod_internals.h. Defined in adasum_device_op.cc.
#pragma once

#include <memory>

#include "horovod/common/ops/nccl_operations.h"

namespace adasum_hvd {

namespace hvd = horovod::common;

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

} // namespace adasum_hvd
