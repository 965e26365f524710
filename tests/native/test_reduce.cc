// The op's arithmetic, ranks as threads, against a float64 tree walked on whole vectors. With
// ADASUM_ON_DEVICE it is the arithmetic on CUDA devices, or on simulated ones.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#if !defined(ADASUM_ON_DEVICE)
#include <cstdlib>
#include <fstream>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "kernels/kernels.h"
#include "op/settings.h"
#include "ranks_as_threads.h"
#include "reduce/layout.h"
#include "reduce/plan.h"
#include "reduce/reduce.h"
#include "reduce/tree.h"
#include "testing.h"
#if defined(ADASUM_ON_DEVICE)
#include "ranks_on_device.h"
#endif

using namespace adasum_hvd;

namespace {

std::string Scientific(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

#if !defined(ADASUM_ON_DEVICE)
std::vector<const Kernels*> AllKernels() {
  std::vector<const Kernels*> all;
  for (const char* name : {"portable", "avx2", "avx512"}) {
    if (const Kernels* kernels = ChooseKernels(name)) {
      all.push_back(kernels);
    }
  }
  return all;
}
#endif

const Kernels& Portable() { return *ChooseKernels("portable"); }

// Of a type of two bytes.
double Widened(uint16_t bits, ElementType type) {
  double value;
  Portable().widen[type](&bits, 1, 1.0, &value);
  return value;
}

uint16_t Narrowed(double value, ElementType type) {
  uint16_t bits;
  Portable().narrow[type](&value, 1, 1.0, &bits);
  return bits;
}

// One rank's tensors, as doubles and in the element type.
struct Tensors {
  std::vector<std::vector<double>> values;
  std::vector<std::vector<char>> bytes;
};

template <class T> std::vector<char> BytesOf(const std::vector<T>& values) {
  std::vector<char> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

std::vector<char> Encode(const std::vector<double>& values, ElementType type) {
  if (type == kFloat64) {
    return BytesOf(values);
  }
  if (type == kFloat32) {
    return BytesOf(std::vector<float>(values.begin(), values.end()));
  }
  std::vector<uint16_t> halves;
  for (double value : values) {
    halves.push_back(Narrowed(value, type));
  }
  return BytesOf(halves);
}

std::vector<double> Decode(const std::vector<char>& bytes, ElementType type) {
  std::vector<double> values(bytes.size() / ElementBytes(type));
  for (size_t k = 0; k < values.size(); ++k) {
    const char* at = bytes.data() + k * ElementBytes(type);
    if (type == kFloat64) {
      std::memcpy(&values[k], at, 8);
    } else if (type == kFloat32) {
      float value;
      std::memcpy(&value, at, 4);
      values[k] = value;
    } else {
      uint16_t half;
      std::memcpy(&half, at, 2);
      values[k] = Widened(half, type);
    }
  }
  return values;
}

using Maker = std::function<double(int rank, size_t tensor, int64_t element)>;

std::vector<Tensors> MakeTensors(int ranks, const std::vector<int64_t>& sizes, ElementType type,
                                 const Maker& maker) {
  std::vector<Tensors> all(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    for (size_t tensor = 0; tensor < sizes.size(); ++tensor) {
      std::vector<double> values(sizes[tensor]);
      for (int64_t k = 0; k < sizes[tensor]; ++k) {
        values[k] = maker(rank, tensor, k);
      }
      all[rank].bytes.push_back(Encode(values, type));
      all[rank].values.push_back(Decode(all[rank].bytes.back(), type));
    }
  }
  return all;
}

// Bell-shaped values that depend on nothing but their place: splitmix64, four uniforms added.
Maker Random(uint64_t seed, double scale = 1.0) {
  return [seed, scale](int rank, size_t tensor, int64_t element) {
    uint64_t state = seed * 1000003 + uint64_t(rank) * 10007 + tensor * 101 + (uint64_t(element) << 24);
    double sum = -2;
    for (int k = 0; k < 4; ++k) {
      state += 0x9e3779b97f4a7c15;
      uint64_t bits = state;
      bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
      bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
      sum += std::ldexp(static_cast<double>((bits ^ (bits >> 31)) >> 11), -53);
    }
    return scale * sum;
  };
}

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
};

Options For(int ranks, ElementType type) {
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
  void Reduce(const std::vector<TensorView>& views, const std::vector<ReduceLevel>& levels,
              const Options& options) {
    ReduceOnDevice(views, options.type, levels, options.scale, options.settings, rank_.scratch, rank_.stream,
                   [](Phase, int) {});
  }
  // Copies everything back; returns how many tensors were walked explicitly.
  int64_t Finish() {
    CheckCuda(cudaStreamSynchronize(rank_.stream), "reduce");
    for (size_t k = 0; k < hosts_.size(); ++k) {
      *hosts_[k] = devices_[k].Read();
    }
    return rank_.scratch.TakeExplicitTensors();
  }

private:
  RankOnDevice& rank_;
  std::vector<std::vector<char>*> hosts_;
  std::deque<OnDevice> devices_;
};

int64_t TotalBytes(const std::vector<Tensors>& ranks) {
  int64_t total = 0;
  for (const std::vector<char>& bytes : ranks[0].bytes) {
    total += static_cast<int64_t>(bytes.size());
  }
  return total;
}

// Calls prepare(rank) for every rank, then reduce(rank), then finish(rank): memory is neither taken nor given
// back while a reduction is under way.
template <class Prepare, class Reduce, class Finish>
void OnEveryRank(const std::vector<Tensors>& ranks, Prepare prepare, Reduce reduce, Finish finish) {
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
  void Reduce(const std::vector<TensorView>& views, const std::vector<ReduceLevel>& levels,
              const Options& options) {
    Workers workers(options.threads);
    Scratch scratch;
    explicit_tensors_ = adasum_hvd::Reduce(views, options.type, levels, options.scale, options.settings,
                                           *options.kernels, workers, scratch, [](Phase, int) {})
                            .explicit_tensors;
  }
  int64_t Finish() const { return explicit_tensors_; }

private:
  Transport& transport_;
  int64_t explicit_tensors_ = 0;
};

template <class Prepare, class Reduce, class Finish>
void OnEveryRank(const std::vector<Tensors>& ranks, Prepare prepare, Reduce reduce, Finish finish) {
  RunRanks(static_cast<int>(ranks.size()), [&](ThreadTransport& transport) {
    Rank rank(transport);
    prepare(rank);
    reduce(rank);
    finish(rank);
  });
}
#endif

// The result on rank 0, after checking that every rank has the same bytes.
std::vector<std::vector<char>> ReduceAll(const std::vector<Tensors>& ranks, const Options& options,
                                         int64_t* explicit_tensors = nullptr) {
  using Bytes = std::vector<std::vector<char>>;
  std::vector<Bytes> inputs, results, starts(ranks.size());
  for (const Tensors& tensors : ranks) {
    inputs.push_back(tensors.bytes);
    results.push_back(tensors.bytes);
  }
  std::vector<std::vector<TensorView>> views(ranks.size());
  std::atomic<int64_t> explicit_count{0};
  auto prepare = [&](Rank& rank) {
    const int me = rank.transport().rank();
    if (options.starts != nullptr) {
      starts[me] = *options.starts;
    }
    for (size_t k = 0; k < inputs[me].size(); ++k) {
      if (!options.in_place) {
        std::fill(results[me][k].begin(), results[me][k].end(), char(0x5a));
      }
      char* output = rank.Put(results[me][k]);
      const int64_t elements = static_cast<int64_t>(inputs[me][k].size() / ElementBytes(options.type));
      views[me].push_back({options.in_place ? output : rank.Put(inputs[me][k]), output, elements,
                           options.starts == nullptr ? nullptr : rank.Put(starts[me][k])});
    }
  };
  auto reduce = [&](Rank& rank) {
    const int me = rank.transport().rank();
    const std::vector<GroupPlan> planned =
        PlanLevels(options.hosts, options.group_op, options.group_size, me, options.radices);
    std::deque<GroupTransport> groups;
    std::vector<ReduceLevel> levels;
    for (const GroupPlan& level : planned) {
      levels.push_back({&groups.emplace_back(rank.transport(), level.group), &level.tree});
    }
    rank.Reduce(views[me], levels, options);
  };
  auto finish = [&](Rank& rank) { explicit_count += rank.Finish(); };
  OnEveryRank(ranks, prepare, reduce, finish);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    Check(inputs[rank] == ranks[rank].bytes, "the input was changed");
    Check(options.starts == nullptr || starts[rank] == *options.starts, "the weights before were changed");
    Check(results[rank] == results[0], "rank " + std::to_string(rank) + " has other bits than rank 0");
  }
  if (explicit_tensors != nullptr) {
    *explicit_tensors = explicit_count;
  }
  return results[0];
}

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  long double sum = 0;
  for (size_t k = 0; k < a.size(); ++k) {
    sum += static_cast<long double>(a[k]) * b[k];
  }
  return static_cast<double>(sum);
}

