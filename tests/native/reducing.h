// Reductions by ranks as threads, on the host or on devices (ADASUM_ON_DEVICE), and the same by a float64
// tree walked on whole vectors.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "ranks_as_threads.h"
#include "reduce/observation.h"
#include "reduce/plan.h"
#include "reduce/reduce.h"
#include "reduce/tree.h"
#include "tensors.h"
#include "testing.h"
#if defined(ADASUM_ON_DEVICE)
#include "ranks_on_device.h"
#endif

namespace adasum_hvd {

struct Options {
  ElementType type = kFloat32;
  std::vector<int> hosts;
  GroupOp group_op = GroupOp::kAdasum;
  int group_size = 0;
  std::vector<int> radices = {0};                         // flat
  Tree tree;                                              // over all ranks: what the result is compared with
  const std::vector<std::vector<char>>* starts = nullptr; // weights that all ranks had before
  int threads = 1;
  double scale = 1.0;
  ReduceSettings settings;
  const Kernels* kernels = ChooseKernels(nullptr);
  bool in_place = false;
  bool share = false;          // ranks reduce in memory that they share
  bool shared_tensors = false; // the tensors lie there
  bool adjacent = false;       // every rank has its tensors one behind the other in memory
  std::vector<std::vector<double>>* observed = nullptr; // by tensor, the sum of the ranks' rows
};

inline Options For(int ranks, ElementType type) {
  Options options;
  options.type = type;
  options.hosts.assign(ranks, 0);
  options.tree = BuildTree(options.hosts, GroupOp::kAdasum, 0);
  options.settings.chunk_bytes = 3 * kBlockElements * ElementBytes(type);
  options.settings.replicate_bytes = 0;
  return options;
}

// A rank's tensors where a reduction finds them, and what it does there.
#if defined(ADASUM_ON_DEVICE)
class Rank {
public:
  explicit Rank(RankOnDevice& rank) : rank_(rank) {}

  Transport& transport() { return *rank_.transport; }
  char* Put(std::vector<char>& bytes) {
    hosts_.push_back(&bytes);
    return devices_.emplace_back(bytes, rank_.stream).get();
  }
  char* Share(std::vector<char>& bytes) { return Put(bytes); }
  void Reduce(const std::vector<TensorView>& views, const std::vector<ReduceLevel>& levels,
              const Options& options) {
    observation_ = ReduceOnDevice(views, options.type, levels, options.scale, options.settings, rank_.scratch,
                                  rank_.stream, [](Phase, int) {});
  }
  // Copies everything back.
  int64_t Finish() {
    CheckCuda(cudaStreamSynchronize(rank_.stream), "reduce");
    Check(observation_ == nullptr || observation_->Write(1), "what is observed has not come");
    for (size_t k = 0; k < hosts_.size(); ++k) {
      *hosts_[k] = devices_[k].Read();
    }
    return rank_.scratch.explicit_tensors.Read() - explicit_before_;
  }

private:
  RankOnDevice& rank_;
  int64_t explicit_before_ = rank_.scratch.explicit_tensors.Read();
  std::shared_ptr<DeviceObservation> observation_;
  std::vector<std::vector<char>*> hosts_;
  std::deque<OnDevice> devices_;
};

inline int64_t TotalBytes(const std::vector<Tensors>& ranks) {
  int64_t total = 0;
  for (const std::vector<char>& bytes : ranks[0].bytes) {
    total += static_cast<int64_t>(bytes.size());
  }
  return total;
}

// Calls prepare(rank) for every rank, then reduce(rank), then finish(rank): memory is neither taken nor given
// back while a reduction is under way.
template <class Prepare, class Reduce, class Finish>
void OnEveryRank(const std::vector<Tensors>& ranks, const Options&, Prepare prepare, Reduce reduce,
                 Finish finish) {
  const int size = static_cast<int>(ranks.size());
  auto& job = RanksOnDevice(size, TotalBytes(ranks) * (size + 1));
  std::deque<Rank> all;
  for (auto& rank : job) {
    all.emplace_back(*rank);
  }
  auto each = [&](auto what) {
    InThreads(size, [&](int rank) {
      CheckCuda(cudaSetDevice(DeviceOf(rank)), "choose a device");
      what(all[rank]);
    });
  };
  each(prepare);
  each(reduce);
  each(finish);
}
#else
class Rank {
public:
  explicit Rank(Transport& transport) : transport_(transport) {}

