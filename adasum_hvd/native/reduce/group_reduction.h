// One level of a reduction, as one rank sees it: the ranks of a group hold different values of the same
// elements, and each of them reduces a slice of these.
//
// The next level works on what the slices became, with ranks of other groups. A tensor may then lie on the
// slices of many ranks, of this group and of all groups below; what is added up over them takes one small
// exchange in each of these groups.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "kernels/kernels.h"
#include "reduce/gram.h"
#include "reduce/layout.h"
#include "reduce/tree.h"
#include "reduce/workers.h"
#include "transport/transport.h"

namespace adasum_hvd {

// What every level of a reduction has in common.
struct Arithmetic {
  ElementType type;
  const Kernels& kernels;
  Workers& workers;
  size_t tensors; // how many
  int64_t bytes() const { return ElementBytes(type); }
};

class Level {
public:
  // `region` holds the elements that the group reduces, the same on all its ranks; with `replicate` every
  // rank reduces all of them. `below` is the level whose results this one reduces, or null. The result is
  // multiplied by `scale`.
  Level(const Arithmetic& arithmetic, Transport& transport, const Tree& tree, const Slice& region,
        bool replicate, Level* below, double scale);

  int rank() const { return rank_; }
  int size() const { return size_; }
  Transport& transport() { return transport_; }
  const Slice& slice(int rank) const { return shares_.slices[rank]; }
  int64_t start(int rank) const {
    return shares_.starts[rank];
  } // of a slice: its first element in the region
  const Slice& mine() const { return slice(rank_); }
  int64_t explicit_tensors() const { return static_cast<int64_t>(explicit_.size()); }

  // Where the elements of this rank's slice are: per run its own and the result (which may be the same
  // place); per rank what is received of the others.
  void Place(std::vector<const char*> own, std::vector<char*> result, std::vector<char*> received);

  // Adds to the Gram matrices: the first `received` elements of the slice have come from every rank.
  void GramUpTo(int64_t received);

  // float64 only, when all has been received and before GramUpTo. Collective.
  void FindScales();

  // Finds the coefficients of the tensors that are not on one slice alone; GramUpTo has seen everything.
  // Collective.
  void Solve();

  // Writes elements [begin, end) of this rank's slice of the result.
  void Combine(int64_t begin, int64_t end);

private:
  // The coefficients of the two sides of every merge of an explicitly walked tree.
  struct Sides {
    double left = 1;
    double right = 1;
  };
  using ExplicitTree = std::vector<Sides>;
  using Sums = std::vector<DoubleDouble>;
  using SumsByTensor = std::map<int, Sums>;
  enum class Fold { kAdd, kMaximum };

  // What a worker needs room for.
  struct Bench {
    std::vector<const void*> vectors; // per rank
    std::vector<double> c;            // per rank
    std::vector<double> nodes;        // per rank, one block of each

    double* node(int rank) { return nodes.data() + rank * kBlockElements; }
  };

  void PointAt(size_t run, int64_t position, Bench& bench) const;
  double* CoefficientsOf(size_t run) { return &coefficients_[run * size_]; }
  void FinishBlocks(const std::vector<Block>& blocks);
  void FinishRun(size_t run);
  void FoldOverGroup(SumsByTensor& sums, const std::set<int>* only, size_t entries, Fold fold);
  void FoldOverRanks(SumsByTensor& sums, const std::set<int>* only, size_t entries, Fold fold = Fold::kAdd);
  void SolveExplicitly(const std::set<int>& tensors, bool shared);
  void EvaluateNodes(const Block& block, size_t levels, double scale, const std::vector<double>& leaves,
                     const ExplicitTree& sides, Bench& bench) const;
  Sums LevelSums(size_t run, size_t level, const ExplicitTree& sides);
  void ReserveNodes();

  const Arithmetic& arithmetic_;
  Transport& transport_;
  const Tree& tree_;
  const int rank_;
  const int size_;
  const double scale_;
  Level* below_;
  const Shares shares_;
  std::vector<const char*> own_;      // per run
  std::vector<char*> result_;         // per run
  std::vector<char*> received_;       // per rank
  std::vector<double> coefficients_;  // per run and rank
  std::vector<double> tensor_scales_; // per tensor: the power of two that float64 input is scaled by
  const ExplicitTree plain_sum_;      // all coefficients 1
  std::map<int, ExplicitTree> explicit_;
  SumsByTensor partial_grams_;
  size_t gram_run_ = 0; // the run and the position in it up to which the Gram matrices are summed
  int64_t gram_position_ = 0;
  GramSum gram_;
  std::vector<double> block_sums_;
  std::vector<Bench> benches_; // per worker
};

} // namespace adasum_hvd
