// From the sums of blocks to coefficients: sums over blocks and ranks, the tree walked on a Gram matrix, the
// sides of merges, and the scales of float64.
#include "cuda/block.h"

namespace adasum_hvd {
namespace device {
namespace {

// The sums of a run's tensor, in rows of so many entries.
__device__ inline const DoubleDouble* SumsOf(const Slice& slice, int run, int64_t entries) {
  const int shared = slice.runs[run].shared;
  return shared < 0 ? slice.run_sums + run * entries : slice.totals + shared * entries;
}

// ---- sums over blocks and ranks ----

__device__ inline DoubleDouble Folded(const DoubleDouble& a, const DoubleDouble& b, FoldBy by) {
  DoubleDouble sum = a;
  if (by == FoldBy::kAdd) {
    sum += b;
  } else if (a.high < b.high) {
    sum = b;
  }
  return sum;
}

// The same on every lane: what a lane adds and what its partner adds are the same two numbers.
__device__ inline DoubleDouble FoldedOverLanes(DoubleDouble sum, FoldBy by) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    DoubleDouble other;
    other.high = __shfl_xor_sync(kAllLanes, sum.high, offset);
    other.low = __shfl_xor_sync(kAllLanes, sum.low, offset);
    sum = Folded(sum, other, by);
  }
  return sum;
}

// A warp per run and entry.
__global__ void FoldBlocksKernel(Slice slice, int entries, FoldBy by, bool walked_only) {
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int run = static_cast<int>(warp / entries), entry = static_cast<int>(warp % entries);
  if (run >= slice.run_count) {
    return;
  }
  const Run& of = slice.runs[run];
  DoubleDouble sum;
  if (!walked_only || slice.walk_tree[run] != 0) {
    const int blocks = static_cast<int>((of.count + kBlockElements - 1) / kBlockElements);
    for (int block = lane; block < blocks; block += kWarp) {
      const double value = slice.block_sums[(int64_t{of.first_block} + block) * entries + entry];
      sum = Folded(sum, DoubleDouble{value, 0.0}, by);
    }
    sum = FoldedOverLanes(sum, by);
  }
  if (lane == 0) {
    slice.run_sums[int64_t{run} * entries + entry] = sum;
    if (of.slot >= 0) {
      slice.sent[int64_t{of.slot} * entries + entry] = sum;
    }
  }
}

__global__ void FoldSharedKernel(Fold fold, int entries, FoldBy by) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int k = index / entries, entry = index % entries;
  if (k >= fold.count) {
    return;
  }
  DoubleDouble sum;
  for (int s = fold.first_source[k]; s < fold.first_source[k + 1]; ++s) {
    sum = Folded(sum, fold.gathered[int64_t{fold.source[s]} * entries + entry], by);
  }
  fold.totals[int64_t{fold.row[k]} * entries + entry] = sum;
  if (fold.next_slot[k] >= 0) {
    fold.next[int64_t{fold.next_slot[k]} * entries + entry] = sum;
  }
}

// ---- coefficients ----

struct Form {
  double value;
  double magnitude;
};

// c_left' G c_right over the members of two nodes, the terms dealt out to the lanes of a warp.
__device__ Form BilinearForm(const TreeOf& tree, const DoubleDouble* gram, const double* c, int left,
                             int right) {
  const int32_t* lefts = tree.members + tree.first_member[left];
  const int32_t* rights = tree.members + tree.first_member[right];
  const int width = tree.first_member[right + 1] - tree.first_member[right];
  const int terms = (tree.first_member[left + 1] - tree.first_member[left]) * width;
  DoubleDouble sum;
  double magnitude = 0;
  for (int t = static_cast<int>(threadIdx.x) % kWarp; t < terms; t += kWarp) {
    const int i = lefts[t / width], j = rights[t % width];
    const double term = c[i] * c[j] * gram[GramIndex(tree.leaves, i < j ? i : j, i < j ? j : i)].Rounded();
    sum += term;
    magnitude += fabs(term);
  }
  sum = FoldedOverLanes(sum, FoldBy::kAdd);
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    magnitude += __shfl_xor_sync(kAllLanes, magnitude, offset);
  }
  return {sum.Rounded(), magnitude};
}

__device__ void Multiply(const TreeOf& tree, int node, double factor, double* c) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int m = tree.first_member[node] + lane; m < tree.first_member[node + 1]; m += kWarp) {
    c[tree.members[m]] *= factor;
  }
}

