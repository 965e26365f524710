// Sums of tensors that lie on the slices of several ranks. In the levels above the first these are ranks of
// this level's group and of all groups below: what is added up over them takes one small exchange in each of
// these groups.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <vector>

#include "reduce/gram.h"
#include "reduce/placement.h"

namespace adasum_hvd {

using Sums = std::vector<DoubleDouble>;
using SumsByTensor = std::map<int, Sums>;

enum class FoldOp { kAdd, kMaximum };

class SumsOverRanks {
public:
  // Of a level; `below` is that of the level below, or null.
  SumsOverRanks(const PlacedLevel& level, const SumsOverRanks* below) : level_(level), below_(below) {}

  // Replaces `entries` sums of each tensor of which this rank holds a part by those of all ranks: folded in
  // rank order, so that every rank that needs a tensor's total gets it from the same bytes in the same order.
  // `only` restricts it to some tensors, null to none; the ranks agree on those that concern them, having
  // seen the same totals before. Collective.
  void Fold(SumsByTensor& sums, const std::set<int>* only, size_t entries, FoldOp op) const;

private:
  void FoldOverGroup(SumsByTensor& sums, const std::set<int>* only, size_t entries, FoldOp op) const;
  const std::vector<int>& PartsOf(int rank) const { return level_.shares.shared[rank]; }
  bool IsPassedOn(int tensor) const;

  const PlacedLevel& level_;
  const SumsOverRanks* below_;
};

} // namespace adasum_hvd
