// Force-included into Horovod's operations.cc, and nowhere else (cmake/targets.cmake).
//
// Horovod makes its list of ops inside an anonymous namespace, so there is no hook to register another.
// Instead operations.cc constructs the class below in place of OperationManager: the same class, with our
// op in front of Horovod's own AdaSum ops. No line of Horovod is edited.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "horovod/common/ops/operation_manager.h"
#include "op/host_hooks.h"
#include "op/shut_down.h"
#if ADASUM_ON_DEVICES
#include "op/device_hooks.h"
#endif

namespace adasum_hvd {

// HorovodOp::global_state_ is protected; a pointer to member named through a derived class reads it from
// the join op, the one op that exists in every configuration.
struct GlobalStateOf : horovod::common::HorovodOp {
  static horovod::common::HorovodGlobalState* Read(horovod::common::HorovodOp& op) {
    return op.*(&GlobalStateOf::global_state_);
  }
};

#if ADASUM_ON_DEVICES
// Read in the same way from Horovod's own NCCL op.
struct ContextsOf : horovod::common::NCCLAllreduce {
  static horovod::common::NCCLContext* Nccl(horovod::common::NCCLAllreduce& op) {
    return op.*(&ContextsOf::nccl_context_);
  }
  static horovod::common::GPUContext* Gpu(horovod::common::NCCLAllreduce& op) {
    return op.*(&ContextsOf::gpu_context_);
  }
};
#endif

class OperationManagerWithAdasum : public horovod::common::OperationManager {
  template <class Op> using Ops = std::vector<std::shared_ptr<Op>>;

public:
  OperationManagerWithAdasum(
      horovod::common::ParameterManager* parameter_manager, Ops<horovod::common::AllreduceOp> allreduce_ops,
      Ops<horovod::common::AllgatherOp> allgather_ops, Ops<horovod::common::BroadcastOp> broadcast_ops,
      Ops<horovod::common::AlltoallOp> alltoall_ops, Ops<horovod::common::ReducescatterOp> reducescatter_ops,
      std::shared_ptr<horovod::common::JoinOp> join_op, Ops<horovod::common::AllreduceOp> adasum_ops,
      std::shared_ptr<horovod::common::BarrierOp> barrier_op,
      std::shared_ptr<horovod::common::ErrorOp> error_op)
      : OperationManager(parameter_manager, allreduce_ops, std::move(allgather_ops), std::move(broadcast_ops),
                         std::move(alltoall_ops), std::move(reducescatter_ops), join_op,
                         WithOurs(*join_op, allreduce_ops, std::move(adasum_ops)), std::move(barrier_op),
                         std::move(error_op)) {}

