// What reduce.h does, on a CUDA device: the same placement, levels, trees and block sums. Everything is
// enqueued on one stream, the exchanges too, and nothing waits for the device:
//
//   1. one copy tells the device what there is: blocks, addresses, trees (plan_device.h), unless the same
//      tensors were reduced before;
//   2. what does not lie contiguously is laid end to end, changes of weights are formed (combine.cu);
//
//   and in each level
//   3. every rank receives its group's elements of its slice, whole, and sums the Gram matrices (gram.cu);
//   4. the sums of the tensors that several slices share are exchanged, if there are such tensors;
//   5. coefficients, or a flag where a node is ill-conditioned (solve.cu). The trees of flagged tensors are
//      walked on vectors, a tier at a time; for all others those kernels return at once;
//   6. every rank combines its slice, which is what the next level reduces with other groups.
//
//   (3 to 6 of what is small are one kernel behind the exchange: small.cu.)
//
//   7. The slices are sent to the others, from the last level back to the first; what was laid end to end is
//      put back, changes are added to the weights before.
#pragma once

#include <memory>
#include <vector>

#include <cuda_runtime.h>

#include "cuda/observation_device.h"
#include "cuda/plan_device.h"
#include "reduce/reduce.h"

namespace adasum_hvd {

// As Reduce (reduce.h), with tensors in the memory of the current device and transports that enqueue their
// exchanges on `stream`. Returns when all is enqueued. `observer` is called when a phase has been.
//
// The tensors' rows (TensorView::observed) are written by what is returned, once the stream has come so far;
// null where there are none.
std::shared_ptr<DeviceObservation> ReduceOnDevice(const std::vector<TensorView>& tensors, ElementType type,
                                                  const std::vector<ReduceLevel>& levels, double scale,
                                                  const ReduceSettings& settings, DeviceScratch& scratch,
                                                  cudaStream_t stream, const PhaseObserver& observer);

} // namespace adasum_hvd
