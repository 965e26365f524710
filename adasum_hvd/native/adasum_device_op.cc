#include "adasum_device_op.h"

#include <deque>
#include <exception>
#include <string>
#include <unordered_set>

#include "horovod/common/controller.h"
#include "horovod/common/global_state.h"
#include "registry.h"
#include "statistics.h"

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
  if (!settings_.off) {
    return true;
  }
  // Horovod asks on every rank, so here is where a rank that is off and one that is not find out.
  const int id = entries.front().process_set_id;
  auto& agreed = const_cast<AdasumDeviceOp*>(this)->AgreedFor(id, global_state_->process_set_table.Get(id));
  return !agreed.disagreement.empty();
}

Agreement& AdasumDeviceOp::AgreedFor(int process_set_id, hvd::ProcessSet& process_set) {
  Agreement& agreed = agreed_[process_set_id];
  if (!agreed.IsOf(process_set.controller)) {
    agreed = Agree(process_set.controller, settings_);
    std::string path = settings_.off ? "Horovod's own op" : "NCCL";
    if (!settings_.off && agreed.levels.size() > 1) {
      path += ", levels of " + Describe(agreed.levels) + " ranks";
    }
    SetPath(process_set_id, Memory::kDevice, path);
  }
  return agreed;
}

hvd::Status AdasumDeviceOp::Execute(Entries& entries, const hvd::Response& response) {
  if (const hvd::Status status = CheckType(entries.front()); !status.ok()) {
    return status;
  }
  const int process_set_id = entries.front().process_set_id;
  hvd::ProcessSet& process_set = global_state_->process_set_table.Get(process_set_id);
  Agreement& agreed = AgreedFor(process_set_id, process_set);
  if (!agreed.disagreement.empty()) {
    return hvd::Status::InvalidArgument(agreed.disagreement);
  }
  std::vector<Job> jobs;
  if (const hvd::Status status = ReadJobs(entries, response, jobs); !status.ok()) {
    return status;
  }
  DeviceScratch* scratch = &scratch_[{entries.front().device, global_state_->current_nccl_stream}];
  // With HOROVOD_ENABLE_ASYNC_COMPLETION Horovod does not call back.
  Count(kExplicitTensors, scratch->TakeExplicitTensors());
  try {
    gpu_op_context_.InitGPU(entries);
    nccl_op_context_.InitNCCLComm(entries, response.devices());
    gpu_op_context_.InitGPUQueue(entries, response);
    WaitForData(entries);
    for (const Job& job : jobs) {
      Enqueue(job, agreed, *process_set.controller, *scratch);
    }
  } catch (const std::exception& error) {
    agreed.disagreement = std::string("AdaSum: an earlier reduction failed on this rank: ") + error.what();
    GiveUp();
    throw;
  }
  return gpu_op_context_.FinalizeGPUQueue(entries, true, [this, scratch] {
    nccl_op_context_.AsyncErrorCheck();
    Count(kExplicitTensors, scratch->TakeExplicitTensors());
  });
}

// What the other ranks wait for was not enqueued here, and Horovod's own reductions use the same
// communicator: out of step, they would hang or mix. Nothing that still needs it may run.
void AdasumDeviceOp::GiveUp() {
  if (nccl_op_context_.nccl_comm_ != nullptr && *nccl_op_context_.nccl_comm_ != nullptr) {
    ncclCommAbort(*nccl_op_context_.nccl_comm_);
    *nccl_op_context_.nccl_comm_ = nullptr;
  }
  global_state_->shut_down = true;
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

void AdasumDeviceOp::Enqueue(const Job& job, const Agreement& agreed, hvd::Controller& controller,
                             DeviceScratch& scratch) {
  const cudaStream_t stream = *gpu_op_context_.stream;
  NcclTransport everyone(*nccl_op_context_.nccl_comm_, controller.GetRank(), controller.GetSize(), stream);
  std::deque<GroupTransport> groups;
  std::vector<ReduceLevel> levels;
  for (const PlannedLevel& level : agreed.levels) {
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
    phase_under_way = job.PhaseName(phase, level);
  };
  ReduceOnDevice(job.tensors, job.type, levels, job.scale, agreed.reduce, scratch, stream, observer);
  end_phase();
}

std::shared_ptr<hvd::AllreduceOp> MakeAdasumDeviceOp(hvd::NCCLContext* nccl_context,
                                                     hvd::GPUContext* gpu_context,
                                                     hvd::HorovodGlobalState* state) {
  return std::make_shared<AdasumDeviceOp>(nccl_context, gpu_context, state);
}

} // namespace adasum_hvd
