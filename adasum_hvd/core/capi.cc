// The C interface of adasum.h.
#include "adasum.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <unistd.h>

#include "host/abort_notice.h"
#include "host/hybrid.h"
#include "host/processor_quota.h"
#include "kernels/kernels.h"
#include "reduce/observation.h"
#include "reduce/plan.h"
#include "reduce/reduce.h"

#define EXPORT __attribute__((visibility("default")))

using namespace adasum_hvd;

namespace {

constexpr int kMostThreads = 8;
// The network's functions may have to wait for their caller, so that their messages are long.
constexpr int64_t kNetworkMessageBytes = 4 << 20;
// Of ranks of a place more than of the network, whose error then reaches them as a notice.
constexpr int kSecondsAfterNetwork = 1;
thread_local std::string last_error;

int Failed(const std::string& text, int code = ADASUM_FAILED) {
  last_error = text;
  return code;
}

// The network of the caller.
class CallersNetwork : public Network {
public:
  explicit CallersNetwork(const adasum_config& config)
      : rank_(config.rank), size_(config.size), functions_(config.network) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void Start(const std::vector<Message>& messages) override {
    std::vector<adasum_message> table(size_);
    for (int peer = 0; peer < size_; ++peer) {
      const Message& one = messages[peer];
      if (peer != rank_) {
        table[peer] = {one.send, one.send_bytes, one.receive, one.receive_bytes};
      }
    }
    Call([&](int* done) { functions_->start(table.data(), done); });
  }
  void Wait() override {
    Call([this](int* done) { functions_->wait(done); });
  }
  void Abort(const AbortNotice&) override { Abort(); }
  // Twice, if a signal interrupts the first call.
  void Abort() {
    for (int tries = 0; functions_ != nullptr && aborted_ == 0 && tries < 2; ++tries) {
      functions_->abort(&aborted_);
    }
  }

private:
  // Aborts before it throws, because that frees buffers.
  template <class Function> void Call(const Function& function) {
    int done = 0;
    functions_->problem[0] = '\0';
    function(&done);
    if (done == 0) {
      const std::string problem = functions_->problem;
      Abort();
      if (problem.empty()) {
        throw std::runtime_error(
            "AdaSum: expected messages, but a signal interrupted them; look for its exception above");
      }
      throw std::runtime_error(problem);
    }
  }

  const int rank_, size_;
  adasum_network* const functions_;
  int aborted_ = 0;
};

} // namespace

struct adasum_group {
  explicit adasum_group(const adasum_config& config)
      : hosts(config.hosts, config.hosts + config.size), group_op(static_cast<GroupOp>(config.group_op)),
        group_size(config.group_size), has_network(config.network != nullptr), network(config) {}

  const pid_t owner = getpid();
  std::unique_ptr<LocalGroup> joining; // until connected
  const std::vector<int> hosts;        // by rank
  const GroupOp group_op;
  const int group_size;
  const bool has_network;
  std::vector<int> neighbours; // the ranks of this place
  std::unique_ptr<LocalTransport> local;
  CallersNetwork network;
  std::unique_ptr<HybridTransport> hybrid;
  std::unique_ptr<Transport> everyone;
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
  group->network.Abort();
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
    return Failed(error.what(), ADASUM_RULE_FAILED);
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

// Ranks of this place, and what they share.
void Join(adasum_group& group, const adasum_config& config) {
  std::vector<int> job_ranks;
  for (int rank = 0; rank < config.size; ++rank) {
    if (config.places[rank] == config.places[config.rank]) {
      group.neighbours.push_back(rank);
      job_ranks.push_back(config.job_ranks[rank]);
    }
  }
  if (group.neighbours.size() < group.hosts.size() && !group.has_network) {
    throw std::invalid_argument("expected a network between places, but got none");
  }
  const auto mine = std::find(group.neighbours.begin(), group.neighbours.end(), config.rank);
  LocalSettings settings;
  settings.timeout_seconds = static_cast<int>(std::clamp(std::ceil(config.timeout_s), 1.0, 1e9)) +
                             (group.has_network ? kSecondsAfterNetwork : 0);
  settings.limit = config.limit;
  settings.moves_threads = false; // a thread of the program
  group.joining = MakeLocalGroup(static_cast<int>(mine - group.neighbours.begin()), job_ranks, settings);
}

void CheckConnected(const adasum_group* group) {
  if (group->local == nullptr) {
    throw std::invalid_argument("expected a connected group");
  }
}

void Plan(adasum_group& group) {
  group.hybrid = std::make_unique<HybridTransport>(*group.local, group.network, group.neighbours);
  group.plan = PlanLevels(group.hosts, group.group_op, group.group_size, group.network.rank(), {});
  for (const GroupPlan& level : group.plan) {
    group.transports.push_back(group.hybrid->Among(level.group));
    group.levels.push_back({group.transports.back().get(), &level.tree});
  }
  group.tree = BuildTree(group.hosts, group.group_op, group.group_size);
  std::vector<int> everyone(group.hosts.size());
  std::iota(everyone.begin(), everyone.end(), 0);
  group.everyone = group.hybrid->Among(everyone);
}

// By rank of this place, of those by rank.
std::vector<int> OfNeighbours(const adasum_group& group, const int* numbers) {
  std::vector<int> some;
  std::transform(group.neighbours.begin(), group.neighbours.end(), std::back_inserter(some),
                 [numbers](int rank) { return numbers[rank]; });
  return some;
}

} // namespace

