#include "op/fused_tensors.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>

#include "op/observations.h"
#include "op/statistics.h"
#include "op/weights.h"

namespace adasum_hvd {
namespace {

constexpr int64_t kMostSegments = 1 << 24; // of one length
constexpr char kDeltaPrefix[] = "adasum.delta/";
constexpr char kBfloat16Prefix[] = "adasum.bfloat16/";
constexpr char kSegments[] = "adasum.segments=";

// The segments that end a name: 768, 768 and 64 elements for "adasum.segments=768*2,64". Else one.
std::vector<int64_t> SegmentsOf(const hvd::TensorTableEntry& entry) {
  const std::string& name = entry.tensor_name;
  const size_t found = name.find(kSegments);
  if (found == std::string::npos) {
    return {entry.tensor->shape().num_elements()};
  }
  std::vector<int64_t> elements;
  const char* at = name.data() + found + sizeof kSegments - 1;
  const char* end = name.data() + name.size();
  for (bool more = true; more;) {
    int64_t each = 0, times = 1;
    at = std::from_chars(at, end, each).ptr;
    if (at != end && *at == '*') {
      at = std::from_chars(at + 1, end, times).ptr;
    }
    elements.insert(elements.end(), std::clamp<int64_t>(times, 0, kMostSegments), each);
    more = at != end && *at == ',';
    at += more ? 1 : 0;
  }
  return elements;
}

bool Has(const std::string& name, const char* prefix) { return name.find(prefix) != std::string::npos; }

std::optional<ElementType> ElementTypeOf(const hvd::TensorTableEntry& entry) {
  switch (entry.tensor->dtype()) {
  case hvd::HOROVOD_FLOAT16: return Has(entry.tensor_name, kBfloat16Prefix) ? kBfloat16 : kFloat16;
  case hvd::HOROVOD_FLOAT32: return kFloat32;
  case hvd::HOROVOD_FLOAT64: return kFloat64;
  default: return std::nullopt;
  }
}

FusedTensors& FusedTensorsFor(const hvd::TensorTableEntry& entry, const hvd::Response& response,
                              std::vector<FusedTensors>& by_type) {
  const ElementType type = *ElementTypeOf(entry); // CheckType has accepted the dtype
  for (FusedTensors& fused : by_type) {
    if (fused.type == type) {
      return fused;
    }
  }
  by_type.emplace_back();
  by_type.back().type = type;
  // AdaSum(s g) = s AdaSum(g): both factors are applied once, in float64.
  by_type.back().scale = response.prescale_factor() * response.postscale_factor();
  by_type.back().delta = Has(entry.tensor_name, kDeltaPrefix);
  return by_type.back();
}

} // namespace

// Levels after the first have a number.
std::string FusedTensors::PhaseName(Phase phase, int level) const {
  const char* name = phase == Phase::kReduceScatterGram ? "REDUCE_SCATTER_GRAM"
                     : phase == Phase::kCoefficients    ? "COEFFICIENTS"
                                                        : "COMBINE_ALLGATHER";
  return std::string(delta ? "ADASUM_DELTA_" : "ADASUM_") + name +
         (level == 0 ? "" : "_LEVEL_" + std::to_string(level + 1));
}

hvd::Status CheckType(const hvd::TensorTableEntry& entry) {
  if (ElementTypeOf(entry)) {
    return hvd::Status::OK();
  }
  return hvd::Status::InvalidArgument(
      "AdaSum of tensor \"" + entry.tensor_name + "\": expected dtype float16, float32 or float64, but got " +
      hvd::DataType_Name(entry.tensor->dtype()) + "; cast it before the reduction");
}

hvd::Status ReadFusedTensors(const std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response,
                             std::vector<FusedTensors>& by_type) {
  for (const hvd::TensorTableEntry& entry : entries) {
    // All ranks have the same name, so one that has joined, or has no such bucket, cuts it as the others.
    const std::vector<int64_t> sizes = SegmentsOf(entry);
    const Weights weights = WeightsOf(entry);
    const bool fits = weights.newer.empty() || weights.elements == sizes;
    const std::vector<int64_t>& actual = fits ? sizes : weights.elements;
    const int64_t total = std::accumulate(actual.begin(), actual.end(), int64_t{0});
    if (!fits || total != entry.tensor->shape().num_elements()) {
      return hvd::Status::InvalidArgument("AdaSum of tensor \"" + entry.tensor_name +
                                          "\": expected segments of " +
                                          std::to_string(entry.tensor->shape().num_elements()) +
                                          " elements in total, but got " + std::to_string(total));
    }
    FusedTensors& fused = FusedTensorsFor(entry, response, by_type);
    if (ObservationRequested(entry.tensor_name)) {
      fused.observations.push_back({entry.tensor_name, fused.tensors.size(), sizes.size()});
    }
    const char* input = static_cast<const char*>(entry.tensor->data());
    char* output = static_cast<char*>(const_cast<void*>(entry.output->data()));
    if (weights.checksum != nullptr) {
      weights.checksum->store(0);
      fused.checksums.push_back(weights.checksum);
    }
    int64_t first = 0;
    for (size_t k = 0; k < sizes.size(); ++k) {
      if (weights.newer.empty()) {
        fused.tensors.push_back({input, output, sizes[k]});
      } else {
        fused.tensors.push_back(
            {weights.newer[k], weights.newer[k], sizes[k], input, weights.checksum.get(), first});
      }
      first += sizes[k];
      input += sizes[k] * ElementBytes(fused.type);
      output += sizes[k] * ElementBytes(fused.type);
    }
    Count(kBytes, static_cast<int64_t>(entry.tensor->size()));
    Count(kTensors, static_cast<int64_t>(sizes.size()));
    Count(kDeltaTensors, Has(entry.tensor_name, kDeltaPrefix) ? static_cast<int64_t>(sizes.size()) : 0);
  }
  Count(kCalls, 1);
  return hvd::Status::OK();
}

} // namespace adasum_hvd
