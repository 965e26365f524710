// A small reduction that every rank does as a whole, in one kernel, because no step has to wait for other
// blocks. It stays because it replaces ten kernels (docs/devices.md); the time that this saves is a model,
// not a measurement.
#include "cuda/passes.h"

namespace adasum_hvd {
namespace device {
namespace {

// One CUDA block per run.
template <class T, int N> __global__ void SmallKernel(Slice slice, Sums gram, Tiers tiers, double scale) {
  const int run = static_cast<int>(blockIdx.x);
  const int first = slice.runs[run].first_block, end = first + slice.runs[run].blocks();
  for (int block = first; block < end; ++block) {
    SumGram<T, N>(Block<T>(slice, block));
    __syncthreads();
  }
  FoldRun(slice, gram, run, N * (N + 1) / 2);
  __syncthreads();
  if (threadIdx.x < kWarp) {
    SolveRun(slice, gram, run);
  }
  __syncthreads();
  Tier last = {};
  for (int t = 0; t < tiers.count; ++t) {
    const Tier& tier = tiers.at[t];
    if (slice.walk_tree[run] != 0) {
      SetSides(slice, last, run);
      for (int block = first; block < end; ++block) {
        for (int k = 0; k < tier.count; ++k) {
          SumMerge(Block<T>(slice, block), tier, k);
          __syncthreads();
        }
      }
      FoldRun(slice, tier.sums, run, 3 * tier.count);
      __syncthreads();
    }
    last = tier;
  }
  for (int block = first; block < end; ++block) {
    CombineBlock<T, N>(Block<T>(slice, block), last, scale);
  }
}

using Kernel = void (*)(Slice, Sums, Tiers, double);
template <class T>
constexpr Kernel kSmall[] = {SmallKernel<T, 2>, SmallKernel<T, 3>, SmallKernel<T, 4>, SmallKernel<T, 5>,
                             SmallKernel<T, 6>, SmallKernel<T, 7>, SmallKernel<T, 8>};
static_assert(sizeof kSmall<float> / sizeof *kSmall<float> == kMostUnrolled - 1);

// Calls `form` with a null pointer to the element type, of those that need no scale.
template <class Form> void ByUnscaledType(ElementType type, Form form) {
  ByType(type, [&](auto* element) {
    if constexpr (!std::is_same_v<decltype(element), double*>) {
      form(element);
    }
  });
}

} // namespace

bool IsSmall(ElementType type, int ranks, int64_t longest_run) {
  return type != kFloat64 && ranks > 1 && ranks <= kMostUnrolled && longest_run <= kMostSmall;
}

void ReduceSmall(const Slice& slice, const Sums& gram, const Tiers& tiers, double scale,
                 cudaStream_t stream) {
  ByUnscaledType(slice.type, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    Launch("the kernel of small reductions", kSmall<T>[slice.size - 2], slice.run_count, stream, slice, gram,
           tiers, scale);
  });
}

void LoadSmall() {
  for (int type = 0; type < kElementTypes; ++type) {
    ByUnscaledType(static_cast<ElementType>(type), [](auto* element) {
      for (Kernel kernel : kSmall<std::remove_pointer_t<decltype(element)>>) {
        Load(kernel);
      }
    });
  }
}

} // namespace device
} // namespace adasum_hvd
