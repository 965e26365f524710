// The elements that each rank reduces: a group's region is cut into one slice per rank, at block borders.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace adasum_hvd {

// Consecutive elements of one tensor inside a slice; `first` is a multiple of kBlockElements.
struct Run {
  int tensor;
  int64_t first;  // element of the tensor
  int64_t count;  // elements
  int64_t offset; // element of the slice
  bool whole;     // the run is the whole tensor
};

struct Slice {
  int64_t elements = 0;
  std::vector<Run> runs; // none is empty
};

// Concatenated tensors of the given element counts.
Slice Fused(const std::vector<int64_t>& tensor_elements);

// Cuts a slice into `parts` consecutive ones of about the same length.
std::vector<Slice> Cut(const Slice& slice, int parts);

// A slice per rank of a group; `starts` are their first elements in the region.
struct Shares {
  std::vector<Slice> slices;
  std::vector<int64_t> starts;
  std::vector<std::vector<int>> parts; // per rank: the tensors of which it holds a part, at most two
  bool everywhere;                     // all ranks need the sums of all tensors, and `parts` lists all
};

// With `replicate` every rank's slice is the whole region.
Shares Share(const Slice& region, int ranks, bool replicate, bool everywhere);

// Consecutive elements to copy. If `other` is not null: to = from + sign * other, rounded once.
struct Copy {
  const void* from = nullptr;
  const void* other = nullptr;
  void* to = nullptr;
  double sign = 0;
  int64_t count = 0; // elements
  // If not null: the checksum of `to` is added to it, with elements counted from `first`.
  std::atomic<uint64_t>* checksum = nullptr;
  int64_t first = 0;
};

// At most kBlockElements elements of one run, from its element `position`.
struct Block {
  size_t run; // index
  int64_t position;
  int64_t n;
};

// The blocks of elements [begin, end) of a slice.
std::vector<Block> Blocks(const Slice& slice, int64_t begin, int64_t end);

} // namespace adasum_hvd
