// What a simulation could hide, or a first run on a device find: the order in which memory goes, grids and
// positions beyond 16 and 31 bits, plans that outlive what they were made for, and what is enqueued.
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "reducing.h"

using namespace adasum_hvd;

namespace {

template <class T>
const T* Put(std::deque<OnDevice>& memory, const std::vector<T>& values, cudaStream_t stream) {
  std::vector<char> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return reinterpret_cast<const T*>(memory.emplace_back(bytes, stream).get());
}

template <class T> std::vector<T> Take(const OnDevice& memory) {
  const std::vector<char> bytes = memory.Read();
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

cudaStream_t Stream() {
  static const cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    CheckCuda(cudaStreamCreate(&made), "create a stream");
    return made;
  }();
  return stream;
}

// One run of a slice with all ranks' elements of it, of which the table of blocks names some.
struct OneRun {
  OneRun(const std::vector<std::vector<float>>& vectors, int64_t position)
      : size(static_cast<int>(vectors.size())), n(static_cast<int64_t>(vectors[0].size())) {
    std::vector<const void*> received;
    for (const std::vector<float>& vector : vectors) {
      received.push_back(Put(memory, vector, Stream()) - position);
    }
    result = &memory.emplace_back(std::vector<char>(n * sizeof(float)), Stream());
    float* out = reinterpret_cast<float*>(result->get()) - position;
    const std::vector<device::Run> runs = {{received[0], out, 0, position + n, 0, -1, -1}};
    const auto first = static_cast<int32_t>(position / kBlockElements);
    std::vector<device::BlockOf> blocks;
    for (int32_t block = first; block < runs[0].blocks(); ++block) {
      blocks.push_back({0, block});
    }
    slice.type = kFloat32;
    slice.size = size;
    slice.runs = Put(memory, runs, Stream());
    slice.run_count = 1;
    slice.blocks = {Put(memory, blocks, Stream()), static_cast<int>(blocks.size())};
    slice.received = Put(memory, received, Stream());
    sums = &memory.emplace_back(std::vector<char>(blocks.size() * GramSize(size) * sizeof(double)), Stream());
    slice.block_sums = reinterpret_cast<double*>(sums->get());
    slice.walk_tree = const_cast<int32_t*>(Put(memory, std::vector<int32_t>{0}, Stream()));
    slice.coefficients = const_cast<double*>(Put(memory, std::vector<double>(size, 0.5), Stream()));
  }

