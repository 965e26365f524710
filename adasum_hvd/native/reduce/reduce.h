// AdaSum over ranks, in the Gram form: every node of the tree is a linear combination of the inputs, so its
// coefficients follow from the per-tensor Gram matrix G_ij = g_i.g_j alone. In each level
// (group_reduction.h):
//
//   1. every rank receives its group's elements of its slice (placement.h says where), and sums the slice's
//      part of G on the way;
//   2. the parts of the tensors that several slices share are exchanged (a few hundred bytes);
//   3. coefficients by walking the tree on G, scalars only;
//   4. every rank combines its slice, which is what the next level reduces with other groups.
//
// At the end the slices are sent to the others, from the last level back to the first.
// 2 n (N - 1) / N bytes leave a rank for n bytes reduced, as in a ring allreduce, in 3 rounds for any N in
// one level; 2 when no tensor crosses a slice border, 1 for a few kilobytes (each rank then does everything
// itself).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/kernels.h"
#include "reduce/scratch.h"
#include "reduce/tree.h"
#include "reduce/workers.h"
#include "transport/transport.h"

namespace adasum_hvd {

// `input` and `output` may be the same memory, or must not overlap.
struct TensorView {
  const void* input;
  void* output;
  int64_t elements;
  // Where not null: weights before `input`. Their difference is reduced, and the output is `start` plus that.
  const void* start = nullptr;
  // Where not null: a row of zeros for what is found of the tensor (observation.h).
  double* observed = nullptr;
};

// A level is a step of the hierarchy, and nothing else here: first the ranks of a host reduce, then those at
// the same place on every host, and so on outwards. This is a rank's group in one level, and the tree over
// it.
struct ReduceLevel {
  Transport* transport;
  const Tree* tree;
};

struct ReduceSettings {
  int64_t chunk_bytes = 1 << 20;      // sent at a time, so that arithmetic and transport overlap
  int64_t replicate_bytes = 32 << 10; // up to this many bytes times ranks, every rank reduces everything
  // Copied to shared staging memory at a time; a larger tensor by itself. A bucket of 16 MiB is less.
  int64_t window_bytes = 18 << 20;
};

enum class Phase { kExchangeAndGram, kSharedTensors, kCombineAndGather };
constexpr int kPhases = 3;
using PhaseObserver = std::function<void(Phase, int level)>;

struct ReduceResult {
  int64_t explicit_tensors = 0; // tensors of which an ill-conditioned node had to be formed on this rank
};

// Replaces every tensor's output by scale * AdaSum over ranks of its input.
//
// Collective: every rank of the levels' groups calls it with the same tensor sizes, type, scale and settings,
// and with levels that fit together. Blocks. Throws what a transport throws.
ReduceResult Reduce(const std::vector<TensorView>& tensors, ElementType type,
                    const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                    const Kernels& kernels, Workers& workers, Scratch& scratch,
                    const PhaseObserver& observer);

} // namespace adasum_hvd