std::vector<double> Reference(const std::vector<Tensors>& ranks, size_t tensor, const Tree& tree) {
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

// Largest difference relative to the largest element, or to `floor` where everything is smaller.
double RelativeError(const std::vector<double>& got, const std::vector<double>& wanted, double floor = 0) {
  double difference = 0, largest = floor;
  for (size_t k = 0; k < got.size(); ++k) {
    difference = std::max(difference, std::fabs(got[k] - wanted[k]));
    largest = std::max(largest, std::fabs(wanted[k]));
  }
  return largest == 0 ? difference : difference / largest;
}

// One rounding to the element type. For float64 the arithmetic itself shows: a node may cancel to 1e-6 of
// its terms before its vector is formed, which costs 2^-52 / 1e-6.
constexpr double kRounding[] = {1.0 / 1024, 1.0 / (1 << 23), 2.3e-10, 1.0 / 128};

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

void AgreesWithTheFloat64Tree() {
  for (ElementType type : {kFloat16, kFloat32, kFloat64, kBfloat16}) {
    for (int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12}) {
      const Options options = For(ranks, type);
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, type, Random(ranks));
      const auto result = ReduceAll(tensors, options);
      for (size_t k = 0; k < kSizes.size(); ++k) {
        // Opposite scalars cancel; half the typical input is what the error is then measured against.
        const double error = RelativeError(Decode(result[k], type), Reference(tensors, k, options.tree), 0.3);
        Check(error <= kRounding[type], "type " + std::to_string(type) + ", " + std::to_string(ranks) +
                                            " ranks, " + std::to_string(kSizes[k]) + " elements: error " +
                                            Scientific(error));
      }
    }
  }
}

