// What is summed over the elements of a block: Gram matrices, the nodes of trees that are walked, and the
// largest element.
#include "cuda/block.h"

#include <type_traits>

namespace adasum_hvd {
namespace device {
namespace {

constexpr int kTile = 4; // vectors on a side of a tile of pairs

// Every thread's sums[e] added up into to[e], always in the same order. All threads of the block come here.
template <int kEntries> __device__ void SumOverThreads(double (&sums)[kEntries], double* to) {
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
    to[e] = (of_warps[0][e] + of_warps[1][e]) + (of_warps[2][e] + of_warps[3][e]);
  }
}

// `N` vectors, all pairs of them.
template <class T, int N> __global__ void GramKernel(Slice slice) {
  constexpr int kPairs = N * (N + 1) / 2;
  const Block<T> block(slice, static_cast<int>(blockIdx.x));
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
  __shared__ double columns[kPairs];
  SumOverThreads(sums, columns);
  __syncthreads();
  if (threadIdx.x == 0) {
    double* to = slice.block_sums + block.index * int64_t{kPairs};
    int pair = 0;
    for (int i = 0; i < N; ++i) {
      for (int j = 0; j <= i; ++j) {
        to[GramIndex(N, j, i)] = columns[pair++];
      }
    }
  }
}

// Any number of vectors: a tile of kTile x kTile pairs per blockIdx.y, of tiles on and above the diagonal.
template <class T> __global__ void GramTileKernel(Slice slice) {
  const Block<T> block(slice, static_cast<int>(blockIdx.x));
  const int tiles = (slice.size + kTile - 1) / kTile;
  int row = 0, left = static_cast<int>(blockIdx.y);
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
  __shared__ double tile[kTile * kTile];
  SumOverThreads(sums, tile);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  const int i = row * kTile + thread / kTile, j = column * kTile + thread % kTile;
  if (thread < kTile * kTile && i <= j && j < slice.size) {
    slice.block_sums[block.index * GramSize(slice.size) + GramIndex(slice.size, i, j)] = tile[thread];
  }
}

template <class T> __global__ void NodesKernel(Slice slice, const int32_t* merges) {
  const Block<T> block(slice, static_cast<int>(blockIdx.x));
  if (slice.walk_tree[block.run] == 0) {
    return;
  }
  const Merge merge = slice.tree.merge[merges[blockIdx.y]];
  const Sides* sides = slice.sides + int64_t{block.run} * slice.tree.merges;
  const double scale = block.Scale();
  double sums[3] = {};
  for (int k = static_cast<int>(threadIdx.x); k < block.n; k += kThreads) {
    auto leaf = [&](int rank) {
      return Widened(block.Of(rank)[k]) * (scale * slice.tree.leaf_weights[rank]);
    };
    const double left = Evaluate(slice.tree, merge.left, sides, leaf);
    const double right = Evaluate(slice.tree, merge.right, sides, leaf);
    sums[0] = fma(left, left, sums[0]);
    sums[1] = fma(left, right, sums[1]);
    sums[2] = fma(right, right, sums[2]);
  }
  SumOverThreads(sums, slice.block_sums + (block.index * int64_t{gridDim.y} + blockIdx.y) * 3);
}

__global__ void LargestKernel(Slice slice) {
  const Block<double> block(slice, static_cast<int>(blockIdx.x));
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

template <class T> void LaunchGram(const Slice& slice, cudaStream_t stream) {
  using SliceKernel = void (*)(Slice);
  static constexpr SliceKernel kUnrolled[] = {GramKernel<T, 1>, GramKernel<T, 2>, GramKernel<T, 3>,
                                              GramKernel<T, 4>, GramKernel<T, 5>, GramKernel<T, 6>,
                                              GramKernel<T, 7>, GramKernel<T, 8>};
  if (slice.size <= kMostUnrolled) {
    Launch("the Gram kernel", kUnrolled[slice.size - 1], Grid(slice.blocks.count), kThreads, stream, slice);
  } else {
    const int64_t tiles = (slice.size + kTile - 1) / kTile;
    Launch("the Gram kernel", GramTileKernel<T>, Grid(slice.blocks.count, tiles * (tiles + 1) / 2), kThreads,
           stream, slice);
  }
}

template <class T>
void LaunchNodes(const Slice& slice, const int32_t* merges, int merge_count, cudaStream_t stream) {
  Launch("the node kernel", NodesKernel<T>, Grid(slice.blocks.count, merge_count), kThreads, stream, slice,
         merges);
}

} // namespace

void LargestOfBlocks(const Slice& slice, cudaStream_t stream) {
  Launch("the kernel of the largest", LargestKernel, Grid(slice.blocks.count), kThreads, stream, slice);
}

void GramOfBlocks(const Slice& slice, cudaStream_t stream) {
  ByType(slice.type,
         [&](auto* element) { LaunchGram<std::remove_pointer_t<decltype(element)>>(slice, stream); });
}

void NodesOfBlocks(const Slice& slice, const int32_t* merges, int merge_count, cudaStream_t stream) {
  ByType(slice.type, [&](auto* element) {
    LaunchNodes<std::remove_pointer_t<decltype(element)>>(slice, merges, merge_count, stream);
  });
}

} // namespace device
} // namespace adasum_hvd
