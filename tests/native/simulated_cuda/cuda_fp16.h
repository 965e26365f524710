// IEEE binary16 as CUDA names it; simulated_cuda.cc converts with the op's own portable kernels.
#pragma once

#include <cstdint>

struct __half {
  uint16_t bits;
};
float __half2float(__half value);
__half __double2half(double value);