// Every way to cut, fuse, place and compute gives the same bits.
void SameBitsInEveryForm() {
  for (ElementType type : kTypes) {
    for (int ranks : {2, 3, 5, 8}) {
      const Options plain = For(ranks, type);
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, type, Random(77));
      const auto fused = ReduceAll(tensors, plain);
      Options in_place = plain;
      in_place.in_place = true;
      Check(ReduceAll(tensors, in_place) == fused, "in place");
      Options replicated = plain;
      replicated.settings.replicate_bytes = int64_t{1} << 30;
      Check(ReduceAll(tensors, replicated) == fused, "replicated");
#if !defined(ADASUM_ON_DEVICE) // where there are no chunks, and the kernels are the device's
      for (int64_t chunk_bytes : {int64_t{1}, int64_t{1} << 30}) {
        Options chunked = plain;
        chunked.settings.chunk_bytes = chunk_bytes;
        Check(ReduceAll(tensors, chunked) == fused, "another chunk size");
      }
      Options threaded = plain;
      threaded.threads = 3;
      Check(ReduceAll(tensors, threaded) == fused, "several threads");
      for (const Kernels* kernels : AllKernels()) {
        Options other = plain;
        other.kernels = kernels;
        Check(ReduceAll(tensors, other) == fused, std::string("kernels ") + kernels->name);
      }
#endif
      for (size_t k = 0; k < kSizes.size(); ++k) {
        std::vector<Tensors> alone(ranks);
        for (int rank = 0; rank < ranks; ++rank) {
          alone[rank].bytes = {tensors[rank].bytes[k]};
        }
        for (const Options& form : {plain, replicated}) {
          Check(ReduceAll(alone, form)[0] == fused[k],
                "unfused tensor of " + std::to_string(kSizes[k]) + " elements");
        }
      }
    }
  }
}

void IdenticalInputsComeBackBitForBit() {
  for (ElementType type : kTypes) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      const Maker same = [](int, size_t tensor, int64_t k) { return Random(5)(0, tensor, k); };
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, type, same);
      Check(ReduceAll(tensors, For(ranks, type)) == tensors[0].bytes, std::to_string(ranks) + " ranks");
    }
  }
}

void WideRangeInOneFloat64Tensor() {
  const Maker wide = [](int, size_t, int64_t k) { return k % 2 == 0 ? 1e200 : 1e-200; };
  const std::vector<Tensors> tensors = MakeTensors(4, {64}, kFloat64, wide);
  Check(ReduceAll(tensors, For(4, kFloat64)) == tensors[0].bytes, "small elements were flushed");
  Options threaded = For(4, kFloat64); // every rank looks at enough blocks for its threads to share
  threaded.threads = 3;
  threaded.settings.replicate_bytes = int64_t{1} << 30;
  const std::vector<Tensors> longer = MakeTensors(4, {64, 8 * kBlockElements}, kFloat64, wide);
  Check(ReduceAll(longer, threaded) == longer[0].bytes, "small elements of many blocks were flushed");
}

void OrthogonalInputsAddUp() {
  const int ranks = 5;
  const Maker disjoint = [](int rank, size_t tensor, int64_t k) {
    return k % 5 == rank ? Random(6)(rank, tensor, k) : 0.0;
  };
  const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, kFloat32, disjoint);
  const auto result = ReduceAll(tensors, For(ranks, kFloat32));
  for (size_t k = 0; k < kSizes.size(); ++k) {
    std::vector<double> sum(kSizes[k]);
    for (const Tensors& rank : tensors) {
      for (int64_t e = 0; e < kSizes[k]; ++e) {
        sum[e] += rank.values[k][e];
      }
    }
    Check(Decode(result[k], kFloat32) == sum, "tensor " + std::to_string(k));
  }
}

void TwiceTheOtherGivesOneAndAHalf() {
  const Maker doubled = [](int rank, size_t tensor, int64_t k) {
    return (rank + 1) * std::floor(1000 * Random(8)(0, tensor, k));
  };
  const std::vector<Tensors> tensors = MakeTensors(2, kSizes, kFloat32, doubled);
  const auto result = ReduceAll(tensors, For(2, kFloat32));
  for (size_t k = 0; k < kSizes.size(); ++k) {
    const std::vector<double> got = Decode(result[k], kFloat32);
    for (int64_t e = 0; e < kSizes[k]; ++e) {
      Check(got[e] == 1.5 * tensors[0].values[k][e], "tensor " + std::to_string(k));
    }
  }
}

void ZeroIsNeutral() {
  for (int ranks : {2, 3, 6}) {
    for (int giver = 0; giver < ranks; ++giver) {
      const Maker one = [giver](int rank, size_t tensor, int64_t k) {
        return rank == giver ? Random(9)(0, tensor, k) : 0.0;
      };
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, kFloat32, one);
      Check(ReduceAll(tensors, For(ranks, kFloat32)) == tensors[giver].bytes,
            "rank " + std::to_string(giver));
    }
  }
}

void HomogeneousAndSymmetricBitForBit() {
  const std::vector<Tensors> small = MakeTensors(4, kSizes, kFloat32, Random(10));
  const std::vector<Tensors> big = MakeTensors(4, kSizes, kFloat32, Random(10, std::ldexp(1.0, 40)));
  const auto a = ReduceAll(small, For(4, kFloat32)), b = ReduceAll(big, For(4, kFloat32));
  for (size_t k = 0; k < kSizes.size(); ++k) {
    std::vector<double> scaled = Decode(a[k], kFloat32);
    for (double& value : scaled) {
      value = std::ldexp(value, 40);
    }
    Check(scaled == Decode(b[k], kFloat32), "f(2^40 x) is not 2^40 f(x)");
  }
  std::vector<Tensors> swapped = {small[1], small[0]}, straight = {small[0], small[1]};
  Check(ReduceAll(swapped, For(2, kFloat32)) == ReduceAll(straight, For(2, kFloat32)), "not symmetric");
}

