// Sums over the elements of a block: Gram matrices, nodes of walked trees, and the largest element.
#include "cuda/passes.h"

namespace adasum_hvd {
namespace device {
namespace {

constexpr int kTile = 4; // vectors on a side of a tile of pairs

template <class T, int N> __global__ void GramKernel(Slice slice) {
  SumGram<T, N>(Block<T>(slice, blockIdx.x));
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

template <class T> void LaunchGram(const Slice& slice, cudaStream_t stream) {
  if (slice.size <= kMostUnrolled) {
    Launch("the Gram kernel", kGram<T>[slice.size - 1], slice.blocks.count, stream, slice);
  } else {
    Launch("the Gram kernel", GramTileKernel<T>, slice.blocks.count * Tiles(slice.size), stream, slice);
  }
}

template <class T>
void LaunchWalk(const Slice& slice, const Tier& before, const Tier& tier, cudaStream_t stream) {
  Launch("the walk kernel", WalkKernel<T>, int64_t{slice.blocks.count} * tier.count, stream, slice, before,
         tier);
}

template <class T> void LoadGram() {
  for (SliceKernel kernel : kGram<T>) {
    Load(kernel);
  }
  Load(GramTileKernel<T>);
  Load(WalkKernel<T>);
}

} // namespace

void LargestOfBlocks(const Slice& slice, cudaStream_t stream) {
  Launch("the kernel of the largest", LargestKernel, slice.blocks.count, stream, slice);
}

void GramOfBlocks(const Slice& slice, cudaStream_t stream) {
  ByType(slice.type,
         [&](auto* element) { LaunchGram<std::remove_pointer_t<decltype(element)>>(slice, stream); });
}

void WalkTier(const Slice& slice, const Tier& before, const Tier& tier, cudaStream_t stream) {
  ByType(slice.type, [&](auto* element) {
    LaunchWalk<std::remove_pointer_t<decltype(element)>>(slice, before, tier, stream);
  });
}

void LoadSums() {
  for (int type = 0; type < kElementTypes; ++type) {
    ByType(static_cast<ElementType>(type),
           [](auto* element) { LoadGram<std::remove_pointer_t<decltype(element)>>(); });
  }
  Load(LargestKernel);
}

} // namespace device
} // namespace adasum_hvd
