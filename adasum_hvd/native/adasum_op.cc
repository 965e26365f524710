#include "adasum_op.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <unordered_map>

#include <link.h>
#include <sched.h>

#include "horovod/common/controller.h"
#include "horovod/common/global_state.h"

#if HAVE_GLOO
#include "transport_gloo.h"
#endif
#if HAVE_MPI
#include "transport_mpi.h"
#endif

namespace adasum_hvd {
namespace {

namespace hvd = horovod::common;

constexpr char kDeltaPrefix[] = "adasum.delta/";
constexpr int kMostThreads = 8; // that a rank takes without being told; memory is then the limit

// Up to so many bytes, times ranks, every rank reduces everything itself: (N - 1) n bytes sent instead of
// 2 n (N - 1) / N, for one exchange instead of two or three. Inside a host a waiting rank costs more than
// the bytes do; a 1 Gbit/s link carries 32 KiB in the time of one exchange.
constexpr int64_t kReplicateOnHostBytes = 1 << 20;
constexpr int64_t kReplicateOverHostsBytes = 32 << 10;

// Read from Python while the background thread counts.
enum Counter {
  kCalls,
  kTensors,
  kDeltaTensors,
  kBytes,
  kExplicitTensors,
  kNanoseconds, // per phase, in the order of Phase
  kCounters = kNanoseconds + kPhases
};
std::array<std::atomic<int64_t>, kCounters> counters;

// Tensors that are many tensors laid end to end, by their name in Horovod; the sum of a registered
// tensor's segments is checked against its size before anything is sent.
std::mutex segments_mutex;
struct Segments {
  std::vector<int64_t> elements;
  const void* start = nullptr; // the tensor, if it holds weights
  std::vector<void*> weights;  // and newer ones, by segment
};
std::unordered_map<std::string, Segments> segments_by_name;

Segments SegmentsOf(const hvd::TensorTableEntry& entry) {
  std::lock_guard<std::mutex> guard(segments_mutex);
  const auto found = segments_by_name.find(entry.tensor_name);
  if (found == segments_by_name.end()) {
    return {{entry.tensor->shape().num_elements()}, nullptr, {}};
  }
  Segments segments = found->second;
  if (segments.start != entry.tensor->data()) { // zeros that stand in for a rank that has joined
    segments.weights.clear();
  }
  return segments;
}

// How the ranks of each process set reach each other, for people to read.
std::mutex paths_mutex;
std::unordered_map<int, std::string> paths;

void SetPath(int process_set_id, std::string path) {
  std::lock_guard<std::mutex> guard(paths_mutex);
  paths[process_set_id] = std::move(path);
}

// Horovod's timeline shows it. Levels above the first have a number.
std::string PhaseName(Phase phase, int level, bool delta) {
  const char* what = phase == Phase::kExchangeAndGram ? "EXCHANGE_GRAM"
                     : phase == Phase::kSharedTensors ? "SOLVE"
                                                      : "COMBINE_GATHER";
  return std::string(delta ? "ADASUM_DELTA_" : "ADASUM_") + what +
         (level == 0 ? "" : "_LEVEL_" + std::to_string(level + 1));
}

bool IsDelta(const std::string& name) { return name.find(kDeltaPrefix) != std::string::npos; }

bool ElementTypeOf(hvd::DataType dtype, ElementType& type) {
  switch (dtype) {
  case hvd::HOROVOD_FLOAT16: type = kFloat16; return true;
  case hvd::HOROVOD_FLOAT32: type = kFloat32; return true;
  case hvd::HOROVOD_FLOAT64: type = kFloat64; return true;
  default: return false;
  }
}

hvd::Status Unsupported(const hvd::TensorTableEntry& entry) {
  return hvd::Status::InvalidArgument(
      "AdaSum of tensor \"" + entry.tensor_name + "\": required dtype float16, float32 or float64, got " +
      hvd::DataType_Name(entry.tensor->dtype()) + "; cast it before the reduction");
}

// Settings are for process sets of that many ranks; smaller ones are planned.
std::vector<int> WantedRadices(const std::vector<int>& radices, int size) {
  const int64_t product = std::accumulate(radices.begin(), radices.end(), int64_t{1}, std::multiplies<>());
  return product == 0 || product == size ? radices : std::vector<int>();
}

bool HasLevelOnHost(const std::vector<PlannedLevel>& levels) {
  return std::any_of(levels.begin(), levels.end(),
                     [](const PlannedLevel& level) { return level.on_one_host; });
}

int ProcessorsOfThisProcess() {
  cpu_set_t allowed;
  return sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
}

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

// The processors that this rank may use, shared with the ranks of the host that may use the same.
int ThreadsFor(const std::vector<int>& host, const LocalTransport* local) {
  const double mine = local != nullptr ? local->ShareOfProcessors()
                                       : ProcessorsOfThisProcess() / static_cast<double>(host.size());
  return std::clamp(static_cast<int>(mine / CopiesOfTheOp()), 1, kMostThreads);
}

} // namespace

AdasumOp::AdasumOp(hvd::HorovodGlobalState* global_state)
    : AllreduceOp(global_state), settings_(Settings::FromEnvironment()) {}

bool AdasumOp::Enabled(const hvd::ParameterManager&, const std::vector<hvd::TensorTableEntry>& entries,
                       const hvd::Response&) const {
  if (entries.empty() || entries.front().device != CPU_DEVICE_ID) {
    return entries.empty() && !settings_.off;
  }
  if (!settings_.off) {
    return true;
  }
  // Horovod asks on every rank, so here is where a rank that is off and one that is not find out.
  const int id = entries.front().process_set_id;
  auto& agreed = const_cast<AdasumOp*>(this)->AgreedFor(id, global_state_->process_set_table.Get(id));
  return !agreed.disagreement.empty();
}

AdasumOp::Agreed& AdasumOp::AgreedFor(int process_set_id, hvd::ProcessSet& process_set) {
  Agreed& agreed = agreed_[process_set_id];
  if (agreed.controller.lock() == process_set.controller) {
    return agreed;
  }
  hvd::Controller& controller = *process_set.controller;
  const std::vector<int>& local = controller.GetLocalCommRanks();
  const int host = *std::min_element(local.begin(), local.end());
  std::vector<int> gathered;
  controller.Allgather2Ints({host, settings_.Fingerprint()}, gathered);
  std::vector<int> hosts;
  agreed = Agreed();
  agreed.controller = process_set.controller;
  agreed.reduce = settings_.reduce;
  agreed.disagreement = settings_.error;
  for (int rank = 0; rank < controller.GetSize(); ++rank) {
    hosts.push_back(gathered[2 * rank]);
    if (gathered[2 * rank + 1] != gathered[1]) {
      agreed.disagreement =
          "AdaSum: required the same ADASUM_HVD_* variables on all ranks, got other ones on rank " +
          std::to_string(controller.GetGlobalRanks()[rank]) + " than on rank " +
          std::to_string(controller.GetGlobalRanks()[0]) + "; export them on every host";
      return agreed;
    }
    if (gathered[2 * rank] == host) {
      agreed.host.push_back(rank);
    }
  }
  const int size = controller.GetSize();
  const bool one_host = static_cast<int>(agreed.host.size()) == size;
  try {
    agreed.levels = PlanLevels(hosts, settings_.group_op, settings_.group_size, controller.GetRank(),
                               WantedRadices(settings_.radices, size));
  } catch (const std::invalid_argument& error) { // on every rank
    agreed.disagreement = std::string("AdaSum: ADASUM_HVD_RADICES: ") + error.what() + ", got " +
                          RadicesText(settings_.radices) + "; unset it or mend it on all ranks";
    return agreed;
  }
  if (agreed.reduce.replicate_bytes < 0) {
    agreed.reduce.replicate_bytes = one_host ? kReplicateOnHostBytes : kReplicateOverHostsBytes;
  }
  if (settings_.off) {
    SetPath(process_set_id, "Horovod's own op");
    return agreed;
  }
  std::string path = one_host ? "one rank" : "network";
  if (size > 1 && HasLevelOnHost(agreed.levels)) {
    try {
      path = ConnectLocally(agreed, controller);
    } catch (const std::exception& error) { // or the next call would find this rank alone on the network
      agreed.disagreement = std::string("AdaSum: the ranks could not connect: ") + error.what();
      throw;
    }
  }
  if (agreed.levels.size() > 1) {
    path = "levels of " + Describe(agreed.levels) + " ranks; inside a host " + path;
  }
  SetPath(process_set_id, path);
  agreed.threads = settings_.threads > 0 ? settings_.threads : ThreadsFor(agreed.host, agreed.local.get());
  return agreed;
}

// Connects the ranks of every host; returns how they reach each other.
std::string AdasumOp::ConnectLocally(Agreed& agreed, hvd::Controller& controller) {
  if (settings_.local.mode == LocalMode::kOff) {
    return "network (ADASUM_HVD_LOCAL=off)";
  }
  std::vector<int> global_ranks;
  for (int rank : agreed.host) {
    global_ranks.push_back(controller.GetGlobalRanks()[rank]);
  }
  const int place = static_cast<int>(std::find(agreed.host.begin(), agreed.host.end(), controller.GetRank()) -
                                     agreed.host.begin());
  std::string why_not;
  std::unique_ptr<LocalGroup> group = ConnectLocalRanks(
      agreed.host, place, global_ranks, settings_.local,
      [&](int first, int second) {
        std::vector<int> gathered;
        controller.Allgather2Ints({first, second}, gathered);
        return gathered;
      },
      why_not);
  if (group == nullptr) {
    return "network (no shared memory: " + why_not + ")";
  }
  agreed.local = std::make_unique<LocalTransport>(std::move(group));
  return agreed.local->direct() ? "shared memory, direct" : "shared memory, staged";
}

std::unique_ptr<Transport> AdasumOp::NetworkFor(hvd::ProcessSet& process_set) const {
#if HAVE_MPI
  if (global_state_->control_operation == hvd::LibType::MPI) {
    return std::make_unique<MpiTransport>(
        process_set.mpi_context.GetMPICommunicator(hvd::Communicator::GLOBAL), settings_.max_message_bytes);
  }
#endif
#if HAVE_GLOO
  return std::make_unique<GlooTransport>(process_set.gloo_context.GetGlooContext(hvd::Communicator::GLOBAL));
#else
  throw std::logic_error("AdaSum: required a Horovod with Gloo or MPI, got neither");
#endif
}

hvd::Status AdasumOp::Execute(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response) {
  if (entries.empty()) {
    return hvd::Status::OK();
  }
  ElementType type;
  if (!ElementTypeOf(entries.front().tensor->dtype(), type)) {
    return Unsupported(entries.front());
  }
  const int process_set_id = entries.front().process_set_id;
  hvd::ProcessSet& process_set = global_state_->process_set_table.Get(process_set_id);
  Agreed& agreed = AgreedFor(process_set_id, process_set);
  if (!agreed.disagreement.empty()) {
    return hvd::Status::InvalidArgument(agreed.disagreement);
  }
  if (agreed.local == nullptr) {
    return ExecuteAgreed(entries, response, type, agreed, process_set);
  }
  agreed.local->BeginOperation();
  try {
    return ExecuteAgreed(entries, response, type, agreed, process_set);
  } catch (const std::exception& error) {
    agreed.local->Break(std::string("AdaSum: an earlier reduction failed on this rank: ") + error.what());
    throw;
  }
}

hvd::Status AdasumOp::ExecuteAgreed(std::vector<hvd::TensorTableEntry>& entries,
                                    const hvd::Response& response, ElementType type, Agreed& agreed,
                                    hvd::ProcessSet& process_set) {
  std::vector<TensorView> tensors;
  for (const hvd::TensorTableEntry& entry : entries) {
    const Segments segments = SegmentsOf(entry);
    const std::vector<int64_t>& sizes = segments.elements;
    const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    if (total != entry.tensor->shape().num_elements()) {
      return hvd::Status::InvalidArgument("AdaSum of tensor \"" + entry.tensor_name +
                                          "\": required segments of " +
                                          std::to_string(entry.tensor->shape().num_elements()) +
                                          " elements in total, got " + std::to_string(total));
    }
    const char* input = static_cast<const char*>(entry.tensor->data());
    char* output = static_cast<char*>(const_cast<void*>(entry.output->data()));
    for (size_t k = 0; k < sizes.size(); ++k) {
      if (segments.weights.empty()) {
        tensors.push_back({input, output, sizes[k]});
      } else {
        tensors.push_back({segments.weights[k], segments.weights[k], sizes[k], input});
      }
      input += sizes[k] * ElementBytes(type);
      output += sizes[k] * ElementBytes(type);
    }
    counters[kBytes] += entry.tensor->size();
    counters[kDeltaTensors] += IsDelta(entry.tensor_name) ? static_cast<int64_t>(sizes.size()) : 0;
  }
  counters[kCalls] += 1;
  counters[kTensors] += static_cast<int64_t>(tensors.size());

  WaitForData(entries);
  hvd::Timeline& timeline = global_state_->timeline;
  const bool delta = IsDelta(entries.front().tensor_name);
  std::optional<Phase> current;
  std::chrono::steady_clock::time_point started;
  auto end_phase = [&] {
    if (current) {
      timeline.ActivityEndAll(entries);
      const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - started;
      counters[kNanoseconds + static_cast<int>(*current)] += taken.count();
    }
  };
  auto observer = [&](Phase phase, int level) {
    end_phase();
    timeline.ActivityStartAll(entries, PhaseName(phase, level, delta));
    current = phase;
    started = std::chrono::steady_clock::now();
  };
  // AdaSum is homogeneous, AdaSum(s g) = s AdaSum(g): both factors are applied once, in float64.
  const double scale = response.prescale_factor() * response.postscale_factor();
  const ReduceResult result = ReduceInLevels(tensors, type, scale, agreed, process_set, observer);
  end_phase();
  counters[kExplicitTensors] += result.explicit_tensors;
  return hvd::Status::OK();
}

ReduceResult AdasumOp::ReduceInLevels(const std::vector<TensorView>& tensors, ElementType type, double scale,
                                      Agreed& agreed, hvd::ProcessSet& process_set,
                                      const PhaseObserver& observer) {
  if (workers_ == nullptr || workers_->threads() != agreed.threads) {
    workers_ = std::make_unique<Workers>(agreed.threads);
  }
  std::unique_ptr<Transport> network;
  std::vector<std::unique_ptr<Transport>> groups;
  std::vector<ReduceLevel> levels;
  for (const PlannedLevel& level : agreed.levels) {
    if (level.on_one_host && agreed.local != nullptr) {
      std::vector<int> places;
      for (int rank : level.group) {
        places.push_back(
            static_cast<int>(std::find(agreed.host.begin(), agreed.host.end(), rank) - agreed.host.begin()));
      }
      groups.push_back(std::make_unique<GroupTransport>(*agreed.local, std::move(places)));
    } else {
      network = network ? std::move(network) : NetworkFor(process_set);
      groups.push_back(std::make_unique<GroupTransport>(*network, level.group));
    }
    levels.push_back({groups.back().get(), &level.tree});
  }
  return Reduce(tensors, type, levels, scale, agreed.reduce, *settings_.kernels, *workers_, scratch_,
                observer);
}

std::shared_ptr<hvd::AllreduceOp> MakeAdasumOp(hvd::HorovodGlobalState* state) {
  return std::make_shared<AdasumOp>(state);
}

} // namespace adasum_hvd

