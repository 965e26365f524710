#define ADASUM_ISA avx512
#define ADASUM_ISA_NAME "avx512"
#define ADASUM_KERNELS kAvx512Kernels
#include "kernels/kernels.inc"