void ExtremeMagnitudes() {
  for (double scale : {1e19, 1e-30}) {
    for (int ranks : {2, 3, 8}) {
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, kFloat32, Random(11, scale));
      const auto result = ReduceAll(tensors, For(ranks, kFloat32));
      for (size_t k = 0; k < kSizes.size(); ++k) {
        Check(RelativeError(Decode(result[k], kFloat32), Reference(tensors, k, For(ranks, kFloat32).tree)) <=
                  kRounding[kFloat32],
              "float32 at " + std::to_string(scale));
      }
    }
  }
  const std::vector<Tensors> plain = MakeTensors(3, kSizes, kFloat64, Random(12));
  for (int exponent : {990, -990}) {
    const std::vector<Tensors> tensors =
        MakeTensors(3, kSizes, kFloat64, Random(12, std::ldexp(1.0, exponent)));
    const auto result = ReduceAll(tensors, For(3, kFloat64));
    for (size_t k = 0; k < kSizes.size(); ++k) {
      std::vector<double> wanted = Reference(plain, k, For(3, kFloat64).tree);
      for (double& value : wanted) {
        value = std::ldexp(value, exponent);
      }
      Check(RelativeError(Decode(result[k], kFloat64), wanted) <= kRounding[kFloat64],
            "float64 at 2^" + std::to_string(exponent));
    }
  }
}

// b = -a + eps noise: the Gram matrix alone would lose the node a + b.
void CancellingPairs() {
  const std::vector<int64_t> sizes = {5000, 30000, 64, 100000};
  for (ElementType type : {kFloat32, kFloat64}) {
    for (int ranks : {4, 8, 6}) {
      for (int digits : kDigits) {
        const double eps = std::pow(10.0, -digits);
        const Maker opposite = [eps](int rank, size_t tensor, int64_t k) {
          const double base = Random(13)(rank / 2, tensor, k);
          return rank % 2 == 0 ? base : -base + eps * Random(14)(rank, tensor, k);
        };
        const Options options = For(ranks, type);
        const std::vector<Tensors> tensors = MakeTensors(ranks, sizes, type, opposite);
        int64_t explicit_tensors = 0;
        const auto result = ReduceAll(tensors, options, &explicit_tensors);
        Check(digits < 4 || explicit_tensors > 0, "no node was formed explicitly");
        Options other = options;
#if defined(ADASUM_ON_DEVICE)
        other.settings.replicate_bytes = int64_t{1} << 30;
#else
        other.kernels = &Portable();
        other.threads = 3;
        other.settings.chunk_bytes = 1;
#endif
        Check(ReduceAll(tensors, other) == result, "other bits in another form");
        for (size_t k = 0; k < sizes.size(); ++k) {
          // The float64 tree itself has an error of about 2^-52 / eps here.
          const double bound = kRounding[type] + 10 * std::ldexp(1.0, -52) / eps;
          const double error = RelativeError(Decode(result[k], type), Reference(tensors, k, options.tree));
          Check(error <= bound, "eps 1e-" + std::to_string(digits) + ", " + std::to_string(ranks) +
                                    " ranks, type " + std::to_string(type) + ": error " +
                                    std::to_string(error / bound) + " of the bound");
        }
      }
    }
  }
}

void GroupsAndPlacements() {
  const std::vector<std::vector<int>> placements = {
      {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {5, 5, 5, 2, 2, 9}, {0, 1, 2, 0, 1, 2, 0}};
  for (const std::vector<int>& hosts : placements) {
    for (GroupOp group_op : {GroupOp::kAdasum, GroupOp::kAverage, GroupOp::kSum}) {
      for (int group_size : {0, 2, 3}) {
        const int ranks = static_cast<int>(hosts.size());
        Options options = For(ranks, kFloat32);
        options.hosts = hosts;
        options.group_op = group_op;
        options.group_size = group_size;
        options.tree = BuildTree(hosts, group_op, group_size);
        const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, kFloat32, Random(15));
        const auto result = ReduceAll(tensors, options);
        for (size_t k = 0; k < kSizes.size(); ++k) {
          Check(RelativeError(Decode(result[k], kFloat32), Reference(tensors, k, options.tree)) <=
                    2 * kRounding[kFloat32],
                "placement of " + std::to_string(ranks) + " ranks");
        }
      }
    }
  }
  const Tree tree = BuildTree({0, 1, 0, 1, 0}, GroupOp::kAdasum, 0);
  const std::vector<std::pair<int, int>> wanted = {{0, 2}, {5, 4}, {1, 3}, {6, 7}};
  for (size_t k = 0; k < wanted.size(); ++k) {
    Check(tree.merges[k].left == wanted[k].first && tree.merges[k].right == wanted[k].second,
          "round-robin tree, merge " + std::to_string(k));
  }
}

void ScaleAndNonFinite() {
  Options options = For(3, kFloat32);
  const std::vector<Tensors> tensors = MakeTensors(3, kSizes, kFloat32, Random(16));
  const auto plain = ReduceAll(tensors, options);
  options.scale = 0.25;
  const auto scaled = ReduceAll(tensors, options);
  for (size_t k = 0; k < kSizes.size(); ++k) {
    std::vector<double> wanted = Decode(plain[k], kFloat32);
    for (double& value : wanted) {
      value *= 0.25;
    }
    Check(Decode(scaled[k], kFloat32) == wanted, "scale 0.25");
  }
  for (ElementType type : {kFloat16, kFloat32, kFloat64, kBfloat16}) {
    const Maker overflowed = [](int rank, size_t tensor, int64_t k) {
      return rank == 1 && k == 0 ? HUGE_VAL : Random(17)(rank, tensor, k);
    };
    const auto result = ReduceAll(MakeTensors(3, kSizes, type, overflowed), For(3, type));
    for (size_t k = 0; k < kSizes.size(); ++k) {
      for (double value : Decode(result[k], type)) {
        Check(!std::isfinite(value), "an infinity on one rank did not reach every element");
      }
    }
  }
}

