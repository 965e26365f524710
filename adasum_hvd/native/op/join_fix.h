// Force-included into Horovod's controller.cc, and nowhere else (cmake/targets.cmake).
//
// When ranks have joined, Horovod's coordinator makes a vector as long as the number of remaining ranks and
// then writes to it at their rank numbers: past its end, on the heap. Jobs of 7 ranks and more die of it in
// join(), whatever the reduction. The vector's length has a meaning (a short one keeps the response out of
// the cache), so it stays; its memory is made long enough for every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "horovod/common/controller.h"

namespace adasum_hvd {

inline std::vector<int32_t> WithRoomFor(size_t length, int ranks) {
  std::vector<int32_t> values;
  values.reserve(static_cast<size_t>(ranks));
  values.resize(length);
  return values;
}

} // namespace adasum_hvd

// The definition `std::vector<int32_t> devices(requests.size())`; calls of devices() stay as they are.
#define devices(...) devices(__VA_OPT__(::adasum_hvd::WithRoomFor(__VA_ARGS__, GetSize())))
