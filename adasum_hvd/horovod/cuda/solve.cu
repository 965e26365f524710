// From sums of blocks to coefficients: sums over blocks and ranks, the tree walked on a Gram matrix, the
// sides of merges, and the scales of float64.
#include "cuda/block.h"

namespace adasum_hvd {
namespace device {
namespace {

// ---- sums over blocks and ranks ----

// Sums all stretches of a run, on the last warp that has summed one. The order is that of the stretches in
// the run, and does not depend on the warp.
__device__ bool FoldedOverStretches(const Slice& slice, const BlockOf& stretch, int64_t index, int stretches,
                                    int entries, int entry, FoldBy by, DoubleDouble& sum) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int last = 0;
  if (lane == 0) {
    slice.stretch_sums[index * entries + entry] = sum;
    __threadfence();
    int32_t* arrived = &slice.arrived[int64_t{stretch.run} * entries + entry];
    last = atomicAdd(arrived, 1) == stretches - 1 ? 1 : 0;
    if (last != 0) {
      *arrived = 0;
    }
    __threadfence();
  }
  if (__shfl_sync(kAllLanes, last, 0) == 0) {
    return false;
  }
  __syncwarp();
  sum = DoubleDouble();
  for (int k = lane; k < stretches; k += kWarp) {
    sum = Folded(sum, Fresh(&slice.stretch_sums[(index - stretch.block + k) * entries + entry]), by);
  }
  sum = FoldedOverLanes(sum, by);
  return true;
}

// A warp per stretch and entry.
__global__ void FoldBlocksKernel(Slice slice, Sums sums, int entries, FoldBy by) {
  const int64_t warp = ThisThread() / kWarp, index = warp / entries;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, entry = static_cast<int>(warp % entries);
  if (index >= slice.stretches.count) {
    return;
  }
  const BlockOf stretch = slice.stretches.at[index];
  const Run& of = slice.runs[stretch.run];
  const int end = min(of.blocks(), (stretch.block + 1) * kStretch);
  DoubleDouble sum;
  for (int block = stretch.block * kStretch + lane; block < end; block += kWarp) {
    const double value = slice.block_sums[(int64_t{of.first_block} + block) * entries + entry];
    sum = Folded(sum, DoubleDouble{value, 0.0}, by);
  }
  sum = FoldedOverLanes(sum, by);
  const int stretches = (of.blocks() + kStretch - 1) / kStretch;
  if ((stretches == 1 || FoldedOverStretches(slice, stretch, index, stretches, entries, entry, by, sum)) &&
      lane == 0) {
    SetRunSum(sums, slice, stretch.run, entries, entry, sum);
  }
}

__global__ void FoldSharedKernel(Fold fold, int entries, FoldBy by) {
  const int64_t index = ThisThread();
  const int entry = static_cast<int>(index % entries);
  if (index / entries >= fold.count) {
    return;
  }
  const int k = static_cast<int>(index / entries);
  const DoubleDouble sum = FoldedOverSources(fold, k, entries, entry, by);
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

// c_left' G c_right over the members of two nodes, with the terms distributed over the lanes of a warp.
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

// The Gram matrix of a run's tensor.
__device__ const DoubleDouble* GramOf(const Slice& slice, const Sums& sums, int run) {
  const int entries = static_cast<int>(GramSize(slice.size));
  const int shared = slice.runs[run].shared;
  if (shared < 0) {
    return sums.runs + int64_t{run} * entries;
  }
  DoubleDouble* total = sums.totals + int64_t{shared} * entries;
  for (int e = static_cast<int>(threadIdx.x) % kWarp; sums.fold.count > 0 && e < entries; e += kWarp) {
    total[e] = FoldedOverSources(sums.fold, shared, entries, e, FoldBy::kAdd);
  }
  __syncwarp();
  return total;
}

// A warp per run, whose lanes all take the same branches.
__global__ void SolveKernel(Slice slice, Sums sums) {
  if (ThisThread() / kWarp >= slice.run_count) {
    return;
  }
  const int run = static_cast<int>(ThisThread() / kWarp);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const TreeOf& tree = slice.tree;
  const DoubleDouble* gram = GramOf(slice, sums, run);
  double* c = slice.coefficients + int64_t{run} * slice.size;
  for (int i = lane; i < slice.size; i += kWarp) {
    c[i] = tree.leaf_weights[i];
  }
  __syncwarp();
  bool cancelled = false;
  for (int m = 0; m < tree.merges && !cancelled; ++m) {
    const Merge merge = tree.merge[m];
    if (!merge.adasum) {
      continue; // plain addition does not change the coefficients
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
    if (cancelled) {
      atomicAdd(reinterpret_cast<unsigned long long*>(slice.explicit_tensors), 1ULL);
    }
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

__global__ void ScalesKernel(Slice slice, Sums largest) {
  const int64_t run = ThisThread();
  if (run < slice.run_count) {
    slice.scales[run] =
        PowerOfTwoScale(SumOf(largest, slice, static_cast<int>(run), 1, 0, FoldBy::kMaximum).high);
  }
}

} // namespace

void FoldBlocks(const Slice& slice, const Sums& sums, int entries, FoldBy by, cudaStream_t stream) {
  Launch("the fold kernel", FoldBlocksKernel, BlocksFor(int64_t{slice.stretches.count} * entries * kWarp),
         stream, slice, sums, entries, by);
}

void FoldShared(const Fold& fold, int entries, FoldBy by, cudaStream_t stream) {
  Launch("the fold kernel", FoldSharedKernel, BlocksFor(int64_t{fold.count} * entries), stream, fold, entries,
         by);
}

void Solve(const Slice& slice, const Sums& gram, cudaStream_t stream) {
  Launch("the solve kernel", SolveKernel, BlocksFor(int64_t{slice.run_count} * kWarp), stream, slice, gram);
}

void SetScales(const Slice& slice, const Sums& largest, cudaStream_t stream) {
  Launch("the scale kernel", ScalesKernel, BlocksFor(slice.run_count), stream, slice, largest);
}

void LoadKernels() {
  LoadSums();
  LoadElements();
  Load(FoldBlocksKernel);
  Load(FoldSharedKernel);
  Load(SolveKernel);
  Load(ScalesKernel);
}

} // namespace device
} // namespace adasum_hvd
