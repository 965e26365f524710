// One level of a reduction on one rank. The ranks of the level's group hold different values of the same
// elements, its region; each rank reduces one slice of the region, in this order:
//
//   1. GramUpTo, as elements arrive: the Gram matrix of every run of the slice, block by block. A tensor that
//      lies whole in the slice is solved as soon as its sums are complete;
//   2. Solve: the sums of tensors that lie on several slices are exchanged, and these tensors are solved;
//   3. Combine: the slice of the result, in any parts.
//
// The next level's region is this rank's slice; its group has ranks of other groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "host/transport.h"
#include "kernels/kernels.h"
#include "reduce/fold.h"
#include "reduce/gram.h"
#include "reduce/observation.h"
#include "reduce/placement.h"
#include "reduce/tree.h"
#include "reduce/workers.h"

namespace adasum_hvd {

// Common to all levels of a reduction.
struct Arithmetic {
  ElementType type;
  const ReduceSettings& settings;
  const Kernels& kernels;
  Workers& workers;
  size_t tensors;                 // how many
  const Observation* observation; // or null: no tensor is observed
  int64_t bytes() const { return ElementBytes(type); }
};

// Whether a group that shares memory reduces more than fits the caches, so that elements that one rank writes
// have left the cache before another reads them.
bool IsPastCaches(const Arithmetic& arithmetic, const PlacedLevel& level);

class GroupReduction {
public:
  // `below` is the level whose results this one reduces, or null for the first.
  GroupReduction(const Arithmetic& arithmetic, const PlacedLevel& level, const GroupReduction* below,
                 bool last);

  int64_t explicit_tensors() const; // of this rank's slice

  // Adds to the Gram matrices. The first `received` elements of the slice have arrived from every rank.
  void GramUpTo(int64_t received);

  // float64 only: after all elements have arrived, and before GramUpTo. Collective.
  void FindScales();

  // After GramUpTo for all elements: finds the coefficients of tensors on several slices. Collective.
  void Solve();

  // Writes elements [begin, end) of this rank's slice of the result; in the last level of ranks that share
  // memory, to the memory of all, except for whole tensors, which are already written.
  void Combine(int64_t begin, int64_t end);

  // Copies this rank's slice of the result to the memory of the others of a group that shares memory.
  void Spread();

private:
  using TreeSides = std::vector<Sides>; // by merge

  // Memory of one thread.
  struct WorkerScratch {
    std::vector<const void*> vectors; // per rank
    std::vector<double> coefficients; // per rank
    std::vector<double> nodes;        // per rank, kBlockElements of each; empty until a tree is walked
    std::vector<char> block;          // of the result, before it is copied to several ranks
    std::vector<void*> places;        // per rank, the target of the copy

    double* node(int rank) { return nodes.data() + rank * kBlockElements; }
  };

  void PointAt(size_t run, int64_t position, WorkerScratch& scratch) const;
  double* CoefficientsOf(size_t run) { return &coefficients_[run * size_]; }
  void FinishBlocks(const std::vector<Block>& blocks);
  void FinishRun(size_t run);
  bool IsSolvedAlone(const Run& run) const { return run.whole && !arithmetic_.settings.knows_all_grams(); }
  bool AddsOnly() const; // AdaSum joins nothing in this level
  void FindCoefficients();
  void ApplyRule();
  void Observe(size_t run, const std::vector<double>& gram) const;
  void WriteSolved(const std::vector<Block>& blocks);
  void CombineBlocks(const std::vector<Block>& blocks);
  void CombineBlock(const Block& block, char* to, WorkerScratch& scratch);
  void SpreadBlock(const Block& block, const char* from, WorkerScratch& scratch) const;
  void WalkTrees(const std::set<int>& tensors, bool on_several_ranks);
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
  const bool spreads_;                // the result is written directly to all ranks of the group
  const std::vector<Block> blocks_;   // of this rank's slice
  const ptrdiff_t blocks_at_once_;    // whose sums are kept before they are added
  ptrdiff_t summed_ = 0;              // blocks whose Gram matrices are added
  std::vector<double> coefficients_;  // per run and rank
  std::vector<bool> written_;         // per run: whether its result is already written
  std::vector<double> tensor_scales_; // per tensor: the power of two that float64 input is scaled by
  const TreeSides all_ones_;          // all coefficients 1
  std::map<int, TreeSides> walked_;   // by ill-conditioned tensor
  SumsByTensor partial_grams_;        // of runs that are parts of tensors
  Sums gram_;                         // of the current run
  std::vector<double> block_sums_;
  std::vector<WorkerScratch> worker_scratch_; // per worker
};

} // namespace adasum_hvd
