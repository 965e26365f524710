// The AdaSum op that Horovod's background thread calls: glue between Horovod and reduce.h, no arithmetic.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "horovod/common/ops/collective_operations.h"
#include "plan.h"
#include "reduce.h"
#include "settings.h"
#include "transport_local.h"

namespace adasum_hvd {

class AdasumOp : public horovod::common::AllreduceOp {
public:
  explicit AdasumOp(horovod::common::HorovodGlobalState* global_state);

  // True for every dtype and device that is not handed on to Horovod's own op: what this op cannot do is
  // refused by Execute, with a message, on all ranks.
  bool Enabled(const horovod::common::ParameterManager& parameter_manager,
               const std::vector<horovod::common::TensorTableEntry>& entries,
               const horovod::common::Response& response) const override;

  horovod::common::Status Execute(std::vector<horovod::common::TensorTableEntry>& entries,
                                  const horovod::common::Response& response) override;

private:
  // What a process set's ranks agreed on when they first reduced something in it. Horovod recycles the ids
  // of process sets and rebuilds controllers at every init, so the controller is what identifies one.
  struct Agreed {
    std::weak_ptr<horovod::common::Controller> controller;
    std::vector<PlannedLevel> levels;
    ReduceSettings reduce;
    std::string disagreement;              // why nothing can be reduced, or empty
    std::vector<int> host;                 // the ranks of this host
    std::unique_ptr<LocalTransport> local; // among them, where they share memory
    int threads = 1;
  };

  horovod::common::Status ExecuteAgreed(std::vector<horovod::common::TensorTableEntry>& entries,
                                        const horovod::common::Response& response, ElementType type,
                                        Agreed& agreed, horovod::common::ProcessSet& process_set);
  Agreed& AgreedFor(int process_set_id, horovod::common::ProcessSet& process_set);
  std::string ConnectLocally(Agreed& agreed, horovod::common::Controller& controller);
  ReduceResult ReduceInLevels(const std::vector<TensorView>& tensors, ElementType type, double scale,
                              Agreed& agreed, horovod::common::ProcessSet& process_set,
                              const PhaseObserver& observer);
  std::unique_ptr<Transport> NetworkFor(horovod::common::ProcessSet& process_set) const;

  Settings settings_;
  Scratch scratch_;
  std::unique_ptr<Workers> workers_;
  std::map<int, Agreed> agreed_; // by process set id
};

} // namespace adasum_hvd
