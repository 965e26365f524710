// The arithmetic of a reduction on a CUDA device (gram.cu, solve.cu, combine.cu, small.cu): what kernels.h,
// gram.h and tree.h are on the host, and the same sums over the same blocks. Every function enqueues one
// kernel and returns.
//
// Nothing here depends on what the kernels find, so a whole reduction is enqueued without once waiting for
// the device: tensors with an ill-conditioned node are flagged there, and the kernels that walk their trees
// explicitly return at once for all others.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "kernels/kernels.h"
#include "reduce/gram.h"
#include "reduce/layout.h"
#include "reduce/tree.h"

namespace adasum_hvd {
namespace device {

// A stretch of one tensor; `own` and `result` are where its first element is.
struct Run {
  const void* own;
  void* result;
  int64_t offset;      // element of the slice: where the run starts in what is received
  int64_t count;       // elements
  int32_t first_block; // of the slice
  int32_t shared;      // row of the tensor's sums in `totals`; -1: the run is the whole tensor
  int32_t slot;        // of its sums in what this rank sends; -1: none

  ADASUM_HOST_DEVICE int blocks() const {
    return static_cast<int>((count + kBlockElements - 1) / kBlockElements);
  }
};

// Block `block` of stretch `run`: kBlockElements elements, or what is left of them.
struct BlockOf {
  int32_t run;
  int32_t block;
};

struct Blocks {
  const BlockOf* at;
  int count;
};

// A tree.h Tree. Node n has the members members[first_member[n]] up to members[first_member[n + 1] - 1];
// its vector is what `program` leaves on a stack between first_step[n] and first_step[n] + steps(n): step
// s >= 0 pushes leaf s, step s < 0 merges the two topmost by merge ~s.
struct TreeOf {
  int leaves;
  int merges;
  const double* leaf_weights;
  const Merge* merge;
  const int32_t* members;
  const int32_t* first_member;
  const int32_t* program;
  const int32_t* first_step;
};
constexpr int kMostStack = 24; // vectors on that stack: one more than the tiers of a tree of 2^23 ranks

constexpr int kStretch = 256; // block sums that a warp adds up

// A slice with all ranks' elements of it, and room for what is computed of it. Rows are `entries` long, of
// Gram matrices or of three sums per merge of a tier of the tree.
struct Slice {
  ElementType type;
  int rank;
  int size; // ranks
  const Run* runs;
  int run_count;
  Blocks blocks;
  Blocks stretches;            // kStretch blocks of a run each
  const void* const* received; // per rank: its elements of the slice, but for this rank's own
  TreeOf tree;
  bool nearest;               // neighbours first, all of them: what kernels are compiled for
  double* scales;             // per run: the power of two that float64 input is scaled by
  double* block_sums;         // row per block
  DoubleDouble* stretch_sums; // row per stretch
  int32_t* arrived;          // per run and entry: how many of its stretches, or blocks, are summed; 0 outside
  double* coefficients;      // per run and rank
  int32_t* walk_tree;        // per run: not 0 where the coefficients could not be had
  Sides* sides;              // per run and merge
  int64_t* explicit_tensors; // counts them, in host memory that the device sees
};

// The sums of the tensors that several ranks of a group hold parts of: row[k] of the totals becomes the sum
// (or the maximum) of the rows source[first_source[k]] to source[first_source[k + 1] - 1] of what was
// gathered, in this order, and is also written to next[next_slot[k]] where that is not negative.
struct Fold {
  int count;
  const int32_t* row;
  const int32_t* first_source;
  const int32_t* source;
  const int32_t* next_slot;
  const DoubleDouble* gathered;
  DoubleDouble* totals;
  DoubleDouble* next;
};

// Where the sums of a slice's tensors are, in rows.
struct Sums {
  DoubleDouble* runs;   // row per run
  DoubleDouble* sent;   // row per slot, of those that other ranks need
  DoubleDouble* totals; // row per shared tensor
  Fold fold;            // that is yet to be done, row k of it the k-th; count 0: none
};

// A tier's merges, and where its sums are.
struct Tier {
  int count;
  const int32_t* merges;
  Sums sums;
};

// Those above the first, of a tree of so few ranks that a kernel is compiled for them.
struct Tiers {
  static constexpr int kMost = 6;
  int count;
  Tier at[kMost];
};

enum class FoldBy { kAdd, kMaximum };

// Has the driver load all kernels: it would load each when it is first launched, which may wait for all that
// the device does. Throws where there is none for this device.
void LoadKernels();

void CopyBlocks(ElementType type, const Copy* copies, Blocks blocks, cudaStream_t stream);

// float64: block_sums[block] = the largest magnitude in it over all ranks; NaN counts as infinity.
void LargestOfBlocks(const Slice& slice, cudaStream_t stream);
// scales[run], from the largest magnitudes.
void SetScales(const Slice& slice, const Sums& largest, cudaStream_t stream);

// block_sums[block] = the packed Gram matrix of the block.
void GramOfBlocks(const Slice& slice, cudaStream_t stream);

// sums.runs[run] = the blocks' rows folded, and sums.sent[slot] too.
void FoldBlocks(const Slice& slice, const Sums& sums, int entries, FoldBy by, cudaStream_t stream);
void FoldShared(const Fold& fold, int entries, FoldBy by, cudaStream_t stream);

// The coefficients from the Gram matrices; or the flag, and the sides of the merges of leaves.
void Solve(const Slice& slice, const Sums& gram, cudaStream_t stream);

// Of runs that are walked explicitly: the sides of the merges of the tier `before`, from its sums (of none
// for the first that is walked); then for every merge of `tier` |left|^2, left.right and |right|^2, folded.
// Of other runs the sums are zeros.
void WalkTier(const Slice& slice, const Tier& before, const Tier& tier, cudaStream_t stream);

// result = scale * sum_i c_i x_i in float64, rounded once. `last` is the last tier that was walked.
void Combine(const Slice& slice, const Tier& last, double scale, cudaStream_t stream);

// All of it in one kernel, where every rank reduces everything by itself and no run is longer than
// `kMostSmall` elements: from block_sums to result.
constexpr int64_t kMostSmall = 4 * kBlockElements;
bool IsSmall(ElementType type, int ranks, int64_t longest_run);
void ReduceSmall(const Slice& slice, const Sums& gram, const Tiers& tiers, double scale, cudaStream_t stream);

} // namespace device
} // namespace adasum_hvd
