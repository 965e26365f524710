// The agreement of the ranks of a process set before its first reduction.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "horovod/common/controller.h"
#include "horovod/common/process_set.h"
#include "op/hooks.h"
#include "op/network.h"
#include "op/settings.h"
#include "op/statistics.h"
#include "reduce/mapping.h"
#include "reduce/plan.h"
#include "reduce/reduce.h"

namespace adasum_hvd {

struct Agreement {
  // Horovod recycles the ids of process sets and rebuilds controllers at every init, so the controller is
  // what identifies one.
  std::weak_ptr<hvd::Controller> controller;
  std::shared_ptr<NetworkTransport> network;
  std::vector<GroupPlan> levels;
  ReduceSettings reduce;
  std::string disagreement;     // an error that all ranks have found, or empty
  std::string failure;          // the error of an earlier reduction, or empty
  std::vector<int> host;        // the ranks of this host
  bool one_host = false;        // it has all ranks
  bool have_neighbours = false; // some host has several ranks

  // OK, or the reason why no tensor can be reduced.
  hvd::Status Usable() const;
};

// Collective over the process set. Ranks that are off also call it, to detect that others are not.
Agreement Agree(const std::shared_ptr<hvd::Controller>& controller, const Settings& settings,
                const AllgatherTwo& allgather);

// The state of every process set for tensors in one kind of memory; a State is an Agreement.
template <class State> class Agreements {
public:
  explicit Agreements(Memory memory) : memory_(memory) {}

  // Collective over the process set at its first call for it, which agrees and then calls
  // `prepare(state, allgather)`; that returns a description of the transport. A failure is kept, because a
  // second attempt would not be collective.
  template <class Prepare>
  State& Connect(int id, hvd::HorovodGlobalState& global_state, const Settings& settings, Prepare prepare) {
    hvd::ProcessSet& process_set = global_state.process_set_table.Get(id);
    State& state = by_id_[id];
    if (state.controller.lock() != process_set.controller) {
      state = State();
      state.controller = process_set.controller;
      try {
        const auto network = NetworkOf(global_state, process_set, settings);
        PollRegularly(network);
        network->BeginOperation();
        // Unlike Controller::Allgather2Ints, it has a timeout over MPI, too.
        const AllgatherTwo allgather = [&](int first, int second) {
          return Gathered(*network, std::vector<int>{first, second});
        };
        static_cast<Agreement&>(state) = Agree(process_set.controller, settings, allgather);
        state.network = network;
        if (state.disagreement.empty()) {
          SetPath(id, memory_, settings.off ? "Horovod's own op" : prepare(state, allgather));
        }
      } catch (const std::exception& error) {
        const auto* unresponsive = dynamic_cast<const UnresponsiveRank*>(&error);
        Report(unresponsive != nullptr
                   ? *unresponsive
                   : UnresponsiveRank(OwnFailure(global_state.global_controller->GetRank(), error)));
        state.failure = std::string("AdaSum: the ranks could not connect: ") + error.what();
      }
    }
    return state;
  }

  void Clear() { by_id_.clear(); }

private:
  Memory memory_;
  std::map<int, State> by_id_;
};

} // namespace adasum_hvd
