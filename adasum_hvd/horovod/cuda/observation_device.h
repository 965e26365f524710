// An Observation (reduce/observation.h) of tensors on a device: its sums are copied to the host in the order
// of the stream. The host waits for the device, and writes rows, when they are requested.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <cuda_runtime.h>

#include "cuda/device_memory.h"
#include "cuda/plan_device.h"
#include "reduce/observation.h"

namespace adasum_hvd {

class DeviceObservation {
public:
  DeviceObservation(const std::vector<TensorView>& tensors, const std::vector<ReduceLevel>& levels,
                    const DevicePlan& plan, DeviceScratch& scratch);

  // To be enqueued after a level is solved, and its trees are walked up to the tier `last`, whose sums are
  // written, but not its sides.
  void CopyGrams(size_t index, const DeviceLevel& level, cudaStream_t stream);
  void CopyCoefficients(size_t index, const DeviceLevel& level, const device::Tier& last,
                        cudaStream_t stream);

  // Writes the tensors' rows, once. Returns false if the device has not completed within the timeout.
  bool Write(int seconds);

private:
  // Sums of a slice's tensors, copied: a row per run, and one per tensor that slices share.
  struct Rows {
    DoubleDouble* runs;
    DoubleDouble* totals;
  };
  // The copied data of a level (device.h), by run.
  struct Level {
    std::vector<Run> runs;
    std::vector<int32_t> shared; // row of the totals, or -1
    std::vector<int> last_tier;  // by merge of the tree, in tiers after the first
    int64_t totals;              // rows
    int64_t size;                // ranks
    int64_t merges;
    std::shared_ptr<char> memory;
    Rows gram;
    Rows last;
    double* coefficients;
    Sides* sides;
    double* scales; // null but for float64
    int32_t* walk_tree;
  };

  void Place(Level& level, ElementType type, DeviceScratch& scratch) const;
  static void CopyRows(const Level& level, const DeviceLevel& on_device, int entries, int set, Rows& to,
                       cudaStream_t stream);
  void WriteRun(const Level& level, size_t index, size_t run) const;

  const Observation observation_;
  std::vector<Level> levels_;
  StreamMark copied_;
  bool written_ = false;
};

} // namespace adasum_hvd
