// Force-included into Horovod's controller.cc, and nowhere else (cmake/targets.cmake).
//
// Joining: when ranks have joined, Horovod's coordinator makes a vector as long as the number of remaining
// ranks and then writes to it at their rank numbers: past its end, on the heap. Jobs of 7 ranks and more die
// of it in join(), whatever the reduction. The vector's length has a meaning (a short one keeps the response
// out of the cache), so it stays; its memory is made long enough for every rank. Stalls: Horovod's inspector
// of stalled tensors takes the number of ranks from the length of a vector that its Gloo controller only
// reserves, and so never finds one. It gets the whole vector, and what it finds is kept for the errors that
// all ranks get.
//
// Leaving: a rank on which a reduction has failed shuts down with all others, which may be through with that
// reduction and wait for the next one. When a rank is to shut down, the others hear why, if it is known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "horovod/common/controller.h"
#include "op/shut_down.h"

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

#define CheckForStalledTensors(global_ranks)                                                                 \
  CheckForStalledTensors(::adasum_hvd::GlobalRanks(*this)) && ::adasum_hvd::NoteStalled(*this)

// Asked in every turn of the loop, beside `should_shut_down`, which is true when the script wants to.
#define ShouldPerformCheck() ShouldPerformCheck() & ::adasum_hvd::NoteLeaving(*this, should_shut_down)
