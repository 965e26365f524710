// Every use of Horovod's internals, with its reason. No line of Horovod's sources is changed.
//
// The first part reads members that are not public, for failure/shut_down.cc. The others are force-included
// into one of Horovod's sources each, which a macro names (cmake/targets.cmake), and change its calls.
// tests/unit/test_horovod_internals.py checks the lines of Horovod on which they rely.
#pragma once

#ifndef ADASUM_IN_HOROVOD

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "horovod/common/process_set.h"
#include "horovod/common/stall_inspector.h"
#include "horovod/common/tensor_queue.h"

namespace adasum_hvd {

namespace hvd = horovod::common;

// A derived class may form a pointer to a protected member of its base, and this pointer then applies to any
// object of the base.

// Horovod: the inspector logs the names of stalled tensors, but no error of any rank has them.
// We need: the tensors and the ranks that have submitted them, for the errors of all ranks; the limits.
struct StallTables : hvd::StallInspector {
  static const auto& Waiting(const hvd::StallInspector& inspector) {
    return inspector.*(&StallTables::uncached_tensor_table);
  }
  static int LimitSeconds(const hvd::StallInspector& inspector) {
    return inspector.*(&StallTables::stall_shutdown_time_seconds);
  }
  static int CheckSeconds(const hvd::StallInspector& inspector) {
    return inspector.*(&StallTables::stall_warning_time_seconds);
  }
};

// Horovod: a queue does not list its tensors.
// We need: the names of the tensors that this rank waits for when Horovod shuts down.
struct QueueTables : hvd::TensorQueue {
  static std::vector<std::string> Names(hvd::TensorQueue& queue) {
    std::lock_guard<std::mutex> guard(queue.*(&QueueTables::mutex_));
    std::vector<std::string> names;
    for (const auto& [name, entry] : queue.*(&QueueTables::tensor_table_)) {
      names.push_back(name);
    }
    return names;
  }
};

// Horovod: removing a process set is a private member function, called after a negotiation of all ranks.
// We need: to remove it if the ranks have not agreed to shut down; the negotiation would never end. A private
// name is allowed in an explicit instantiation of a template, which defines the friend function here.
using RemoveFunction = void (hvd::ProcessSetTable::*)(int32_t);
RemoveFunction PrivateRemoveFunction();
template <RemoveFunction member> struct DefinePrivate {
  friend RemoveFunction PrivateRemoveFunction() { return member; }
};
template struct DefinePrivate<&hvd::ProcessSetTable::DeregisterProcessSet>;

inline void RemoveFrom(hvd::ProcessSetTable& table, int32_t id) { (table.*PrivateRemoveFunction())(id); }

} // namespace adasum_hvd

#endif

// ---- in operations.cc ----

#if defined(ADASUM_IN_OPERATIONS)

#include <memory>
#include <utility>
#include <vector>

#include "failure/shut_down.h"
#include "horovod/common/ops/operation_manager.h"
#include "op/hooks.h"
#if ADASUM_ON_DEVICES && HAVE_MPI
// It names NCCLContext, which is another class below.
#include "horovod/common/ops/adasum_gpu_operations.h"
#endif

namespace adasum_hvd {

// The macros below have the names of functions, and append `| Then{...}` to their calls: the result of a call
// goes through the function in braces.

template <class Function> struct Then {
  Function function;
};
template <class Function> Then(Function) -> Then<Function>;
template <class Value, class Function> auto operator|(Value value, const Then<Function>& then) {
  return then.function(std::move(value));
}

// Horovod: the global state is in an anonymous namespace of operations.cc.
// We need: its address, when the list of ops is made. Every op has it; the join op exists in every build.
struct GlobalStateOf : hvd::HorovodOp {
  static hvd::HorovodGlobalState* Read(hvd::HorovodOp& op) { return op.*(&GlobalStateOf::global_state_); }
};

#if ADASUM_ON_DEVICES
// Horovod: its NCCL op holds the contexts of NCCL and the device as protected members.
// We need: the same ones for the op on devices.
struct ContextsOf : hvd::NCCLAllreduce {
  static hvd::NCCLContext* Nccl(hvd::NCCLAllreduce& op) { return op.*(&ContextsOf::nccl_context_); }
  static hvd::GPUContext* Gpu(hvd::NCCLAllreduce& op) { return op.*(&ContextsOf::gpu_context_); }
};
#endif

// Horovod: makes its list of ops inside an anonymous namespace; there is no hook to add one.
// We need: our op before Horovod's own AdaSum ops. So operations.cc constructs this class in place of
// OperationManager (by the macro below), which it adds our op to.
class OperationManagerWithAdasum : public hvd::OperationManager {
  template <class Op> using Ops = std::vector<std::shared_ptr<Op>>;

public:
  OperationManagerWithAdasum(hvd::ParameterManager* parameter_manager, Ops<hvd::AllreduceOp> allreduce_ops,
                             Ops<hvd::AllgatherOp> allgather_ops, Ops<hvd::BroadcastOp> broadcast_ops,
                             Ops<hvd::AlltoallOp> alltoall_ops, Ops<hvd::ReducescatterOp> reducescatter_ops,
                             std::shared_ptr<hvd::JoinOp> join_op, Ops<hvd::AllreduceOp> adasum_ops,
                             std::shared_ptr<hvd::BarrierOp> barrier_op,
                             std::shared_ptr<hvd::ErrorOp> error_op)
      : OperationManager(parameter_manager, allreduce_ops, std::move(allgather_ops), std::move(broadcast_ops),
                         std::move(alltoall_ops), std::move(reducescatter_ops), join_op,
                         WithOurs(*join_op, allreduce_ops, std::move(adasum_ops)), std::move(barrier_op),
                         std::move(error_op)) {}

