// Kernels that write elements: copies, changes of weights, and the result.
#include "cuda/passes.h"

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

template <class T, int N> __global__ void CombineKernel(Slice slice, Tier last, double scale) {
  CombineBlock<T, N>(Block<T>(slice, blockIdx.x), last, scale);
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

template <class T> void LaunchCopy(const Copy* copies, Blocks blocks, cudaStream_t stream) {
  Launch("the copy kernel", CopyKernel<T>, blocks.count, stream, copies, blocks);
}

using LevelKernel = void (*)(Slice, Tier, double);
template <class T>
constexpr LevelKernel kCombine[] = {CombineKernel<T, 1>, CombineKernel<T, 2>, CombineKernel<T, 3>,
                                    CombineKernel<T, 4>, CombineKernel<T, 5>, CombineKernel<T, 6>,
                                    CombineKernel<T, 7>, CombineKernel<T, 8>};
static_assert(sizeof kCombine<float> / sizeof *kCombine<float> == kMostUnrolled);

template <class T>
void LaunchCombine(const Slice& slice, const Tier& last, double scale, cudaStream_t stream) {
  const LevelKernel kernel =
      slice.size <= kMostUnrolled ? kCombine<T>[slice.size - 1] : LevelKernel(CombineAnyKernel<T>);
  Launch("the combine kernel", kernel, slice.blocks.count, stream, slice, last, scale);
}

template <class T> void LoadCombine() {
  for (LevelKernel kernel : kCombine<T>) {
    Load(kernel);
  }
  Load(CombineAnyKernel<T>);
  Load(CopyKernel<T>);
}

} // namespace

void CopyBlocks(ElementType type, const Copy* copies, Blocks blocks, cudaStream_t stream) {
  ByType(type, [&](auto* element) {
    LaunchCopy<std::remove_pointer_t<decltype(element)>>(copies, blocks, stream);
  });
}

void Combine(const Slice& slice, const Tier& last, double scale, cudaStream_t stream) {
  ByType(slice.type, [&](auto* element) {
    LaunchCombine<std::remove_pointer_t<decltype(element)>>(slice, last, scale, stream);
  });
}

void LoadElements() {
  for (int type = 0; type < kElementTypes; ++type) {
    ByType(static_cast<ElementType>(type),
           [](auto* element) { LoadCombine<std::remove_pointer_t<decltype(element)>>(); });
  }
}

} // namespace device
} // namespace adasum_hvd
