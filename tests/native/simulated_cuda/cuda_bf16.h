// bfloat16 as CUDA names it; simulated_cuda.cc converts with the op's own portable kernels.
#pragma once

#include <cstdint>

struct __nv_bfloat16 {
  uint16_t bits;
};
float __bfloat162float(__nv_bfloat16 value);
__nv_bfloat16 __double2bfloat16(double value);
