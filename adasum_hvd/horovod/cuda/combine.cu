// Kernels that write elements: copies, changes of weights, and the result.
#include <type_traits>

#include "cuda/block.h"

namespace adasum_hvd {
namespace device {
namespace {

template <class T> __global__ void CopyKernel(const Copy* copies, Blocks blocks) {
  const BlockOf place = blocks.at[blockIdx.x];
  const Copy copy = copies[place.run];
  const int64_t position = place.block * kBlockElements;
  const int64_t left = copy.count - position;
  const int n = static_cast<int>(left < kBlockElements ? left : kBlockElements);
  const T* from = static_cast<const T*>(copy.from) + position;
  const T* other = copy.other == nullptr ? nullptr : static_cast<const T*>(copy.other) + position;
  T* to = static_cast<T*>(copy.to) + position;
  const bool aligned = IsAligned(from) && IsAligned(to) && (other == nullptr || IsAligned(other));
  for (int k = static_cast<int>(threadIdx.x) * kVector; k < n; k += kThreads * kVector) {
    const bool whole = aligned && k + kVector <= n;
    if (other == nullptr && whole) { // a copy of the bits
      *reinterpret_cast<Vector<T>*>(to + k) = *reinterpret_cast<const Vector<T>*>(from + k);
    } else if (other == nullptr) {
      for (int lane = 0; lane < kVector && k + lane < n; ++lane) {
        to[k + lane] = from[k + lane];
      }
    } else {
      double sum[kVector], added[kVector];
      Load(from, k, n, whole, sum);
      Load(other, k, n, whole, added);
#pragma unroll
      for (int lane = 0; lane < kVector; ++lane) {
        sum[lane] += copy.sign * added[lane];
      }
      Store(sum, to, k, n, whole);
    }
  }
}

// Combines the block if its tree is walked, or if the order of the sum is that of a tree without a compiled
// kernel. Returns whether it did.
template <class T> __device__ bool CombinedByTree(const Block<T>& block, const Tier& last, double scale) {
  const Slice& slice = block.slice;
  const bool walk_tree = slice.walk_tree[block.run] != 0;
  if (walk_tree) {
    SetSides(slice, last, block.run);
  } else if (!InTreeOrder(slice.type, slice.size) || (slice.nearest && slice.size <= kMostUnrolled)) {
    return false;
  }
  const double* c = slice.coefficients + int64_t{block.run} * slice.size;
  const Sides* sides =
      walk_tree ? slice.sides + int64_t{block.run} * slice.tree.merges : nullptr; // null: all 1
  const double input_scale = block.Scale();
  const int root = slice.tree.leaves + slice.tree.merges - 1;
  for (int k = static_cast<int>(threadIdx.x); k < block.n; k += kThreads) {
    const double value = Evaluate(slice.tree, root, sides, [&](int rank) {
      const double factor = walk_tree ? input_scale * slice.tree.leaf_weights[rank] : c[rank] * scale;
      return Widened(block.Of(rank)[k]) * factor;
    });
    Narrow(walk_tree ? value * (scale / input_scale) : value, &block.Result()[k]);
  }
  return true;
}

// In the order of the ranks, or of a tree of nearest neighbours: tree.h, InTreeOrder.
template <bool kInTreeOrder, int N> __device__ double SumOverRanks(double (&terms)[N]) {
  if constexpr (kInTreeOrder) {
#pragma unroll
    for (int apart = 1; apart < N; apart *= 2) {
#pragma unroll
      for (int i = 0; i + apart < N; i += 2 * apart) {
        terms[i] += terms[i + apart];
      }
    }
  } else {
#pragma unroll
    for (int i = 1; i < N; ++i) {
      terms[0] += terms[i];
    }
  }
  return terms[0];
}

template <class T, int N> __global__ void CombineKernel(Slice slice, Tier last, double scale) {
  const Block<T> block(slice, blockIdx.x);
  constexpr bool kInTreeOrder = std::is_same_v<T, double> && InTreeOrder(kFloat64, N);
  if (CombinedByTree(block, last, scale)) {
    return;
  }
  const double* c = slice.coefficients + int64_t{block.run} * N;
  T* to = block.Result();
  const T* x[N];
  double weight[N];
  bool aligned = IsAligned(to);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = block.Of(i);
    weight[i] = c[i] * scale;
    aligned = aligned && IsAligned(x[i]);
  }
  for (int k = static_cast<int>(threadIdx.x) * kVector; k < block.n; k += kThreads * kVector) {
    const bool whole = aligned && k + kVector <= block.n;
    double values[N][kVector];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Load(x[i], k, block.n, whole, values[i]);
    }
    double sum[kVector];
#pragma unroll
    for (int lane = 0; lane < kVector; ++lane) {
      double terms[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        terms[i] = values[i][lane] * weight[i];
      }
      sum[lane] = SumOverRanks<kInTreeOrder>(terms);
    }
    Store(sum, to, k, block.n, whole);
  }
}

template <class T> __global__ void CombineAnyKernel(Slice slice, Tier last, double scale) {
  const Block<T> block(slice, blockIdx.x);
  if (CombinedByTree(block, last, scale)) {
    return;
  }
  const double* c = slice.coefficients + int64_t{block.run} * slice.size;
  for (int k = static_cast<int>(threadIdx.x); k < block.n; k += kThreads) {
    double sum = Widened(block.Of(0)[k]) * (c[0] * scale);
    for (int rank = 1; rank < slice.size; ++rank) {
      sum += Widened(block.Of(rank)[k]) * (c[rank] * scale);
    }
    Narrow(sum, &block.Result()[k]);
  }
}

using LevelKernel = void (*)(Slice, Tier, double);
template <class T>
constexpr LevelKernel kCombine[] = {CombineKernel<T, 1>, CombineKernel<T, 2>, CombineKernel<T, 3>,
                                    CombineKernel<T, 4>, CombineKernel<T, 5>, CombineKernel<T, 6>,
                                    CombineKernel<T, 7>, CombineKernel<T, 8>};
static_assert(sizeof kCombine<float> / sizeof *kCombine<float> == kMostUnrolled);

} // namespace

void CopyBlocks(ElementType type, const Copy* copies, Blocks blocks, cudaStream_t stream) {
  ByType(type, [&](auto element) {
    Launch("the copy kernel", CopyKernel<decltype(element)>, blocks.count, stream, copies, blocks);
  });
}

void Combine(const Slice& slice, const Tier& last, double scale, cudaStream_t stream) {
  ByType(slice.type, [&](auto element) {
    using T = decltype(element);
    const LevelKernel kernel =
        slice.size <= kMostUnrolled ? kCombine<T>[slice.size - 1] : LevelKernel(CombineAnyKernel<T>);
    Launch("the combine kernel", kernel, slice.blocks.count, stream, slice, last, scale);
  });
}

void LoadElements() {
  ForEachType([](auto element) {
    using T = decltype(element);
    for (LevelKernel kernel : kCombine<T>) {
      Load(kernel);
    }
    Load(CombineAnyKernel<T>);
    Load(CopyKernel<T>);
  });
}

} // namespace device
} // namespace adasum_hvd