  // Horovod's, which is not virtual, seen: a turn of its loop may take as long as all that is in it.
  horovod::common::Status ExecuteOperation(std::vector<horovod::common::TensorTableEntry>& entries,
                                           const horovod::common::Response& response,
                                           horovod::common::ProcessSet& process_set) const {
    NoteOperation();
    return OperationManager::ExecuteOperation(entries, response, process_set);
  }

private:
  static Ops<horovod::common::AllreduceOp> WithOurs(horovod::common::HorovodOp& any_op,
                                                    const Ops<horovod::common::AllreduceOp>& allreduce_ops,
                                                    Ops<horovod::common::AllreduceOp> adasum_ops) {
    horovod::common::HorovodGlobalState* state = GlobalStateOf::Read(any_op);
    adasum_ops.insert(adasum_ops.begin(), MakeAdasumOp(state));
#if ADASUM_ON_DEVICES
    for (const auto& op : allreduce_ops) {
      if (auto* nccl = dynamic_cast<horovod::common::NCCLAllreduce*>(op.get())) {
        adasum_ops.insert(adasum_ops.begin(),
                          MakeAdasumDeviceOp(ContextsOf::Nccl(*nccl), ContextsOf::Gpu(*nccl), state));
        break;
      }
    }
#else
    (void)allreduce_ops;
#endif
    return adasum_ops;
  }
};

// What operations.cc divides by. For AdaSum of device tensors it divides the caller's postscale factor by the
// number of ranks on the host, because its own op sums them first; then ranks on uneven hosts do not even ask
// for the same. That one division is left out; everywhere else this is the number.
struct LocalSize {
  int ranks;
  operator int() const { return ranks; }
};
struct AsLocalSize {};
inline LocalSize operator+(int ranks, AsLocalSize) { return {ranks}; }
inline double& operator/=(double& factor, LocalSize size) {
  return IsLeftToHorovod() ? factor = factor / size.ranks : factor;
}

// Beside what a turn of Horovod's loop has negotiated in a process set.
struct Turn {
  const horovod::common::HorovodGlobalState& state;
  const horovod::common::ProcessSet& process_set;
};
inline horovod::common::ResponseList operator+(horovod::common::ResponseList responses, const Turn& turn) {
  NoteTurn(*turn.process_set.controller, responses.shutdown());
  return responses;
}

// Beside a refusal of what somebody submits: after the end, when Horovod's process sets are gone, it is the
// end that is told, and not that there is no such set.
struct OrTheEnd {
  horovod::common::HorovodGlobalState& state;
};
inline horovod::common::Status operator+(horovod::common::Status refusal, OrTheEnd submitted) {
  return submitted.state.shut_down ? ShutDownError(submitted.state, horovod::common::SHUT_DOWN_ERROR)
                                   : refusal;
}

// Beside what puts a tensor into a queue, which Horovod's loop empties for the last time when it ends: a
// thread that has looked before that whether Horovod shuts down, and comes here after it, would wait for
// ever.
struct UnlessTheLoopHasEnded {
  horovod::common::HorovodGlobalState& state;
  horovod::common::TensorQueue& queue;
};
inline horovod::common::Status operator+(horovod::common::Status added, UnlessTheLoopHasEnded late) {
  if (LoopHasEnded()) {
    late.queue.FinalizeTensorQueue(ShutDownError(late.state, horovod::common::SHUT_DOWN_ERROR));
  }
  return added;
}

} // namespace adasum_hvd

namespace horovod {
namespace common {
using AdasumOperationManager = ::adasum_hvd::OperationManagerWithAdasum;
#if ADASUM_ON_DEVICES
using AdasumNcclContext = ::adasum_hvd::NcclContextThatTells;
#endif
} // namespace common
} // namespace horovod

#define OperationManager AdasumOperationManager
#if ADASUM_ON_DEVICES
#define NCCLContext AdasumNcclContext
#endif

// An AdaSum response carries reduce_op SUM while the request carried ADASUM, so Horovod's response cache
// never hits and every step negotiates every tensor again. request_type already says ADASUM; operations.cc
// calls set_reduce_op on nothing but that request.
#define set_reduce_op(op)                                                                                    \
  set_reduce_op((op) == ::horovod::common::ReduceOp::ADASUM ? ::horovod::common::ReduceOp::SUM : (op))

#define GetLocalSize() GetLocalSize() + ::adasum_hvd::AsLocalSize()

// Its only use in operations.cc is in the loop.
#define ComputeResponseList(leaving, state, process_set)                                                     \
  ComputeResponseList(leaving, state, process_set) + ::adasum_hvd::Turn { state, process_set }

// Horovod's words for a shutdown name no cause.
#define SHUT_DOWN_ERROR ::adasum_hvd::ShutDownError(horovod_global, SHUT_DOWN_ERROR)

#define AddToTensorQueue(entry, message)                                                                     \
  AddToTensorQueue(entry, message) + ::adasum_hvd::UnlessTheLoopHasEnded {                                   \
    horovod_global, process_set.tensor_queue                                                                 \
  }
#define AddToTensorQueueMulti(entries, messages)                                                             \
  AddToTensorQueueMulti(entries, messages) + ::adasum_hvd::UnlessTheLoopHasEnded {                           \
    horovod_global, process_set.tensor_queue                                                                 \
  }

#define InvalidArgument(...)                                                                                 \
  InvalidArgument(__VA_ARGS__) + ::adasum_hvd::OrTheEnd { horovod_global }
