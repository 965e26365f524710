// The AdaSum op for tensors in host memory, called by Horovod's background thread: glue between Horovod and
// reduce.h, no arithmetic.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "failure/heartbeat_monitor.h"
#include "horovod/common/ops/collective_operations.h"
#include "host/hybrid.h"
#include "op/agreement.h"
#include "op/fused_tensors.h"
#include "op/settings.h"
#include "reduce/reduce.h"

namespace adasum_hvd {

class AdasumOp : public hvd::AllreduceOp {
public:
  explicit AdasumOp(hvd::HorovodGlobalState* global_state);

  // True for every dtype, unless Horovod's own op is chosen: Execute refuses unsupported tensors with a
  // message on all ranks.
  bool Enabled(const hvd::ParameterManager& parameter_manager,
               const std::vector<hvd::TensorTableEntry>& entries,
               const hvd::Response& response) const override;

  hvd::Status Execute(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response) override;

  // Starts monitoring before the first reduction, so that no wait of Horovod's is without a limit.
  void PrepareForFailure();

  // Frees memory, threads and descriptors; no reduction may follow.
  void Release();

private:
  // Of a process set: the agreement, and the transports that use shared memory.
  struct ProcessSetState : Agreement {
    std::unique_ptr<LocalTransport> local;   // among the ranks of this host, if they share memory
    std::unique_ptr<HybridTransport> hybrid; // in that case, among all ranks
    int threads = 1;
  };

  class PhaseClock;

  hvd::Status ReduceEntries(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response,
                            ProcessSetState& state, PhaseClock& clock);
  // Collective at a process set's first call. Const, because Horovod's Enabled is, which calls it, too.
  ProcessSetState& Connect(int process_set_id) const;
  std::string ConnectLocally(ProcessSetState& state, hvd::Controller& controller,
                             const AllgatherTwo& allgather) const;
  int GlobalRank() const;
  hvd::Status Abort(ProcessSetState& state, const std::vector<hvd::TensorTableEntry>& entries,
                    const UnresponsiveRank& error);
  void KeepForever(const std::vector<hvd::TensorTableEntry>& entries);
  void Warn(const std::string& text) const;
  static std::string PathText(const ProcessSetState& state, const std::string& path);
  int64_t ReduceInLevels(FusedTensors& fused, ProcessSetState& state, const PhaseObserver& observer);

  Settings settings_;
  Scratch scratch_;
  std::unique_ptr<Workers> workers_;
  mutable Agreements<ProcessSetState> agreements_{Memory::kHost};
  std::unique_ptr<HeartbeatMonitor> monitor_; // of more than one rank
};

} // namespace adasum_hvd
