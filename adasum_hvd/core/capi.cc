// The C interface of adasum.h.
#include "adasum.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <unistd.h>

#include "host/abort_notice.h"
#include "host/handshake.h"
#include "host/local_transport.h"
#include "kernels/kernels.h"
#include "reduce/observation.h"
#include "reduce/plan.h"
#include "reduce/reduce.h"

#define EXPORT __attribute__((visibility("default")))

using namespace adasum_hvd;

namespace {

constexpr int kMostThreads = 8;
thread_local std::string last_error;

int Failed(const std::string& text, int code = ADASUM_FAILED) {
  last_error = text;
  return code;
}

} // namespace

struct adasum_group {
  const pid_t owner = getpid();
  std::unique_ptr<LocalGroup> joining; // until confirmed
  Descriptor listening;
  std::vector<int> hosts; // by rank
  GroupOp group_op = GroupOp::kAdasum;
  int group_size = 0;
  int threads = 0;
  std::unique_ptr<LocalTransport> local;
  std::vector<GroupPlan> plan;
  std::vector<std::unique_ptr<Transport>> transports; // by level
  std::vector<ReduceLevel> levels;
  std::unique_ptr<Workers> workers;
  Scratch scratch;
  std::string description;
  std::string failure; // of an earlier call
  int failure_code = ADASUM_OK;
};

namespace {

// Runs `work`; an error of a group that has reduced, or tried to, is final. The peers are notified of it.
template <class Work> int Guarded(adasum_group* group, const Work& work) {
  if (group != nullptr && group->owner != getpid()) {
    return Failed("expected the process that made the group, but got a forked child of it");
  }
  if (group != nullptr && group->failure_code != ADASUM_OK) {
    return Failed(group->failure, group->failure_code);
  }
  int code = ADASUM_FAILED;
  std::string problem;
  try {
    work();
    return ADASUM_OK;
  } catch (const UnresponsiveRank& error) {
    problem = error.what();
    code = ADASUM_UNRESPONSIVE;
  } catch (const std::exception& error) {
    problem = error.what();
    if (group != nullptr && group->local != nullptr) {
      group->local->Abort(OwnFailure(group->local->global_rank(), error));
    }
  }
  if (group != nullptr) {
    group->failure = problem;
    group->failure_code = code;
  }
  return Failed(problem, code);
}

std::unique_ptr<LocalGroup> Joining(const adasum_config& config) {
  LocalSettings settings;
  settings.mode = config.shares != 0 ? LocalMode::kAuto : LocalMode::kStaged;
  settings.timeout_seconds = static_cast<int>(std::clamp(std::ceil(config.timeout_s), 1.0, 1e9));
  settings.limit = config.limit;
  settings.moves_threads = config.moves_threads != 0;
  return MakeLocalGroup(config.rank, {config.job_ranks, config.job_ranks + config.size}, settings);
}

void Plan(adasum_group& group) {
  group.plan = PlanLevels(group.hosts, group.group_op, group.group_size, group.local->rank(), {});
  for (const GroupPlan& level : group.plan) {
    group.transports.push_back(std::make_unique<GroupTransport>(*group.local, level.group));
    group.levels.push_back({group.transports.back().get(), &level.tree});
  }
}

} // namespace

extern "C" {

EXPORT int adasum_abi(void) { return ADASUM_ABI; }

EXPORT const char* adasum_error(void) { return last_error.c_str(); }

EXPORT int adasum_listen(const adasum_config* config, adasum_group** result, int* name, int* nonce) {
  *result = nullptr;
  *name = kNoName;
  *nonce = static_cast<int>(std::random_device()() & 0x7fffffff);
  return Guarded(nullptr, [&] {
    if (config->abi != ADASUM_ABI) {
      throw std::invalid_argument("expected ABI " + std::to_string(ADASUM_ABI) + ", but got " +
                                  std::to_string(config->abi));
    }
    auto group = std::make_unique<adasum_group>();
    group->hosts.assign(config->hosts, config->hosts + config->size);
    group->group_op = static_cast<GroupOp>(config->group_op);
    group->group_size = config->group_size;
    group->threads = config->threads;
    group->joining = Joining(*config);
    group->listening = Listen(config->size, *name);
    *result = group.release();
  });
}

EXPORT int adasum_connect(adasum_group* group, const int* names, const int* nonces) {
  return Guarded(group, [&] {
    const size_t size = group->hosts.size();
    const std::vector<int> all_names(names, names + size), all_nonces(nonces, nonces + size);
    Handshake(*group->joining, group->listening.value(), all_names, all_nonces).Run();
    group->joining->crowded = group->joining->Crowded();
    group->listening = Descriptor();
  });
}

EXPORT int adasum_confirm(adasum_group* group, const int* connected) {
  return Guarded(group, [&] {
    if (!std::all_of(connected, connected + group->hosts.size(), [](int one) { return one != 0; })) {
      throw std::runtime_error("another rank could not connect");
    }
    group->local = std::make_unique<LocalTransport>(std::move(group->joining));
    Plan(*group);
    const int share = std::clamp(static_cast<int>(group->local->ShareOfProcessors()), 1, kMostThreads);
    group->workers = std::make_unique<Workers>(group->threads > 0 ? group->threads : share);
    group->description = "levels " + Describe(group->plan) + ", " + ChooseKernels("")->name + ", threads " +
                         std::to_string(group->workers->threads());
  });
}

EXPORT int adasum_reduce(adasum_group* group, const adasum_tensor* tensors, int count, int dtype,
                         double scale) {
  return Guarded(group, [&] {
    if (dtype < 0 || dtype >= kElementTypes || group->local == nullptr) {
      throw std::invalid_argument("expected a known dtype and a confirmed group");
    }
    std::vector<TensorView> views(count);
    std::transform(tensors, tensors + count, views.begin(), [](const adasum_tensor& tensor) {
      TensorView view = {tensor.input, tensor.output, tensor.elements};
      view.observation = tensor.observation;
      return view;
    });
    group->local->BeginOperation();
    Reduce(views, static_cast<ElementType>(dtype), group->levels, scale, {}, *ChooseKernels(""),
           *group->workers, group->scratch, [](Phase, int) {});
  });
}

EXPORT int adasum_levels(const adasum_group* group, int* sizes, int most) {
  const std::vector<int> all = Observation({}, group->levels, false).sizes();
  std::copy_n(all.begin(), std::min<size_t>(all.size(), most), sizes);
  return static_cast<int>(all.size());
}

EXPORT const char* adasum_describe(const adasum_group* group) { return group->description.c_str(); }

EXPORT void* adasum_share(void* at, int64_t bytes) {
  void* other = nullptr;
  Guarded(nullptr, [&] { other = ShareUnder(at, bytes); });
  return other;
}

EXPORT void adasum_free(void* other) { FreeShared(other); }

// A forked child has none of the threads that it would join.
EXPORT void adasum_close(adasum_group* group) {
  if (group != nullptr && group->owner == getpid()) {
    delete group;
  }
}

} // extern "C"
