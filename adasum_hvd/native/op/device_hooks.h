// What registry.h needs of the op for tensors on devices. Defined in adasum_device_op.cc.
#pragma once

#include <memory>

#include "horovod/common/ops/nccl_operations.h"

namespace adasum_hvd {

std::shared_ptr<horovod::common::AllreduceOp> MakeAdasumDeviceOp(horovod::common::NCCLContext* nccl_context,
                                                                 horovod::common::GPUContext* gpu_context,
                                                                 horovod::common::HorovodGlobalState* state);

// On the background thread, before its communicators are destroyed or aborted.
void CommunicatorsEnd();

// In place of Horovod's.
struct NcclContextThatTells : horovod::common::NCCLContext {
  void ShutDown() {
    CommunicatorsEnd();
    if (elastic) {
      AbortAll();
    }
    NCCLContext::ShutDown();
  }

private:
  // Horovod's way, one after the other, hangs where several wait for a rank: each frees memory, for which
  // CUDA waits for the kernels of the others. In a group all are told before.
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
