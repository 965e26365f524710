// The reduction of reduce.h on a CUDA device, with the same placement, levels, trees and block sums. All
// work, including the exchanges, is enqueued on one stream, and the host does not wait for the device:
//
//   1. one copy uploads the tables (plan_device.h), unless the same tensors were reduced before;
//   2. slices that are not contiguous are concatenated, and changes of weights are formed (combine.cu);
//
//   and in each level
//   3. every rank receives its group's elements of its slice, whole, and sums the Gram matrices (gram.cu);
//   4. the sums of tensors that lie on several slices are exchanged, if there are any;
//   5. coefficients, or a flag if a node is ill-conditioned (solve.cu). The trees of flagged tensors are
//      walked on vectors, a tier at a time; for all others those kernels return at once;
//   6. every rank combines its slice. The next level reduces this slice over other groups.
//
//   7. An allgather sends the slices, from the last level back to the first; concatenated slices are copied
//      back, and changes are added to the older weights.
#pragma once

#include <memory>
#include <vector>

#include <cuda_runtime.h>

#include "cuda/observation_device.h"
#include "cuda/plan_device.h"
#include "reduce/reduce.h"

namespace adasum_hvd {

// As Reduce (reduce.h), with tensors in the memory of the current device and transports that enqueue their
// exchanges on `stream`. Returns after all work is enqueued. `observer` is called after each phase is
// enqueued.
//
// The returned object writes the tensors' rows (TensorView::observation) after the stream has completed; null
// if there are none.
std::shared_ptr<DeviceObservation> ReduceOnDevice(const std::vector<TensorView>& tensors, ElementType type,
                                                  const std::vector<ReduceLevel>& levels, double scale,
                                                  const ReduceSettings& settings, DeviceScratch& scratch,
                                                  cudaStream_t stream, const PhaseObserver& observer);

} // namespace adasum_hvd
