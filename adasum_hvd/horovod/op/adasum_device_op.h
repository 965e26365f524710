// The AdaSum op for tensors on CUDA devices, of a Horovod with NCCL: glue between Horovod's stream and
// communicator and reduce_device.h, no arithmetic. All work is enqueued; Horovod's finalizer thread waits for
// an event that completes it.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/reduce_device.h"
#include "failure/pending_callbacks.h"
#include "horovod/common/ops/nccl_operations.h"
#include "network/nccl.h"
#include "op/agreement.h"
#include "op/fused_tensors.h"
#include "op/settings.h"

namespace adasum_hvd {

class AdasumDeviceOp : public horovod::common::AllreduceOp,
                       public std::enable_shared_from_this<AdasumDeviceOp> {
public:
  AdasumDeviceOp(horovod::common::NCCLContext* nccl_context, horovod::common::GPUContext* gpu_context,
                 horovod::common::HorovodGlobalState* global_state);

  bool Enabled(const horovod::common::ParameterManager& parameter_manager,
               const std::vector<horovod::common::TensorTableEntry>& entries,
               const horovod::common::Response& response) const override;

  horovod::common::Status Execute(std::vector<horovod::common::TensorTableEntry>& entries,
                                  const horovod::common::Response& response) override;

  // To be called before Horovod ends its communicators; those of an elastic job are aborted on all ranks.
  void PrepareForShutDown();

  // The number of tensors in completed reductions whose trees were walked. Thread-safe.
  int64_t ExplicitTensors();

  // Frees memory on devices; no reduction may follow.
  void Release();

protected:
  // Horovod's stream waits for the tensors; this thread does not.
  void WaitForData(std::vector<horovod::common::TensorTableEntry>& entries) override;

private:
  using Entries = std::vector<horovod::common::TensorTableEntry>;

  Agreement& Connect(int process_set_id) const;
  DeviceScratch& ScratchOf(int device);
  void AbortElastic(const Entries& entries, DeviceScratch& scratch, const std::string& why);
  bool IsDrained();
  [[noreturn]] void EndThisProcess(const std::string& why) const;
  void CheckCommunicator(ncclComm_t communicator);
  void Enqueue(FusedTensors& fused, const Agreement& agreement, horovod::common::Controller& controller,
               DeviceScratch& scratch);

  Settings settings_;
  horovod::common::GPUContext* gpu_context_;
  horovod::common::GPUOpContext gpu_op_context_;
  horovod::common::NCCLOpContext nccl_op_context_;
  mutable Agreements<Agreement> agreements_{Memory::kDevice};
  std::map<std::pair<int, int>, DeviceScratch> scratch_; // by device and Horovod's stream
  std::mutex scratch_mutex_; // guards the map; only the background thread uses its elements
  PendingCallbacks pending_;
  std::mutex communicator_mutex_; // finalizer threads check communicators that Horovod ends
  bool communicators_end_ = false;
};

} // namespace adasum_hvd
