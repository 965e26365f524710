#include "failure/shut_down.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <unistd.h>

#if HAVE_MPI
#define OMPI_SKIP_MPICXX
#include <mpi.h>
#endif

#include "horovod/common/logging.h"
#include "op/horovod_internals.h"
#include "op/network.h"

namespace adasum_hvd {
namespace {

constexpr size_t kMostNames = 5;                      // in one message
constexpr int kUsualStallCheckSeconds = 60;           // Horovod's
constexpr std::chrono::seconds kCauseLimit{2};        // that a caller waits for the cause
constexpr std::chrono::milliseconds kReportGrace{20}; // for threads that poll a process set each millisecond

// What this rank knows of the cause. Callers ask for it on their own threads.
struct Cause {
  std::string text;
  std::string leave_reason;
  bool complete = false; // Horovod's loop has ended
  std::optional<std::chrono::steady_clock::time_point> first_asked;
};
std::mutex cause_mutex;
std::condition_variable cause_complete;
Cause cause;

// State of the thread of Horovod's loop.
struct Loop {
  const hvd::Controller* all_ranks = nullptr; // null on other threads
  bool leaving = false;                       // this process, by its own script
  bool all_agreed = false;                    // to shut down
  int stall_seconds = 0;
  FailureProbe probe;
};
thread_local Loop loop;

std::atomic<bool> program_ended{false};

std::string NameList(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  std::string text;
  for (size_t k = 0; k < std::min(names.size(), kMostNames); ++k) {
    text += (k == 0 ? "" : ", ") + names[k];
  }
  const size_t more = names.size() - std::min(names.size(), kMostNames);
  return more == 0 ? text : text + " and " + std::to_string(more) + " more";
}

std::string PendingNames(hvd::HorovodGlobalState& state) {
  std::vector<std::string> names;
  for (const int id : state.process_set_table.Ids()) {
    const std::vector<std::string> pending = QueueTables::Names(state.process_set_table.Get(id).tensor_queue);
    names.insert(names.end(), pending.begin(), pending.end());
  }
  return NameList(names);
}

// Removes all process sets, or those that not all ranks have added yet, without the negotiation that Horovod
// does at its shutdown.
void RemoveProcessSets(hvd::ProcessSetTable& table, const hvd::Status& status, bool all) {
  std::vector<int32_t> ids = table.Ids();
  const auto stays = [&](int id) { return id == 0 || (!all && table.Get(id).initialization_done); };
  ids.erase(std::remove_if(ids.begin(), ids.end(), stays), ids.end());
  if (!ids.empty()) {
    std::this_thread::sleep_for(kReportGrace);
  }
  for (const int32_t id : ids) {
    table.Get(id).Finalize(status);
    RemoveFrom(table, id);
  }
}

// Sets the limit that BeginLoop describes; only the first call for a controller has an effect.
void LimitStalls(hvd::StallInspector& inspector, int seconds) {
  if (seconds == 0 || StallTables::LimitSeconds(inspector) != 0 ||
      std::getenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") != nullptr) {
    return;
  }
  // Horovod needs up to two checks to see that a cached tensor waits, and one more to find it too late.
  if (std::getenv("HOROVOD_STALL_CHECK_TIME_SECONDS") == nullptr) {
    inspector.SetStallWarningTimeSeconds(std::clamp(seconds / 6, 1, kUsualStallCheckSeconds));
  }
  const int period = StallTables::CheckSeconds(inspector);
  inspector.SetStallShutdownTimeSeconds(std::max(period, seconds - 3 * period));
}

// Adds notices of the other ranks, and their lost connections, to the cause.
void CollectNotices(NetworkTransport& network, const std::string& pending) {
  std::vector<int> lost;
  if (!loop.leaving) {
    lost = network.Notify({{}, "it waited for " + (pending.empty() ? "nothing" : pending)});
  }
  for (const auto& [rank, notice] : network.Notices()) {
    if (!notice.Suspects().empty()) {
      NoteFailure(RankList({rank}) + " reported: " + notice.reason);
    }
    lost.erase(std::remove(lost.begin(), lost.end(), rank), lost.end());
  }
  std::lock_guard<std::mutex> guard(cause_mutex);
  if (!lost.empty() && cause.text.empty()) { // ranks also disconnect once they know a cause
    cause.text = RankList(lost) + " disconnected";
  }
}

// Callers on other threads wait for the end of the loop, so that all get the same cause. The limit is common
// to them, because they may hold a lock that the loop needs to end, such as Python's.
hvd::Status WithCause(const hvd::Status& horovod_error) {
  std::unique_lock<std::mutex> lock(cause_mutex);
  if (loop.all_ranks != nullptr) {
    cause.complete = true;
    cause_complete.notify_all();
  }
  if (!cause.first_asked) {
    cause.first_asked = std::chrono::steady_clock::now();
  }
  cause_complete.wait_until(lock, *cause.first_asked + kCauseLimit, [] { return cause.complete; });
  return cause.text.empty() ? horovod_error
                            : hvd::Status::UnknownError(horovod_error.reason() + " AdaSum: " + cause.text);
}

} // namespace

void BeginLoop(const hvd::HorovodGlobalState& state, int stall_seconds, FailureProbe probe) {
  loop = {state.global_controller.get(), /*leaving=*/false, /*all_agreed=*/false, stall_seconds,
          std::move(probe)};
  program_ended = false;
  std::lock_guard<std::mutex> guard(cause_mutex);
  cause = Cause();
}

void NoteFailure(const std::string& reason) {
  std::lock_guard<std::mutex> guard(cause_mutex);
  if (cause.text.find(reason) == std::string::npos) {
    cause.text += (cause.text.empty() ? "" : "; ") + reason;
  }
}

bool NoteStalled(hvd::Controller& controller) {
  const hvd::StallInspector& inspector = controller.GetStallInspector();
  const std::chrono::seconds limit(StallTables::LimitSeconds(inspector));
  const std::vector<int> ranks = GlobalRanks(controller);
  std::vector<int> suspects;
  std::vector<std::string> tensors;
  for (const auto& [name, waiting] : StallTables::Waiting(inspector)) {
    const auto& [ready, since] = waiting;
    if (std::chrono::steady_clock::now() - since <= limit) {
      continue;
    }
    std::vector<int> submitted, missing;
    for (int rank = 0; rank < controller.GetSize(); ++rank) {
      const bool has = std::find(ready.begin(), ready.end(), rank) != ready.end();
      (has ? submitted : missing).push_back(ranks[rank]);
    }
    tensors.push_back("tensor \"" + name + "\" from " + RankList(submitted) + " and not from " +
                      RankList(missing));
    suspects.insert(suspects.end(), missing.begin(), missing.end());
  }
  std::sort(suspects.begin(), suspects.end());
  suspects.erase(std::unique(suspects.begin(), suspects.end()), suspects.end());
  const std::string reason = "expected every rank to submit the same tensors, but got for over " +
                             std::to_string(limit.count()) + " s " + NameList(tensors) +
                             "; call the same operations on all ranks, or raise ADASUM_HVD_STALL_SECONDS";
  NoteFailure(reason);
  NotifyAll({suspects, reason});
  // Over MPI, ranks outside of a process set would wait for its ranks forever. So a process set does not shut
  // down alone: NoteLeaving asks all ranks in the next cycle.
  return &controller == loop.all_ranks;
}

void NoteProgramEnd() { program_ended = true; }

bool ProgramHasEnded() { return program_ended; }

void SetLeaveReason(const std::string& reason) {
  std::lock_guard<std::mutex> guard(cause_mutex);
  cause.leave_reason = reason;
}

bool NoteLeaving(hvd::Controller& controller, bool& leaving) {
  LimitStalls(controller.GetStallInspector(), loop.stall_seconds);
  loop.leaving = leaving;
  std::lock_guard<std::mutex> guard(cause_mutex);
  if (leaving && !cause.leave_reason.empty()) {
    const auto networks = KnownNetworks();
    if (const auto found = networks.find(&controller); found != networks.end()) {
      found->second->Notify({{GlobalRanks(controller)[controller.GetRank()]}, cause.leave_reason});
    }
  }
  // Only in the process set of all ranks: others do not shut down alone.
  leaving = leaving || (&controller == loop.all_ranks && !cause.text.empty());
  return true;
}

void NoteCycle(const hvd::Controller& controller, bool is_last) {
  loop.all_agreed = is_last && &controller == loop.all_ranks;
}

void NotifyAll(const AbortNotice& notice) {
  for (const auto& [controller, network] : KnownNetworks()) {
    network->Notify(notice);
  }
}

hvd::Status ShutDownError(hvd::HorovodGlobalState& state, const hvd::Status& horovod_error) {
  const auto networks = KnownNetworks(); // none on other threads
  if (networks.empty()) {
    return WithCause(horovod_error);
  }
  const std::string pending = PendingNames(state);
  if (const std::string problem = loop.probe(loop.all_agreed); !problem.empty()) {
    NoteFailure(problem);
  }
  for (const auto& [controller, network] : networks) {
    CollectNotices(*network, pending);
  }
  if (!pending.empty()) {
    NoteFailure(RankList({state.global_controller->GetRank()}) + " waited for " + pending);
  }
  const hvd::Status status = WithCause(horovod_error);
  RemoveProcessSets(state.process_set_table, status, /*all=*/!loop.all_agreed);
  return status;
}

bool LoopHasEnded() {
  std::lock_guard<std::mutex> guard(cause_mutex);
  return cause.complete;
}

void CloseConnections() {
  if (!loop.all_agreed) {
    for (const auto& [controller, network] : KnownNetworks()) {
      network->Close();
    }
  }
}

void LogEnd(int rank, const std::string& reason, bool ends_process) {
  hvd::LogMessage(__FILE__, __LINE__, hvd::LogLevel::ERROR)
      << "[" << rank << "]: AdaSum: Horovod cannot go on" << (ends_process ? ", this process ends" : "")
      << ": " << reason;
}

void EndProcess() {
  std::signal(SIGALRM, SIG_DFL); // in case MPI_Abort blocks
  alarm(10);
#if HAVE_MPI
  int started = 0, finished = 0, provided = 0;
  MPI_Initialized(&started);
  MPI_Finalized(&finished);
  if (started != 0 && finished == 0 && MPI_Query_thread(&provided) == MPI_SUCCESS &&
      provided == MPI_THREAD_MULTIPLE) {
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
#endif
  _exit(1);
}

} // namespace adasum_hvd
