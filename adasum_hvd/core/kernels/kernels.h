// The inner loops, on blocks of at most kBlockElements elements. Portable C++ with GCC's vector types,
// compiled once per instruction set from kernels.inc; every build gives the same bits, because each sum
// runs over the same eight lanes in the same order and nothing is contracted to a fused multiply-add.
#pragma once

#include <cstddef>
#include <cstdint>

namespace adasum_hvd {

// Sums run over blocks counted from a tensor's own start, so that they do not depend on fusion or slicing.
constexpr int64_t kBlockElements = 4096;

enum ElementType { kFloat16 = 0, kFloat32 = 1, kFloat64 = 2, kBfloat16 = 3 };
constexpr int kElementTypes = 4;
inline int64_t ElementBytes(ElementType type) { return type == kBfloat16 ? 2 : int64_t{2} << type; }

struct Kernels {
  const char* name;
  // sums[GramIndex(i, j)] = (scale x_i).(scale x_j); products and sums in float64.
  void (*gram[kElementTypes])(const void* const* x, int count, int64_t n, double scale, double* sums);
  // out = sum_i c_i x_i in rank order, in float64, rounded once; out may be one of the x.
  void (*combine[kElementTypes])(const void* const* x, const double* c, int count, int64_t n, void* out);
  // out = scale x, in float64.
  void (*widen[kElementTypes])(const void* x, int64_t n, double scale, double* out);
  // out = scale x, rounded once to the element type.
  void (*narrow[kElementTypes])(const double* x, int64_t n, double scale, void* out);
  // Copies `bytes` bytes to `count` addresses; `past_caches` if they are not needed there soon.
  void (*spread)(const void* from, int64_t bytes, void* const* to, int count, bool past_caches);
  // sum_i (bits(x_i) xor mask(first + i))^2 modulo 2^64; of float64 each half counts as an element. Parts of
  // a tensor add up, in any order and cut anywhere.
  uint64_t (*checksum)(ElementType type, const void* x, int64_t n, int64_t first);
  // The largest magnitude; NaN counts as infinity. float64 only: the others need no scaling.
  double (*max_abs)(const double* x, int64_t n);
};

// The fastest build that this processor runs, or the one that ADASUM_HVD_KERNELS names ("portable", "avx2",
// "avx512"); null if that name is unknown or this processor lacks it.
const Kernels* ChooseKernels(const char* name);

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

} // namespace adasum_hvd