// For ctypes. Horovod's link map exports names that contain "horovod", and nothing else.
extern "C" {

__attribute__((visibility("default"))) const char* horovod_adasum_version() { return adasum_hvd::kVersion; }

// The settings that the environment asks for now, as JSON; valid until the next call on the same thread.
__attribute__((visibility("default"))) const char* horovod_adasum_settings() {
  static thread_local std::string text;
  text = adasum_hvd::Settings::FromEnvironment().Json();
  return text.c_str();
}

// What is wrong with the ADASUM_HVD_* variables, or an empty string.
__attribute__((visibility("default"))) const char* horovod_adasum_settings_error() {
  static thread_local std::string text;
  text = adasum_hvd::Settings::FromEnvironment().error;
  return text.c_str();
}

// Fills eight counters: calls, tensors, delta tensors, bytes, tensors with an ill-conditioned node, and the
// nanoseconds of the three phases.
__attribute__((visibility("default"))) void horovod_adasum_counters(int64_t* values) {
  std::copy(adasum_hvd::counters.begin(), adasum_hvd::counters.end(), values);
}

// How the ranks of a process set reach each other; empty before the first reduction in it. Valid until the
// next call on the same thread.
__attribute__((visibility("default"))) const char* horovod_adasum_path(int process_set_id) {
  static thread_local std::string text;
  std::lock_guard<std::mutex> guard(adasum_hvd::paths_mutex);
  text = adasum_hvd::paths[process_set_id];
  return text.c_str();
}

// Declares the tensor `name` to be `count` tensors laid end to end; count 0 forgets it. Where `start` is not
// null it is that tensor's address: it holds weights, weights[k] points to as many newer ones of the same
// type, and what is reduced is the change: each newer weight becomes the older one plus the AdaSum of the
// changes, and the tensor stays as it is.
__attribute__((visibility("default"))) void horovod_adasum_register_segments(const char* name,
                                                                             const int64_t* elements,
                                                                             int count, const void* start,
                                                                             void* const* weights) {
  std::lock_guard<std::mutex> guard(adasum_hvd::segments_mutex);
  if (count == 0) {
    adasum_hvd::segments_by_name.erase(name);
    return;
  }
  adasum_hvd::Segments& segments = adasum_hvd::segments_by_name[name];
  segments = {{elements, elements + count}, start, {}};
  if (start != nullptr) {
    segments.weights.assign(weights, weights + count);
  }
}

} // extern "C"