#if defined(ADASUM_ON_DEVICE)
// Reductions of three tensors are enqueued behind one another while the device is held up, all three with
// ill-conditioned nodes: nothing waits for it.
void NothingWaitsForTheDevice() {
  const int size = 4;
  const std::vector<int64_t> sizes = {kSizes[6], kSizes[8], kSizes[3]};
  const Maker opposite = [](int rank, size_t tensor, int64_t k) {
    return (rank % 2 == 0 ? 1 : -1) * Random(26)(0, tensor, k) + 1e-6 * Random(27)(rank, tensor, k);
  };
  const std::vector<Tensors> tensors = MakeTensors(size, sizes, kFloat32, opposite);
  const Options options = For(size, kFloat32);
  int64_t explicit_tensors = 0;
  const auto wanted = ReduceAll(tensors, options, &explicit_tensors); // and all memory is there
  Check(explicit_tensors >= 3, "not every tensor was walked");
  std::vector<std::vector<std::vector<char>>> results(size);
  std::vector<std::vector<TensorView>> views(size);
  Gate gate;
  bool held = false;
  auto& job = RanksOnDevice(size, TotalBytes(tensors) * (size + 1));
  OnEveryRank(
      tensors,
      [&](Rank& rank) {
        const int me = rank.transport().rank();
        results[me] = tensors[me].bytes;
        for (std::vector<char>& bytes : results[me]) {
          char* at = rank.Put(bytes);
          views[me].push_back({at, at, static_cast<int64_t>(bytes.size() / sizeof(float))});
        }
      },
      [&](Rank& rank) {
        const int me = rank.transport().rank();
        gate.Close(job[me]->stream);
        for (const TensorView& view : views[me]) {
          rank.Reduce({view}, {{&rank.transport(), &options.tree}}, options);
        }
      },
      [&](Rank& rank) {
        if (rank.transport().rank() == 0) {
          held = gate.Open();
        }
        rank.Finish();
      });
  Check(held, "a reduction was enqueued only when the device was let go");
  for (const auto& result : results) {
    Check(result == wanted, "other bits than when waited for");
  }
}
#else
// What goes over the wire: 2 n (N - 1) / N per rank, and one exchange where everything is small.
void BytesAndRounds() {
  const std::vector<int64_t> sizes = {1 << 20};
  const std::vector<Tensors> tensors = MakeTensors(4, sizes, kFloat32, Random(18));
  RunRanks(4, [&](ThreadTransport& transport) {
    Scratch scratch;
    ReduceSettings settings;
    std::vector<char> output = tensors[transport.rank()].bytes[0];
    const Tree tree = BuildTree({0, 0, 0, 0}, GroupOp::kAdasum, 0);
    const std::vector<ReduceLevel> flat = {{&transport, &tree}};
    Workers workers(1);
    Reduce({{output.data(), output.data(), sizes[0]}}, kFloat32, flat, 1.0, settings, Portable(), workers,
           scratch, [](Phase, int) {});
    const double payload = 2.0 * 3 / 4 * static_cast<double>(output.size());
    Check(static_cast<double>(transport.sent_bytes()) <= 1.01 * payload, "more bytes than 2n(N-1)/N");
    const int64_t before = transport.exchanges();
    Reduce({{output.data(), output.data(), 64}}, kFloat32, flat, 1.0, settings, Portable(), workers, scratch,
           [](Phase, int) {});
    Check(transport.exchanges() == before + 1, "a small tensor took more than one exchange");
  });
}
#endif

// In levels every rank still gets the tree of all ranks, with a rounding between levels.
void LevelsWalkTheSameTree() {
  struct Form {
    std::vector<int> hosts;
    GroupOp group_op;
    int group_size;
    std::vector<int> radices;
  };
  const std::vector<Form> forms = {
      {{0, 0, 1, 1}, GroupOp::kAdasum, 0, {2, 2}},
      {{0, 1, 0, 1}, GroupOp::kAdasum, 0, {2, 2}},
      {{0, 0, 0, 1, 1, 1}, GroupOp::kAdasum, 0, {3, 2}},
      {{0, 1, 2, 2, 1, 0}, GroupOp::kAverage, 0, {2, 3}},
      {{0, 0, 0, 0, 1, 1, 1, 1}, GroupOp::kSum, 0, {2, 2, 2}},
      {{0, 0, 0, 0, 0, 0, 0, 0}, GroupOp::kAdasum, 4, {4, 2}},
      {{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}, GroupOp::kAdasum, 0, {2, 4, 2}},
      {{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5}, GroupOp::kAverage, 0, {2, 2, 3}},
  };
  for (const Form& form : forms) {
    const int ranks = static_cast<int>(form.hosts.size());
    for (ElementType type : kTypes) {
      Options options = For(ranks, type);
      options.hosts = form.hosts;
      options.group_op = form.group_op;
      options.group_size = form.group_size;
      options.tree = BuildTree(form.hosts, form.group_op, form.group_size);
      options.radices = form.radices;
      const std::string which = std::to_string(ranks) + " ranks, type " + std::to_string(type);
      const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, type, Random(20));
      const auto result = ReduceAll(tensors, options);
      for (size_t k = 0; k < kSizes.size(); ++k) {
        const double error = RelativeError(Decode(result[k], type), Reference(tensors, k, options.tree), 0.3);
        Check(error <= 4 * kRounding[type], which + ": error " + Scientific(error));
      }
      Options other = options;
      other.settings.replicate_bytes = int64_t{1} << 30;
      Check(ReduceAll(tensors, other) == result, which + ": other bits when replicated");
      other = options;
      other.in_place = true;
      other.threads = 3;
      other.settings.chunk_bytes = 1;
      Check(ReduceAll(tensors, other) == result, which + ": other bits in place, in small chunks");
      for (size_t k : {3, 6}) {
        std::vector<Tensors> alone(ranks);
        for (int rank = 0; rank < ranks; ++rank) {
          alone[rank].bytes = {tensors[rank].bytes[k]};
        }
        Check(ReduceAll(alone, options)[0] == result[k], which + ": other bits unfused");
      }
      const Maker same = [](int, size_t tensor, int64_t k) { return Random(5)(0, tensor, k); };
      const std::vector<Tensors> identical = MakeTensors(ranks, kSizes, type, same);
      Check(form.group_op == GroupOp::kSum || ReduceAll(identical, options) == identical[0].bytes,
            which + ": identical inputs changed");
    }
  }
}

