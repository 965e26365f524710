#include "op/shut_down.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>

#include <unistd.h>

#if HAVE_MPI
#define OMPI_SKIP_MPICXX
#include <mpi.h>
#endif

#include "horovod/common/logging.h"

namespace adasum_hvd {
namespace {

namespace hvd = horovod::common;

constexpr size_t kMostNames = 5;      // in one message
constexpr int kUsualLookSeconds = 60; // Horovod's
constexpr std::chrono::seconds kToConclude{2};
constexpr std::chrono::milliseconds kToBeSeen{20}; // by threads that poll a process set each millisecond

// What this rank knows of the cause, as it is told to callers; they ask on their own threads.
std::mutex cause_mutex;
std::string cause;
std::condition_variable concluded_signal;
bool concluded = false; // Horovod's loop has ended, and the cause is what it will be
std::optional<std::chrono::steady_clock::time_point> asked_at; // for the cause, first
std::string leave;                                             // why this process is about to shut down
Witness witness;                                               // of the background thread

// Of the loop's thread.
thread_local bool asked_to_leave = false;               // this process, by its own script
thread_local bool all_agreed = false;                   // that Horovod shuts down
thread_local const hvd::Controller* everyone = nullptr; // where all ranks agree on it; null on other threads
thread_local int stall_bound = 0;                       // seconds

// A private member, which an explicit instantiation may name.
using Deregister = void (hvd::ProcessSetTable::*)(int32_t);
Deregister DeregisterProcessSet();
template <Deregister member> struct Private {
  friend Deregister DeregisterProcessSet() { return member; }
};
template struct Private<&hvd::ProcessSetTable::DeregisterProcessSet>;

// Protected members of Horovod's, named through derived classes.
struct InspectorTables : hvd::StallInspector {
  static const auto& Waiting(const hvd::StallInspector& inspector) {
    return inspector.*(&InspectorTables::uncached_tensor_table);
  }
  static int ShutDownSeconds(const hvd::StallInspector& inspector) {
    return inspector.*(&InspectorTables::stall_shutdown_time_seconds);
  }
};
struct QueueTables : hvd::TensorQueue {
  static std::vector<std::string> Pending(hvd::TensorQueue& queue) {
    std::lock_guard<std::mutex> guard(queue.*(&QueueTables::mutex_));
    std::vector<std::string> names;
    for (const auto& one : queue.*(&QueueTables::tensor_table_)) {
      names.push_back(one.first);
    }
    return names;
  }
};

std::string List(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  std::string text;
  for (size_t k = 0; k < std::min(names.size(), kMostNames); ++k) {
    text += (k == 0 ? "" : ", ") + names[k];
  }
  return names.size() > kMostNames ? text + " and " + std::to_string(names.size() - kMostNames) + " more"
                                   : text;
}

std::string List(const std::vector<int>& ranks) {
  std::string text;
  for (size_t k = 0; k < ranks.size(); ++k) {
    text += (k == 0 ? "" : ", ") + std::to_string(ranks[k]);
  }
  return text;
}

std::string PendingNames(hvd::HorovodGlobalState& state) {
  std::vector<std::string> names;
  for (const int id : state.process_set_table.Ids()) {
    const std::vector<std::string> more = QueueTables::Pending(state.process_set_table.Get(id).tensor_queue);
    names.insert(names.end(), more.begin(), more.end());
  }
  return List(names);
}

// As Horovod does when it shuts down, without asking the other ranks: of all process sets, or only of those
// that not all ranks have, since adding one is all ranks' own decision.
void RemoveProcessSets(hvd::ProcessSetTable& table, const hvd::Status& status, bool all) {
  const auto is_due = [&](int id) { return id != 0 && (all || !table.Get(id).initialization_done); };
  const std::vector<int32_t> ids = table.Ids();
  if (std::none_of(ids.begin(), ids.end(), is_due)) {
    return;
  }
  std::this_thread::sleep_for(kToBeSeen);
  for (const int id : ids) {
    if (is_due(id)) {
      table.Get(id).Finalize(status);
      (table.*DeregisterProcessSet())(id);
    }
  }
}

bool NoCause() {
  std::lock_guard<std::mutex> guard(cause_mutex);
  return cause.empty();
}

// Who submits something while the loop ends hears of the same cause.
hvd::Status WithCause(const hvd::Status& horovods) {
  std::unique_lock<std::mutex> lock(cause_mutex);
  if (everyone != nullptr) { // on the loop's thread
    concluded = true;
    concluded_signal.notify_all();
  }
  // Together: they may hold what the loop needs to come to its end, as Python's lock, one after another.
  if (!asked_at) {
    asked_at = std::chrono::steady_clock::now();
  }
  concluded_signal.wait_until(lock, *asked_at + kToConclude, [] { return concluded; });
  return cause.empty() ? horovods : hvd::Status::UnknownError(horovods.reason() + " AdaSum: " + cause);
}

// As BeginLoop says. Once for each controller.
void BoundStalls(hvd::Controller& controller, int seconds) {
  if (seconds == 0 || InspectorTables::ShutDownSeconds(controller.GetStallInspector()) != 0 ||
      std::getenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") != nullptr ||
      std::getenv("HOROVOD_STALL_CHECK_TIME_SECONDS") != nullptr) {
    return;
  }
  // A tensor that was reduced before takes up to two looks to be seen as one that waits, and a last one to be
  // found too late.
  const int look = std::max(1, std::min(kUsualLookSeconds, seconds / 6));
  controller.GetStallInspector().SetStallWarningTimeSeconds(look);
  controller.GetStallInspector().SetStallShutdownTimeSeconds(std::max(look, seconds - 3 * look));
}

} // namespace

void BeginLoop(const hvd::HorovodGlobalState& state, int stall_seconds) {
  everyone = state.global_controller.get();
  stall_bound = stall_seconds;
  all_agreed = asked_to_leave = false;
  std::lock_guard<std::mutex> guard(cause_mutex);
  cause.clear();
  leave.clear();
  concluded = false;
  asked_at.reset();
  witness = nullptr;
}

bool NoteStalled(hvd::Controller& controller) {
  const hvd::StallInspector& inspector = controller.GetStallInspector();
  const std::chrono::seconds limit(InspectorTables::ShutDownSeconds(inspector));
  const std::vector<int> ranks = GlobalRanks(controller);
  std::vector<int> blamed;
  std::vector<std::string> tensors;
  for (const auto& [name, waiting] : InspectorTables::Waiting(inspector)) {
    const auto& [ready, since] = waiting;
    if (std::chrono::steady_clock::now() - since <= limit) {
      continue;
    }
    std::vector<int> there, missing;
    for (int rank = 0; rank < controller.GetSize(); ++rank) {
      const bool has = std::find(ready.begin(), ready.end(), rank) != ready.end();
      (has ? there : missing).push_back(ranks[rank]);
    }
    tensors.push_back("tensor \"" + name + "\" (of ranks " + List(there) + ", not of ranks " + List(missing) +
                      ")");
    blamed.insert(blamed.end(), missing.begin(), missing.end());
  }
  std::sort(blamed.begin(), blamed.end());
  blamed.erase(std::unique(blamed.begin(), blamed.end()), blamed.end());
  const std::string why = "required every rank to submit the same tensors, got for more than " +
                          std::to_string(limit.count()) + " s " + List(tensors) +
                          "; call the same operations on all ranks, or raise ADASUM_HVD_STALL_SECONDS";
  NoteFailure(why);
  TellEverybody({blamed, why});
  return true;
}

void NoteTurn(const hvd::Controller& controller, bool is_last) {
  all_agreed = is_last && &controller == everyone;
}

void TellEverybody(const LastWords& words) {
  for (const auto& [controller, network] : KnownNetworks()) {
    network->Tell(words);
  }
}

void Leave(const std::string& why) {
  std::lock_guard<std::mutex> guard(cause_mutex);
  leave = why;
}

bool NoteLeaving(hvd::Controller& controller, bool& leaving) {
  BoundStalls(controller, stall_bound);
  asked_to_leave = leaving;
  if (leaving) {
    std::lock_guard<std::mutex> guard(cause_mutex);
    const auto networks = KnownNetworks();
    if (const auto found = networks.find(&controller); !leave.empty() && found != networks.end()) {
      found->second->Tell({{GlobalRanks(controller)[controller.GetRank()]}, leave});
    }
  }
  leaving = leaving || (&controller == everyone && !NoCause()); // else ranks of a process set leave alone
  return true;
}

hvd::Status ShutDownError(hvd::HorovodGlobalState& state, const hvd::Status& horovods) {
  const auto networks = KnownNetworks(); // of Horovod's background thread alone
  const std::string pending = networks.empty() ? "" : PendingNames(state);
  if (const std::string seen = networks.empty() || !witness ? "" : witness(all_agreed); !seen.empty()) {
    NoteFailure(seen);
  }
  for (const auto& [controller, network] : networks) {
    std::vector<int> gone;
    if (!asked_to_leave) {
      gone = network->Tell({{}, "it waited for " + (pending.empty() ? "nothing" : pending)});
    }
    for (const auto& [rank, words] : network->Listen()) {
      if (!words.Blamed().empty()) {
        NoteFailure("rank " + std::to_string(rank) + " says: " + words.why);
      }
      gone.erase(std::remove(gone.begin(), gone.end(), rank), gone.end());
    }
    if (!gone.empty() && NoCause()) { // others leave, too, once something is known
      NoteFailure("ranks " + List(gone) + " have gone");
    }
  }
  if (!pending.empty()) {
    NoteFailure("rank " + std::to_string(state.global_controller->GetRank()) + " waited for " + pending);
  }
  const hvd::Status status = WithCause(horovods);
  if (!networks.empty()) {
    RemoveProcessSets(state.process_set_table, status, /*all=*/!all_agreed);
  }
  return status;
}

bool LoopHasEnded() {
  std::lock_guard<std::mutex> guard(cause_mutex);
  return concluded;
}

void CloseConnections() {
  if (!all_agreed) {
    for (const auto& [controller, network] : KnownNetworks()) {
      network->Close();
    }
  }
}

void LogEnd(int rank, const std::string& why, bool ends) {
  hvd::LogMessage(__FILE__, __LINE__, hvd::LogLevel::ERROR)
      << "[" << rank << "]: AdaSum: Horovod cannot go on" << (ends ? ", this process ends" : "") << ": "
      << why;
}

void EndProcess() {
  std::signal(SIGALRM, SIG_DFL); // where MPI itself is stuck
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

void NoteFailure(const std::string& why) {
  std::lock_guard<std::mutex> guard(cause_mutex);
  if (cause.find(why) == std::string::npos) {
    cause += (cause.empty() ? "" : "; ") + why;
  }
}

void SetWitness(Witness one) { witness = std::move(one); }

} // namespace adasum_hvd
