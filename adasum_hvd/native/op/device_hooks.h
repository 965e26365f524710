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

struct NcclContextThatTells : horovod::common::NCCLContext {
  void ShutDown() {
    CommunicatorsEnd();
    NCCLContext::ShutDown();
  }
};

} // namespace adasum_hvd
