// The cache of plans.
#include <algorithm>

#include "cuda/plan_device.h"

namespace adasum_hvd {
namespace {

bool Same(const TensorView& a, const TensorView& b) {
  return a.input == b.input && a.output == b.output && a.elements == b.elements && a.start == b.start;
}

bool Same(const Merge& a, const Merge& b) {
  return a.left == b.left && a.right == b.right && a.adasum == b.adasum;
}

// Trees are equal if their merges and weights are.
bool Same(const Tree& a, const Tree& b) {
  const auto same = [](const Merge& one, const Merge& other) { return Same(one, other); };
  return a.leaves == b.leaves && a.leaf_weights == b.leaf_weights &&
         std::equal(a.merges.begin(), a.merges.end(), b.merges.begin(), b.merges.end(), same);
}

} // namespace

bool DevicePlan::Fits(const std::vector<TensorView>& tensors, ElementType type,
                      const std::vector<ReduceLevel>& requested, double scale, const ReduceSettings& settings,
                      const DeviceScratch& scratch) const {
  const auto same = [](const TensorView& a, const TensorView& b) { return Same(a, b); };
  bool fits = type == type_ && scale == scale_ && settings.replicate_bytes == replicate_bytes_ &&
              requested.size() == trees_.size() &&
              (staging_ == nullptr || staging_ == scratch.staging.get()) &&
              (received_ == nullptr || received_ == scratch.received.get()) &&
              std::equal(tensors.begin(), tensors.end(), tensors_.begin(), tensors_.end(), same);
  for (size_t k = 0; fits && k < requested.size(); ++k) {
    fits = requested[k].transport->rank() == ranks_[k] && Same(*requested[k].tree, trees_[k]);
  }
  return fits;
}

DevicePlan& DevicePlans::For(const std::vector<TensorView>& tensors, ElementType type,
                             const std::vector<ReduceLevel>& levels, double scale,
                             const ReduceSettings& settings, DeviceScratch& scratch, cudaStream_t stream) {
  if (!kernels_loaded_) {
    device::LoadKernels();
    kernels_loaded_ = true;
  }
  const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const DevicePlan& plan) {
    return plan.Fits(tensors, type, levels, scale, settings, scratch);
  });
  if (found != plans_.end()) {
    plans_.splice(plans_.begin(), plans_, found);
    return plans_.front();
  }
  auto memory = std::make_unique<DeviceBuffer>();
  if (plans_.size() ==
      kMost) { // its last reduction completes, in stream order, before a new one writes there
    memory = plans_.back().TakeMemory();
    plans_.pop_back();
  }
  return plans_.emplace_front(tensors, type, levels, scale, settings, std::move(memory), scratch, stream);
}

} // namespace adasum_hvd
