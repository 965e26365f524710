#include "job.h"

#include <mutex>
#include <numeric>
#include <unordered_map>

#include "statistics.h"

namespace adasum_hvd {
namespace {

namespace hvd = horovod::common;

constexpr char kDeltaPrefix[] = "adasum.delta/";
constexpr char kBfloat16Prefix[] = "adasum.bfloat16/";

// Tensors that are many tensors laid end to end, by their name in Horovod; the sum of a registered
// tensor's segments is checked against its size before anything is sent.
std::mutex segments_mutex;
struct Segments {
  std::vector<int64_t> elements;
  const void* start = nullptr; // the tensor, if it holds weights
  std::vector<void*> weights;  // and newer ones, by segment
};
std::unordered_map<std::string, Segments> segments_by_name;

Segments SegmentsOf(const hvd::TensorTableEntry& entry) {
  std::lock_guard<std::mutex> guard(segments_mutex);
  const auto found = segments_by_name.find(entry.tensor_name);
  if (found == segments_by_name.end()) {
    return {{entry.tensor->shape().num_elements()}, nullptr, {}};
  }
  Segments segments = found->second;
  if (segments.start != entry.tensor->data()) { // zeros that stand in for a rank that has joined
    segments.weights.clear();
  }
  return segments;
}

bool Has(const std::string& name, const char* prefix) { return name.find(prefix) != std::string::npos; }

bool ElementTypeOf(const hvd::TensorTableEntry& entry, ElementType& type) {
  switch (entry.tensor->dtype()) {
  case hvd::HOROVOD_FLOAT16:
    type = Has(entry.tensor_name, kBfloat16Prefix) ? kBfloat16 : kFloat16;
    return true;
  case hvd::HOROVOD_FLOAT32: type = kFloat32; return true;
  case hvd::HOROVOD_FLOAT64: type = kFloat64; return true;
  default: return false;
  }
}

Job& JobOf(const hvd::TensorTableEntry& entry, std::vector<Job>& jobs) {
  ElementType type = kFloat32;
  ElementTypeOf(entry, type);
  for (Job& job : jobs) {
    if (job.type == type) {
      return job;
    }
  }
  jobs.emplace_back();
  jobs.back().type = type;
  jobs.back().delta = Has(entry.tensor_name, kDeltaPrefix);
  return jobs.back();
}

} // namespace

// Levels above the first have a number.
std::string Job::PhaseName(Phase phase, int level) const {
  const char* what = phase == Phase::kExchangeAndGram ? "EXCHANGE_GRAM"
                     : phase == Phase::kSharedTensors ? "SOLVE"
                                                      : "COMBINE_GATHER";
  return std::string(delta ? "ADASUM_DELTA_" : "ADASUM_") + what +
         (level == 0 ? "" : "_LEVEL_" + std::to_string(level + 1));
}

hvd::Status CheckType(const hvd::TensorTableEntry& entry) {
  ElementType type;
  if (ElementTypeOf(entry, type)) {
    return hvd::Status::OK();
  }
  return hvd::Status::InvalidArgument(
      "AdaSum of tensor \"" + entry.tensor_name + "\": required dtype float16, float32 or float64, got " +
      hvd::DataType_Name(entry.tensor->dtype()) + "; cast it before the reduction");
}

hvd::Status ReadJobs(const std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response,
                     std::vector<Job>& jobs) {
  for (const hvd::TensorTableEntry& entry : entries) {
    const Segments segments = SegmentsOf(entry);
    const std::vector<int64_t>& sizes = segments.elements;
    const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    if (total != entry.tensor->shape().num_elements()) {
      return hvd::Status::InvalidArgument("AdaSum of tensor \"" + entry.tensor_name +
                                          "\": required segments of " +
                                          std::to_string(entry.tensor->shape().num_elements()) +
                                          " elements in total, got " + std::to_string(total));
    }
    Job& job = JobOf(entry, jobs);
    const char* input = static_cast<const char*>(entry.tensor->data());
    char* output = static_cast<char*>(const_cast<void*>(entry.output->data()));
    for (size_t k = 0; k < sizes.size(); ++k) {
      if (segments.weights.empty()) {
        job.tensors.push_back({input, output, sizes[k]});
      } else {
        job.tensors.push_back({segments.weights[k], segments.weights[k], sizes[k], input});
      }
      input += sizes[k] * ElementBytes(job.type);
      output += sizes[k] * ElementBytes(job.type);
    }
    Count(kBytes, static_cast<int64_t>(entry.tensor->size()));
    Count(kTensors, static_cast<int64_t>(sizes.size()));
    Count(kDeltaTensors, Has(entry.tensor_name, kDeltaPrefix) ? static_cast<int64_t>(sizes.size()) : 0);
  }
  for (Job& job : jobs) { // AdaSum(s g) = s AdaSum(g): both factors are applied once, in float64
    job.scale = response.prescale_factor() * response.postscale_factor();
  }
  Count(kCalls, 1);
  return hvd::Status::OK();
}

void RegisterSegments(const std::string& name, std::vector<int64_t> elements, const void* start,
                      std::vector<void*> weights) {
  std::lock_guard<std::mutex> guard(segments_mutex);
  if (elements.empty()) {
    segments_by_name.erase(name);
  } else {
    segments_by_name[name] = {std::move(elements), start, std::move(weights)};
  }
}

} // namespace adasum_hvd