// A warp per run; all its lanes take the same branches.
__global__ void SolveKernel(Slice slice) {
  const int run = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / kWarp);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (run >= slice.run_count) {
    return;
  }
  const TreeOf& tree = slice.tree;
  const DoubleDouble* gram = SumsOf(slice, run, GramSize(slice.size));
  double* c = slice.coefficients + int64_t{run} * slice.size;
  for (int i = lane; i < slice.size; i += kWarp) {
    c[i] = tree.leaf_weights[i];
  }
  __syncwarp();
  bool cancelled = false;
  for (int m = 0; m < tree.merges && !cancelled; ++m) {
    const Merge merge = tree.merge[m];
    if (!merge.adasum) {
      continue; // plain addition: the coefficients stand as they are
    }
    const Form left = BilinearForm(tree, gram, c, merge.left, merge.left);
    const Form right = BilinearForm(tree, gram, c, merge.right, merge.right);
    const double dot = BilinearForm(tree, gram, c, merge.left, merge.right).value;
    cancelled = Cancels(left.value, left.magnitude) || Cancels(right.value, right.magnitude);
    __syncwarp();
    Multiply(tree, merge.left, AdasumCoefficient(dot, left.value), c);
    Multiply(tree, merge.right, AdasumCoefficient(dot, right.value), c);
    __syncwarp();
  }
  if (lane == 0) {
    slice.walk_tree[run] = cancelled ? 1 : 0;
  }
  if (!cancelled) {
    return;
  }
  for (int m = lane; m < tree.merges; m += kWarp) {
    const Merge merge = tree.merge[m];
    Sides sides = {1.0, 1.0};
    if (merge.adasum && merge.left < tree.leaves && merge.right < tree.leaves) {
      const double dot = gram[GramIndex(tree.leaves, merge.left, merge.right)].Rounded();
      sides.left = AdasumCoefficient(dot, gram[GramIndex(tree.leaves, merge.left, merge.left)].Rounded());
      sides.right = AdasumCoefficient(dot, gram[GramIndex(tree.leaves, merge.right, merge.right)].Rounded());
    }
    slice.sides[int64_t{run} * tree.merges + m] = sides;
  }
}

__global__ void SidesKernel(Slice slice, const int32_t* merges, int merge_count) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int run = index / merge_count, k = index % merge_count;
  if (run >= slice.run_count || slice.walk_tree[run] == 0) {
    return;
  }
  const int merge = merges[k];
  if (!slice.tree.merge[merge].adasum) {
    return;
  }
  const int64_t row = 3 * int64_t{merge_count};
  const DoubleDouble* sums = SumsOf(slice, run, row) + 3 * k;
  const double dot = sums[1].Rounded();
  slice.sides[int64_t{run} * slice.tree.merges + merge] = {AdasumCoefficient(dot, sums[0].Rounded()),
                                                           AdasumCoefficient(dot, sums[2].Rounded())};
}

__global__ void ScalesKernel(Slice slice) {
  const int run = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (run >= slice.run_count) {
    return;
  }
  slice.scales[run] = PowerOfTwoScale(SumsOf(slice, run, 1)->high);
}

} // namespace

void FoldBlocks(const Slice& slice, int entries, FoldBy by, bool walked_only, cudaStream_t stream) {
  Launch("the fold kernel", FoldBlocksKernel, Grid(BlocksFor(int64_t{slice.run_count} * entries * kWarp)),
         kThreads, stream, slice, entries, by, walked_only);
}

void FoldShared(const Fold& fold, int entries, FoldBy by, cudaStream_t stream) {
  Launch("the fold kernel", FoldSharedKernel, Grid(BlocksFor(int64_t{fold.count} * entries)), kThreads,
         stream, fold, entries, by);
}

void Solve(const Slice& slice, cudaStream_t stream) {
  Launch("the solve kernel", SolveKernel, Grid(BlocksFor(int64_t{slice.run_count} * kWarp)), kThreads, stream,
         slice);
}

void SetSides(const Slice& slice, const int32_t* merges, int merge_count, cudaStream_t stream) {
  Launch("the sides kernel", SidesKernel, Grid(BlocksFor(int64_t{slice.run_count} * merge_count)), kThreads,
         stream, slice, merges, merge_count);
}

void SetScales(const Slice& slice, cudaStream_t stream) {
  Launch("the scale kernel", ScalesKernel, Grid(BlocksFor(slice.run_count)), kThreads, stream, slice);
}

} // namespace device
} // namespace adasum_hvd
