// What the op has done in this process, for Python to read while the background thread counts.
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
  kExplicitTensors, // on devices, of reductions that have ended: nothing waits for what kernels find
  kNanoseconds,     // per phase, in the order of Phase; of reductions on the host
  kCounters = kNanoseconds + kPhases
};

void Count(Counter counter, int64_t more);
void CountNanoseconds(Phase phase, int64_t more);
void ReadCounters(int64_t* values); // kCounters of them

// What `more` returns is read as part of kExplicitTensors; null: nothing.
void CountAlso(std::function<int64_t()> more);

// How the ranks of a process set reach each other, for people to read. There is one for host tensors and one
// for those on devices; PathOf gives both.
enum class Memory { kHost, kDevice };
void SetPath(int process_set_id, Memory memory, std::string path);
std::string PathOf(int process_set_id);
void ForgetPaths(); // Horovod starts anew

} // namespace adasum_hvd
