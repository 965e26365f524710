#define ADASUM_ISA portable
#define ADASUM_ISA_NAME "portable"
#define ADASUM_KERNELS kPortableKernels
#include "kernels/kernels.inc"
