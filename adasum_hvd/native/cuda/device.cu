#include "cuda/device.h"

#include <stdexcept>
#include <string>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace adasum_hvd {
namespace device {
namespace {

constexpr int kThreads = 128; // that share a block of kBlockElements elements
constexpr int kWarp = 32;
constexpr int kVector = 4; // consecutive elements that a thread takes at a time
constexpr int kMostUnrolled = 8;
constexpr int kTile = 4;
constexpr unsigned kAllLanes = 0xffffffff;

// ---- elements ----

__device__ inline double Widened(__half value) { return static_cast<double>(__half2float(value)); }
__device__ inline double Widened(__nv_bfloat16 value) { return static_cast<double>(__bfloat162float(value)); }
__device__ inline double Widened(float value) { return static_cast<double>(value); }
__device__ inline double Widened(double value) { return value; }

__device__ inline void Narrow(double value, __half* to) { *to = __double2half(value); }
__device__ inline void Narrow(double value, __nv_bfloat16* to) { *to = __double2bfloat16(value); }
__device__ inline void Narrow(double value, float* to) { *to = static_cast<float>(value); }
__device__ inline void Narrow(double value, double* to) { *to = value; }

template <class T> struct alignas(sizeof(T) * kVector < 16 ? sizeof(T) * kVector : 16) Vector {
  T value[kVector];
};

template <class T> __device__ inline bool IsAligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Vector<T>) == 0;
}

// Elements k to k + kVector - 1, zeros behind n: adding 0 * 0 leaves a sum as it is.
template <class T> __device__ inline void Load(const T* p, int k, int n, bool whole, double* to) {
  if (whole) {
    const Vector<T> values = *reinterpret_cast<const Vector<T>*>(p + k);
#pragma unroll
    for (int lane = 0; lane < kVector; ++lane) {
      to[lane] = Widened(values.value[lane]);
    }
  } else {
#pragma unroll
    for (int lane = 0; lane < kVector; ++lane) {
      to[lane] = k + lane < n ? Widened(p[k + lane]) : 0.0;
    }
  }
}

template <class T> __device__ inline void Store(const double* from, T* p, int k, int n, bool whole) {
  if (whole) {
    Vector<T> values;
#pragma unroll
    for (int lane = 0; lane < kVector; ++lane) {
      Narrow(from[lane], &values.value[lane]);
    }
    *reinterpret_cast<Vector<T>*>(p + k) = values;
  } else {
    for (int lane = 0; lane < kVector && k + lane < n; ++lane) {
      Narrow(from[lane], &p[k + lane]);
    }
  }
}

// ---- blocks ----

template <class T> struct Block {
  const Slice& slice;
  int index;
  int run;
  int64_t position; // element of the run
  int n;

  __device__ Block(const Slice& of, int which) : slice(of), index(which) {
    const BlockOf& place = of.blocks.at[which];
    run = place.run;
    position = place.block * kBlockElements;
    const int64_t left = of.runs[run].count - position;
    n = static_cast<int>(left < kBlockElements ? left : kBlockElements);
  }

  __device__ const T* Of(int rank) const {
    const Run& whole = slice.runs[run];
    return rank == slice.rank ? static_cast<const T*>(whole.own) + position
                              : static_cast<const T*>(slice.received[rank]) + whole.offset + position;
  }
  __device__ T* Result() const { return static_cast<T*>(slice.runs[run].result) + position; }
  __device__ double Scale() const { return sizeof(T) == sizeof(double) ? slice.scales[run] : 1.0; }
};

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

// ---- copies ----

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
    if (other == nullptr && whole) { // the bits as they are
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

// ---- Gram matrices ----

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

// ---- explicit walks ----

// Leaf `i` contributes leaf(i).
template <class Leaf>
__device__ double Evaluate(const TreeOf& tree, int node, const Sides* sides, Leaf leaf) {
  double stack[kMostStack];
  int top = 0;
  const int first = tree.first_step[node];
  const int steps = 2 * (tree.first_member[node + 1] - tree.first_member[node]) - 1;
  for (int s = first; s < first + steps; ++s) {
    const int step = tree.program[s];
    if (step >= 0) {
      stack[top++] = leaf(step);
    } else {
      const double right = stack[--top];
      const double left = stack[top - 1] * (sides == nullptr ? 1.0 : sides[~step].left);
      stack[top - 1] = left + right * (sides == nullptr ? 1.0 : sides[~step].right);
    }
  }
  return stack[0];
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
  const int shared = slice.runs[run].shared;
  const DoubleDouble* sums = (shared < 0 ? slice.run_sums + run * row : slice.totals + shared * row) + 3 * k;
  const double dot = sums[1].Rounded();
  slice.sides[int64_t{run} * slice.tree.merges + merge] = {AdasumCoefficient(dot, sums[0].Rounded()),
                                                           AdasumCoefficient(dot, sums[2].Rounded())};
}

// ---- float64 ----

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

__global__ void ScalesKernel(Slice slice) {
  const int run = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (run >= slice.run_count) {
    return;
  }
  const int shared = slice.runs[run].shared;
  slice.scales[run] = PowerOfTwoScale((shared < 0 ? slice.run_sums[run] : slice.totals[shared]).high);
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
  const int64_t entries = GramSize(slice.size);
  const int shared = slice.runs[run].shared;
  const DoubleDouble* gram = shared < 0 ? slice.run_sums + run * entries : slice.totals + shared * entries;
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
  if (lane == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(slice.explicit_counter), 1ULL);
  }
}

