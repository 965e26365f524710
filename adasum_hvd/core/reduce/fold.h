// Sums of tensors that lie on the slices of several ranks. In a level after the first these are ranks of the
// level's group and of all groups of the levels before; each of these groups needs one small exchange.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <vector>

#include "reduce/gram.h"
#include "reduce/placement.h"

namespace adasum_hvd {

using SumsByTensor = std::map<int, Sums>;

enum class FoldOp { kAdd, kMaximum };

class SumsOverRanks {
public:
  // `below` is the object of the level before, or null.
  SumsOverRanks(const PlacedLevel& level, const SumsOverRanks* below, const std::vector<Shards>& shards)
      : level_(level), below_(below), shards_(shards) {}

  // Replaces the `entries` sums of each tensor of which this rank holds a part by the total over all ranks,
  // and over the ranks of other shards. Totals are folded in rank order, so that all ranks compute a total
  // from the same bytes in the same order.
  // `only` restricts this to some tensors, on which the ranks agree; null: all tensors. Collective.
  void Fold(SumsByTensor& sums, const std::set<int>* only, size_t entries, FoldOp op) const;

private:
  void FoldOverGroup(SumsByTensor& sums, const std::set<int>* only, size_t entries, FoldOp op) const;
  const std::vector<int>& PartsOf(int rank) const { return level_.shares.parts[rank]; }
  bool IsPassedOn(int tensor) const;

  const PlacedLevel& level_;
  const SumsOverRanks* below_;
  const std::vector<Shards>& shards_;
};

} // namespace adasum_hvd
