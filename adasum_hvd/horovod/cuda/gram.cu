// Sums over the elements of a block: Gram matrices, nodes of walked trees, and the largest element.
#include "cuda/block.h"

namespace adasum_hvd {
namespace device {
namespace {

constexpr int kTile = 4; // vectors on a side of a tile of pairs

// Adds every thread's sums[e], always in the same order; one thread calls write(e, sum). All threads of the
// block must call it.
template <int kEntries, class Write>
__device__ void SumOverThreads(double (&sums)[kEntries], const Write& write) {
  __shared__ double of_warps[kThreads / kWarp][kEntries];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      sums[e] += __shfl_xor_sync(kAllLanes, sums[e], offset);
    }
  }
  const int thread = static_cast<int>(threadIdx.x);
  if (thread % kWarp == 0) {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      of_warps[thread / kWarp][e] = sums[e];
    }
  }
  __syncthreads();
  for (int e = thread; e < kEntries; e += kThreads) {
    write(e, (of_warps[0][e] + of_warps[1][e]) + (of_warps[2][e] + of_warps[3][e]));
  }
}

// Writes block_sums[block]: all pairs of `N` vectors.
template <class T, int N> __device__ void SumGram(const Block<T>& block) {
  constexpr int kPairs = N * (N + 1) / 2;
  const T* x[N];
  bool aligned = true;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = block.Of(i);
    aligned = aligned && IsAligned(x[i]);
  }
  const double scale = block.Scale();
  double sums[kPairs] = {};
  for (int k = static_cast<int>(threadIdx.x) * kVector; k < block.n; k += kThreads * kVector) {
    double values[N][kVector];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Load(x[i], k, block.n, aligned && k + kVector <= block.n, values[i]);
    }
#pragma unroll
    for (int lane = 0; lane < kVector; ++lane) {
      int pair = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[i][lane] *= scale;
#pragma unroll
        for (int j = 0; j <= i; ++j) { // the packed triangle, by columns
          sums[pair] = fma(values[j][lane], values[i][lane], sums[pair]);
          ++pair;
        }
      }
    }
  }
  double* to = block.slice.block_sums + block.index * int64_t{kPairs};
  SumOverThreads(sums, [to](int pair, double sum) {
    int i = 0, j = pair; // of the packed triangle by columns
    while (j > i) {
      ++i;
      j -= i;
    }
    to[GramIndex(N, j, i)] = sum;
  });
}

template <class T, int N> __global__ void GramKernel(Slice slice) {
  SumGram<T, N>(Block<T>(slice, blockIdx.x));
}

// Writes block_sums[block] of the `k`-th merge of a tier; the sides of the tiers before are known.
template <class T> __device__ void SumMerge(const Block<T>& block, const Tier& tier, int k) {
  const Slice& slice = block.slice;
  const Merge merge = slice.tree.merge[tier.merges[k]];
  const Sides* sides = slice.sides + int64_t{block.run} * slice.tree.merges;
  const double scale = block.Scale();
  double sums[3] = {};
  for (int e = static_cast<int>(threadIdx.x); e < block.n; e += kThreads) {
    auto leaf = [&](int rank) {
      return Widened(block.Of(rank)[e]) * (scale * slice.tree.leaf_weights[rank]);
    };
    const double left = Evaluate(slice.tree, merge.left, sides, leaf);
    const double right = Evaluate(slice.tree, merge.right, sides, leaf);
    sums[0] = fma(left, left, sums[0]);
    sums[1] = fma(left, right, sums[1]);
    sums[2] = fma(right, right, sums[2]);
  }
  double* to = slice.block_sums + block.index * int64_t{3} * tier.count + 3 * k;
  SumOverThreads(sums, [to](int which, double sum) { to[which] = sum; });
}

// Sums the rows of a run's blocks, on all threads of one block.
__device__ void FoldRun(const Slice& slice, const Sums& sums, int run, int entries) {
  const Run& of = slice.runs[run];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int e = static_cast<int>(threadIdx.x) / kWarp; e < entries; e += kThreads / kWarp) {
    DoubleDouble sum;
    for (int b = lane; b < of.blocks(); b += kWarp) {
      sum += __ldcg(&slice.block_sums[(int64_t{of.first_block} + b) * entries + e]);
    }
    sum = FoldedOverLanes(sum, FoldBy::kAdd);
    if (lane == 0) {
      SetRunSum(sums, slice, run, entries, e, sum);
    }
  }
}

__host__ __device__ int64_t Tiles(int size) {
  const int64_t side = (size + kTile - 1) / kTile;
  return side * (side + 1) / 2;
}

