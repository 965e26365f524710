// Which rank reduces which elements: the fused tensors are cut into one slice per rank, at block borders.
#pragma once

#include <cstdint>
#include <vector>

namespace adasum_hvd {

// A stretch of one tensor inside a slice; `first` is a multiple of kBlockElements.
struct Run {
  int tensor;
  int64_t first;  // element of the tensor
  int64_t count;  // elements
  int64_t offset; // element of the slice
  bool whole;     // the run is the whole tensor
};

struct Slice {
  int64_t elements = 0;
  std::vector<Run> runs;
};

// Cuts tensors of the given element counts into `size` slices of about the same length. With `replicate`
// every slice is everything: each rank then reduces all tensors by itself.
std::vector<Slice> MakeSlices(const std::vector<int64_t>& tensor_elements, int size, bool replicate);

} // namespace adasum_hvd