  Transport& transport() { return transport_; }
  char* Put(std::vector<char>& bytes) { return bytes.data(); }
  char* Share(std::vector<char>& bytes) {
    auto* memory = static_cast<char*>(AllocateShared(static_cast<int64_t>(bytes.size())));
    std::copy(bytes.begin(), bytes.end(), memory);
    shared_.emplace_back(&bytes, memory);
    return memory;
  }
  void Reduce(const std::vector<TensorView>& views, const std::vector<ReduceLevel>& levels,
              const Options& options) {
    Workers workers(options.threads);
    Scratch scratch;
    explicit_tensors_ = adasum_hvd::Reduce(views, options.type, levels, options.scale, options.settings,
                                           *options.kernels, workers, scratch, [](Phase, int) {});
  }
  int64_t Finish() { // returns how many tensors were walked explicitly
    for (const auto& [bytes, memory] : shared_) {
      std::copy(memory, memory + bytes->size(), bytes->begin());
      FreeShared(memory);
    }
    return explicit_tensors_;
  }

private:
  Transport& transport_;
  int64_t explicit_tensors_ = 0;
  std::vector<std::pair<std::vector<char>*, char*>> shared_; // whose bytes are where
};

template <class Prepare, class Reduce, class Finish>
void OnEveryRank(const std::vector<Tensors>& ranks, const Options& options, Prepare prepare, Reduce reduce,
                 Finish finish) {
  RunRanks(
      static_cast<int>(ranks.size()),
      [&](ThreadTransport& transport) {
        Rank rank(transport);
        prepare(rank);
        reduce(rank);
        finish(rank);
      },
      options.share);
}
#endif

// Ranks that share no memory.
class OverTheNetwork : public Transport {
public:
  explicit OverTheNetwork(Transport& all) : all_(all) {}
  int rank() const override { return all_.rank(); }
  int size() const override { return all_.size(); }
  void Start(const std::vector<Message>& messages) override { all_.Start(messages); }
  void Wait() override { all_.Wait(); }

private:
  Transport& all_;
};

using Bytes = std::vector<std::vector<char>>; // by tensor

inline Bytes Joined(const Bytes& tensors) {
  Bytes joined(1);
  for (const std::vector<char>& bytes : tensors) {
    joined[0].insert(joined[0].end(), bytes.begin(), bytes.end());
  }
  return joined;
}

inline Bytes SplitLike(const Bytes& joined, const Bytes& tensors) {
  Bytes split;
  auto at = joined[0].begin();
  for (const std::vector<char>& bytes : tensors) {
    split.emplace_back(at, at + static_cast<std::ptrdiff_t>(bytes.size()));
    at += static_cast<std::ptrdiff_t>(bytes.size());
  }
  return split;
}

// The result on rank 0, after checking that every rank has the same bytes.
inline Bytes ReduceAll(const std::vector<Tensors>& ranks, const Options& options,
                       int64_t* explicit_tensors = nullptr) {
  auto held = [&](const Bytes& tensors) { return options.adjacent ? Joined(tensors) : tensors; };
  std::vector<Bytes> inputs, results, starts;
  for (const Tensors& tensors : ranks) {
    inputs.push_back(held(tensors.bytes));
    results.push_back(held(tensors.bytes));
    starts.push_back(options.starts == nullptr ? Bytes() : held(*options.starts));
  }
  std::vector<std::vector<TensorView>> views(ranks.size());
  std::vector<std::atomic<uint64_t>> checksums(ranks.size());
  std::vector<int64_t> widths(ranks.size());
  std::vector<std::vector<double>> rows(ranks.size());
  std::atomic<int64_t> explicit_count{0};
  auto prepare = [&](Rank& rank) {
    const int me = rank.transport().rank();
    const Bytes& tensors = ranks[me].bytes;
    auto put = [&](Bytes& memory, bool shared = false) { // returns where the tensors are
      std::vector<char*> at;
      for (std::vector<char>& bytes : memory) {
        at.push_back(shared ? rank.Share(bytes) : rank.Put(bytes));
      }
      for (size_t k = 1; options.adjacent && k < tensors.size(); ++k) {
        at.push_back(at.back() + tensors[k - 1].size());
      }
      return at;
    };
    for (std::vector<char>& bytes : results[me]) {
      if (!options.in_place) {
        std::fill(bytes.begin(), bytes.end(), char(0x5a));
      }
    }
    const std::vector<char*> output = put(results[me], options.shared_tensors);
    const std::vector<char*> input = options.in_place ? output : put(inputs[me]);
    const std::vector<char*> start =
        options.starts == nullptr ? std::vector<char*>(tensors.size()) : put(starts[me]);
    for (size_t k = 0; k < tensors.size(); ++k) {
      const auto elements = static_cast<int64_t>(tensors[k].size()) / ElementBytes(options.type);
      views[me].push_back({input[k], output[k], elements, start[k]});
#if !defined(ADASUM_ON_DEVICE) // no checksums there
      if (options.starts != nullptr) {
        views[me].back().checksum = &checksums[me];
        views[me].back().first = k == 0 ? 0 : views[me][k - 1].first + views[me][k - 1].elements;
      }
#endif
    }
  };
  auto reduce = [&](Rank& rank) {
    const int me = rank.transport().rank();
    const std::vector<GroupPlan> planned =
        PlanLevels(options.hosts, options.group_op, options.group_size, me, options.radices);
    std::deque<GroupTransport> groups;
    std::deque<OverTheNetwork> between_hosts;
    std::vector<ReduceLevel> levels;
    for (const GroupPlan& level : planned) {
      Transport* group = &groups.emplace_back(rank.transport(), level.group);
      const bool on_one_host = std::all_of(level.group.begin(), level.group.end(), [&](int member) {
        return options.hosts[member] == options.hosts[me];
      });
      levels.push_back({on_one_host ? group : &between_hosts.emplace_back(*group), &level.tree});
    }
    if (options.observed != nullptr) {
      widths[me] = Observation({}, levels, false).width();
      rows[me].resize(widths[me] * views[me].size());
      for (size_t k = 0; k < views[me].size(); ++k) {
        views[me][k].observation = rows[me].data() + k * widths[me];
      }
    }
    rank.Reduce(views[me], levels, options);
  };
  auto finish = [&](Rank& rank) { explicit_count += rank.Finish(); };
  OnEveryRank(ranks, options, prepare, reduce, finish);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    uint64_t checksum = 0;
    for (const TensorView& view : views[rank]) {
      checksum += view.checksum == nullptr
                      ? 0
                      : Portable().checksum(options.type, view.output, view.elements, view.first);
    }
    Check(checksums[rank] == checksum, "another checksum than that of the results");
    Check(inputs[rank] == held(ranks[rank].bytes), "the input was changed");
    Check(options.starts == nullptr || starts[rank] == held(*options.starts),
          "the weights before were changed");
    Check(results[rank] == results[0], "rank " + std::to_string(rank) + " has other bits than rank 0");
  }
  if (options.observed != nullptr) {
    options.observed->assign(ranks[0].bytes.size(), std::vector<double>(widths[0]));
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (size_t k = 0; k < rows[rank].size(); ++k) {
        (*options.observed)[k / widths[rank]][k % widths[rank]] += rows[rank][k];
      }
    }
  }
  if (explicit_tensors != nullptr) {
    *explicit_tensors = explicit_count;
  }
  return options.adjacent ? SplitLike(results[0], ranks[0].bytes) : results[0];
}

