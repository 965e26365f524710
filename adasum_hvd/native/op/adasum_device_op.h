// The AdaSum op for tensors on CUDA devices, of a Horovod with NCCL: glue between Horovod's stream and
// communicator and reduce_device.h, no arithmetic. Everything is enqueued; Horovod's finalizer thread learns
// from an event that it is done.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/reduce_device.h"
#include "horovod/common/ops/nccl_operations.h"
#include "op/agreement.h"
#include "op/fused_tensors.h"
#include "op/settings.h"
#include "op/under_way.h"
#include "transport/nccl.h"

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

  // Horovod is about to end its communicators: those of an elastic job are aborted, on all ranks.
  void PrepareForShutDown();

  // How many tensors' trees were walked, as far as the devices have come. On any thread.
  int64_t ExplicitTensors();

  // Lets go of memory on devices; no reduction may follow.
  void Release();

protected:
  // Horovod's stream waits for the tensors, and this thread does not.
  void WaitForData(std::vector<horovod::common::TensorTableEntry>& entries) override;

private:
  using Entries = std::vector<horovod::common::TensorTableEntry>;

  Agreement& AgreementOf(int process_set_id) const;
  DeviceScratch& ScratchOf(int device);
  void GiveUp(const Entries& entries, DeviceScratch& scratch, const std::string& why);
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
  std::mutex scratch_mutex_; // of the map: what is in it is the background thread's
  UnderWay under_way_;
  std::mutex communicator_mutex_; // finalizer threads look at what Horovod ends
  bool communicators_end_ = false;
};

} // namespace adasum_hvd