  std::deque<OnDevice> memory;
  int size;
  int64_t n;
  device::Slice slice = {};
  OnDevice* result;
  OnDevice* sums;
};

std::vector<std::vector<float>> SmallIntegers(int ranks, int64_t n) { // whose sums are exact
  std::vector<std::vector<float>> vectors(ranks, std::vector<float>(n));
  for (int rank = 0; rank < ranks; ++rank) {
    for (int64_t k = 0; k < n; ++k) {
      vectors[rank][k] = static_cast<float>((31 * rank + 7 * k) % 61 - 30);
    }
  }
  return vectors;
}

// cudaFree does not wait where memory is of a pool.
void MemoryGoesInTheOrderOfItsStream() {
  OnDevice copy(std::vector<char>(1000), Stream());
  Gate gate;
  gate.Close(Stream());
  {
    DeviceBuffer buffer;
    char* first = buffer.Reserve(1000, Stream());
    CheckCuda(cudaMemsetAsync(first, 7, 1000, Stream()), "set");
    CheckCuda(cudaMemcpyAsync(copy.get(), first, 1000, cudaMemcpyDeviceToDevice, Stream()), "copy");
    CheckCuda(cudaMemsetAsync(buffer.Reserve(5000, Stream()), 8, 5000, Stream()), "set");
  }
  Check(gate.Open(), "the host waited for the device");
  Check(copy.Read() == std::vector<char>(1000, 7), "memory went while it was used");
}

#if defined(ADASUM_SIMULATED)
void DevicesWithoutMemoryPools() {
  SimulatedMemoryPools(false);
  {
    DeviceBuffer buffer;
    for (int64_t bytes : {1000, 5000}) {
      CheckCuda(cudaMemsetAsync(buffer.Reserve(bytes, Stream()), 7, bytes, Stream()), "set");
    }
  }
  CheckCuda(cudaStreamSynchronize(Stream()), "wait");
  SimulatedMemoryPools(true);
}
#endif

// Tiles are numbered along the first dimension of the grid, the only one that 1,445 ranks do not exceed.
void TilesOfManyRanks() {
  const int ranks = 70;
  const std::vector<std::vector<float>> vectors = SmallIntegers(ranks, 3);
  const OneRun one(vectors, 0);
  device::GramOfBlocks(one.slice, Stream());
  const std::vector<double> gram = Take<double>(*one.sums);
  for (int i = 0; i < ranks; ++i) {
    for (int j = i; j < ranks; ++j) {
      double expected = 0;
      for (size_t k = 0; k < vectors[i].size(); ++k) {
        expected += double{vectors[i][k]} * vectors[j][k];
      }
      Check(gram[GramIndex(ranks, i, j)] == expected, "pair " + std::to_string(i) + ", " + std::to_string(j));
    }
  }
}

// A run of 2^32 elements of which the first 2^32 are nowhere: the table of blocks leaves them out.
void PositionsBeyond31Bits() {
  for (int ranks : {3, 10}) {
    const std::vector<std::vector<float>> vectors = SmallIntegers(ranks, kBlockElements + 77);
    const OneRun here(vectors, 0), there(vectors, int64_t{1} << 32);
    for (const OneRun* one : {&here, &there}) {
      device::GramOfBlocks(one->slice, Stream());
      device::Combine(one->slice, {}, 2.0, Stream());
    }
    Check(Take<double>(*here.sums) == Take<double>(*there.sums), "other sums");
    Check(Take<float>(*here.result) == Take<float>(*there.result), "another result");
    Check(Take<float>(*here.result)[5] != 0, "no result");
  }
}

// More block sums than a warp folds, by several ranks or by each.
void LongTensorsAreFoldedInStretches() {
  const std::vector<int64_t> sizes = {2 * device::kStretch * kBlockElements + 5, 300};
  const std::vector<Tensors> tensors = MakeTensors(2, sizes, kBfloat16, Random(31));
  Options options = For(2, kBfloat16);
  const auto sliced = ReduceAll(tensors, options);
  options.settings.replicate_bytes = int64_t{1} << 30;
  Check(ReduceAll(tensors, options) == sliced, "other bits when every rank folds all stretches");
  for (size_t k = 0; k < sizes.size(); ++k) {
    Check(RelativeError(Decode(sliced[k], kBfloat16), Reference(tensors, k, options.tree)) <=
              kRounding[kBfloat16],
          "tensor " + std::to_string(k));
  }
}

// Kernels are compiled for trees of neighbours; other trees are interpreted, with the same bits.
void TreesAreCompiledAsTheyAreInterpreted() {
  for (int ranks : {4, 5, 6, 7, 8}) {
    const Maker same = [](int, size_t tensor, int64_t k) { return Random(5)(0, tensor, k); };
    const std::vector<Tensors> tensors = MakeTensors(ranks, kSizes, kFloat64, same);
    Check(ReduceAll(tensors, For(ranks, kFloat64)) == tensors[0].bytes, std::to_string(ranks) + " ranks");
    Options uneven = For(ranks, kFloat64); // ((0, 2, ...), (1, 3, ...)): no kernel's order
    for (int rank = 0; rank < ranks; ++rank) {
      uneven.hosts[rank] = rank % 2;
    }
    uneven.tree = BuildTree(uneven.hosts, GroupOp::kAdasum, 0);
    Check(ReduceAll(tensors, uneven) == tensors[0].bytes, std::to_string(ranks) + " ranks on two hosts");
  }
}

// The trees of small tensors that every rank reduces as a whole, with the bits of sliced ones.
void SmallTensorsAreWalkedOnEveryRank() {
  for (ElementType type : {kFloat32, kFloat16}) {
    for (int ranks : {3, 4, 6, 8}) {
      const Maker opposite = [](int rank, size_t tensor, int64_t k) {
        return (rank % 2 == 0 ? 1 : -1) * Random(35)(rank / 2, tensor, k) +
               (tensor == 1 ? 0 : 1e-3 * Random(36)(rank, tensor, k));
      };
      const std::vector<Tensors> tensors = MakeTensors(ranks, {9000, 64, 0, 5000}, type, opposite);
      Options options = For(ranks, type);
      const auto sliced = ReduceAll(tensors, options);
      options.settings.replicate_bytes = int64_t{1} << 30;
      int64_t explicit_tensors = 0;
      Check(ReduceAll(tensors, options, &explicit_tensors) == sliced, std::to_string(ranks) + " ranks");
      Check(explicit_tensors > 0, "no tree was walked");
    }
  }
}

// Tensors of one rank on the device, and reductions of them.
struct Job {
  Job(int ranks, const std::vector<int64_t>& sizes, int seed)
      : options(For(ranks, kFloat32)), tensors(MakeTensors(ranks, sizes, kFloat32, Random(seed))),
        places(RanksOnDevice(ranks, 16 * TotalBytes(tensors))), memory(ranks), views(ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (const std::vector<char>& bytes : tensors[rank].bytes) {
        const char* in = memory[rank].emplace_back(bytes, places[rank]->stream).get();
        char* out = memory[rank].emplace_back(bytes, places[rank]->stream).get();
        views[rank].push_back({in, out, static_cast<int64_t>(bytes.size() / sizeof(float))});
      }
    }
  }

