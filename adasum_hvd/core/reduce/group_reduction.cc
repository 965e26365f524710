#include "reduce/group_reduction.h"

#include <algorithm>

namespace adasum_hvd {
namespace {

constexpr ptrdiff_t kBlocksAtOnce = 256;
// Bytes of a tensor on all ranks, up to which the result is written while the inputs are still in the caches.
constexpr int64_t kCachedBytes = 1 << 20;
// More bytes than this on all ranks do not stay in the caches.
constexpr int64_t kPastCachesBytes = 8 << 20;

ptrdiff_t BlocksInCaches(const Arithmetic& arithmetic, int ranks) {
  const int64_t bytes = kBlockElements * arithmetic.bytes() * ranks;
  return std::max<int64_t>(kCachedBytes / bytes, 1) * arithmetic.workers.threads();
}

} // namespace

bool IsPastCaches(const Arithmetic& arithmetic, const PlacedLevel& level) {
  return level.mine().elements * arithmetic.bytes() * level.size() * level.size() > kPastCachesBytes;
}

GroupReduction::GroupReduction(const Arithmetic& arithmetic, const PlacedLevel& level,
                               const GroupReduction* below, bool last)
    : arithmetic_(arithmetic), level_(level), tree_(*level.tree), rank_(level.rank()), size_(level.size()),
      over_ranks_(level, below == nullptr ? nullptr : &below->over_ranks_, arithmetic.settings.shards),
      index_(below == nullptr ? 0 : below->index_ + 1), spreads_(level.shared && last),
      blocks_(Blocks(mine(), 0, mine().elements)),
      blocks_at_once_(level.shared ? BlocksInCaches(arithmetic, level.size()) : kBlocksAtOnce),
      written_(level.mine().runs.size()), tensor_scales_(arithmetic.tensors, 1.0),
      all_ones_(tree_.merges.size()), worker_scratch_(arithmetic.workers.threads()) {
  for (size_t run = 0; run < mine().runs.size(); ++run) { // the coefficients if AdaSum joins nothing
    coefficients_.insert(coefficients_.end(), tree_.leaf_weights.begin(), tree_.leaf_weights.end());
  }
  for (WorkerScratch& scratch : worker_scratch_) {
    scratch.vectors.resize(size_);
    scratch.coefficients.resize(size_);
    scratch.places.resize(size_);
    scratch.block.resize(spreads_ ? kBlockElements * arithmetic.bytes() : 0);
  }
}

int64_t GroupReduction::explicit_tensors() const {
  return std::count_if(mine().runs.begin(), mine().runs.end(), [this](const Run& run) {
    return walked_.count(run.tensor) != 0; // it also has tensors whose totals are only passed on
  });
}

// Points at the elements of all ranks, from `position` of a run.
void GroupReduction::PointAt(size_t run, int64_t position, WorkerScratch& scratch) const {
  if (level_.shared) {
    for (int rank = 0; rank < size_; ++rank) {
      scratch.vectors[rank] = level_.by_rank[run * size_ + rank] + position * arithmetic_.bytes();
    }
    return;
  }
  const int64_t offset = mine().runs[run].offset + position;
  for (int rank = 0; rank < size_; ++rank) {
    scratch.vectors[rank] = rank == rank_ ? level_.own[run] + position * arithmetic_.bytes()
                                          : level_.receive[rank] + offset * arithmetic_.bytes();
  }
}

// ---- the Gram matrices ----

bool GroupReduction::AddsOnly() const {
  return arithmetic_.settings.rule == nullptr &&
         std::none_of(tree_.merges.begin(), tree_.merges.end(),
                      [](const Merge& merge) { return merge.adasum; });
}

void GroupReduction::GramUpTo(int64_t received) {
  if (AddsOnly()) {
    return;
  }
  const auto late = std::find_if(blocks_.begin() + summed_, blocks_.end(), [&](const Block& block) {
    return mine().runs[block.run].offset + block.position + block.n > received;
  });
  const auto arrived = late - blocks_.begin();
  while (summed_ < arrived) {
    const auto begin = blocks_.begin() + summed_;
    summed_ = std::min(summed_ + blocks_at_once_, arrived);
    FinishBlocks({begin, blocks_.begin() + summed_});
  }
}

// Block sums are formed in any order, and added in the order of the blocks.
void GroupReduction::FinishBlocks(const std::vector<Block>& blocks) {
  const int64_t entries = GramSize(size_);
  block_sums_.resize(blocks.size() * entries);
  arithmetic_.workers.Run(blocks.size(), [&](int64_t job, int worker) {
    const Block& block = blocks[job];
    WorkerScratch& scratch = worker_scratch_[worker];
    PointAt(block.run, block.position, scratch);
    arithmetic_.kernels.gram[arithmetic_.type](scratch.vectors.data(), size_, block.n,
                                               tensor_scales_[mine().runs[block.run].tensor],
                                               &block_sums_[job * entries]);
  });
  for (size_t job = 0; job < blocks.size(); ++job) {
    const Block& block = blocks[job];
    if (block.position == 0) {
      gram_.assign(entries, DoubleDouble());
    }
    Add(&block_sums_[job * entries], gram_);
    if (block.position + block.n == mine().runs[block.run].count) {
      FinishRun(block.run);
    }
  }
  if (level_.shared) {
    WriteSolved(blocks);
  }
}

// Writes the whole tensors that these blocks complete, while they are in the caches.
void GroupReduction::WriteSolved(const std::vector<Block>& blocks) {
  std::vector<Block> solved;
  for (const Block& block : blocks) {
    const Run& run = mine().runs[block.run];
    if (IsSolvedAlone(run) && block.position + block.n == run.count) {
      const std::vector<Block> whole = Blocks(mine(), run.offset, run.offset + run.count);
      solved.insert(solved.end(), whole.begin(), whole.end());
      written_[block.run] = true;
    }
  }
  CombineBlocks(solved);
}

void GroupReduction::FinishRun(size_t run_index) {
  const Run& run = mine().runs[run_index];
  if (!IsSolvedAlone(run)) {
    partial_grams_[run.tensor] = gram_;
    return;
  }
  const std::vector<double> gram = Rounded(gram_);
  if (!SolveCoefficients(tree_, gram.data(), CoefficientsOf(run_index))) {
    WalkTrees({run.tensor}, /*on_several_ranks=*/false);
  }
  Observe(run_index, gram);
}

// Writes the observation of a solved tensor.
void GroupReduction::Observe(size_t run_index, const std::vector<double>& gram) const {
  const Observation* observation = arithmetic_.observation;
  const Run& run = mine().runs[run_index];
  double* row = observation == nullptr ? nullptr : observation->RowOf(index_, run);
  if (row == nullptr) {
    return;
  }
  const double scale = tensor_scales_[run.tensor];
  const auto walked = walked_.find(run.tensor);
  if (walked != walked_.end()) {
    observation->WriteWalked(index_, gram.data(), scale, walked->second.data(), row);
  } else {
    observation->Write(index_, gram.data(), scale, &coefficients_[run_index * size_], row);
  }
}

// The scales follow from the largest element over all ranks.
void GroupReduction::FindScales() {
  if (AddsOnly()) {
    return;
  }
  std::vector<double> of_blocks(blocks_.size()), of_runs(mine().runs.size());
  arithmetic_.workers.Run(blocks_.size(), [&](int64_t job, int worker) {
    WorkerScratch& scratch = worker_scratch_[worker];
    PointAt(blocks_[job].run, blocks_[job].position, scratch);
    for (const void* vector : scratch.vectors) {
      const double largest = arithmetic_.kernels.max_abs(static_cast<const double*>(vector), blocks_[job].n);
      of_blocks[job] = std::max(of_blocks[job], largest);
    }
  });
  for (size_t job = 0; job < blocks_.size(); ++job) {
    double& of_run = of_runs[blocks_[job].run];
    of_run = std::max(of_run, of_blocks[job]);
  }
  SumsByTensor partial;
  for (size_t index = 0; index < of_runs.size(); ++index) {
    const Run& run = mine().runs[index];
    if (IsSolvedAlone(run)) {
      tensor_scales_[run.tensor] = PowerOfTwoScale(of_runs[index]);
    } else {
      partial[run.tensor] = {DoubleDouble{of_runs[index], 0.0}};
    }
  }
  over_ranks_.Fold(partial, nullptr, 1, FoldOp::kMaximum);
  for (const auto& [tensor, largest] : partial) {
    tensor_scales_[tensor] = PowerOfTwoScale(largest[0].high);
  }
}

// ---- tensors that several ranks solve ----

void GroupReduction::Solve() {
  if (AddsOnly()) {
    return;
  }
  over_ranks_.Fold(partial_grams_, nullptr, GramSize(size_), FoldOp::kAdd);
  if (arithmetic_.settings.rule != nullptr) {
    ApplyRule();
  } else {
    FindCoefficients();
  }
  for (size_t run = 0; arithmetic_.observation != nullptr && run < mine().runs.size(); ++run) {
    if (!IsSolvedAlone(mine().runs[run])) {
      Observe(run, Rounded(partial_grams_.at(mine().runs[run].tensor)));
    }
  }
}

void GroupReduction::FindCoefficients() {
  std::set<int> ill_conditioned;
  std::map<int, std::vector<double>> solved;
  for (const auto& [tensor, gram] : partial_grams_) {
    std::vector<double>& coefficients = solved[tensor];
    coefficients.resize(size_);
    if (!SolveCoefficients(tree_, Rounded(gram).data(), coefficients.data())) {
      ill_conditioned.insert(tensor);
    }
  }
  for (size_t run = 0; run < mine().runs.size(); ++run) {
    if (const auto found = solved.find(mine().runs[run].tensor); found != solved.end()) {
      std::copy(found->second.begin(), found->second.end(), CoefficientsOf(run));
    }
  }
  if (!ill_conditioned.empty()) {
    WalkTrees(ill_conditioned, /*on_several_ranks=*/true);
  }
}

// Empty tensors have Gram matrices of zeros.
void GroupReduction::ApplyRule() {
  const int64_t entries = GramSize(size_);
  std::vector<double> grams(arithmetic_.tensors * entries), coefficients(arithmetic_.tensors * size_);
  for (const auto& [tensor, gram] : partial_grams_) {
    const std::vector<double> rounded = Rounded(gram);
    std::copy(rounded.begin(), rounded.end(), grams.begin() + tensor * entries);
  }
  const bool failed = !arithmetic_.settings.rule(grams.data(), coefficients.data());
  if (AnyRank(*level_.transport, failed)) {
    throw RuleFailed("AdaSum: expected coefficients of the rule on all ranks, but it failed on another one; "
                     "see its error");
  }
  for (size_t run = 0; run < mine().runs.size(); ++run) {
    const double* from = &coefficients[mine().runs[run].tensor * size_];
    std::copy(from, from + size_, CoefficientsOf(run));
  }
}

// ---- ill-conditioned tensors ----

// Walks the tree on vectors, one tier after the other. The vector of a node is never stored: each pass forms
// it again, block by block, from the inputs and the coefficients known so far. Tensors on several slices need
// one small exchange per tier. All ranks have the same Gram matrix, and so agree on that.
void GroupReduction::WalkTrees(const std::set<int>& tensors, bool on_several_ranks) {
  ReserveNodes();
  for (int tensor : tensors) {
    walked_[tensor].resize(tree_.merges.size());
  }
  for (size_t tier = 0; tier < tree_.tiers.size(); ++tier) {
    SumsByTensor sums;
    for (size_t run = 0; run < mine().runs.size(); ++run) {
      const int tensor = mine().runs[run].tensor;
      if (tensors.count(tensor) != 0) {
        sums[tensor] = TierSums(run, tier, walked_[tensor]);
      }
    }
    const std::vector<int>& merges = tree_.tiers[tier];
    if (on_several_ranks) {
      over_ranks_.Fold(sums, &tensors, 3 * merges.size(), FoldOp::kAdd);
    }
    for (const auto& [tensor, sum] : sums) {
      for (size_t k = 0; k < merges.size(); ++k) {
        if (tree_.merges[merges[k]].adasum) {
          const double dot = sum[3 * k + 1].Rounded();
          walked_[tensor][merges[k]] = {AdasumCoefficient(dot, sum[3 * k].Rounded()),
                                        AdasumCoefficient(dot, sum[3 * k + 2].Rounded())};
        }
      }
    }
  }
}

void GroupReduction::ReserveNodes() {
  for (WorkerScratch& scratch : worker_scratch_) {
    scratch.nodes.resize(size_ * kBlockElements);
  }
}

// Writes to scratch.node(i), where i is the smallest rank of a node, the node's vector after `tiers` tiers,
// times `scale`.
void GroupReduction::EvaluateNodes(const Block& block, size_t tiers, double scale,
                                   const std::vector<double>& leaves, const TreeSides& sides,
                                   WorkerScratch& scratch) const {
  PointAt(block.run, block.position, scratch);
  for (int rank = 0; rank < size_; ++rank) {
    arithmetic_.kernels.widen[arithmetic_.type](scratch.vectors[rank], block.n, scale * leaves[rank],
                                                scratch.node(rank));
  }
  for (size_t tier = 0; tier < tiers; ++tier) {
    for (int merge : tree_.tiers[tier]) {
      double* left = scratch.node(tree_.members[tree_.merges[merge].left].front());
      double* right = scratch.node(tree_.members[tree_.merges[merge].right].front());
      const void* both[] = {left, right};
      const double c[] = {sides[merge].left, sides[merge].right};
      arithmetic_.kernels.combine[kFloat64](both, c, 2, block.n, left);
    }
  }
}

// Returns |left|^2, left.right and |right|^2 of each merge of a tier, over one run.
Sums GroupReduction::TierSums(size_t run, size_t tier, const TreeSides& sides) {
  const std::vector<int>& merges = tree_.tiers[tier];
  const Run& whole = mine().runs[run];
  const std::vector<Block> blocks = Blocks(mine(), whole.offset, whole.offset + whole.count);
  std::vector<double> block_sums(blocks.size() * merges.size() * 3);
  arithmetic_.workers.Run(blocks.size(), [&](int64_t job, int worker) {
    WorkerScratch& scratch = worker_scratch_[worker];
    EvaluateNodes(blocks[job], tier, tensor_scales_[whole.tensor], tree_.leaf_weights, sides, scratch);
    for (size_t k = 0; k < merges.size(); ++k) {
      const Merge& merge = tree_.merges[merges[k]];
      const void* both[] = {scratch.node(tree_.members[merge.left].front()),
                            scratch.node(tree_.members[merge.right].front())};
      arithmetic_.kernels.gram[kFloat64](both, 2, blocks[job].n, 1.0,
                                         &block_sums[(job * merges.size() + k) * 3]);
    }
  });
  Sums sums(3 * merges.size());
  for (size_t job = 0; job < blocks.size(); ++job) {
    Add(&block_sums[job * sums.size()], sums);
  }
  return sums;
}

// ---- combine ----

void GroupReduction::Combine(int64_t begin, int64_t end) {
  std::vector<Block> blocks = Blocks(mine(), begin, end);
  blocks.erase(std::remove_if(blocks.begin(), blocks.end(),
                              [this](const Block& block) { return written_[block.run]; }),
               blocks.end());
  CombineBlocks(blocks);
}

void GroupReduction::CombineBlocks(const std::vector<Block>& blocks) {
  if (InTreeOrder(arithmetic_.type, size_) || !walked_.empty()) {
    ReserveNodes();
  }
  arithmetic_.workers.Run(blocks.size(), [&](int64_t job, int worker) {
    const Block& block = blocks[job];
    WorkerScratch& scratch = worker_scratch_[worker];
    if (spreads_) {
      CombineBlock(block, scratch.block.data(), scratch);
      SpreadBlock(block, scratch.block.data(), scratch);
    } else {
      CombineBlock(block, level_.out[block.run] + block.position * arithmetic_.bytes(), scratch);
    }
  });
}

void GroupReduction::CombineBlock(const Block& block, char* to, WorkerScratch& scratch) {
  const int tensor = mine().runs[block.run].tensor;
  const auto walked = walked_.find(tensor);
  if (walked != walked_.end()) {
    EvaluateNodes(block, tree_.tiers.size(), tensor_scales_[tensor], tree_.leaf_weights, walked->second,
                  scratch);
    arithmetic_.kernels.narrow[arithmetic_.type](scratch.node(0), block.n,
                                                 level_.scale / tensor_scales_[tensor], to);
    return;
  }
  std::transform(CoefficientsOf(block.run), CoefficientsOf(block.run) + size_, scratch.coefficients.begin(),
                 [this](double coefficient) { return coefficient * level_.scale; });
  if (InTreeOrder(arithmetic_.type, size_)) {
    EvaluateNodes(block, tree_.tiers.size(), 1.0, scratch.coefficients, all_ones_, scratch);
    arithmetic_.kernels.narrow[arithmetic_.type](scratch.node(0), block.n, 1.0, to);
  } else {
    PointAt(block.run, block.position, scratch);
    arithmetic_.kernels.combine[arithmetic_.type](scratch.vectors.data(), scratch.coefficients.data(), size_,
                                                  block.n, to);
  }
}

// ---- allgather in shared memory ----

void GroupReduction::Spread() {
  arithmetic_.workers.Run(blocks_.size(), [&](int64_t job, int worker) {
    const Block& block = blocks_[job];
    SpreadBlock(block, level_.out[block.run] + block.position * arithmetic_.bytes(), worker_scratch_[worker]);
  });
}

void GroupReduction::SpreadBlock(const Block& block, const char* from, WorkerScratch& scratch) const {
  const int64_t offset = block.position * arithmetic_.bytes();
  int places = 0;
  for (int rank = 0; rank < size_; ++rank) {
    char* to = level_.by_rank[block.run * size_ + rank] + offset;
    if (to != from) {
      scratch.places[places++] = to;
    }
  }
  arithmetic_.kernels.spread(from, block.n * arithmetic_.bytes(), scratch.places.data(), places,
                             IsPastCaches(arithmetic_, level_));
}

} // namespace adasum_hvd
