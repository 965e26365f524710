#include "reduce/fold.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace adasum_hvd {
namespace {

bool Holds(const std::vector<int>& tensors, int one) {
  return std::find(tensors.begin(), tensors.end(), one) != tensors.end();
}

void FoldInto(Sums& total, const DoubleDouble* values, FoldOp op) {
  if (op == FoldOp::kAdd) {
    Add(values, total);
    return;
  }
  std::transform(total.begin(), total.end(), values, total.begin(),
                 [](const DoubleDouble& a, const DoubleDouble& b) { return a.high < b.high ? b : a; });
}

// A rank whose shard of a tensor is empty contributes zeros.
void FoldOverShards(const Shards& shards, SumsByTensor& sums, const std::set<int>* only, size_t entries,
                    FoldOp op) {
  std::vector<int> tensors;
  std::copy_if(shards.tensors.begin(), shards.tensors.end(), std::back_inserter(tensors),
               [only](int tensor) { return only == nullptr || only->count(tensor) != 0; });
  Sums mine;
  for (int tensor : tensors) {
    Sums& own = sums[tensor];
    own.resize(entries);
    mine.insert(mine.end(), own.begin(), own.end());
    own.assign(entries, DoubleDouble());
  }
  const Sums all = Gathered(*shards.transport, mine);
  const DoubleDouble* values = all.data();
  for (int rank = 0; rank < shards.transport->size(); ++rank) {
    for (int tensor : tensors) {
      FoldInto(sums[tensor], values, op);
      values += entries;
    }
  }
}

} // namespace

// From the group of this level, whose slices are adjacent, to the group of the first level.
void SumsOverRanks::Fold(SumsByTensor& sums, const std::set<int>* only, size_t entries, FoldOp op) const {
  for (const SumsOverRanks* level = this; level != nullptr; level = level->below_) {
    level->FoldOverGroup(sums, only, entries, op);
  }
  for (const Shards& shards : shards_) {
    FoldOverShards(shards, sums, only, entries, op);
  }
}

// Whether all ranks of the group need a tensor's total, also ranks without a part of it: in the level before
// they hold one, in adjacent slices, and send the total to the others there.
bool SumsOverRanks::IsPassedOn(int tensor) const {
  return below_ != nullptr && Holds(below_->PartsOf(below_->level_.rank()), tensor);
}

void SumsOverRanks::FoldOverGroup(SumsByTensor& sums, const std::set<int>* only, size_t entries,
                                  FoldOp op) const {
  const int size = level_.size(), mine = level_.rank();
  const auto needed = [&](int from, int by) { // of the parts of one rank
    std::vector<int> tensors;
    for (int tensor : PartsOf(from)) {
      if ((only == nullptr || only->count(tensor) != 0) &&
          (level_.shares.everywhere || Holds(PartsOf(by), tensor) || IsPassedOn(tensor))) {
        tensors.push_back(tensor);
      }
    }
    return tensors;
  };
  std::vector<Sums> out(size), in(size); // by rank
  std::vector<Message> messages(size);
  bool any = false;
  for (int rank = 0; rank < size; ++rank) {
    for (int tensor : needed(mine, rank)) {
      out[rank].insert(out[rank].end(), sums.at(tensor).begin(), sums.at(tensor).end());
    }
    if (rank == mine) {
      in[rank] = out[rank];
      continue;
    }
    in[rank].resize(needed(rank, mine).size() * entries);
    const auto bytes = [](const Sums& some) { return static_cast<int64_t>(some.size() * sizeof some[0]); };
    messages[rank] = {out[rank].data(), bytes(out[rank]), in[rank].data(), bytes(in[rank])};
    any = any || !out[rank].empty() || !in[rank].empty();
  }
  if (!any) {
    return;
  }
  try {
    level_.transport->Exchange(messages);
  } catch (...) { // not freed: MPI may still use them, until the process ends with the failed job
    static_cast<void>(new std::pair(std::move(out), std::move(in)));
    throw;
  }
  SumsByTensor totals;
  for (int rank = 0; rank < size; ++rank) {
    const DoubleDouble* values = in[rank].data();
    for (int tensor : needed(rank, mine)) {
      totals[tensor].resize(entries);
      FoldInto(totals[tensor], values, op);
      values += entries;
    }
  }
  for (auto& [tensor, total] : totals) {
    sums[tensor] = std::move(total);
  }
}

} // namespace adasum_hvd