// Tensors on the slices of many ranks, in groups of other sizes, of which some have to be walked on vectors
// on some ranks: whoever takes part in an exchange must be of one mind.
void CancellingPairsInLevels() {
#if defined(ADASUM_SIMULATED)
  const std::vector<int64_t> sizes = {5000, 60000, 64, 20000}; // a simulated device takes its time
#else
  const std::vector<int64_t> sizes = {5000, 300000, 64, 100000};
#endif
  for (ElementType type : {kFloat32, kFloat64}) {
    for (int digits : kDigits.size() > 2 ? std::vector<int>{2, 5, 9} : kDigits) {
      const double eps = std::pow(10.0, -digits);
      // Ranks 0, 1 and 2, 3 of a host cancel; so do, in every other tensor, the first and the second host.
      const Maker opposite = [eps](int rank, size_t tensor, int64_t k) {
        const int sign = (rank % 2 == 0 ? 1 : -1) * (tensor % 2 == 0 && rank / 4 % 2 == 1 ? -1 : 1);
        return sign * Random(21)(0, tensor, k) + eps * Random(22)(rank, tensor, k);
      };
      Options options = For(16, type);
      options.hosts = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
      options.radices = {4, 4};
      options.tree = BuildTree(options.hosts, GroupOp::kAdasum, 0);
      const std::vector<Tensors> tensors = MakeTensors(16, sizes, type, opposite);
      int64_t explicit_tensors = 0;
      const auto result = ReduceAll(tensors, options, &explicit_tensors);
      Check(digits < 5 || explicit_tensors > 0, "no node was formed explicitly");
      options.settings.replicate_bytes = int64_t{1} << 30;
      Check(ReduceAll(tensors, options) == result, "other bits when replicated");
      for (size_t k = 0; k < sizes.size(); ++k) {
        const double bound = 8 * kRounding[type] + 10 * std::ldexp(1.0, -52) / eps;
        const double error = RelativeError(Decode(result[k], type), Reference(tensors, k, options.tree));
        Check(error <= bound,
              "eps 1e-" + std::to_string(digits) + ": error " + Scientific(error / bound) + " of the bound");
      }
    }
  }
}

// start + AdaSum(input - start), in place and not, alone and with other ranks.
void ChangesOfWeights() {
  for (ElementType type : kTypes) {
    for (int ranks : {1, 2, 3, 8}) {
      Options options = For(ranks, type);
      const std::vector<Tensors> before = MakeTensors(
          1, kSizes, type, [](int, size_t tensor, int64_t k) { return Random(23)(0, tensor, k); });
      const std::vector<Tensors> after =
          MakeTensors(ranks, kSizes, type, [](int rank, size_t tensor, int64_t k) {
            return Random(23)(0, tensor, k) + Random(24, 0.01)(rank, tensor, k);
          });
      std::vector<Tensors> changes(ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        for (size_t k = 0; k < kSizes.size(); ++k) {
          std::vector<double> change = after[rank].values[k];
          for (size_t e = 0; e < change.size(); ++e) {
            change[e] -= before[0].values[k][e];
          }
          changes[rank].bytes.push_back(Encode(change, type));
        }
      }
      const auto reduced = ReduceAll(changes, options);
      std::vector<std::vector<char>> wanted;
      for (size_t k = 0; k < kSizes.size(); ++k) {
        std::vector<double> weights = Decode(reduced[k], type);
        for (size_t e = 0; e < weights.size(); ++e) {
          weights[e] += before[0].values[k][e];
        }
        wanted.push_back(Encode(weights, type));
      }
      options.starts = &before[0].bytes;
      for (bool in_place : {false, true}) {
        for (int64_t replicate_bytes : {0, 1 << 30}) {
          options.in_place = in_place;
          options.settings.replicate_bytes = replicate_bytes;
          Check(ReduceAll(after, options) == wanted,
                std::to_string(ranks) + " ranks, type " + std::to_string(type));
        }
      }
      if (ranks == 8) {
        options.hosts = {0, 0, 1, 1, 2, 2, 3, 3};
        options.radices = {2, 4};
        const auto in_levels = ReduceAll(after, options);
        options.settings.replicate_bytes = 0;
        Check(ReduceAll(after, options) == in_levels, "in levels: other bits when replicated");
        for (size_t k = 0; k < kSizes.size(); ++k) {
          Check(RelativeError(Decode(in_levels[k], type), Decode(wanted[k], type), 0.3) <=
                    4 * kRounding[type],
                "in levels, type " + std::to_string(type));
        }
      }
    }
  }
}