extern "C" {

EXPORT int adasum_abi(void) { return ADASUM_ABI; }

EXPORT const char* adasum_error(void) { return last_error.c_str(); }

EXPORT int adasum_listen(const adasum_config* config, adasum_group** result, int* name, int* nonce) {
  *result = nullptr;
  return Guarded(nullptr, [&] {
    if (config->abi != ADASUM_ABI) {
      throw std::invalid_argument("expected ABI " + std::to_string(ADASUM_ABI) + ", but got " +
                                  std::to_string(config->abi));
    }
    auto group = std::make_unique<adasum_group>(*config);
    Join(*group, *config);
    *name = group->joining->name;
    *nonce = group->joining->nonce;
    *result = group.release();
  });
}

EXPORT int adasum_connect(adasum_group* group, const int* names, const int* nonces) {
  return Guarded(nullptr, [&] { // an error leaves the caller's network as it is
    ConnectPeers(*group->joining, OfNeighbours(*group, names), OfNeighbours(*group, nonces));
    group->local = std::make_unique<LocalTransport>(std::move(group->joining));
    Plan(*group);
    const int share = static_cast<int>(group->local->ShareOfProcessors());
    group->workers = std::make_unique<Workers>(std::clamp(share, 1, kMostThreads));
    group->description = "levels " + Describe(group->plan) + ", " + ChooseKernels("")->name + ", threads " +
                         std::to_string(group->workers->threads());
    if (group->has_network) {
      group->description.append(", host of ").append(std::to_string(group->neighbours.size()));
    }
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
    CheckConnected(group);
    std::for_each(others.begin(), others.end(), CheckConnected);
    std::vector<TensorView> views(count);
    std::transform(tensors, tensors + count, views.begin(), [](const adasum_tensor& tensor) {
      TensorView view = {tensor.input, tensor.output, tensor.elements};
      view.observation = tensor.observation;
      return view;
    });
    ReduceSettings settings;
    if (group->has_network) {
      settings.chunk_bytes = kNetworkMessageBytes;
    }
    std::vector<ReduceLevel> levels = group->levels;
    group->local->BeginOperation();
    if (extra != nullptr) {
      levels = {{group->everyone.get(), &group->tree}};
      for (size_t k = 0; k < others.size(); ++k) {
        const adasum_shards& shards = extra->shards[k];
        others[k]->local->BeginOperation();
        settings.shards.push_back(
            {others[k]->everyone.get(), {shards.tensors, shards.tensors + shards.count}});
      }
      if (extra->rule != nullptr) {
        settings.rule = [extra](const double* grams, double* c) {
          int done = 0;
          extra->rule(grams, c, &done);
          return done != 0;
        };
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
    CheckConnected(group);
    group->local->BeginOperation();
    group->everyone->Exchange(messages);
    std::memcpy(rows + group->everyone->rank() * bytes, mine, bytes);
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

EXPORT double adasum_quota(const char* membership, const char* mount) {
  ProcessorQuota quota;
  Guarded(nullptr, [&] { quota = ReadProcessorQuota(membership, mount); });
  return quota.processors;
}

} // extern "C"
