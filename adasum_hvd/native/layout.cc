#include "layout.h"

#include <algorithm>
#include <numeric>

#include "kernels.h"

namespace adasum_hvd {
namespace {

void Append(Slice& slice, int tensor, int64_t first, int64_t count, int64_t tensor_elements) {
  slice.runs.push_back({tensor, first, count, slice.elements, count == tensor_elements});
  slice.elements += count;
}

// The first block border of the tensor that is at or behind `wanted` elements.
int64_t BorderAtOrAfter(int64_t wanted, int64_t tensor_elements) {
  int64_t blocks = (wanted + kBlockElements - 1) / kBlockElements;
  return std::min(blocks * kBlockElements, tensor_elements);
}

} // namespace

std::vector<Slice> MakeSlices(const std::vector<int64_t>& tensor_elements, int size, bool replicate) {
  const int64_t total = std::accumulate(tensor_elements.begin(), tensor_elements.end(), int64_t{0});
  const int slices_to_fill = replicate ? 1 : size;
  std::vector<Slice> slices(size);
  int slice = 0;
  int64_t before = 0; // elements of the tensors already dealt out
  for (int tensor = 0; tensor < static_cast<int>(tensor_elements.size()); ++tensor) {
    const int64_t elements = tensor_elements[tensor];
    int64_t first = 0;
    while (first < elements) {
      // Slice s ends at the first border at or behind (s + 1) / size of everything.
      const int64_t end_of_slice =
          slice + 1 == slices_to_fill
              ? total
              : total / slices_to_fill * (slice + 1) + total % slices_to_fill * (slice + 1) / slices_to_fill;
      const int64_t end = end_of_slice <= before ? 0 : BorderAtOrAfter(end_of_slice - before, elements);
      if (end <= first) {
        ++slice;
        continue;
      }
      Append(slices[slice], tensor, first, end - first, elements);
      first = end;
    }
    before += elements;
  }
  if (replicate) {
    std::fill(slices.begin() + 1, slices.end(), slices.front());
  }
  return slices;
}

} // namespace adasum_hvd
