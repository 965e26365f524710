// What reduce.h does, on a CUDA device: the same levels, slices, trees and block sums. Everything is enqueued
// on one stream, the exchanges too; nothing waits for the device.
#pragma once

#include <vector>

#include <cuda_runtime.h>

#include "cuda/device_memory.h"
#include "reduce/reduce.h"

namespace adasum_hvd {

// As Reduce (reduce.h), with tensors in the memory of the current device and transports that enqueue their
// exchanges on `stream`. Returns when all is enqueued. `observer` is called when a phase has been.
void ReduceOnDevice(const std::vector<TensorView>& tensors, ElementType type,
                    const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                    DeviceScratch& scratch, cudaStream_t stream, const PhaseObserver& observer);

} // namespace adasum_hvd
