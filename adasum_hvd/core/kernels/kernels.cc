#include "kernels/kernels.h"

#include <cstring>

namespace adasum_hvd {
namespace {

bool Runs(const Kernels* kernels) {
#if defined(__x86_64__)
  if (kernels == &kAvx512Kernels) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  }
  if (kernels == &kAvx2Kernels) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
#endif
  return true;
}

} // namespace

const Kernels* ChooseKernels(const char* name) {
  static const Kernels* const kFastestFirst[] = {
#if defined(__x86_64__)
      &kAvx512Kernels, &kAvx2Kernels,
#endif
      &kPortableKernels};
  bool any = name == nullptr || *name == '\0';
  for (const Kernels* kernels : kFastestFirst) {
    if ((any || std::strcmp(name, kernels->name) == 0) && Runs(kernels)) {
      return kernels;
    }
  }
  return nullptr;
}

} // namespace adasum_hvd
