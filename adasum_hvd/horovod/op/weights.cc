#include "op/weights.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "op/settings.h"
#include "reduce/workers.h"

namespace adasum_hvd {
namespace {

constexpr int64_t kPartElements = 64 * kBlockElements; // that a thread takes at a time

std::mutex weights_mutex;
std::unordered_map<std::string, Weights> weights_by_name;

Weights Find(const std::string& name) {
  std::lock_guard<std::mutex> guard(weights_mutex);
  const auto found = weights_by_name.find(name);
  return found == weights_by_name.end() ? Weights() : found->second;
}

// Elements [begin, end) of a segment, which is at `first` in the tensor of the older weights.
struct Part {
  const char* from;
  int64_t first;
  int64_t begin;
  int64_t end;
};

std::vector<Part> PartsOf(const Weights& weights) {
  std::vector<Part> parts;
  int64_t first = 0;
  for (size_t segment = 0; segment < weights.newer.size(); ++segment) {
    const int64_t elements = weights.elements[segment];
    for (int64_t begin = 0; begin < elements; begin += kPartElements) {
      const int64_t end = std::min(begin + kPartElements, elements);
      parts.push_back({static_cast<const char*>(weights.newer[segment]), first, begin, end});
    }
    first += elements;
  }
  return parts;
}

} // namespace

Weights WeightsOf(const hvd::TensorTableEntry& entry) {
  Weights found = Find(entry.tensor_name);
  return found.start == entry.tensor->data() ? found : Weights();
}

void RegisterWeights(const std::string& name, std::vector<int64_t> elements, void* start,
                     std::vector<void*> newer) {
  std::lock_guard<std::mutex> guard(weights_mutex);
  if (newer.empty()) {
    weights_by_name.erase(name);
  } else {
    weights_by_name[name] = {std::move(elements), start, std::move(newer),
                             std::make_shared<std::atomic<uint64_t>>(0)};
  }
}

uint64_t ChecksumOfWeights(const std::string& name) {
  const Weights weights = Find(name);
  return weights.checksum == nullptr ? 0 : weights.checksum->load();
}

uint64_t RecordWeights(const std::string& name, ElementType type, int threads) {
  static const Kernels& kernels = *Settings::FromEnvironment().kernels;
  const Weights weights = Find(name);
  const std::vector<Part> parts = PartsOf(weights);
  const int64_t bytes = ElementBytes(type);
  std::atomic<uint64_t> sum{0};
  // Fewer parts are done sooner by this thread alone.
  const int useful = std::max(std::min(threads, static_cast<int>(parts.size() / 4)), 1);
  Workers(useful).Run(static_cast<int64_t>(parts.size()), [&](int64_t index, int) {
    const Part& part = parts[index];
    for (int64_t at = part.begin; at < part.end; at += kBlockElements) {
      const int64_t n = std::min(kBlockElements, part.end - at);
      const char* from = part.from + at * bytes;
      void* const to[] = {static_cast<char*>(weights.start) + (part.first + at) * bytes};
      sum += kernels.checksum(type, from, n, part.first + at); // brings the block into the cache
      kernels.spread(from, n * bytes, to, 1, true);
    }
  });
  return sum;
}

} // namespace adasum_hvd
