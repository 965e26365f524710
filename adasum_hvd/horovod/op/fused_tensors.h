// The tensors that Horovod passes to an op, with the properties that Python has registered by name.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "horovod/common/common.h"
#include "horovod/common/message.h"
#include "reduce/reduce.h"

namespace adasum_hvd {

namespace hvd = horovod::common;

struct FusedTensors {
  ElementType type = kFloat32;
  double scale = 1;
  bool delta = false; // of the delta variant, by name
  std::vector<TensorView> tensors;
  std::vector<std::shared_ptr<std::atomic<uint64_t>>> checksums; // to which tensors point

  // The segments of a tensor whose observation is requested (observations.h).
  struct Range {
    std::string name;
    size_t first; // of `tensors`
    size_t count;
  };
  std::vector<Range> observations;

  // The name of a phase in Horovod's timeline.
  std::string PhaseName(Phase phase, int level) const;
};

// Groups the tensors by element type, and counts them. An error is the same on all ranks.
//
// A name that ends in "adasum.segments=" and element counts is that of several concatenated tensors.
// Horovod has no bfloat16. A tensor of float16 with "adasum.bfloat16/" in its name holds bfloat16, and
// Horovod may fuse it with others of float16.
hvd::Status ReadFusedTensors(const std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response,
                             std::vector<FusedTensors>& by_type);

// OK if the op reduces tensors of that dtype, else the error.
hvd::Status CheckType(const hvd::TensorTableEntry& entry);

} // namespace adasum_hvd
