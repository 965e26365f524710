// What registry.h needs of the op for tensors in host memory. Defined in adasum_op.cc.
#pragma once

#include <memory>

#include "horovod/common/ops/collective_operations.h"

namespace adasum_hvd {

std::shared_ptr<horovod::common::AllreduceOp> MakeAdasumOp(horovod::common::HorovodGlobalState* state);
bool IsLeftToHorovod(); // ADASUM_HVD_OP=off, as it was at init
void NoteOperation();   // that Horovod begins one, of any kind

} // namespace adasum_hvd