#if !defined(ADASUM_ON_DEVICE)
// What a rank sends to other hosts in two levels: 2 (n / L) (H - 1) / H.
void LevelsKeepBytesInsideTheHost() {
  const std::vector<Tensors> tensors = MakeTensors(4, {1 << 20}, kFloat32, Random(25));
  RunRanks(4, [&](ThreadTransport& transport) {
    const std::vector<GroupPlan> planned =
        PlanLevels({0, 0, 1, 1}, GroupOp::kAdasum, 0, transport.rank(), {2, 2});
    GroupTransport inside(transport, planned[0].group), between(transport, planned[1].group);
    std::vector<char> output = tensors[transport.rank()].bytes[0];
    Scratch scratch;
    Workers workers(2);
    Reduce({{output.data(), output.data(), 1 << 20}}, kFloat32,
           {{&inside, &planned[0].tree}, {&between, &planned[1].tree}}, 1.0, ReduceSettings(), Portable(),
           workers, scratch, [](Phase, int) {});
    const auto n = static_cast<double>(output.size());
    const int away = (transport.rank() + 2) % 4;
    Check(static_cast<double>(transport.sent_bytes(away)) <= 1.01 * n / 2,
          "more bytes than n/2 to another host");
    Check(static_cast<double>(transport.sent_bytes()) <= 1.01 * 1.5 * n, "more bytes than n + n/2");
  });
}

void PlansFollowHostsAndCosts() {
  auto radices = [](const std::vector<int>& hosts, int group_size, const std::vector<int>& wanted) {
    std::vector<int> sizes;
    for (const GroupPlan& level : PlanLevels(hosts, GroupOp::kAdasum, group_size, 0, wanted)) {
      sizes.push_back(static_cast<int>(level.group.size()));
    }
    return sizes;
  };
  auto hosts_of = [](int hosts, int ranks) {
    std::vector<int> all;
    for (int rank = 0; rank < hosts * ranks; ++rank) {
      all.push_back(rank / ranks);
    }
    return all;
  };
  using Sizes = std::vector<int>;
  Check(radices(hosts_of(1, 1), 0, {}) == Sizes{1}, "one rank is one level");
  Check(radices(hosts_of(1, 8), 0, {}) == Sizes{8}, "8 ranks of a host are one level");
  Check(radices(hosts_of(2, 2), 0, {}) == Sizes({2, 2}), "2 x 2");
  Check(radices(hosts_of(2, 8), 0, {}) == Sizes({8, 2}), "8 x 2");
  Check(radices(hosts_of(3, 2), 0, {}) == Sizes({2, 3}), "2 x 3");
  Check(radices({0, 0, 1}, 0, {}) == Sizes{3}, "uneven hosts are flat");
  Check(radices(hosts_of(2, 2), 0, {0}) == Sizes{4}, "flat where it is asked for");
  Check(radices(hosts_of(1, 16), 0, {}).size() > 1, "16 ranks of a host are split");
  Check(radices(hosts_of(512, 8), 0, {}).size() > 2, "512 hosts are split");
  for (const Sizes& wrong : {Sizes{3, 2}, Sizes{4, 4}, Sizes{16, 1}, Sizes{3, 3}}) {
    bool refused = false;
    try {
      radices(hosts_of(2, 8), 0, wrong);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    Check(refused, "levels that do not fit were not refused");
  }
  // Every rank is in exactly one group of each level, and any two ranks share at most one group.
  for (const std::vector<int>& hosts : {hosts_of(4, 8), std::vector<int>{0, 1, 2, 3, 3, 2, 1, 0}}) {
    const int ranks = static_cast<int>(hosts.size());
    std::map<std::pair<int, int>, int> shared;
    for (int rank = 0; rank < ranks; ++rank) {
      for (const GroupPlan& level : PlanLevels(hosts, GroupOp::kAdasum, 0, rank, {})) {
        Check(std::count(level.group.begin(), level.group.end(), rank) == 1,
              "a rank is not in its own group");
        for (int member : level.group) {
          shared[{rank, member}] += member == rank ? 0 : 1;
          Check(!level.on_one_host || hosts[member] == hosts[rank],
                "a group of a host has a rank of another");
        }
      }
    }
    for (const auto& [pair, groups] : shared) {
      Check(groups <= 1, "two ranks share two groups");
      Check(groups == shared[{pair.second, pair.first}], "groups differ between their members");
    }
  }
}

void WorkersDoEveryJobOnce() {
  for (int threads : {1, 2, 5}) {
    Workers workers(threads);
    for (int round = 0; round < 300; ++round) {
      const int jobs = round % 70;
      std::vector<std::atomic<int>> done(jobs);
      std::vector<std::atomic<int>> busy(threads);
      workers.Run(jobs, [&](int64_t job, int worker) {
        Check(busy[worker].fetch_add(1) == 0, "two jobs of one worker at once");
        done[job] += 1;
        busy[worker] -= 1;
      });
      for (const std::atomic<int>& count : done) {
        Check(count == 1, "a job was done " + std::to_string(count) + " times");
      }
    }
  }
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) // which need address space themselves
// In a child with room for a few more stacks.
bool FewerThreadsDoEveryJob() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t bytes = static_cast<rlim_t>(pages) * sysconf(_SC_PAGESIZE) + (64 << 20);
  const rlimit limit = {bytes, bytes};
  if (setrlimit(RLIMIT_AS, &limit) != 0) {
    return false;
  }
  constexpr int kWanted = 512, kJobs = 1000;
  Workers workers(kWanted);
  std::atomic<int> done{0};
  workers.Run(kJobs, [&](int64_t, int) { ++done; });
  return workers.threads() < kWanted && done == kJobs;
}

void WorkersDoWithFewerThreads() {
  const pid_t child = fork();
  if (child == 0) {
    bool good = false;
    try {
      good = FewerThreadsDoEveryJob();
    } catch (const std::exception&) { // says enough by its status
    }
    _exit(good ? 0 : 1);
  }
  int status = -1;
  Check(waitpid(child, &status, 0) == child, "waitpid");
  Check(status == 0, "the child ended with status " + std::to_string(status));
}
#endif

