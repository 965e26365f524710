#define ADASUM_ISA avx2
#define ADASUM_ISA_NAME "avx2"
#define ADASUM_KERNELS kAvx2Kernels
#include "kernels/kernels.inc"
