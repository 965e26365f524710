// The steps of a block or a run.
#pragma once

#include <type_traits>

#include "cuda/block.h"

namespace adasum_hvd {
namespace device {

// ---- sums over elements ----

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
__device__ inline void FoldRun(const Slice& slice, const Sums& sums, int run, int entries) {
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

// ---- coefficients ----

struct Form {
  double value;
  double magnitude;
};

// c_left' G c_right over the members of two nodes, with the terms distributed over the lanes of a warp.
__device__ inline Form BilinearForm(const TreeOf& tree, const DoubleDouble* gram, const double* c, int left,
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

__device__ inline void Multiply(const TreeOf& tree, int node, double factor, double* c) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int m = tree.first_member[node] + lane; m < tree.first_member[node + 1]; m += kWarp) {
    c[tree.members[m]] *= factor;
  }
}

// The Gram matrix of a run's tensor.
__device__ inline const DoubleDouble* GramOf(const Slice& slice, const Sums& sums, int run) {
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

// On a warp, whose lanes all take the same branches.
__device__ inline void SolveRun(const Slice& slice, const Sums& sums, int run) {
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

// ---- the result ----

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

template <class T, int N>
__device__ void CombineBlock(const Block<T>& block, const Tier& last, double scale) {
  constexpr bool kInTreeOrder = std::is_same_v<T, double> && InTreeOrder(kFloat64, N);
  if (CombinedByTree(block, last, scale)) {
    return;
  }
  const double* c = block.slice.coefficients + int64_t{block.run} * N;
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

} // namespace device
} // namespace adasum_hvd
