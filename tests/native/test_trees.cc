// Trees of every form: groups, hosts and levels, and nodes of which the Gram matrix loses the norm. On
// devices as test_reduce.cc.
#include "reducing.h"

using namespace adasum_hvd;

namespace {

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
  const std::vector<std::pair<int, int>> expected = {{0, 2}, {5, 4}, {1, 3}, {6, 7}};
  for (size_t k = 0; k < expected.size(); ++k) {
    Check(tree.merges[k].left == expected[k].first && tree.merges[k].right == expected[k].second,
          "round-robin tree, merge " + std::to_string(k));
  }
}

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
#if defined(ADASUM_ON_DEVICE) // where there are no chunks, no threads and no shared memory
      Check(ReduceAll(tensors, other) == result, which + ": other bits in place");
#else
      other.threads = 3;
      other.settings.chunk_bytes = 1;
      Check(ReduceAll(tensors, other) == result, which + ": other bits in place, in small chunks");
      other.share = true;
      Check(ReduceAll(tensors, other) == result, which + ": other bits staged in shared memory");
      other.settings.window_bytes = 1;
      Check(ReduceAll(tensors, other) == result, which + ": other bits in windows of shared memory");
      other.shared_tensors = true;
      Check(ReduceAll(tensors, other) == result, which + ": other bits in shared memory");
#endif
      other.adjacent = true;
      Check(ReduceAll(tensors, other) == result, which + ": other bits in one piece of memory");
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

// b = -a + eps noise: the Gram matrix alone would lose the node a + b.
void CancellingPairs() {
#if defined(ADASUM_SIMULATED)
  const std::vector<int64_t> sizes = {5000, 30000, 64, 40000}; // a simulated device takes its time
#else
  const std::vector<int64_t> sizes = {5000, 30000, 64, 100000};
#endif
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

// Tensors on the slices of many ranks, in groups of other sizes, of which some have to be walked on vectors
// on some ranks: whoever takes part in an exchange must be of one mind.
void CancellingPairsInLevels() {
#if defined(ADASUM_SIMULATED)
  const std::vector<int64_t> sizes = {5000, 60000, 64, 20000};
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

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {
                      {"groups and placements", GroupsAndPlacements},
                      {"levels walk the same tree", LevelsWalkTheSameTree},
                      {"cancelling pairs", CancellingPairs},
                      {"cancelling pairs in levels", CancellingPairsInLevels},
                  });
}
