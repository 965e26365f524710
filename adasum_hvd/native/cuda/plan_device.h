// What the kernels of one reduction are told: tables of blocks, runs, addresses, trees and sums, in one piece
// of device memory that one copy fills.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/device_memory.h"
#include "reduce/placement.h"

namespace adasum_hvd {

constexpr int kSlots = 2; // sums that a rank sends at most: a slice has two ends

// An exchange of sums among the ranks of one group, of the tensors that lie on several of their slices.
struct SumExchange {
  Transport* transport;
  std::vector<int64_t> slots; // per rank: how many sums it sends
  device::Fold fold = {};
  DoubleDouble* gathered = nullptr; // kSlots sums per rank
  SumExchange* next = nullptr;      // in the level below

  // Where the sums of a rank are, each of so many entries.
  DoubleDouble* Of(int rank, int entries) const { return gathered + int64_t{kSlots} * rank * entries; }
  DoubleDouble* Sent(int entries) const { return Of(transport->rank(), entries); }
};

// The merges of a tier of a tree.
struct DeviceTier {
  const int32_t* merges = nullptr;
  int count = 0;
};

struct DeviceLevel {
  const PlacedLevel& placed;
  device::Slice slice = {};
  std::deque<SumExchange> exchanges; // from this level's group to the lowest level's
  std::deque<DeviceTier> tiers;      // above the first, which needs no more than the Gram matrix
};

struct DeviceCopies {
  const Copy* at = nullptr;
  device::Blocks blocks = {};
};

class Arena;

class DevicePlan {
public:
  // Enqueues the copy of everything to the device.
  DevicePlan(const Placement& placement, ElementType type, DeviceScratch& scratch, cudaStream_t stream);
  DevicePlan(const DevicePlan&) = delete;
  DevicePlan& operator=(const DevicePlan&) = delete;

  std::deque<DeviceLevel> levels; // that do not move, nor do their members
  DeviceCopies packs;
  DeviceCopies unpacks;

private:
  std::map<int, int> PlanExchanges(size_t level, Arena& arena);
  void PlanSlice(size_t level, ElementType type, Arena& arena);
};

} // namespace adasum_hvd