  // Hides Horovod's function, to count operations: a cycle takes as long as all operations in it.
  hvd::Status ExecuteOperation(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response,
                               hvd::ProcessSet& process_set) const {
    NoteOperation();
    return OperationManager::ExecuteOperation(entries, response, process_set);
  }

private:
  static Ops<hvd::AllreduceOp> WithOurs(hvd::HorovodOp& any_op, const Ops<hvd::AllreduceOp>& allreduce_ops,
                                        Ops<hvd::AllreduceOp> adasum_ops) {
    hvd::HorovodGlobalState* state = GlobalStateOf::Read(any_op);
    adasum_ops.insert(adasum_ops.begin(), MakeAdasumOp(state));
#if ADASUM_ON_DEVICES
    for (const auto& op : allreduce_ops) {
      if (auto* nccl = dynamic_cast<hvd::NCCLAllreduce*>(op.get())) {
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

// See GetLocalSize below.
struct LocalSize {
  int ranks;
  operator int() const { return ranks; }
};
inline double& operator/=(double& factor, LocalSize size) {
  return IsLeftToHorovod() ? factor = factor / size.ranks : factor;
}

} // namespace adasum_hvd

// Names in operations.cc are looked up in Horovod's namespace.
namespace horovod {
namespace common {
using AdasumOperationManager = ::adasum_hvd::OperationManagerWithAdasum;
#if ADASUM_ON_DEVICES
using AdasumNcclContext = ::adasum_hvd::NcclContextWithAbort;
#endif
} // namespace common
} // namespace horovod

#define OperationManager AdasumOperationManager
#if ADASUM_ON_DEVICES
#define NCCLContext AdasumNcclContext // for the reason see op/hooks.h
#endif

// Horovod: an AdaSum response has reduce_op SUM, its request ADASUM, so that the response cache never hits
// and every step negotiates every tensor again.
// We need: the same value in both. request_type already says ADASUM, and this is the only call.
#define set_reduce_op(op)                                                                                    \
  set_reduce_op((op) == ::horovod::common::ReduceOp::ADASUM ? ::horovod::common::ReduceOp::SUM : (op))

// Horovod: divides the postscale factor of AdaSum on devices by the number of ranks of the host, because its
// own op sums these first. On hosts with different numbers of ranks the factors then differ: an error.
// We need: the factor undivided. The type of the divisor selects the `/=` above; elsewhere it is the number.
#define GetLocalSize()                                                                                       \
  GetLocalSize() | ::adasum_hvd::Then {                                                                      \
    [](int ranks) { return ::adasum_hvd::LocalSize{ranks}; }                                                 \
  }

// Horovod: the result of the loop's only call says whether the ranks have agreed to shut down.
// We need: that value when the process sets are removed.
#define ComputeResponseList(leaving, state, process_set)                                                     \
  ComputeResponseList(leaving, state, process_set) | ::adasum_hvd::Then {                                    \
    [&](::horovod::common::ResponseList responses) {                                                         \
      ::adasum_hvd::NoteCycle(*process_set.controller, responses.shutdown());                                \
      return responses;                                                                                      \
    }                                                                                                        \
  }

// Horovod: its loop sets the same flag when it ends by itself as the script does when it asks for the end.
// We need: the script's request. A thread is tested only there.
#define joinable()                                                                                           \
  joinable() | ::adasum_hvd::Then {                                                                          \
    [](bool runs) {                                                                                          \
      ::adasum_hvd::NoteProgramEnd();                                                                        \
      return runs;                                                                                           \
    }                                                                                                        \
  }

// Horovod: the error of a shutdown names no cause.
// We need: the cause in it.
#define SHUT_DOWN_ERROR ::adasum_hvd::ShutDownError(horovod_global, SHUT_DOWN_ERROR)

// Horovod: a thread that submits a tensor checks first whether Horovod shuts down. If the loop empties its
// queues for the last time between the check and the insertion, the thread waits without a timeout.
// We need: a second check after the insertion.
#define ADASUM_UNLESS_LOOP_HAS_ENDED(queue)                                                                  \
  ::adasum_hvd::Then {                                                                                       \
    [&](::horovod::common::Status inserted) {                                                                \
      if (::adasum_hvd::LoopHasEnded()) {                                                                    \
        (queue).FinalizeTensorQueue(SHUT_DOWN_ERROR);                                                        \
      }                                                                                                      \
      return inserted;                                                                                       \
    }                                                                                                        \
  }
#define AddToTensorQueue(entry, message)                                                                     \
  AddToTensorQueue(entry, message) | ADASUM_UNLESS_LOOP_HAS_ENDED(process_set.tensor_queue)
#define AddToTensorQueueMulti(entries, messages)                                                             \
  AddToTensorQueueMulti(entries, messages) | ADASUM_UNLESS_LOOP_HAS_ENDED(process_set.tensor_queue)

// Horovod: after a shutdown its process sets are gone, so that it refuses arguments as invalid.
// We need: the error of the shutdown.
#define InvalidArgument(...)                                                                                 \
  InvalidArgument(__VA_ARGS__) | ::adasum_hvd::Then {                                                        \
    [](::horovod::common::Status refusal) { return horovod_global.shut_down ? SHUT_DOWN_ERROR : refusal; }   \
  }

#endif // ADASUM_IN_OPERATIONS

// ---- in controller.cc ----

#if defined(ADASUM_IN_CONTROLLER)

#include <cstddef>
#include <cstdint>
#include <vector>

#include "failure/shut_down.h"
#include "op/network.h"

namespace adasum_hvd {

inline std::vector<int32_t> WithCapacityFor(int ranks, size_t length) {
  std::vector<int32_t> values;
  values.reserve(static_cast<size_t>(ranks));
  values.resize(length);
  return values;
}

} // namespace adasum_hvd

// Horovod: when ranks have joined, the coordinator makes a vector with one element per remaining rank, and
// writes to it at the ranks' numbers, which is past its end. Jobs of 7 ranks and more crash in join().
// We need: memory for all ranks. The length stays, because a short vector keeps the response out of the
// cache. The macro matches the definition `std::vector<int32_t> devices(requests.size())`, and leaves calls
// of devices() as they are.
#define devices(...) devices(__VA_OPT__(::adasum_hvd::WithCapacityFor(GetSize(), __VA_ARGS__)))

// Horovod: its search for stalled tensors takes the number of ranks from a vector that the Gloo controller
// only reserves, so that it finds none.
// And a process set whose tensors stall shuts down alone, while the other ranks wait for its ranks.
// We need: the search over all ranks, its result in the errors of all ranks, and one shutdown of all ranks.
#define CheckForStalledTensors(global_ranks)                                                                 \
  CheckForStalledTensors(::adasum_hvd::GlobalRanks(*this)) && ::adasum_hvd::NoteStalled(*this)

// Horovod: `should_shut_down` is set if the script asks for it. This check comes right after, in every cycle.
// We need: the flag also after a failed reduction, because other ranks may have completed it and wait for the
// next one; and a notice to the other ranks of why this one shuts down. `&` evaluates both sides.
#define ShouldPerformCheck() ShouldPerformCheck() & ::adasum_hvd::NoteLeaving(*this, should_shut_down)

#endif // ADASUM_IN_CONTROLLER

// ---- in gloo/gloo_context.cc ----

#if defined(ADASUM_IN_GLOO_CONTEXT)

#include <string>

#include "horovod/common/gloo/gloo_context.h"
#include "horovod/common/utils/env_parser.h"

namespace adasum_hvd {

// Horovod: ranks with the same number on their hosts meet under their number among the set's ranks of their
// host. If a set has ranks 0 and 1 of a host and rank 1 of another, these are 1 and 0, and both ranks wait.
// We need: the number on the host, under which the job's own ranks meet, too.
struct CrossScope {
  std::string operator+(const std::string& /*number_in_set*/) const {
    const int number = horovod::common::GetIntEnvOrDefault(HOROVOD_LOCAL_RANK, 0);
    return HOROVOD_GLOO_CROSS_PREFIX + std::to_string(number); // Horovod's macro still
  }
};

} // namespace adasum_hvd

#undef HOROVOD_GLOO_CROSS_PREFIX
#define HOROVOD_GLOO_CROSS_PREFIX                                                                            \
  ::adasum_hvd::CrossScope {}

#endif // ADASUM_IN_GLOO_CONTEXT

// ---- in torch/mpi_ops_v2.cc and tensorflow/mpi_ops.cc ----

#if defined(ADASUM_IN_WAITING_LOOPS)

#include <chrono>
#include <thread>

namespace adasum_hvd {
constexpr std::chrono::microseconds kPollPeriod{50}; // less than a cycle of Horovod's loop
} // namespace adasum_hvd

// Horovod: a thread that waits for an operation polls, and only yields in between. With fewer processors than
// threads this takes processor time from the threads of all ranks that execute the operation. With kernels
// whose scheduler miscounts yields (Linux 6.18) it stopped other processes for half a minute.
// We need: a sleep. The macro matches `std::this_thread::yield()`.
#define yield() sleep_for(::adasum_hvd::kPollPeriod)

#endif // ADASUM_IN_WAITING_LOOPS
