// The AdaSum op for tensors on CUDA devices, of a Horovod with NCCL: glue between Horovod's stream and
// communicator and reduce_device.h, no arithmetic. All work is enqueued; Horovod's finalizer thread waits for
// an event that completes it.
#include <algorithm>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda/reduce_device.h"
#include "failure/pending_callbacks.h"
#include "failure/shut_down.h"
#include "horovod/common/controller.h"
#include "horovod/common/global_state.h"
#include "network/nccl.h"
#include "op/agreement.h"
#include "op/fused_tensors.h"
#include "op/observations.h"
#include "op/settings.h"
#include "op/statistics.h"

namespace adasum_hvd {
namespace {

class AdasumDeviceOp : public hvd::AllreduceOp, public std::enable_shared_from_this<AdasumDeviceOp> {
public:
  AdasumDeviceOp(hvd::NCCLContext* nccl_context, hvd::GPUContext* gpu_context,
                 hvd::HorovodGlobalState* global_state)
      : AllreduceOp(global_state), settings_(Settings::Begin()), gpu_context_(gpu_context),
        gpu_op_context_(gpu_context, global_state),
        nccl_op_context_(nccl_context, global_state, hvd::Communicator::GLOBAL) {}

  bool Enabled(const hvd::ParameterManager& parameter_manager,
               const std::vector<hvd::TensorTableEntry>& entries,
               const hvd::Response& response) const override;

  hvd::Status Execute(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response) override;

  // To be called before Horovod ends its communicators; those of an elastic job are aborted on all ranks.
  void PrepareForShutDown();

  // The number of tensors in completed reductions whose trees were walked. Thread-safe.
  int64_t ExplicitTensors();

  // Frees memory on devices; no reduction may follow.
  void Release();

protected:
  // Horovod's stream waits for the tensors; this thread does not.
  void WaitForData(std::vector<hvd::TensorTableEntry>& entries) override;

private:
  using Entries = std::vector<hvd::TensorTableEntry>;

  Agreement& Connect(int process_set_id) const;
  DeviceScratch& ScratchOf(int device) {
    std::lock_guard<std::mutex> guard(scratch_mutex_); // ExplicitTensors reads the map on other threads
    return scratch_[{device, global_state_->current_nccl_stream}];
  }
  void AbortElastic(const Entries& entries, DeviceScratch& scratch, const std::string& why);
  bool IsDrained();
  [[noreturn]] void EndThisProcess(const std::string& why) const {
    LogEnd(global_state_->global_controller->GetRank(), why);
    EndProcess();
  }
  void CheckCommunicator(ncclComm_t communicator);
  void Enqueue(FusedTensors& fused, const Agreement& agreement, hvd::Controller& controller,
               DeviceScratch& scratch);

