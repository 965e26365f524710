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
  std::unique_ptr<LocalGroup> joining; // until connected
  Descriptor listening;
  std::vector<int> hosts; // by rank
  GroupOp group_op = GroupOp::kAdasum;
  int group_size = 0;
  std::unique_ptr<LocalTransport> local;
  std::vector<GroupPlan> plan;
  std::vector<std::unique_ptr<Transport>> transports; // by level
  std::vector<ReduceLevel> levels;
  Tree tree; // of all ranks in one level
  std::unique_ptr<Workers> workers;
  Scratch scratch;
  std::string description;
  std::string failure; // of an earlier call
  int failure_code = ADASUM_OK;
};

namespace {

void Fail(adasum_group* group, const std::string& problem, int code, const RootCause* cause) {
  if (group == nullptr || group->failure_code != ADASUM_OK) {
    return;
  }
  if (group->local != nullptr && cause != nullptr) {
    group->local->Abort(*cause);
  }
  group->failure = problem;
  group->failure_code = code;
}

// Runs `work`; an error of groups that have reduced, or tried to, is final. The peers are notified of it.
template <class Work>
int Guarded(adasum_group* group, const Work& work, const std::vector<adasum_group*>& others = {}) {
  if (group != nullptr && group->owner != getpid()) {
    return Failed("expected the process that made the group, but got a forked child of it");
  }
  if (group != nullptr && group->failure_code != ADASUM_OK) {
    return Failed(group->failure, group->failure_code);
  }
  const auto fail = [&](const std::exception& error, int code, const RootCause* cause) {
    Fail(group, error.what(), code, cause);
    for (adasum_group* other : others) {
      Fail(other, error.what(), code, cause);
    }
    return Failed(error.what(), code);
  };
  try {
    work();
    return ADASUM_OK;
  } catch (const RuleFailed& error) {
    return Failed(error.what());
  } catch (const UnresponsiveRank& error) {
    return fail(error, ADASUM_UNRESPONSIVE, &error.cause);
  } catch (const std::exception& error) {
    if (group == nullptr || group->local == nullptr) {
      return fail(error, ADASUM_FAILED, nullptr);
    }
    const RootCause cause = OwnFailure(group->local->global_rank(), error);
    return fail(error, ADASUM_FAILED, &cause);
  }
}

std::unique_ptr<LocalGroup> Joining(const adasum_config& config) {
  LocalSettings settings;
  settings.timeout_seconds = static_cast<int>(std::clamp(std::ceil(config.timeout_s), 1.0, 1e9));
  settings.limit = config.limit;
  settings.moves_threads = false; // a thread of the program
  return MakeLocalGroup(config.rank, {config.job_ranks, config.job_ranks + config.size}, settings);
}

LocalTransport& Connected(const adasum_group* group) {
  if (group->local == nullptr) {
    throw std::invalid_argument("expected a connected group");
  }
  return *group->local;
}

void Plan(adasum_group& group) {
  group.plan = PlanLevels(group.hosts, group.group_op, group.group_size, group.local->rank(), {});
  for (const GroupPlan& level : group.plan) {
    group.transports.push_back(std::make_unique<GroupTransport>(*group.local, level.group));
    group.levels.push_back({group.transports.back().get(), &level.tree});
  }
  group.tree = BuildTree(group.hosts, group.group_op, group.group_size);
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
    group->local = std::make_unique<LocalTransport>(std::move(group->joining));
    Plan(*group);
    const int share = static_cast<int>(group->local->ShareOfProcessors());
    group->workers = std::make_unique<Workers>(std::clamp(share, 1, kMostThreads));
    group->description = "levels " + Describe(group->plan) + ", " + ChooseKernels("")->name + ", threads " +
                         std::to_string(group->workers->threads());
  });
}

EXPORT int adasum_reduce(adasum_group* group, const adasum_tensor* tensors, int count, int dtype,
                         const adasum_extra* extra) {
  std::vector<adasum_group*> others;
  for (int k = 0; extra != nullptr && k < extra->shards_count; ++k) {
    others.push_back(extra->shards[k].group);
  }
  const auto reduce = [&] {
    if (dtype < 0 || dtype >= kElementTypes) {
      throw std::invalid_argument("expected a known dtype");
    }
    std::for_each(others.begin(), others.end(), Connected);
    LocalTransport& local = Connected(group);
    std::vector<TensorView> views(count);
    std::transform(tensors, tensors + count, views.begin(), [](const adasum_tensor& tensor) {
      TensorView view = {tensor.input, tensor.output, tensor.elements};
      view.observation = tensor.observation;
      return view;
    });
    ReduceSettings settings;
    std::vector<ReduceLevel> levels = group->levels;
    local.BeginOperation();
    if (extra != nullptr) {
      levels = {{&local, &group->tree}};
      for (size_t k = 0; k < others.size(); ++k) {
        const adasum_shards& shards = extra->shards[k];
        others[k]->local->BeginOperation();
        settings.shards.push_back({others[k]->local.get(), {shards.tensors, shards.tensors + shards.count}});
      }
      if (extra->rule != nullptr) {
        settings.rule = [extra](const double* grams, double* c) { return extra->rule(grams, c) == 0; };
      }
    }
    Reduce(views, static_cast<ElementType>(dtype), levels, /*scale=*/1.0, settings, *ChooseKernels(""),
           *group->workers, group->scratch, [](Phase, int) {});
  };
  return Guarded(group, reduce, others);
}

EXPORT int adasum_gather(adasum_group* group, const void* mine, void* all, int64_t bytes) {
  return Guarded(group, [&] {
    char* rows = static_cast<char*>(all);
    std::vector<Message> messages(group->hosts.size());
    for (size_t rank = 0; rank < messages.size(); ++rank) {
      messages[rank] = {mine, bytes, rows + rank * bytes, bytes};
    }
    LocalTransport& local = Connected(group);
    local.BeginOperation();
    local.Exchange(messages);
    std::memcpy(rows + local.rank() * bytes, mine, bytes);
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
