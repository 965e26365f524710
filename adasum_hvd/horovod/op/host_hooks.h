// The op for tensors in host memory, for horovod_internals.h, and what both ops use of its monitor. Defined
// in adasum_op.cc.
#pragma once

#include <memory>

#include "horovod/common/ops/collective_operations.h"
#include "host/abort_notice.h"
#include "network/network.h"

namespace adasum_hvd {

std::shared_ptr<horovod::common::AllreduceOp> MakeAdasumOp(horovod::common::HorovodGlobalState* state);
bool IsLeftToHorovod(); // ADASUM_HVD_OP=off, at init
void NoteOperation();   // counts an operation of any kind that Horovod begins

// Only for Horovod's background thread: calls a network's Poll while this thread waits.
void PollRegularly(std::weak_ptr<NetworkTransport> network);

// The same: notifies all ranks of a failure, because some may have completed this reduction, or be in another
// process set. Returns the error.
horovod::common::Status Report(const UnresponsiveRank& error);

} // namespace adasum_hvd
