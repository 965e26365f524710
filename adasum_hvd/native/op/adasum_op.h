// The AdaSum op for tensors in host memory, called by Horovod's background thread: glue between Horovod and
// reduce.h, no arithmetic.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "horovod/common/ops/collective_operations.h"
#include "op/agreement.h"
#include "op/fused_tensors.h"
#include "op/settings.h"
#include "reduce/reduce.h"
#include "transport/hybrid.h"
#include "transport/local/transport.h"
#include "transport/local/watch.h"

namespace adasum_hvd {

class AdasumOp : public horovod::common::AllreduceOp {
public:
  explicit AdasumOp(horovod::common::HorovodGlobalState* global_state);

  // True for every dtype that is not handed on to Horovod's own op: what this op cannot do is refused by
  // Execute, with a message, on all ranks.
  bool Enabled(const horovod::common::ParameterManager& parameter_manager,
               const std::vector<horovod::common::TensorTableEntry>& entries,
               const horovod::common::Response& response) const override;

  horovod::common::Status Execute(std::vector<horovod::common::TensorTableEntry>& entries,
                                  const horovod::common::Response& response) override;

  bool is_off() const { return settings_.off; }

  void PrepareForFailure();

  // Lets go of memory, threads and descriptors; no reduction may follow.
  void Release();

private:
  // What is kept for a process set: the agreement, and what its ranks on this host share.
  struct ProcessSetState : Agreement {
    std::unique_ptr<LocalTransport> local;   // among the ranks of this host, where they share memory
    std::unique_ptr<HybridTransport> hybrid; // then, among all
    int threads = 1;
  };

  class PhaseClock;

  horovod::common::Status ReduceEntries(std::vector<horovod::common::TensorTableEntry>& entries,
                                        const horovod::common::Response& response, ProcessSetState& state,
                                        PhaseClock& clock);
  ProcessSetState& StateOf(int process_set_id) const;
  std::string ConnectLocally(ProcessSetState& state, horovod::common::Controller& controller,
                             const AllgatherTwo& allgather) const;
  horovod::common::Status TellWhy(const std::string& why, int blamed);
  horovod::common::Status GiveUp(ProcessSetState& state,
                                 const std::vector<horovod::common::TensorTableEntry>& entries,
                                 const std::string& why, int blamed);
  void KeepForEver(const std::vector<horovod::common::TensorTableEntry>& entries);
  void Warn(const std::string& text) const;
  static std::string PathText(const ProcessSetState& state, const std::string& path);
  ReduceResult ReduceInLevels(FusedTensors& fused, ProcessSetState& state, const PhaseObserver& observer);
  static std::unique_ptr<Transport> TransportOf(const GroupPlan& level, ProcessSetState& state);

  Settings settings_;
  Scratch scratch_;
  std::unique_ptr<Workers> workers_;
  mutable Agreements<ProcessSetState> agreements_{Memory::kHost};
  std::unique_ptr<Watch> watch_; // of more than one rank
};

} // namespace adasum_hvd