// ---- combine ----

// Combines the block where that takes the tree, and says whether it did.
template <class T> __device__ bool CombinedByTree(const Block<T>& block, double scale) {
  const Slice& slice = block.slice;
  const bool walk_tree = slice.walk_tree[block.run] != 0;
  if (!walk_tree && !InTreeOrder(slice.type, slice.size)) {
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

template <class T, int N> __global__ void CombineKernel(Slice slice, double scale) {
  const Block<T> block(slice, static_cast<int>(blockIdx.x));
  if (CombinedByTree(block, scale)) {
    return;
  }
  const double* c = slice.coefficients + int64_t{block.run} * slice.size;
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
      sum[lane] = values[0][lane] * weight[0];
#pragma unroll
      for (int i = 1; i < N; ++i) {
        sum[lane] += values[i][lane] * weight[i];
      }
    }
    Store(sum, to, k, block.n, whole);
  }
}

template <class T> __global__ void CombineAnyKernel(Slice slice, double scale) {
  const Block<T> block(slice, static_cast<int>(blockIdx.x));
  if (CombinedByTree(block, scale)) {
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

// ---- launches ----

template <class... Parameters, class... Arguments>
void Launch(const char* what, void (*kernel)(Parameters...), dim3 grid, int threads, cudaStream_t stream,
            const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0) {
    return;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("AdaSum: CUDA could not launch ") + what + ": " +
                             cudaGetErrorString(error));
  }
}

dim3 Grid(int64_t x, int64_t y = 1) { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)); }
int64_t BlocksFor(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

// Calls `form` with a null pointer to the element type.
template <class Form> void ByType(ElementType type, Form form) {
  switch (type) {
  case kFloat16: return form(static_cast<__half*>(nullptr));
  case kBfloat16: return form(static_cast<__nv_bfloat16*>(nullptr));
  case kFloat32: return form(static_cast<float*>(nullptr));
  case kFloat64: return form(static_cast<double*>(nullptr));
  }
}

using SliceKernel = void (*)(Slice);
using ScaledKernel = void (*)(Slice, double);

template <class T> void LaunchGram(const Slice& slice, cudaStream_t stream) {
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

template <class T> void LaunchCombine(const Slice& slice, double scale, cudaStream_t stream) {
  static constexpr ScaledKernel kUnrolled[] = {CombineKernel<T, 1>, CombineKernel<T, 2>, CombineKernel<T, 3>,
                                               CombineKernel<T, 4>, CombineKernel<T, 5>, CombineKernel<T, 6>,
                                               CombineKernel<T, 7>, CombineKernel<T, 8>};
  Launch("the combine kernel",
         slice.size <= kMostUnrolled ? kUnrolled[slice.size - 1] : ScaledKernel(CombineAnyKernel<T>),
         Grid(slice.blocks.count), kThreads, stream, slice, scale);
}

template <class T>
void LaunchNodes(const Slice& slice, const int32_t* merges, int merge_count, cudaStream_t stream) {
  Launch("the node kernel", NodesKernel<T>, Grid(slice.blocks.count, merge_count), kThreads, stream, slice,
         merges);
}

template <class T> void LaunchCopy(const Copy* copies, Blocks blocks, cudaStream_t stream) {
  Launch("the copy kernel", CopyKernel<T>, Grid(blocks.count), kThreads, stream, copies, blocks);
}

} // namespace

void CopyBlocks(ElementType type, const Copy* copies, Blocks blocks, cudaStream_t stream) {
  ByType(type, [&](auto* element) {
    LaunchCopy<std::remove_pointer_t<decltype(element)>>(copies, blocks, stream);
  });
}

void LargestOfBlocks(const Slice& slice, cudaStream_t stream) {
  Launch("the kernel of the largest", LargestKernel, Grid(slice.blocks.count), kThreads, stream, slice);
}

void SetScales(const Slice& slice, cudaStream_t stream) {
  Launch("the scale kernel", ScalesKernel, Grid(BlocksFor(slice.run_count)), kThreads, stream, slice);
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

void Combine(const Slice& slice, double scale, cudaStream_t stream) {
  ByType(slice.type, [&](auto* element) {
    LaunchCombine<std::remove_pointer_t<decltype(element)>>(slice, scale, stream);
  });
}

} // namespace device
} // namespace adasum_hvd
