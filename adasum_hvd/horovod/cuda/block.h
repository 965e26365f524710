// Common to all kernels: access of a thread to elements, blocks and trees, and launches.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device.h"
#include "cuda/device_memory.h"

namespace adasum_hvd {
namespace device {

constexpr int kThreads = 128;    // that share a block of kBlockElements elements
constexpr int kWarp = 32;        // threads
constexpr int kVector = 4;       // consecutive elements that a thread loads at a time
constexpr int kMostUnrolled = 8; // the largest number of ranks with a kernel of its own
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

// Elements k to k + kVector - 1, and zeros after n: adding 0 * 0 does not change a sum.
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

// ---- sums of a slice's tensors ----

__device__ inline DoubleDouble Folded(const DoubleDouble& a, const DoubleDouble& b, FoldBy by) {
  DoubleDouble sum = a;
  if (by == FoldBy::kAdd) {
    sum += b;
  } else if (a.high < b.high) {
    sum = b;
  }
  return sum;
}

// The same on every lane, because a lane and its partner add the same two numbers.
__device__ inline DoubleDouble FoldedOverLanes(DoubleDouble sum, FoldBy by) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    DoubleDouble other;
    other.high = __shfl_xor_sync(kAllLanes, sum.high, offset);
    other.low = __shfl_xor_sync(kAllLanes, sum.low, offset);
    sum = Folded(sum, other, by);
  }
  return sum;
}

__device__ inline DoubleDouble FoldedOverSources(const Fold& fold, int k, int entries, int entry, FoldBy by) {
  DoubleDouble sum;
  for (int s = fold.first_source[k]; s < fold.first_source[k + 1]; ++s) {
    sum = Folded(sum, fold.gathered[int64_t{fold.source[s]} * entries + entry], by);
  }
  return sum;
}

// An entry of the sums of a run's tensor.
__device__ inline DoubleDouble SumOf(const Sums& sums, const Slice& slice, int run, int entries, int entry,
                                     FoldBy by) {
  const int shared = slice.runs[run].shared;
  if (shared < 0) {
    return sums.runs[int64_t{run} * entries + entry];
  }
  return sums.fold.count > 0 ? FoldedOverSources(sums.fold, shared, entries, entry, by)
                             : sums.totals[int64_t{shared} * entries + entry];
}

__device__ inline void SetRunSum(const Sums& sums, const Slice& slice, int run, int entries, int entry,
                                 const DoubleDouble& sum) {
  const int slot = slice.runs[run].slot;
  sums.runs[int64_t{run} * entries + entry] = sum;
  if (slot >= 0) {
    sums.sent[int64_t{slot} * entries + entry] = sum;
  }
}

// Reads a value that other blocks of this kernel have written: not from this multiprocessor's cache.
__device__ inline DoubleDouble Fresh(const DoubleDouble* sum) {
  return {__ldcg(&sum->high), __ldcg(&sum->low)};
}

// Writes the sides of a tier's merges, for a run whose tree is walked. Every block of the run writes the same
// values, before its threads continue.
__device__ inline void SetSides(const Slice& slice, const Tier& tier, int run) {
  for (int k = static_cast<int>(threadIdx.x); k < tier.count; k += kThreads) {
    const int merge = tier.merges[k];
    if (slice.tree.merge[merge].adasum) {
      auto sum = [&](int which) {
        return SumOf(tier.sums, slice, run, 3 * tier.count, 3 * k + which, FoldBy::kAdd).Rounded();
      };
      const double dot = sum(1);
      slice.sides[int64_t{run} * slice.tree.merges + merge] = {AdasumCoefficient(dot, sum(0)),
                                                               AdasumCoefficient(dot, sum(2))};
    }
  }
  __syncthreads();
}

// ---- trees ----

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

// ---- launches ----

constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1; // of a grid

// The grid has one dimension, because the others are limited to 65535.
template <class... Parameters, class... Arguments>
void Launch(const char* what, void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream,
            const Arguments&... arguments) {
  if (blocks == 0) {
    return;
  }
  if (blocks > kMostBlocks) {
    throw std::runtime_error(std::string("AdaSum: expected at most 2^31 - 1 blocks of ") + what +
                             ", but got " + std::to_string(blocks) + "; reduce in smaller buckets");
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("AdaSum: CUDA could not launch ") + what + ": " +
                             cudaGetErrorString(error));
  }
}

inline int64_t BlocksFor(int64_t threads) { return (threads + kThreads - 1) / kThreads; }
__device__ inline int64_t ThisThread() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

// The parts of LoadKernels in gram.cu and combine.cu.
void LoadSums();
void LoadElements();

template <class... Parameters> void Load(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  CheckCuda(cudaFuncGetAttributes(&attributes, kernel), "load the kernels for this device");
}

// Calls `form` with any value of the element type.
template <class Form> void ByType(ElementType type, Form form) {
  switch (type) {
  case kFloat16: return form(__half());
  case kBfloat16: return form(__nv_bfloat16());
  case kFloat32: return form(float());
  case kFloat64: return form(double());
  }
}

template <class Form> void ForEachType(Form form) {
  for (int type = 0; type < kElementTypes; ++type) {
    ByType(static_cast<ElementType>(type), form);
  }
}

} // namespace device
} // namespace adasum_hvd