inline double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  long double sum = 0;
  for (size_t k = 0; k < a.size(); ++k) {
    sum += static_cast<long double>(a[k]) * b[k];
  }
  return static_cast<double>(sum);
}

inline std::vector<double> Reference(const std::vector<Tensors>& ranks, size_t tensor, const Tree& tree) {
  std::vector<std::vector<double>> nodes;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    nodes.push_back(ranks[rank].values[tensor]);
    for (double& value : nodes.back()) {
      value *= tree.leaf_weights[rank];
    }
  }
  for (const Merge& merge : tree.merges) {
    const std::vector<double>&a = nodes[merge.left], &b = nodes[merge.right];
    const double dot = Dot(a, b);
    const double left = merge.adasum ? AdasumCoefficient(dot, Dot(a, a)) : 1.0;
    const double right = merge.adasum ? AdasumCoefficient(dot, Dot(b, b)) : 1.0;
    std::vector<double> node(a.size());
    for (size_t k = 0; k < a.size(); ++k) {
      node[k] = left * a[k] + right * b[k];
    }
    nodes.push_back(std::move(node));
  }
  return nodes.back();
}

// Sanitizers and simulated devices are slow: with them every element type is in one test, and other tests
// take some. Pairs cancel to 10 to the -kDigits.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
const std::vector<ElementType> kTypes = {kFloat32};
const std::vector<int> kDigits = {3, 8};
#elif defined(ADASUM_SIMULATED)
const std::vector<ElementType> kTypes = {kFloat32, kBfloat16};
const std::vector<int> kDigits = {1, 3, 6, 10};
#else
const std::vector<ElementType> kTypes = {kFloat16, kFloat32, kFloat64, kBfloat16};
const std::vector<int> kDigits = {1, 2, 3, 4, 6, 8, 10, 12};
#endif

const std::vector<int64_t> kSizes = {1, 0, 7, 4096, 300, 4097, 50001, 8, 12288, 1000};

} // namespace adasum_hvd