void SettingsNameTheirBounds() {
  const auto error_of = [](const char* name, const char* value) {
    setenv(name, value, 1);
    const Settings settings = Settings::FromEnvironment();
    unsetenv(name);
    return settings.error;
  };
  const auto wanted = [](const std::string& name, const std::string& bounds, const std::string& value) {
    return name + ": required an integer from " + bounds + ", got \"" + value +
           "\"; unset it or mend it on all ranks";
  };
  const char* threads = "ADASUM_HVD_NUM_THREADS";
  const char* chunk = "ADASUM_HVD_CHUNK_BYTES";
  const char* group = "ADASUM_HVD_GROUP_SIZE";
  Check(error_of(threads, "1024").empty(), "1024 threads are refused");
  Check(error_of(threads, "1025") == wanted(threads, "1 to 1024", "1025"), error_of(threads, "1025"));
  Check(error_of(threads, "0") == wanted(threads, "1 to 1024", "0"), error_of(threads, "0"));
  Check(error_of(chunk, "1073741825") == wanted(chunk, "1 to 2^30", "1073741825"), error_of(chunk, "2 GB"));
  Check(error_of(group, "-1") == wanted(group, "0 to 2^30", "-1"), error_of(group, "-1"));
}

void TwoBytesRoundOnce() {
  for (const Kernels* kernels : AllKernels()) {
    for (ElementType type : {kFloat16, kBfloat16}) {
      const uint16_t infinity = type == kFloat16 ? 0x7c00 : 0x7f80;
      const uint16_t smallest = type == kFloat16 ? 0 : 0x0080; // below it bfloat16 rounds twice
      for (int number = 0; number < 65536; ++number) {
        const uint16_t bits = static_cast<uint16_t>(number);
        double value;
        kernels->widen[type](&bits, 1, 1.0, &value);
        uint16_t back;
        kernels->narrow[type](&value, 1, 1.0, &back);
        if (std::isnan(value)) {
          double again;
          kernels->widen[type](&back, 1, 1.0, &again);
          Check(std::isnan(again), std::string(kernels->name) + ": NaN became a number");
          continue;
        }
        Check(back == bits, std::string(kernels->name) + ": an element does not survive");
        const int magnitude = bits & 0x7fff;
        if (magnitude >= smallest && magnitude + 1 < infinity) {
          // A hair above the midpoint to the next one rounds away from zero, at it to even, below it down.
          const uint16_t next_bits = static_cast<uint16_t>(bits + 1);
          double next;
          kernels->widen[type](&next_bits, 1, 1.0, &next);
          const double middle = (value + next) / 2;
          const double points[] = {std::nextafter(middle, next), middle, std::nextafter(middle, value)};
          const uint16_t wanted[] = {next_bits, number % 2 == 0 ? bits : next_bits, bits};
          for (int k = 0; k < 3; ++k) {
            kernels->narrow[type](&points[k], 1, 1.0, &back);
            Check(back == wanted[k], std::string(kernels->name) + ": rounded twice");
          }
        }
      }
    }
  }
}

void SlicesCoverEverythingOnce() {
  std::mt19937 generator(19);
  for (int round = 0; round < 300; ++round) {
    const int ranks = 1 + static_cast<int>(generator() % 15);
    std::vector<int64_t> sizes(generator() % 20);
    for (int64_t& size : sizes) {
      size = static_cast<int64_t>(generator() % (round % 3 == 0 ? 100 : 40000));
    }
    std::vector<int64_t> covered(sizes.size());
    for (const Slice& slice : Cut(Fused(sizes), ranks)) {
      int64_t offset = 0;
      for (const Run& run : slice.runs) {
        Check(run.offset == offset && run.first == covered[run.tensor] && run.count > 0, "gap or overlap");
        Check(run.first % kBlockElements == 0, "a border inside a block");
        Check(run.whole == (run.count == sizes[run.tensor]), "wrong `whole`");
        covered[run.tensor] += run.count;
        offset += run.count;
      }
      Check(offset == slice.elements, "wrong slice length");
    }
    Check(covered == sizes, "not everything is covered");
  }
}
#endif

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {
                      {"agrees with the float64 tree", AgreesWithTheFloat64Tree},
                      {"same bits in every form", SameBitsInEveryForm},
                      {"identical inputs come back bit for bit", IdenticalInputsComeBackBitForBit},
                      {"wide range in one float64 tensor", WideRangeInOneFloat64Tensor},
                      {"orthogonal inputs add up", OrthogonalInputsAddUp},
                      {"twice the other gives one and a half", TwiceTheOtherGivesOneAndAHalf},
                      {"zero is neutral", ZeroIsNeutral},
                      {"homogeneous and symmetric bit for bit", HomogeneousAndSymmetricBitForBit},
                      {"extreme magnitudes", ExtremeMagnitudes},
                      {"cancelling pairs", CancellingPairs},
                      {"groups and placements", GroupsAndPlacements},
                      {"scale and non-finite values", ScaleAndNonFinite},
                      {"levels walk the same tree", LevelsWalkTheSameTree},
                      {"cancelling pairs in levels", CancellingPairsInLevels},
                      {"changes of weights", ChangesOfWeights},
#if defined(ADASUM_ON_DEVICE)
                      {"nothing waits for the device", NothingWaitsForTheDevice},
#else
                      {"bytes and rounds", BytesAndRounds},
                      {"levels keep bytes inside the host", LevelsKeepBytesInsideTheHost},
                      {"plans follow hosts and costs", PlansFollowHostsAndCosts},
                      {"workers do every job once", WorkersDoEveryJobOnce},
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
                      {"workers do with fewer threads", WorkersDoWithFewerThreads},
#endif
                      {"settings name their bounds", SettingsNameTheirBounds},
                      {"two bytes round once", TwoBytesRoundOnce},
                      {"slices cover everything once", SlicesCoverEverythingOnce},
#endif
                  });
}
