// The arithmetic of a reduction on a CUDA device (gram.cu, solve.cu, combine.cu), with the same sums over the
// same blocks as kernels.h, gram.h and tree.h. Every function enqueues one kernel.
//
// The sequence of kernels does not depend on their results, so a whole reduction is enqueued without a wait
// for the device. Kernels flag tensors with an ill-conditioned node, and the kernels that walk trees
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

// Consecutive elements of one tensor; `own` and `result` point to the first one.
struct Run {
  const void* own;
  void* result;
  int64_t offset;      // first element of the run in the slice, and so in the received data
  int64_t count;       // elements
  int32_t first_block; // of the slice
  int32_t shared;      // row of the tensor's sums in `totals`; -1: the run is the whole tensor
  int32_t slot;        // of its sums in the message of this rank; -1: none

  ADASUM_HOST_DEVICE int blocks() const {
    return static_cast<int>((count + kBlockElements - 1) / kBlockElements);
  }
};

// Block `block` of run `run`: kBlockElements elements, or fewer at its end.
struct BlockOf {
  int32_t run;
  int32_t block;
};

struct Blocks {
  const BlockOf* at;
  int count;
};

// A tree.h Tree. Node n has the members members[first_member[n]] up to members[first_member[n + 1] - 1];
// its vector is the result of the stack program between first_step[n] and first_step[n] + steps(n): step s >=
// 0 pushes leaf s, step s < 0 joins the two topmost vectors by merge ~s.
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

// A slice with the elements of all ranks, and memory for its sums. A row has `entries` sums: a Gram matrix,
// or three sums per merge of a tier.
struct Slice {
  ElementType type;
  int rank;
  int size; // ranks
  const Run* runs;
  int run_count;
  Blocks blocks;
  Blocks stretches;            // kStretch blocks of a run each
  const void* const* received; // per rank: its elements of the slice, except for this rank
  TreeOf tree;
  bool nearest;               // the tree joins nearest neighbours in every tier, as the compiled kernels do
  double* scales;             // per run: the power of two that float64 input is scaled by
  double* block_sums;         // row per block
  DoubleDouble* stretch_sums; // row per stretch
  int32_t* arrived;           // per run and entry: the stretches or blocks summed so far; 0 between kernels
  double* coefficients;       // per run and rank
  int32_t* walk_tree;         // per run: not 0 if the Gram matrix did not give the coefficients
  Sides* sides;               // per run and merge
  int64_t* explicit_tensors;  // their number, in host memory that the device writes
};

// The sums of tensors that lie on several ranks of a group: row[k] of the totals becomes the sum (or the
// maximum) of the gathered rows source[first_source[k]] to source[first_source[k + 1] - 1], in this order,
// and is also written to next[next_slot[k]] if that is not negative.
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

// The addresses of the sums of a slice's tensors, in rows.
struct Sums {
  DoubleDouble* runs;   // row per run
  DoubleDouble* sent;   // row per slot, of tensors on several slices
  DoubleDouble* totals; // row per shared tensor
  Fold fold;            // still to be done, into row k of the totals; count 0: none
};

// A tier's merges, and the address of its sums.
struct Tier {
  int count;
  const int32_t* merges;
  Sums sums;
};

enum class FoldBy { kAdd, kMaximum };

// Makes the driver load all kernels. Otherwise it loads each at its first launch, which may wait for all work
// on the device. Throws if there are no kernels for this device.
void LoadKernels();

void CopyBlocks(ElementType type, const Copy* copies, Blocks blocks, cudaStream_t stream);

// float64: block_sums[block] = the largest magnitude in it over all ranks; NaN counts as infinity.
void LargestOfBlocks(const Slice& slice, cudaStream_t stream);
// Writes scales[run], from the largest magnitudes.
void SetScales(const Slice& slice, const Sums& largest, cudaStream_t stream);

// block_sums[block] = the packed Gram matrix of the block.
void GramOfBlocks(const Slice& slice, cudaStream_t stream);

// sums.runs[run] and sums.sent[slot] = the folded rows of the blocks.
void FoldBlocks(const Slice& slice, const Sums& sums, int entries, FoldBy by, cudaStream_t stream);
void FoldShared(const Fold& fold, int entries, FoldBy by, cudaStream_t stream);

// Writes the coefficients from the Gram matrices; or the flag, and the sides of the merges of leaves.
void Solve(const Slice& slice, const Sums& gram, cudaStream_t stream);

// For runs that are walked explicitly: writes the sides of the merges of the tier `before` from its sums
// (none before the first walked tier), then the folded |left|^2, left.right and |right|^2 of every merge of
// `tier`. For other runs the sums are zeros.
void WalkTier(const Slice& slice, const Tier& before, const Tier& tier, cudaStream_t stream);

// result = scale * sum_i c_i x_i in float64, rounded once. `last` is the last tier that was walked.
void Combine(const Slice& slice, const Tier& last, double scale, cudaStream_t stream);

} // namespace device
} // namespace adasum_hvd
