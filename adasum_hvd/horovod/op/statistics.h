// Counters of the op in this process, which Python reads while the background thread counts.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "reduce/reduce.h"

namespace adasum_hvd {

enum Counter {
  kCalls,
  kTensors,
  kDeltaTensors,
  kBytes,
  kExplicitTensors, // on devices, of completed reductions only, because the host does not wait for kernels
  kNanoseconds,     // per phase, in the order of Phase; of reductions on the host
  kCounters = kNanoseconds + kPhases
};

void Count(Counter counter, int64_t more);
void CountNanoseconds(Phase phase, int64_t more);
void ReadCounters(int64_t* values); // kCounters of them

// Adds the result of `more` to kExplicitTensors whenever it is read; null: nothing.
void CountAlso(std::function<int64_t()> more);

// The description of the transport of a process set. There is one for tensors in host memory and one for
// tensors on devices; PathOf returns both.
enum class Memory { kHost, kDevice };
void SetPath(int process_set_id, Memory memory, std::string path);
std::string PathOf(int process_set_id);
void ForgetPaths(); // Horovod starts anew

} // namespace adasum_hvd
