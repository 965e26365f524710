#include "reduce/layout.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace adasum_hvd {
namespace {

void Append(Slice& slice, const Run& run, int64_t first, int64_t count) {
  slice.runs.push_back(
      {run.tensor, run.first + first, count, slice.elements, run.whole && count == run.count});
  slice.elements += count;
}

// The first block border of the run at or after `elements` elements.
int64_t BorderAtOrAfter(int64_t elements, int64_t run_elements) {
  int64_t blocks = (elements + kBlockElements - 1) / kBlockElements;
  return std::min(blocks * kBlockElements, run_elements);
}

} // namespace

Slice Fused(const std::vector<int64_t>& tensor_elements) {
  Slice slice;
  for (size_t tensor = 0; tensor < tensor_elements.size(); ++tensor) {
    if (const int64_t elements = tensor_elements[tensor]; elements > 0) {
      Append(slice, {static_cast<int>(tensor), 0, elements, 0, true}, 0, elements);
    }
  }
  return slice;
}

std::vector<Slice> Cut(const Slice& slice, int parts) {
  std::vector<Slice> cut(parts);
  int part = 0;
  for (const Run& run : slice.runs) {
    int64_t first = 0;
    while (first < run.count) {
      // Part p ends at the first border at or after (p + 1) / parts of all elements.
      const int64_t end_of_part = part + 1 == parts ? slice.elements
                                                    : slice.elements / parts * (part + 1) +
                                                          slice.elements % parts * (part + 1) / parts;
      const int64_t end =
          end_of_part <= run.offset ? 0 : BorderAtOrAfter(end_of_part - run.offset, run.count);
      if (end <= first) {
        ++part;
        continue;
      }
      Append(cut[part], run, first, end - first);
      first = end;
    }
  }
  return cut;
}

Shares Share(const Slice& region, int ranks, bool replicate, bool everywhere) {
  Shares shares;
  shares.everywhere = everywhere;
  shares.slices = replicate ? std::vector<Slice>(ranks, region) : Cut(region, ranks);
  int64_t start = 0;
  for (const Slice& slice : shares.slices) {
    shares.starts.push_back(start);
    start += replicate ? 0 : slice.elements;
    shares.parts.emplace_back();
    for (const Run& run : slice.runs) {
      if (!run.whole || (everywhere && !replicate)) {
        shares.parts.back().push_back(run.tensor);
      }
    }
  }
  return shares;
}

std::vector<Block> Blocks(const Slice& slice, int64_t begin, int64_t end) {
  std::vector<Block> blocks;
  auto after = std::upper_bound(slice.runs.begin(), slice.runs.end(), begin,
                                [](int64_t offset, const Run& run) { return offset < run.offset; });
  size_t index = after == slice.runs.begin() ? 0 : after - slice.runs.begin() - 1;
  for (; index < slice.runs.size() && slice.runs[index].offset < end; ++index) {
    const Run& run = slice.runs[index];
    const int64_t stop = std::min(end - run.offset, run.count);
    for (int64_t position = std::max<int64_t>(begin - run.offset, 0); position < stop;
         position += kBlockElements) {
      blocks.push_back({index, position, std::min(kBlockElements, stop - position)});
    }
  }
  return blocks;
}

} // namespace adasum_hvd
