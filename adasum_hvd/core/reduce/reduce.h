// AdaSum over ranks, in the Gram form: every node of the tree is a linear combination of the inputs, so its
// coefficients follow from the per-tensor Gram matrix G_ij = g_i.g_j. In each level (group_reduction.h):
//
//   1. reduce-scatter: every rank receives the elements of its slice from its group (placement.h), and sums
//      the slice's part of G as they arrive;
//   2. the sums of tensors that lie on several slices are exchanged: for each tensor, 8 N (N + 1) bytes to
//      every rank that has a part of it. Levels keep N small, unless hosts have different numbers of ranks;
//   3. the coefficients follow by walking the tree on G, scalars only;
//   4. every rank combines its slice. The next level reduces this slice over other groups.
//
// Then an allgather sends the slices of the result, from the last level back to the first. docs/internals.md
// has the numbers of exchanges and bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include <sys/mman.h>

#include "host/transport.h"
#include "kernels/kernels.h"
#include "reduce/tree.h"
#include "reduce/workers.h"

namespace adasum_hvd {

// `input` and `output` may be the same memory, or must not overlap.
struct TensorView {
  const void* input;
  void* output;
  int64_t elements;
  // If not null: older weights. The difference `input` minus `start` is reduced, and added to `start`.
  const void* start = nullptr;
  // If not null, with `start`: the checksum of `output` is added to it, with elements counted from `first`.
  std::atomic<uint64_t>* checksum = nullptr;
  int64_t first = 0;
  // If not null: a row of zeros, which the reduction fills (observation.h).
  double* observation = nullptr;
};

// A step of the hierarchy: first the ranks of a host reduce, then the ranks with the same position on every
// host, and so on. Holds a rank's group in one level, and the tree over it.
struct ReduceLevel {
  Transport* transport;
  const Tree* tree;
};

// Ranks that hold the other shards of some tensors: a whole tensor's dot products are sums over them.
struct Shards {
  Transport* transport;
  std::vector<int> tensors; // as numbers among a reduction's; the same on all of its ranks
};

// A rule in AdaSum's place: writes coefficients of the ranks from packed Gram matrices (tree.h: GramIndex),
// both by tensor, in float64. Returns false if it fails on this rank; all ranks then throw RuleFailed.
using Rule = std::function<bool(const double* grams, double* coefficients)>;

struct RuleFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct ReduceSettings {
  int64_t chunk_bytes = 1 << 20; // sent at a time, so that arithmetic and transport overlap
  // If n bytes times N ranks are at most this, every rank reduces all of them: it sends (N - 1) n bytes
  // instead of 2 n (N - 1) / N, in one exchange instead of two or three. A 1 Gbit/s link sends 32 KiB in the
  // time of one exchange; inside a host up to 1 MiB makes no measurable difference.
  int64_t replicate_bytes = 32 << 10;
  // Bytes copied to shared staging memory at a time, unless one tensor is larger. A bucket has 16 MiB.
  int64_t window_bytes = 18 << 20;
  // With any of these there is one level, and no window: all ranks know the Gram matrices of all tensors.
  std::vector<Shards> shards;
  Rule rule = nullptr;

  bool knows_all_grams() const { return !shards.empty() || rule != nullptr; }
};

// ---- memory for the work of reductions, kept as long as the op ----

constexpr int64_t kHugePageBytes = 2 << 20;

struct PrivateMemory {
  static void* Allocate(int64_t bytes) { // of whole huge pages
    void* memory = std::aligned_alloc(kHugePageBytes, bytes);
    if (memory == nullptr) {
      throw std::bad_alloc();
    }
    madvise(memory, bytes, MADV_HUGEPAGE); // a hint; small pages are also correct
    return memory;
  }
  void operator()(char* memory) const { std::free(memory); }
};

// Memory that the other ranks of the host can map.
struct SharedMemory {
  static void* Allocate(int64_t bytes) { return AllocateShared(bytes); }
  void operator()(char* memory) const { FreeShared(memory); }
};

// Grows if needed, and then loses its content.
template <class Memory> class ScratchBuffer {
public:
  char* Reserve(int64_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0; // in case the next line throws
      const int64_t rounded = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
      memory_.reset(static_cast<char*>(Memory::Allocate(rounded)));
      bytes_ = rounded;
    }
    return memory_.get();
  }

private:
  std::unique_ptr<char, Memory> memory_;
  int64_t bytes_ = 0;
};

struct Scratch {
  ScratchBuffer<PrivateMemory> staging;       // for slices that are not contiguous in the caller's memory
  ScratchBuffer<PrivateMemory> received;      // the other ranks' elements of this rank's slices
  ScratchBuffer<SharedMemory> shared_staging; // for tensors that are not in shared memory
};

enum class Phase { kReduceScatterGram, kCoefficients, kCombineAllgather };
constexpr int kPhases = 3;
using PhaseObserver = std::function<void(Phase, int level)>;

// Replaces every tensor's output by scale * AdaSum over ranks of its input. Returns the number of tensors
// with an ill-conditioned node that this rank formed explicitly.
//
// Collective: every rank of the levels' groups calls it with the same tensor sizes, type, scale and settings,
// and with matching levels. Blocks. Throws the exceptions of a transport.
int64_t Reduce(const std::vector<TensorView>& tensors, ElementType type,
               const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
               const Kernels& kernels, Workers& workers, Scratch& scratch, const PhaseObserver& observer);

} // namespace adasum_hvd