  void Enqueue() { // on all ranks
    InThreads(static_cast<int>(places.size()), [&](int rank) {
      CheckCuda(cudaSetDevice(DeviceOf(rank)), "choose a device");
      RankOnDevice& place = *places[rank];
      ReduceOnDevice(views[rank], kFloat32, {{place.transport.get(), &options.tree}}, options.scale,
                     options.settings, place.scratch, place.stream, [](Phase, int) {});
    });
  }

  // Returns what the last rank has.
  Bytes Reduce() {
    Enqueue();
    for (const auto& place : places) {
      CheckCuda(cudaStreamSynchronize(place->stream), "reduce");
    }
    Bytes results;
    for (size_t k = 1; k < memory.back().size(); k += 2) {
      results.push_back(memory.back()[k].Read());
    }
    return results;
  }

  Options options;
  std::vector<Tensors> tensors;
  std::vector<std::unique_ptr<RankOnDevice>>& places;
  std::vector<std::deque<OnDevice>> memory;
  std::vector<std::vector<TensorView>> views;
};

// The driver loads a kernel when it is first launched, and may wait for the device then: kernels that no
// reduction has needed before are launched while the streams are held.
void KernelsAreLoadedAtTheFirstReduction() {
  Job(2, {300}, 37).Reduce();
  Job job(7, {300, 20000}, 38);
  Gate gate;
  for (const auto& place : job.places) {
    gate.Close(place->stream);
  }
  job.Enqueue();
  Check(gate.Open(), "the host waited for the device");
  Check(job.Reduce() == ReduceAll(job.tensors, job.options), "other bits");
}

// The same tensors again, at other addresses, with other factors, after scratch memory has grown, and after
// so many others that the plan was given up.
void PlansFitWhatIsReduced() {
  Job job(3, {5000, 7, 30000}, 32), elsewhere(3, {5000, 7, 30000}, 32);
  const Bytes expected = ReduceAll(job.tensors, job.options);
  Check(job.Reduce() == expected && job.Reduce() == expected, "a second time");
  Check(elsewhere.Reduce() == expected && job.Reduce() == expected, "elsewhere");
  job.options.scale = elsewhere.options.scale = 0.25;
  const Bytes scaled = job.Reduce();
  Check(scaled != expected && elsewhere.Reduce() == scaled, "another factor");
  job.options.scale = 1.0;
  Job large(3, {700000}, 33);
  large.Reduce();
  Check(job.Reduce() == expected, "after a larger one");
  for (int others = 0; others < 70; ++others) {
    elsewhere.options.scale = 1.0 + others;
    elsewhere.Reduce();
  }
  Check(job.Reduce() == expected, "after many others");
}

#if defined(ADASUM_SIMULATED)
// docs/devices.md says how much: here it is counted.
void WhatIsEnqueued() {
  struct {
    int ranks;
    int64_t elements;
    int64_t replicate_bytes, kernels, groups;
  } const rows[] = {
      {2, 40000, 0, 4, 3},     // Gram, fold, solve, combine; slices, sums, results
      {8, 40000, 0, 6, 5},     // and two tiers, which no one walks
      {8, 100, 1 << 20, 6, 1}, // replicated: the same behind the only exchange
  };
  for (const auto& row : rows) {
    Job job(row.ranks, {row.elements}, 34);
    job.options.settings.replicate_bytes = row.replicate_bytes;
    job.Reduce();
    const SimulatedCounts before = SimulatedEnqueued();
    job.Reduce();
    const SimulatedCounts after = SimulatedEnqueued();
    const std::string which = std::to_string(row.ranks) + " ranks: ";
    Check(after.uploads == before.uploads, which + "something was uploaded");
    Check(after.kernels - before.kernels == row.kernels * row.ranks,
          which + std::to_string(after.kernels - before.kernels) + " kernels");
    Check(!OverNccl() || after.groups - before.groups == row.groups * row.ranks,
          which + std::to_string(after.groups - before.groups) + " groups");
  }
}
#endif

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {
                      {"kernels are loaded at the first reduction", KernelsAreLoadedAtTheFirstReduction},
                      {"memory goes in the order of its stream", MemoryGoesInTheOrderOfItsStream},
#if defined(ADASUM_SIMULATED)
                      {"devices without memory pools", DevicesWithoutMemoryPools},
                      {"what is enqueued", WhatIsEnqueued},
#endif
                      {"tiles of many ranks", TilesOfManyRanks},
                      {"positions beyond 31 bits", PositionsBeyond31Bits},
                      {"long tensors are folded in stretches", LongTensorsAreFoldedInStretches},
                      {"trees are compiled as they are interpreted", TreesAreCompiledAsTheyAreInterpreted},
                      {"small tensors are walked on every rank", SmallTensorsAreWalkedOnEveryRank},
                      {"plans fit what is reduced", PlansFitWhatIsReduced},
                  });
}
