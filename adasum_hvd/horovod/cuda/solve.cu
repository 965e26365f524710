// From sums of blocks to coefficients: sums over blocks and ranks, the tree walked on a Gram matrix, the
// sides of merges, and the scales of float64.
#include "cuda/passes.h"

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

// A warp per run.
__global__ void SolveKernel(Slice slice, Sums sums) {
  const int64_t run = ThisThread() / kWarp;
  if (run < slice.run_count) {
    SolveRun(slice, sums, static_cast<int>(run));
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
