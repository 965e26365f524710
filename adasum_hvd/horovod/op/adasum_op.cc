#include "op/adasum_op.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <system_error>

#include <link.h>

#include "failure/shut_down.h"
#include "horovod/common/controller.h"
#include "horovod/common/global_state.h"
#include "horovod/common/logging.h"
#include "op/hooks.h"
#include "op/network.h"
#include "op/observations.h"
#include "op/statistics.h"

namespace adasum_hvd {
namespace {

constexpr char kStagedPath[]{"shared memory, staged"};
constexpr int kMostThreads = 8; // of a rank by default; more threads are limited by memory

// Read by the threads that enqueue.
std::atomic<bool> left_to_horovod{false};

// Horovod's libraries in this process: torch's and TensorFlow's each hold a copy of the op.
int CopiesOfTheOp() {
  int copies = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* count) {
        *static_cast<int*>(count) += std::strstr(library->dlpi_name, "/mpi_lib") != nullptr ? 1 : 0;
        return 0;
      },
      &copies);
  return std::max(copies, 1);
}

thread_local HeartbeatMonitor* monitor_of_this_thread = nullptr; // Horovod's background thread has one

std::atomic<int64_t> operations{0}; // of any kind, that Horovod has begun in this process

// Gloo's waits have a timeout; those of MPI and NCCL have none, and end only with the process.
bool MustEndProcess(const hvd::HorovodGlobalState& global_state) {
  return !global_state.elastic_enabled && (global_state.control_operation == hvd::LibType::MPI || kOnDevices);
}

MonitoredLoop LoopOf(hvd::HorovodGlobalState& global_state, int checkpoint_seconds) {
  return {[&global_state] { // written by the background thread; it fits a register
            return __atomic_load_n(reinterpret_cast<const int64_t*>(&global_state.last_cycle_start),
                                   __ATOMIC_RELAXED);
          },
          [] { return operations.load(std::memory_order_relaxed); },
          [&global_state] { return global_state.shut_down.load(); },
          ProgramHasEnded,
          [&global_state, checkpoint_seconds](const std::string& reason) {
            const bool ends = MustEndProcess(global_state), at_once = ends && ProgramHasEnded();
            LogEnd(global_state.global_controller->GetRank(),
                   ends && !at_once
                       ? reason + "; this process ends in " + std::to_string(checkpoint_seconds) +
                             " s (ADASUM_HVD_CHECKPOINT_SECONDS), or with its script, unless Horovod goes on"
                       : reason,
                   /*ends_process=*/at_once);
          },
          [&global_state] {
            if (MustEndProcess(global_state)) {
              EndProcess();
            }
          }};
}

// The number that the user has set, or the processors that this rank may use, shared with the ranks of the
// host that may use the same. Collective.
int ThreadsFor(int set, const std::vector<int>& host, const LocalTransport* local,
               const AllgatherTwo& allgather) {
  const double mine = local != nullptr ? local->ShareOfProcessors() : ShareOfProcessors(host, allgather);
  return set > 0 ? set : std::clamp(static_cast<int>(mine / CopiesOfTheOp()), 1, kMostThreads);
}

} // namespace

// The current phase of a reduction, for the timeline, the counters and errors.
class AdasumOp::PhaseClock {
public:
  PhaseClock(hvd::Timeline& timeline, const std::vector<hvd::TensorTableEntry>& entries)
      : timeline_(timeline), entries_(entries) {}

  void Begin(Phase phase, const std::string& name) {
    End();
    timeline_.ActivityStartAll(entries_, name);
    phase_ = phase;
    started_ = std::chrono::steady_clock::now();
  }

  void End() {
    if (phase_) {
      timeline_.ActivityEndAll(entries_);
      const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - started_;
      CountNanoseconds(*phase_, taken.count());
      phase_.reset();
    }
  }

  std::string Tensors() const {
    std::string text("tensor \"" + entries_.front().tensor_name + "\"");
    if (entries_.size() > 1) {
      text += " and " + std::to_string(entries_.size() - 1) + " more";
    }
    return text;
  }

private:
  hvd::Timeline& timeline_;
  const std::vector<hvd::TensorTableEntry>& entries_;
  std::optional<Phase> phase_;
  std::chrono::steady_clock::time_point started_;
};

AdasumOp::AdasumOp(hvd::HorovodGlobalState* global_state)
    : AllreduceOp(global_state), settings_(Settings::Begin()) {
  left_to_horovod = settings_.off;
}

