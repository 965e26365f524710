// Force-included into Horovod's torch/mpi_ops_v2.cc and tensorflow/mpi_ops.cc, and nowhere else
// (cmake/targets.cmake).
//
// Who waits for an operation asks in a loop whether it has ended, and in between only yields. On a machine
// with fewer processors than threads that takes them from those who work for the operation, in all of its
// ranks; with kernels whose scheduler loses count of yields (Linux 6.18) it kept others from running for half
// a minute. So the loop sleeps instead, for less than Horovod's own loop does in a turn.
#pragma once

#include <chrono>
#include <thread>

namespace adasum_hvd {
constexpr std::chrono::microseconds kBetweenLooks{50};
} // namespace adasum_hvd

// In Horovod's `std::this_thread::yield()`.
#define yield() sleep_for(::adasum_hvd::kBetweenLooks)
