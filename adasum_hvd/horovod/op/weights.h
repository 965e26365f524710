// Weights whose change is reduced: Python registers them by the name of the tensor with the older ones.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "horovod/common/common.h"
#include "kernels/kernels.h"

namespace adasum_hvd {

namespace hvd = horovod::common;

struct Weights {
  std::vector<int64_t> elements; // by segment
  void* start = nullptr;         // the tensor
  std::vector<void*> newer;      // by segment
  // Of the newer weights, as the latest reduction wrote them.
  std::shared_ptr<std::atomic<uint64_t>> checksum;
};

// Empty for a tensor without registered weights, and for the zeros of a rank that has joined.
Weights WeightsOf(const hvd::TensorTableEntry& entry);

// See horovod_adasum_register_weights (exports.cc).
void RegisterWeights(const std::string& name, std::vector<int64_t> elements, void* start,
                     std::vector<void*> newer);

// See horovod_adasum_weights_checksum and horovod_adasum_record_weights (exports.cc). 0 for an unknown name.
uint64_t ChecksumOfWeights(const std::string& name);
uint64_t RecordWeights(const std::string& name, ElementType type, int threads);

} // namespace adasum_hvd