void AdasumOp::PrepareForFailure() {
  BeginLoop(*global_state_, settings_.stall_seconds,
            [this](bool agreed) { return monitor_ == nullptr ? "" : monitor_->Finish(agreed); });
  ForgetPaths();
  KnownNetworks(); // constructs this thread's variable, which must outlive the op's Release
  hvd::ProcessSet& everyone = global_state_->process_set_table.Get(0);
  if (everyone.controller->GetSize() > 1) {
    try {
      monitor_ = std::make_unique<HeartbeatMonitor>(LoopOf(*global_state_, settings_.checkpoint_seconds),
                                                    std::chrono::seconds(settings_.local.timeout_seconds),
                                                    std::chrono::seconds(settings_.stall_seconds),
                                                    std::chrono::seconds(settings_.checkpoint_seconds),
                                                    NetworkOf(*global_state_, everyone, settings_));
      monitor_of_this_thread = monitor_.get();
    } catch (const std::system_error& error) {
      Warn(std::string("expected a thread that monitors the other ranks, but got: ") + error.what() +
           "; a rank that fails outside of a reduction is not noticed; raise ulimit -u");
    }
  }
}

bool AdasumOp::Enabled(const hvd::ParameterManager&, const std::vector<hvd::TensorTableEntry>& entries,
                       const hvd::Response&) const {
  if (entries.empty() || entries.front().device != CPU_DEVICE_ID) {
    return entries.empty() && !settings_.off;
  }
  // Horovod calls this on every rank, so ranks with different settings detect it here.
  return !settings_.off || !Connect(entries.front().process_set_id).Usable().ok();
}

AdasumOp::ProcessSetState& AdasumOp::Connect(int process_set_id) const {
  return agreements_.Connect(
      process_set_id, *global_state_, settings_, [&](ProcessSetState& state, const AllgatherTwo& allgather) {
        hvd::Controller& controller = *state.controller.lock();
        std::string path = controller.GetSize() == 1 ? "one rank" : "network";
        if (state.have_neighbours) {
          path = ConnectLocally(state, controller, allgather);
        }
        // Only in process set 0, which has all ranks, and exists while Horovod runs.
        if (process_set_id == 0 && state.local != nullptr && monitor_ != nullptr) {
          monitor_->MonitorHost(state.local->group());
        }
        state.threads = ThreadsFor(settings_.threads, state.host, state.local.get(), allgather);
        return PathText(state, path);
      });
}

std::string AdasumOp::PathText(const ProcessSetState& state, const std::string& path) {
  const std::string inside = state.one_host || !state.have_neighbours ? path : "inside a host " + path;
  return state.levels.size() > 1 ? "levels of " + Describe(state.levels) + " ranks; " + inside : inside;
}

// Connects the ranks of every host; returns how they reach each other.
std::string AdasumOp::ConnectLocally(ProcessSetState& state, hvd::Controller& controller,
                                     const AllgatherTwo& allgather) const {
  if (settings_.local.mode == LocalMode::kOff) {
    return "network (ADASUM_HVD_LOCAL=off)";
  }
  std::vector<int> global_ranks;
  for (int rank : state.host) {
    global_ranks.push_back(controller.GetGlobalRanks()[rank]);
  }
  const int place = static_cast<int>(std::find(state.host.begin(), state.host.end(), controller.GetRank()) -
                                     state.host.begin());
  std::string why_not;
  std::unique_ptr<LocalGroup> group =
      ConnectLocalRanks(state.host, place, global_ranks, settings_.local, allgather, why_not);
  if (group == nullptr) {
    return "network (no shared memory: " + why_not + ")";
  }
  state.local = std::make_unique<LocalTransport>(std::move(group));
  state.hybrid = std::make_unique<HybridTransport>(*state.local, *state.network, state.host);
  state.network->ShowAwaitedIn(&state.local->group()->mine->header().awaits_elsewhere);
  return state.local->shares_memory() ? "shared memory" : kStagedPath;
}

hvd::Status AdasumOp::Execute(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response) {
  if (entries.empty()) {
    return hvd::Status::OK();
  }
  if (const hvd::Status status = CheckType(entries.front()); !status.ok()) {
    return status;
  }
  ProcessSetState& state = Connect(entries.front().process_set_id);
  if (const hvd::Status status = state.Usable(); !status.ok()) {
    return status;
  }
  if (state.local != nullptr) {
    state.local->BeginOperation();
  }
  state.network->BeginOperation();
  PhaseClock clock(global_state_->timeline, entries);
  try {
    return ReduceEntries(entries, response, state, clock);
  } catch (const UnresponsiveRank& error) {
    return Abort(state, entries, UnresponsiveRank(error.cause, clock.Tensors()));
  } catch (const std::exception& error) {
    return Abort(state, entries, UnresponsiveRank(OwnFailure(GlobalRank(), error), clock.Tensors()));
  }
}

int AdasumOp::GlobalRank() const { return global_state_->global_controller->GetRank(); }