// For any number of vectors: tiles of kTile x kTile pairs, on and above the diagonal. The tiles of a block
// follow each other, so that all but the first read its elements from the second-level cache.
template <class T> __global__ void GramTileKernel(Slice slice) {
  const int64_t per_block = Tiles(slice.size);
  const Block<T> block(slice, blockIdx.x / per_block);
  const int tiles = (slice.size + kTile - 1) / kTile;
  int row = 0, left = static_cast<int>(blockIdx.x % per_block);
  while (left >= tiles - row) {
    left -= tiles - row;
    ++row;
  }
  const int column = row + left;
  const T* x[2 * kTile];
  bool aligned = true;
#pragma unroll
  for (int i = 0; i < 2 * kTile; ++i) {
    const int rank = (i < kTile ? row * kTile + i : column * kTile + i - kTile);
    x[i] = block.Of(rank < slice.size ? rank : slice.size - 1);
    aligned = aligned && IsAligned(x[i]);
  }
  const double scale = block.Scale();
  double sums[kTile * kTile] = {};
  for (int k = static_cast<int>(threadIdx.x) * kVector; k < block.n; k += kThreads * kVector) {
    double values[2 * kTile][kVector];
#pragma unroll
    for (int i = 0; i < 2 * kTile; ++i) {
      Load(x[i], k, block.n, aligned && k + kVector <= block.n, values[i]);
    }
#pragma unroll
    for (int lane = 0; lane < kVector; ++lane) {
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
#pragma unroll
        for (int j = 0; j < kTile; ++j) {
          sums[i * kTile + j] =
              fma(values[i][lane] * scale, values[kTile + j][lane] * scale, sums[i * kTile + j]);
        }
      }
    }
  }
  double* to = slice.block_sums + block.index * GramSize(slice.size);
  SumOverThreads(sums, [&](int pair, double sum) {
    const int i = row * kTile + pair / kTile, j = column * kTile + pair % kTile;
    if (i <= j && j < slice.size) {
      to[GramIndex(slice.size, i, j)] = sum;
    }
  });
}

// Whether this block is the last of `blocks` of a run to call it; the writes of the others are then visible.
__device__ bool IsLast(int32_t* arrived, int blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1) == blocks - 1;
    if (last) {
      *arrived = 0;
    }
    __threadfence();
  }
  __syncthreads();
  return last;
}

// One CUDA block per block of elements and merge. Few of them have work.
template <class T> __global__ void WalkKernel(Slice slice, Tier before, Tier tier) {
  const Block<T> block(slice, blockIdx.x / tier.count);
  const int k = static_cast<int>(blockIdx.x % tier.count), entries = 3 * tier.count;
  const bool first = block.position == 0 && k == 0;
  if (slice.walk_tree[block.run] == 0) {
    for (int e = static_cast<int>(threadIdx.x); first && e < entries; e += kThreads) {
      SetRunSum(tier.sums, slice, block.run, entries, e, DoubleDouble());
    }
    return;
  }
  SetSides(slice, before, block.run);
  SumMerge(block, tier, k);
  if (IsLast(&slice.arrived[block.run], slice.runs[block.run].blocks() * tier.count)) {
    FoldRun(slice, tier.sums, block.run, entries);
  }
}

__global__ void LargestKernel(Slice slice) {
  const Block<double> block(slice, blockIdx.x);
  double largest = 0;
  for (int rank = 0; rank < slice.size; ++rank) {
    const double* x = block.Of(rank);
    for (int k = static_cast<int>(threadIdx.x); k < block.n; k += kThreads) {
      const double magnitude = fabs(x[k]);
      largest = magnitude <= largest ? largest : magnitude == magnitude ? magnitude : INFINITY;
    }
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    largest = fmax(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  }
  __shared__ double of_warps[kThreads / kWarp];
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = largest;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    slice.block_sums[block.index] = fmax(fmax(of_warps[0], of_warps[1]), fmax(of_warps[2], of_warps[3]));
  }
}

using SliceKernel = void (*)(Slice);
template <class T>
constexpr SliceKernel kGram[] = {GramKernel<T, 1>, GramKernel<T, 2>, GramKernel<T, 3>, GramKernel<T, 4>,
                                 GramKernel<T, 5>, GramKernel<T, 6>, GramKernel<T, 7>, GramKernel<T, 8>};
static_assert(sizeof kGram<float> / sizeof *kGram<float> == kMostUnrolled);

} // namespace

void LargestOfBlocks(const Slice& slice, cudaStream_t stream) {
  Launch("the kernel of the largest", LargestKernel, slice.blocks.count, stream, slice);
}

void GramOfBlocks(const Slice& slice, cudaStream_t stream) {
  ByType(slice.type, [&](auto element) {
    using T = decltype(element);
    if (slice.size <= kMostUnrolled) {
      Launch("the Gram kernel", kGram<T>[slice.size - 1], slice.blocks.count, stream, slice);
    } else {
      Launch("the Gram kernel", GramTileKernel<T>, slice.blocks.count * Tiles(slice.size), stream, slice);
    }
  });
}

void WalkTier(const Slice& slice, const Tier& before, const Tier& tier, cudaStream_t stream) {
  ByType(slice.type, [&](auto element) {
    Launch("the walk kernel", WalkKernel<decltype(element)>, int64_t{slice.blocks.count} * tier.count, stream,
           slice, before, tier);
  });
}

void LoadSums() {
  ForEachType([](auto element) {
    using T = decltype(element);
    for (SliceKernel kernel : kGram<T>) {
      Load(kernel);
    }
    Load(GramTileKernel<T>);
    Load(WalkKernel<T>);
  });
  Load(LargestKernel);
}

} // namespace device
} // namespace adasum_hvd
