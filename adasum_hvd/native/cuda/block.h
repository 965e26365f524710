// What the kernels share: elements, blocks and trees as a thread sees them, and how a kernel is launched.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device.h"

namespace adasum_hvd {
namespace device {

constexpr int kThreads = 128;    // that share a block of kBlockElements elements
constexpr int kWarp = 32;        // threads
constexpr int kVector = 4;       // consecutive elements that a thread takes at a time
constexpr int kMostUnrolled = 8; // ranks that kernels are compiled for one by one
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

// ---- blocks and trees ----

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

inline dim3 Grid(int64_t x, int64_t y = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}
inline int64_t BlocksFor(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

// Calls `form` with a null pointer to the element type.
template <class Form> void ByType(ElementType type, Form form) {
  switch (type) {
  case kFloat16: return form(static_cast<__half*>(nullptr));
  case kBfloat16: return form(static_cast<__nv_bfloat16*>(nullptr));
  case kFloat32: return form(static_cast<float*>(nullptr));
  case kFloat64: return form(static_cast<double*>(nullptr));
  }
}

} // namespace device
} // namespace adasum_hvd
