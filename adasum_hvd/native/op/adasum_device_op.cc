#include "op/adasum_device_op.h"

#include <deque>
#include <exception>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "horovod/common/controller.h"
#include "horovod/common/global_state.h"
#include "op/registry.h"
#include "op/release.h"

namespace adasum_hvd {

namespace hvd = horovod::common;

AdasumDeviceOp::AdasumDeviceOp(hvd::NCCLContext* nccl_context, hvd::GPUContext* gpu_context,
                               hvd::HorovodGlobalState* global_state)
    : AllreduceOp(global_state), settings_(Settings::FromEnvironment()), gpu_context_(gpu_context),
      gpu_op_context_(gpu_context, global_state),
      nccl_op_context_(nccl_context, global_state, hvd::Communicator::GLOBAL) {}

bool AdasumDeviceOp::Enabled(const hvd::ParameterManager&, const Entries& entries,
                             const hvd::Response&) const {
  if (entries.empty() || entries.front().device == CPU_DEVICE_ID) {
    return false;
  }
  // Horovod asks on every rank, so here is where a rank that is off and one that is not find out.
  return !settings_.off || !AgreementOf(entries.front().process_set_id).disagreement.empty();
}

Agreement& AdasumDeviceOp::AgreementOf(int process_set_id) const {
  return agreements_.Of(
      process_set_id, *global_state_, settings_, [](const Agreement& agreement, const auto&) {
        return agreement.levels.size() > 1 ? "NCCL, levels of " + Describe(agreement.levels) + " ranks"
                                           : std::string("NCCL");
      });
}

hvd::Status AdasumDeviceOp::Execute(Entries& entries, const hvd::Response& response) {
  if (const hvd::Status status = CheckType(entries.front()); !status.ok()) {
    return status;
  }
  const int process_set_id = entries.front().process_set_id;
  hvd::ProcessSet& process_set = global_state_->process_set_table.Get(process_set_id);
  Agreement& agreement = AgreementOf(process_set_id);
  if (!agreement.disagreement.empty()) {
    return hvd::Status::InvalidArgument(agreement.disagreement);
  }
  std::vector<FusedTensors> by_type;
  if (const hvd::Status status = ReadFusedTensors(entries, response, by_type); !status.ok()) {
    return status;
  }
  DeviceScratch* scratch = &scratch_[{entries.front().device, global_state_->current_nccl_stream}];
  ncclComm_t* communicator = nullptr; // of this reduction, once there is one
  try {
    gpu_op_context_.InitGPU(entries);
    scratch->earlier.Set(gpu_context_->streams[global_state_->current_nccl_stream][entries.front().device]);
    nccl_op_context_.InitNCCLComm(entries, response.devices());
    communicator = nccl_op_context_.nccl_comm_;
    gpu_op_context_.InitGPUQueue(entries, response);
    WaitForData(entries);
    for (const FusedTensors& fused : by_type) {
      Enqueue(fused, agreement, *process_set.controller, *scratch);
    }
  } catch (const std::exception& error) {
    agreement.disagreement = std::string("AdaSum: an earlier reduction failed on this rank: ") + error.what();
    GiveUp(communicator, scratch->earlier);
    throw;
  }
  ++unfinished_;
  return gpu_op_context_.FinalizeGPUQueue(entries, true, [this] {
    CheckCommunicator();
    --unfinished_;
  });
}

// What the other ranks wait for was not enqueued here, and Horovod's own reductions use the same
// communicator: out of step, they would hang or mix. Nothing that still needs it may run, but what all ranks
// have enqueued `earlier` comes to its end first.
void AdasumDeviceOp::GiveUp(ncclComm_t* communicator, const StreamMark& earlier) {
  if (communicator != nullptr && *communicator != nullptr) {
    const bool ended = earlier.WaitFor(settings_.local.timeout_seconds);
    std::lock_guard<std::mutex> guard(communicator_mutex_);
    given_up_ = true;
    cut_short_ = !ended;
    ncclCommAbort(*communicator);
    *communicator = nullptr;
  }
  global_state_->shut_down = true;
}

// On a finalizer thread, where an exception ends the process but in elastic mode. What was cut short holds
// anything, and must not pass for a result.
void AdasumDeviceOp::CheckCommunicator() {
  std::lock_guard<std::mutex> guard(communicator_mutex_);
  if (!given_up_) {
    nccl_op_context_.AsyncErrorCheck();
  } else if (cut_short_) {
    throw std::runtime_error("AdaSum: a reduction was cut short: a later one failed on this rank, and it had "
                             "not ended " +
                             std::to_string(settings_.local.timeout_seconds) +
                             " s later (ADASUM_HVD_TIMEOUT_SECONDS)");
  }
}

void AdasumDeviceOp::WaitForData(Entries& entries) {
  if (global_state_->timeline.Initialized()) { // it shows how long the tensors took
    AllreduceOp::WaitForData(entries);
    return;
  }
  std::unordered_set<gpuEvent_t> ready;
  for (hvd::TensorTableEntry& entry : entries) {
    entry.ready_event_list.PushEventsToSet(ready);
  }
  for (gpuEvent_t event : ready) {
    CheckCuda(cudaStreamWaitEvent(*gpu_op_context_.stream, event, 0), "wait for a tensor");
  }
}

void AdasumDeviceOp::Enqueue(const FusedTensors& fused, const Agreement& agreement,
                             hvd::Controller& controller, DeviceScratch& scratch) {
  const cudaStream_t stream = *gpu_op_context_.stream;
  NcclTransport everyone(*nccl_op_context_.nccl_comm_, controller.GetRank(), controller.GetSize(), stream);
  std::deque<GroupTransport> groups;
  std::vector<ReduceLevel> levels;
  for (const GroupPlan& level : agreement.levels) {
    levels.push_back({&groups.emplace_back(everyone, level.group), &level.tree});
  }
  // An event behind every phase: the finalizer thread draws them in the timeline.
  std::string phase_under_way;
  auto end_phase = [&] {
    if (!phase_under_way.empty() && global_state_->timeline.Initialized()) {
      gpu_context_->RecordEvent(gpu_op_context_.event_queue, phase_under_way, *gpu_op_context_.stream);
    }
  };
  auto observer = [&](Phase phase, int level) {
    end_phase();
    phase_under_way = fused.PhaseName(phase, level);
  };
  ReduceOnDevice(fused.tensors, fused.type, levels, fused.scale, agreement.reduce, scratch, stream, observer);
  end_phase();
}

void AdasumDeviceOp::Release() {
  agreements_.Clear();
  if (unfinished_ == 0) { // else a finalizer thread, ended early, left what still points there
    scratch_.clear();
  }
}

std::shared_ptr<hvd::AllreduceOp> MakeAdasumDeviceOp(hvd::NCCLContext* nccl_context,
                                                     hvd::GPUContext* gpu_context,
                                                     hvd::HorovodGlobalState* state) {
  auto op = std::make_shared<AdasumDeviceOp>(nccl_context, gpu_context, state);
  ReleaseWithThisThread(op);
  return op;
}

} // namespace adasum_hvd