  Settings settings_;
  hvd::GPUContext* gpu_context_;
  hvd::GPUOpContext gpu_op_context_;
  hvd::NCCLOpContext nccl_op_context_;
  mutable Agreements<Agreement> agreements_{Memory::kDevice};
  std::map<std::pair<int, int>, DeviceScratch> scratch_; // by device and Horovod's stream
  std::mutex scratch_mutex_; // guards the map; only the background thread uses its elements
  PendingCallbacks pending_;
  std::mutex communicator_mutex_; // finalizer threads check communicators that Horovod ends
  bool communicators_end_ = false;
};

bool AdasumDeviceOp::Enabled(const hvd::ParameterManager&, const Entries& entries,
                             const hvd::Response&) const {
  if (entries.empty() || entries.front().device == CPU_DEVICE_ID) {
    return false;
  }
  // Horovod calls this on every rank, so ranks with different settings detect it here.
  return !settings_.off || !Connect(entries.front().process_set_id).Usable().ok();
}

Agreement& AdasumDeviceOp::Connect(int process_set_id) const {
  return agreements_.Connect(
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
  Agreement& agreement = Connect(process_set_id);
  if (const hvd::Status status = agreement.Usable(); !status.ok()) {
    return status;
  }
  std::vector<FusedTensors> by_type;
  if (const hvd::Status status = ReadFusedTensors(entries, response, by_type); !status.ok()) {
    return status;
  }
  pending_.Add(entries, shared_from_this());
  DeviceScratch& scratch = ScratchOf(entries.front().device);
  ncclComm_t communicator = nullptr;
  try {
    gpu_op_context_.InitGPU(entries);
    nccl_op_context_.InitNCCLComm(entries, response.devices());
    communicator = *nccl_op_context_.nccl_comm_;
    gpu_op_context_.InitGPUQueue(entries, response);
    WaitForData(entries);
    for (FusedTensors& fused : by_type) {
      Enqueue(fused, agreement, *process_set.controller, scratch);
    }
  } catch (const std::exception& error) {
    NoteFailure(error.what());
    agreement.failure = std::string("AdaSum: an earlier reduction failed on this rank: ") + error.what();
    const RootCause cause = OwnFailure(global_state_->global_controller->GetRank(), error);
    const AbortNotice notice({cause.rank}, cause.reason);
    if (!global_state_->elastic_enabled || communicator == nullptr) { // or the others wait for it in NCCL
      agreement.network->Abort(notice);
      EndThisProcess(error.what());
    }
    agreement.network->Notify(notice);
    AbortElastic(entries, scratch, error.what());
    return hvd::Status::InProgress();
  }
  return gpu_op_context_.FinalizeGPUQueue(
      entries, true, [self = shared_from_this(), communicator] { self->CheckCommunicator(communicator); });
}

// The other ranks wait for exchanges that this rank has not enqueued. NCCL aborts them after all ranks of a
// host have asked for it, which they do when Horovod shuts down; this rank now asks all to do that. Until
// then NCCL may still write to the tensors, so their callbacks are called when the stream has completed.
void AdasumDeviceOp::AbortElastic(const Entries& entries, DeviceScratch& scratch, const std::string& why) {
  try {
    scratch.end.Set(*gpu_op_context_.stream);
  } catch (const std::exception& error) {
    EndThisProcess(why + "; then " + error.what());
  }
  pending_.Fail(why);
  global_state_->shut_down = true;
  gpu_context_->finalizer_thread_pool.execute(
      [self = shared_from_this(), own = entries, &scratch, why]() mutable {
        self->gpu_context_->SetDevice(own.front().device);
        if (!scratch.end.WaitFor(self->settings_.local.timeout_seconds)) {
          self->EndThisProcess(why + "; and NCCL did not abort within " +
                               std::to_string(self->settings_.local.timeout_seconds) +
                               " s (ADASUM_HVD_TIMEOUT_SECONDS)");
        }
        for (hvd::TensorTableEntry& entry : own) {
          self->global_state_->timeline.End(entry.tensor_name, nullptr);
          entry.FinishWithCallback(hvd::Status::UnknownError(why));
        }
      });
}

void AdasumDeviceOp::PrepareForShutDown() {
  std::lock_guard<std::mutex> guard(communicator_mutex_);
  communicators_end_ = true;
  if (global_state_->elastic_enabled) {
    pending_.Fail("AdaSum: Horovod shut down during a reduction");
  }
}

// Called on a finalizer thread, while Horovod's background thread may end the communicators.
void AdasumDeviceOp::CheckCommunicator(ncclComm_t communicator) {
  std::lock_guard<std::mutex> guard(communicator_mutex_);
  ncclResult_t failed = ncclSuccess;
  if (!communicators_end_) {
    const ncclResult_t asked = ncclCommGetAsyncError(communicator, &failed);
    failed = asked == ncclSuccess ? failed : asked;
  }
  if (failed != ncclSuccess) {
    const std::string why = std::string("NCCL failed during a reduction: ") + ncclGetErrorString(failed);
    if (!global_state_->elastic_enabled) {
      EndThisProcess(why);
    }
    throw std::runtime_error("AdaSum: " + why);
  }
}

void AdasumDeviceOp::WaitForData(Entries& entries) {
  if (global_state_->timeline.Initialized()) { // which shows this wait
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

void AdasumDeviceOp::Enqueue(FusedTensors& fused, const Agreement& agreement, hvd::Controller& controller,
                             DeviceScratch& scratch) {
  const cudaStream_t stream = *gpu_op_context_.stream;
  NcclTransport everyone(*nccl_op_context_.nccl_comm_, controller.GetRank(), controller.GetSize(), stream);
  std::deque<GroupTransport> groups;
  std::vector<ReduceLevel> levels;
  for (const GroupPlan& level : agreement.levels) {
    levels.push_back({&groups.emplace_back(everyone, level.group), &level.tree});
  }
  // An event after every phase: the finalizer thread adds them to the timeline.
  std::string current_phase;
  auto end_phase = [&] {
    if (!current_phase.empty() && global_state_->timeline.Initialized()) {
      gpu_context_->RecordEvent(gpu_op_context_.event_queue, current_phase, *gpu_op_context_.stream);
    }
  };
  auto observer = [&](Phase phase, int level) {
    end_phase();
    current_phase = fused.PhaseName(phase, level);
  };
  ObservationScope observations(fused, levels);
  const std::shared_ptr<DeviceObservation> observation = ReduceOnDevice(
      fused.tensors, fused.type, levels, fused.scale, agreement.reduce, scratch, stream, observer);
  end_phase();
  const int seconds = settings_.local.timeout_seconds;
  observations.Publish(
      [observation, seconds] { return observation == nullptr || observation->Write(seconds); });
}

bool AdasumDeviceOp::IsDrained() {
  try {
    return std::all_of(scratch_.begin(), scratch_.end(), [this](auto& one) {
      auto& [place, scratch] = one;
      DeviceGuard guard(place.first);
      scratch.end.Set(gpu_context_->streams[place.second][place.first]);
      return scratch.end.WaitFor(settings_.local.timeout_seconds);
    });
  } catch (const std::exception&) { // the device has failed
    return false;
  }
}

int64_t AdasumDeviceOp::ExplicitTensors() {
  std::lock_guard<std::mutex> guard(scratch_mutex_);
  return std::accumulate(scratch_.begin(), scratch_.end(), int64_t{0}, [](int64_t sum, const auto& one) {
    return sum + one.second.explicit_tensors.Read();
  });
}

void AdasumDeviceOp::Release() {
  agreements_.Clear();
  CountAlso(nullptr);
  Count(kExplicitTensors, ExplicitTensors());
  if (IsDrained()) { // else pending reductions still need it
    scratch_.clear();
  }
  pending_.FailAll("AdaSum: Horovod shut down before a reduction ended");
}

thread_local std::weak_ptr<AdasumDeviceOp> op_of_this_thread; // Horovod's background thread

} // namespace

void NoteCommunicatorsEnd() {
  if (const std::shared_ptr<AdasumDeviceOp> op = op_of_this_thread.lock()) {
    op->PrepareForShutDown();
  }
}

std::shared_ptr<hvd::AllreduceOp> MakeAdasumDeviceOp(hvd::NCCLContext* nccl_context,
                                                     hvd::GPUContext* gpu_context,
                                                     hvd::HorovodGlobalState* state) {
  auto op = std::make_shared<AdasumDeviceOp>(nccl_context, gpu_context, state);
  ReleaseWithThisThread(op);
  op_of_this_thread = op;
  CountAlso([op = std::weak_ptr<AdasumDeviceOp>(op)] {
    const std::shared_ptr<AdasumDeviceOp> living = op.lock();
    return living == nullptr ? 0 : living->ExplicitTensors();
  });
  return op;
}

} // namespace adasum_hvd
