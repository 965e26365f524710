// The tables of one reduction for its kernels: blocks, runs, addresses, trees and sums, in one piece of
// device memory that one copy fills. Reductions of the same tensors at the same addresses share a plan, so
// that only the first one uploads it.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/device_memory.h"
#include "reduce/placement.h"

namespace adasum_hvd {

constexpr int kSlots = 2; // the most sums that a rank sends, because a slice has two ends
// Sets of sums: kernels read one while they write the other.
constexpr int kSets = 2;

// An exchange among the ranks of one group, with the sums of tensors that lie on several of their slices.
struct SumExchange {
  size_t level; // of the group
  int rank;     // in it
  int size;
  std::vector<int64_t> slots; // per rank: the number of sums that it sends
  device::Fold fold = {};
  DoubleDouble* gathered[kSets] = {}; // kSlots sums per rank
  SumExchange* next = nullptr;        // in the level before

  // The address of the sums of a rank, with `entries` entries each.
  DoubleDouble* Of(int of, int entries, int set) const {
    return gathered[set] + int64_t{kSlots} * of * entries;
  }
  DoubleDouble* Sent(int entries, int set) const { return Of(rank, entries, set); }
};

struct DeviceLevel {
  const PlacedLevel& placed;
  int rank; // in the level's group
  int size;
  int64_t entries = 0; // of the longest row
  device::Slice slice = {};
  std::vector<int32_t> shared = {}; // per run: its row of the totals, or -1
  DoubleDouble* run_sums[kSets] = {};
  DoubleDouble* totals[kSets] = {};
  std::deque<SumExchange> exchanges; // from this level's group to the first level's
  std::deque<device::Tier> tiers;    // after the first, which needs only the Gram matrix

  // A single exchange needs no separate kernel to fold the received sums: the kernel that reads them does it.
  bool folds_where_read() const { return exchanges.size() == 1; }
  device::Sums SumsOf(int entries, int set) const;
};

struct DeviceCopies {
  const Copy* at = nullptr;
  device::Blocks blocks = {};
};

class Arena;
struct DeviceScratch;

class DevicePlan {
public:
  // Enqueues the copy of all tables to the device, into `memory`.
  DevicePlan(const std::vector<TensorView>& tensors, ElementType type, const std::vector<ReduceLevel>& levels,
             double scale, const ReduceSettings& settings, std::unique_ptr<DeviceBuffer> memory,
             DeviceScratch& scratch, cudaStream_t stream);
  DevicePlan(const DevicePlan&) = delete;
  DevicePlan& operator=(const DevicePlan&) = delete;

  // Whether it is the plan of such a reduction, with the current scratch memory.
  bool Fits(const std::vector<TensorView>& tensors, ElementType type, const std::vector<ReduceLevel>& levels,
            double scale, const ReduceSettings& settings, const DeviceScratch& scratch) const;
  std::unique_ptr<DeviceBuffer> TakeMemory() { return std::move(memory_); }

  ElementType type() const { return type_; }
  bool replicates() const { return placement_.replicates(); }

  std::deque<DeviceLevel> levels; // a deque, because addresses of their members are kept
  DeviceCopies packs;
  DeviceCopies unpacks;

private:
  std::map<int, int> PlanExchanges(size_t level, Arena& arena);
  void PlanSlice(size_t level, Arena& arena);

  const std::vector<TensorView> tensors_;
  const ElementType type_;
  const double scale_;
  const int64_t replicate_bytes_;
  std::vector<Tree> trees_; // per level, with this rank's position
  std::vector<int> ranks_;
  char* staging_ = nullptr; // of the scratch memory, if used
  char* received_ = nullptr;
  Placement placement_;
  std::unique_ptr<DeviceBuffer> memory_;
};

// The plans used last, the most recent first.
class DevicePlans {
public:
  DevicePlan& For(const std::vector<TensorView>& tensors, ElementType type,
                  const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                  DeviceScratch& scratch, cudaStream_t stream);

private:
  static constexpr size_t kMost = 64; // a bucket per plan
  std::list<DevicePlan> plans_;
  bool kernels_loaded_ = false;
};

// One per stream, kept as long as the op.
struct DeviceScratch {
  DeviceBuffer staging;  // for slices that are not contiguous in the caller's memory
  DeviceBuffer received; // the other ranks' elements of this rank's slices
  Uploads uploads;
  Downloads downloads;
  DevicePlans plans;
  DeviceCounter explicit_tensors; // tensors whose trees were walked
  StreamMark end;                 // of the enqueued work, if a reduction has failed
};

} // namespace adasum_hvd
