// TensorFlow no longer exports the function by which Horovod's TensorFlow ops ask for the CUDA stream of a
// kernel (2.21 does not): Horovod compiles, and does not load. This is that function, hidden in Horovod's
// library, by the way that TensorFlow's own kernels take (tensorflow/core/util/gpu_kernel_helper.h,
// since 2.16 at least).
#include <cuda_runtime.h>

#include "tensorflow/compiler/xla/stream_executor/stream.h"

namespace stream_executor {
namespace gpu {

// As Horovod's mpi_ops.cc declares it.
cudaStream_t AsGpuStreamValue(Stream* stream);

cudaStream_t AsGpuStreamValue(Stream* stream) {
  return static_cast<cudaStream_t>(stream->platform_specific_handle().stream);
}

} // namespace gpu
} // namespace stream_executor