// After an error on one rank, later messages of the ranks would not match.
hvd::Status AdasumOp::Abort(ProcessSetState& state, const std::vector<hvd::TensorTableEntry>& entries,
                            const UnresponsiveRank& error) {
  state.failure = std::string("AdaSum: an earlier reduction failed on this rank: ") + error.what();
  if (state.local != nullptr) {
    state.local->Abort(error.cause);
  }
  if (!state.one_host || state.local == nullptr) {
    state.network->Abort({{error.cause.rank}, error.cause.reason});
  }
  if (state.network->may_still_receive()) {
    KeepForever(entries);
  }
  return Report(error);
}

// MPI may still write to these buffers, until the process ends with the failed job.
void AdasumOp::KeepForever(const std::vector<hvd::TensorTableEntry>& entries) {
  struct Remains {
    Scratch scratch;
    std::vector<std::shared_ptr<hvd::Tensor>> tensors;
  };
  Remains* remains = std::make_unique<Remains>().release();
  std::swap(remains->scratch, scratch_);
  for (const hvd::TensorTableEntry& entry : entries) {
    remains->tensors.insert(remains->tensors.end(), {entry.tensor, entry.output});
  }
}

hvd::Status AdasumOp::ReduceEntries(std::vector<hvd::TensorTableEntry>& entries,
                                    const hvd::Response& response, ProcessSetState& state,
                                    PhaseClock& clock) {
  std::vector<FusedTensors> by_type;
  if (const hvd::Status status = ReadFusedTensors(entries, response, by_type); !status.ok()) {
    return status;
  }
  WaitForData(entries);
  const bool shares = state.local != nullptr && state.local->shares_memory();
  for (FusedTensors& fused : by_type) {
    const int64_t explicit_tensors = ReduceInLevels(
        fused, state, [&](Phase phase, int level) { clock.Begin(phase, fused.PhaseName(phase, level)); });
    clock.End();
    Count(kExplicitTensors, explicit_tensors);
  }
  if (shares && !state.local->shares_memory()) {
    SetPath(entries.front().process_set_id, Memory::kHost, PathText(state, kStagedPath));
    if (const std::string& why = state.local->why_not_shared(); !why.empty()) { // this rank is the reason
      Warn("expected to share the memory of tensors with the ranks of this host, but got: " + why +
           "; all of them exchange copies from here on: slower, but the same results; raise ulimit -v");
    }
  }
  return hvd::Status::OK();
}

void AdasumOp::Warn(const std::string& text) const {
  hvd::LogMessage(__FILE__, __LINE__, hvd::LogLevel::WARNING) << "[" << GlobalRank() << "]: AdaSum: " << text;
}

int64_t AdasumOp::ReduceInLevels(FusedTensors& fused, ProcessSetState& state, const PhaseObserver& observer) {
  if (workers_ == nullptr) {
    workers_ = std::make_unique<Workers>(1);
  }
  workers_->UseThreads(state.threads);
  if (workers_->threads() != state.threads) {
    Warn("expected " + std::to_string(state.threads) + " threads, but got " +
         std::to_string(workers_->threads()) +
         ": slower, but the same results; raise ulimit -u or lower ADASUM_HVD_NUM_THREADS");
    state.threads = workers_->threads();
  }
  std::vector<std::unique_ptr<Transport>> groups;
  std::vector<ReduceLevel> levels;
  for (const GroupPlan& level : state.levels) {
    groups.push_back(state.hybrid != nullptr ? state.hybrid->Among(level.group)
                                             : std::make_unique<GroupTransport>(*state.network, level.group));
    levels.push_back({groups.back().get(), &level.tree});
  }
  ObservationScope observations(fused, levels);
  const int64_t explicit_tensors = Reduce(fused.tensors, fused.type, levels, fused.scale, state.reduce,
                                          *settings_.kernels, *workers_, scratch_, observer);
  observations.Publish(nullptr);
  return explicit_tensors;
}

void AdasumOp::Release() {
  monitor_of_this_thread = nullptr;
  monitor_.reset();
  CloseConnections();
  agreements_.Clear();
  workers_.reset();
  scratch_ = Scratch();
}

std::shared_ptr<hvd::AllreduceOp> MakeAdasumOp(hvd::HorovodGlobalState* state) {
  auto op = std::make_shared<AdasumOp>(state);
  op->PrepareForFailure();
  ReleaseWithThisThread(op);
  return op;
}

bool IsLeftToHorovod() { return left_to_horovod; }

void PollRegularly(std::weak_ptr<NetworkTransport> network) {
  if (monitor_of_this_thread != nullptr) {
    monitor_of_this_thread->PollRegularly(std::move(network));
  }
}

hvd::Status Report(const UnresponsiveRank& error) {
  NoteFailure(error.what());
  if (monitor_of_this_thread != nullptr) {
    monitor_of_this_thread->NoteFailure(error.what());
  }
  NotifyAll({{error.cause.rank}, error.cause.reason});
  return hvd::Status::UnknownError(std::string("AdaSum: ") + error.what());
}

void NoteOperation() { operations.fetch_add(1, std::memory_order_relaxed); }

} // namespace adasum_hvd
