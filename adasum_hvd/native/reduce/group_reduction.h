// One level of a reduction, as one rank sees it. The ranks of its group hold different values of the same
// elements, its region; each rank reduces one slice of the region, in this order:
//
//   1. GramUpTo, as elements arrive: the Gram matrix of every run of the slice, block by block. A tensor that
//      lies whole in the slice is solved as soon as it is complete;
//   2. Solve: the sums of the tensors that lie on several slices are exchanged, and these solved;
//   3. Combine: the slice of the result, any part of it as often as it is wanted.
//
// The next level's region is this rank's slice, and its group are ranks of other groups.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "kernels/kernels.h"
#include "reduce/fold.h"
#include "reduce/gram.h"
#include "reduce/observation.h"
#include "reduce/placement.h"
#include "reduce/tree.h"
#include "reduce/workers.h"
#include "transport/transport.h"

namespace adasum_hvd {

// What all levels of a reduction have in common.
struct Arithmetic {
  ElementType type;
  const Kernels& kernels;
  Workers& workers;
  size_t tensors;                 // how many
  const Observation* observation; // or null: nobody watches
  int64_t bytes() const { return ElementBytes(type); }
};

// Whether what the ranks of a group that shares memory reduce is too much for the caches, so that what one
// writes there is gone before another reads it.
bool IsPastCaches(const Arithmetic& arithmetic, const PlacedLevel& level);

class GroupReduction {
public:
  // `below` is the level whose results this one reduces, or null.
  GroupReduction(const Arithmetic& arithmetic, const PlacedLevel& level, const GroupReduction* below,
                 bool last);

  int64_t explicit_tensors() const { return static_cast<int64_t>(walked_.size()); }

  // Adds to the Gram matrices: the first `received` elements of the slice have come from every rank.
  void GramUpTo(int64_t received);

  // float64 only, when all has been received and before GramUpTo. Collective.
  void FindScales();

  // Finds the coefficients of the tensors that are not on one slice alone; GramUpTo has seen everything.
  // Collective.
  void Solve();

  // Writes elements [begin, end) of this rank's slice of the result. Where the ranks share memory and this is
  // the last level, to all of them; whole tensors that were solved have been written then.
  void Combine(int64_t begin, int64_t end);

  // Copies this rank's slice of the result to where the others of a group that shares memory have it.
  void Spread();

private:
  using TreeSides = std::vector<Sides>; // by merge

  // What a thread needs room for.
  struct WorkerScratch {
    std::vector<const void*> vectors; // per rank
    std::vector<double> coefficients; // per rank
    std::vector<double> nodes;        // per rank, kBlockElements of each; empty until a tree is walked
    std::vector<char> block;          // of the result, on its way to several ranks
    std::vector<void*> places;        // per rank, where it goes

    double* node(int rank) { return nodes.data() + rank * kBlockElements; }
  };

  void PointAt(size_t run, int64_t position, WorkerScratch& scratch) const;
  double* CoefficientsOf(size_t run) { return &coefficients_[run * size_]; }
  void FinishBlocks(const std::vector<Block>& blocks);
  void FinishRun(size_t run);
  void Observe(size_t run, const std::vector<double>& gram) const;
  void WriteSolved(const std::vector<Block>& blocks);
  void CombineBlocks(const std::vector<Block>& blocks);
  void CombineBlock(const Block& block, char* to, WorkerScratch& scratch);
  void SpreadBlock(const Block& block, const char* from, WorkerScratch& scratch) const;
  void WalkTrees(const std::set<int>& tensors, bool shared);
  void EvaluateNodes(const Block& block, size_t tiers, double scale, const std::vector<double>& leaves,
                     const TreeSides& sides, WorkerScratch& scratch) const;
  Sums TierSums(size_t run, size_t tier, const TreeSides& sides);
  void ReserveNodes();

  const Slice& mine() const { return level_.mine(); }

  const Arithmetic& arithmetic_;
  const PlacedLevel& level_;
  const Tree& tree_;
  const int rank_;
  const int size_;
  const SumsOverRanks over_ranks_;
  const size_t index_;                // of the level
  const bool spreads_;                // the result goes straight to all ranks of the group
  const size_t blocks_at_once_;       // whose sums are kept until they are added
  std::vector<double> coefficients_;  // per run and rank
  std::vector<bool> written_;         // per run: its result, before the others'
  std::vector<double> tensor_scales_; // per tensor: the power of two that float64 input is scaled by
  const TreeSides all_ones_;          // all coefficients 1
  std::map<int, TreeSides> walked_;   // by ill-conditioned tensor
  SumsByTensor partial_grams_;        // of runs that are parts of tensors
  size_t gram_run_ = 0; // the run and the position in it up to which the Gram matrices are summed
  int64_t gram_position_ = 0;
  GramSum gram_;
  std::vector<double> block_sums_;
  std::vector<WorkerScratch> worker_scratch_; // per worker
};

} // namespace adasum_hvd
