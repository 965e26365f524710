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

namespace adasum_hvd {

// Defined in adasum_op.cc.
std::shared_ptr<horovod::common::AllreduceOp> MakeAdasumOp(horovod::common::HorovodGlobalState* state);

// HorovodOp::global_state_ is protected; a pointer to member named through a derived class reads it from
// the join op, the one op that exists in every configuration.
struct GlobalStateOf : horovod::common::HorovodOp {
  static horovod::common::HorovodGlobalState* Read(horovod::common::HorovodOp& op) {
    return op.*(&GlobalStateOf::global_state_);
  }
};

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
      : OperationManager(parameter_manager, std::move(allreduce_ops), std::move(allgather_ops),
                         std::move(broadcast_ops), std::move(alltoall_ops), std::move(reducescatter_ops),
                         join_op, WithOurs(*join_op, std::move(adasum_ops)), std::move(barrier_op),
                         std::move(error_op)) {}

private:
  static Ops<horovod::common::AllreduceOp> WithOurs(horovod::common::HorovodOp& any_op,
                                                    Ops<horovod::common::AllreduceOp> adasum_ops) {
    adasum_ops.insert(adasum_ops.begin(), MakeAdasumOp(GlobalStateOf::Read(any_op)));
    return adasum_ops;
  }
};

} // namespace adasum_hvd

namespace horovod {
namespace common {
using AdasumOperationManager = ::adasum_hvd::OperationManagerWithAdasum;
} // namespace common
} // namespace horovod

#define OperationManager AdasumOperationManager

// An AdaSum response carries reduce_op SUM while the request carried ADASUM, so Horovod's response cache
// never hits and every step negotiates every tensor again. request_type already says ADASUM; operations.cc
// calls set_reduce_op on nothing but that request.
#define set_reduce_op(op)                                                                                    \
  set_reduce_op((op) == ::horovod::common::ReduceOp::ADASUM ? ::horovod::common::ReduceOp::SUM : (op))
