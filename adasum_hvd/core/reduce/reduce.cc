#include "reduce/reduce.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <optional>
#include <string>

#include "reduce/float_mode.h"
#include "reduce/group_reduction.h"
#include "reduce/observation.h"
#include "reduce/placement.h"

namespace adasum_hvd {
namespace {

class Reduction {
public:
  Reduction(const std::vector<TensorView>& tensors, ElementType type, const std::vector<ReduceLevel>& levels,
            double scale, const ReduceSettings& settings, const Kernels& kernels, Workers& workers,
            Scratch& scratch);
  // Returns false on all ranks if one of them cannot share memory; nothing has changed in that case, and
  // why_not() has the reason on that rank.
  bool MapPeers();
  int64_t Execute(const PhaseObserver& observer); // as Reduce
  const std::string& why_not() const { return why_not_; }

private:
  // A chunk of a slice; null if the slice has no such chunk.
  struct Chunk {
    char* at;
    int64_t bytes;
  };

  int64_t Chunks(const PlacedLevel& level) const;
  int64_t ChunkEnd(int64_t chunk, const Slice& slice) const {
    return std::min((chunk + 1) * chunk_elements_, slice.elements);
  }
  Chunk ChunkOf(const Slice& slice, char* at, int64_t chunk) const;

  void Send(size_t level, int64_t chunk);
  void ReceiveAndSum(size_t level);
  void Gather(size_t level);
  void SumSharedMemory(size_t level);
  void Spread(size_t level);
  char* ReserveShared(Scratch& scratch, int64_t bytes);
  void Prepare(size_t level, int rank, int64_t begin, int64_t end);
  void Pack(int rank, int64_t begin, int64_t end) { RunCopies(placement_.packs()[rank], rank, begin, end); }
  void Unpack(int rank, int64_t begin, int64_t end) {
    RunCopies(placement_.unpacks()[rank], rank, begin, end);
  }
  void RunCopies(const Placement::Copies& copies, int rank, int64_t begin, int64_t end);

  std::string why_not_; // memory cannot be shared
  Placement placement_;
  const std::optional<Observation> observation_;
  const Arithmetic arithmetic_;
  const int64_t chunk_elements_;      // a multiple of kBlockElements
  std::deque<GroupReduction> groups_; // by level; a deque, because their addresses are kept
};

Reduction::Reduction(const std::vector<TensorView>& tensors, ElementType type,
                     const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                     const Kernels& kernels, Workers& workers, Scratch& scratch)
    : placement_(
          tensors, type, levels, scale, settings,
          [&](int64_t bytes) { return scratch.staging.Reserve(bytes); },
          [&](int64_t bytes) { return ReserveShared(scratch, bytes); },
          [&](int64_t bytes) { return scratch.received.Reserve(bytes); }),
      observation_(AnyObservation(tensors)
                       ? std::make_optional<Observation>(tensors, levels, placement_.replicates())
                       : std::nullopt),
      arithmetic_{type, settings, kernels, workers, tensors.size(), observation_ ? &*observation_ : nullptr},
      chunk_elements_(std::max<int64_t>(settings.chunk_bytes / arithmetic_.bytes() / kBlockElements, 1) *
                      kBlockElements) {
  for (const PlacedLevel& level : placement_.levels()) {
    groups_.emplace_back(arithmetic_, level, groups_.empty() ? nullptr : &groups_.back(),
                         &level == &placement_.levels().back());
  }
}

// Falls back to private memory; MapPeers then makes the ranks agree not to share.
char* Reduction::ReserveShared(Scratch& scratch, int64_t bytes) {
  try {
    return scratch.shared_staging.Reserve(bytes);
  } catch (const std::exception& error) {
    why_not_ = error.what();
    return scratch.staging.Reserve(bytes);
  }
}

bool Reduction::MapPeers() {
  const PlacedLevel& first = placement_.levels().front();
  if (!first.shared) {
    return true;
  }
  for (int rank = 0; rank < first.size(); ++rank) {
    Pack(rank, 0, first.slice(rank).elements);
  }
  return placement_.MapPeers(why_not_);
}

int64_t Reduction::Execute(const PhaseObserver& observer) {
  if (placement_.alone()) {
    const int64_t elements = placement_.levels().front().mine().elements;
    Pack(0, 0, elements);
    groups_.front().Combine(0, elements);
    Unpack(0, 0, elements);
    return 0;
  }
  for (size_t level = 0; level < groups_.size(); ++level) {
    if (level > 0) { // Reduce has begun the first one
      observer(Phase::kReduceScatterGram, static_cast<int>(level));
    }
    if (placement_.levels()[level].shared) {
      SumSharedMemory(level);
    } else {
      ReceiveAndSum(level);
    }
    observer(Phase::kCoefficients, static_cast<int>(level));
    groups_[level].Solve();
  }
  for (size_t level = groups_.size(); level-- > 0;) {
    observer(Phase::kCombineAllgather, static_cast<int>(level));
    if (placement_.levels()[level].shared) {
      Spread(level);
    } else {
      Gather(level);
    }
  }
  return std::accumulate(
      groups_.begin(), groups_.end(), int64_t{0},
      [](int64_t sum, const GroupReduction& group) { return sum + group.explicit_tensors(); });
}

// ---- chunks ----

int64_t Reduction::Chunks(const PlacedLevel& level) const {
  int64_t longest = 0;
  for (const Slice& slice : level.shares.slices) {
    longest = std::max(longest, slice.elements);
  }
  return (longest + chunk_elements_ - 1) / chunk_elements_;
}

// Returns a chunk of a slice that begins `at`.
Reduction::Chunk Reduction::ChunkOf(const Slice& slice, char* at, int64_t chunk) const {
  const int64_t begin = chunk * chunk_elements_;
  const int64_t elements = ChunkEnd(chunk, slice) - begin;
  return elements > 0 ? Chunk{at + begin * arithmetic_.bytes(), elements * arithmetic_.bytes()}
                      : Chunk{nullptr, 0};
}

// Runs the copies for elements [begin, end) of a rank's slice in the first level.
void Reduction::RunCopies(const Placement::Copies& copies, int rank, int64_t begin, int64_t end) {
  if (copies.empty()) {
    return;
  }
  const PlacedLevel& level = placement_.levels().front();
  const std::vector<Block> blocks = Blocks(level.slice(rank), begin, end);
  const bool past_caches = level.shared && IsPastCaches(arithmetic_, level);
  arithmetic_.workers.Run(blocks.size(), [&](int64_t job, int) {
    const Block& block = blocks[job];
    const Copy& copy = copies[block.run];
    if (copy.to == nullptr) {
      return;
    }
    const int64_t offset = block.position * arithmetic_.bytes();
    const char* from = static_cast<const char*>(copy.from) + offset;
    char* to = static_cast<char*>(copy.to) + offset;
    if (copy.other == nullptr) {
      void* const only[] = {to};
      arithmetic_.kernels.spread(from, block.n * arithmetic_.bytes(), only, 1, past_caches);
      return;
    }
    const void* both[] = {from, static_cast<const char*>(copy.other) + offset};
    const double signs[] = {1.0, copy.sign};
    arithmetic_.kernels.combine[arithmetic_.type](both, signs, 2, block.n, to);
    if (copy.checksum != nullptr) {
      *copy.checksum +=
          arithmetic_.kernels.checksum(arithmetic_.type, to, block.n, copy.first + block.position);
    }
  });
}

// ---- reduce-scatter ----

// Forms elements [begin, end) of the slice of `rank` in this rank's send buffer.
void Reduction::Prepare(size_t level, int rank, int64_t begin, int64_t end) {
  if (level == 0) {
    Pack(rank, begin, end);
  } else {
    const int64_t start = placement_.levels()[level].shares.starts[rank];
    groups_[level - 1].Combine(start + begin, start + end);
  }
}

void Reduction::Send(size_t index, int64_t chunk) {
  const PlacedLevel& level = placement_.levels()[index];
  const int64_t begin = chunk * chunk_elements_;
  std::vector<Message> messages(level.size());
  for (int rank = 0; rank < level.size(); ++rank) {
    const Slice& slice = level.slice(rank);
    if (begin < slice.elements && (!placement_.replicates() || rank == level.rank())) {
      Prepare(index, rank, begin, ChunkEnd(chunk, slice));
    }
    if (rank != level.rank()) {
      const Chunk out = ChunkOf(slice, level.send[rank], chunk);
      const Chunk in = ChunkOf(level.mine(), level.receive[rank], chunk);
      messages[rank] = {out.at, out.bytes, in.at, in.bytes};
    }
  }
  level.transport->Start(messages);
}

// Sums a chunk while the next one is being sent.
void Reduction::ReceiveAndSum(size_t index) {
  const PlacedLevel& level = placement_.levels()[index];
  const int64_t chunks = Chunks(level);
  const bool sum_at_once = arithmetic_.type != kFloat64; // float64 needs the largest element first
  for (int64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      Send(index, chunk);
    }
    if (chunk > 0) {
      level.transport->Wait();
      if (sum_at_once) {
        groups_[index].GramUpTo(ChunkEnd(chunk - 1, level.mine()));
      }
    }
  }
  if (!sum_at_once) {
    groups_[index].FindScales();
    groups_[index].GramUpTo(level.mine().elements);
  }
}

// ---- allgather ----

void Reduction::Gather(size_t index) {
  const PlacedLevel& level = placement_.levels()[index];
  const bool first = index == 0, last = index + 1 == groups_.size();
  const Slice& mine = level.mine();
  if (placement_.replicates()) { // nothing is sent
    if (last) {
      groups_[index].Combine(0, mine.elements);
    }
    if (first) {
      Unpack(level.rank(), 0, mine.elements);
    }
    return;
  }
  auto unpack = [&](int rank, int64_t chunk) {
    if (first) {
      Unpack(rank, chunk * chunk_elements_, ChunkEnd(chunk, level.slice(rank)));
    }
  };
  const int64_t chunks = Chunks(level);
  for (int64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks && last) {
      groups_[index].Combine(chunk * chunk_elements_, ChunkEnd(chunk, mine));
    }
    if (chunk < chunks) {
      std::vector<Message> messages(level.size());
      const Chunk out = ChunkOf(mine, level.result[level.rank()], chunk);
      for (int rank = 0; rank < level.size(); ++rank) {
        const Chunk in = ChunkOf(level.slice(rank), level.result[rank], chunk);
        messages[rank] = {out.at, out.bytes, in.at, in.bytes};
      }
      level.transport->Start(messages);
      unpack(level.rank(), chunk);
    }
    if (chunk > 0) {
      level.transport->Wait();
      for (int rank = 0; rank < level.size(); ++rank) {
        if (rank != level.rank()) {
          unpack(rank, chunk - 1);
        }
      }
    }
  }
}

// ---- shared memory ----

// Every rank reads its slice in the memory of all ranks; no other rank reads that slice.
void Reduction::SumSharedMemory(size_t index) {
  const PlacedLevel& level = placement_.levels()[index];
  if (index > 0) { // in the first level MapPeers has a barrier
    groups_[index - 1].Combine(0, placement_.levels()[index - 1].mine().elements);
    Barrier(*level.transport);
  }
  if (arithmetic_.type == kFloat64) {
    groups_[index].FindScales();
  }
  groups_[index].GramUpTo(level.mine().elements);
}

void Reduction::Spread(size_t index) {
  const PlacedLevel& level = placement_.levels()[index];
  if (index + 1 == groups_.size()) {
    groups_[index].Combine(0, level.mine().elements);
  } else {
    groups_[index].Spread();
  }
  Barrier(*level.transport);
  for (int rank = 0; index == 0 && rank < level.size(); ++rank) {
    Unpack(rank, 0, level.slice(rank).elements);
  }
}

// ---- windows ----

// Whether some rank copies more to shared staging memory than one window holds. Collective if this rank does.
bool NeedsWindows(const std::vector<TensorView>& tensors, int64_t element_bytes,
                  const std::vector<ReduceLevel>& levels, const ReduceSettings& settings) {
  int64_t elements = 0;
  for (const TensorView& tensor : tensors) {
    elements += tensor.elements;
  }
  const bool on_one_host = std::all_of(levels.begin(), levels.end(), [](const ReduceLevel& level) {
    return level.transport->shares_memory();
  });
  if (settings.knows_all_grams() || !on_one_host || elements * element_bytes <= settings.window_bytes) {
    return false;
  }
  bool any = std::any_of(tensors.begin(), tensors.end(), [&](const TensorView& tensor) {
    return tensor.elements > 0 && !LiesInSharedMemory(tensor, element_bytes);
  });
  for (const ReduceLevel& level : levels) {
    any = AnyRank(*level.transport, any);
  }
  return any;
}

// Divides the tensors into windows, which are reduced one after the other.
std::vector<std::vector<TensorView>> Windows(const std::vector<TensorView>& tensors, int64_t element_bytes,
                                             int64_t window_bytes) {
  std::vector<std::vector<TensorView>> windows;
  int64_t left = 0;
  for (const TensorView& tensor : tensors) {
    const int64_t bytes = tensor.elements * element_bytes;
    if (windows.empty() || bytes > left) {
      windows.emplace_back();
      left = window_bytes;
    }
    windows.back().push_back(tensor);
    left -= bytes;
  }
  return windows;
}

} // namespace

int64_t Reduce(const std::vector<TensorView>& tensors, ElementType type,
               const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
               const Kernels& kernels, Workers& workers, Scratch& scratch, const PhaseObserver& observer) {
  const DefaultFloatMode mode;
  const int64_t element_bytes = ElementBytes(type);
  const auto reduce = [&](const std::vector<TensorView>& some) {
    std::optional<Reduction> reduction(std::in_place, some, type, levels, scale, settings, kernels, workers,
                                       scratch);
    if (!reduction->MapPeers()) {
      for (const ReduceLevel& level : levels) {
        level.transport->StopSharing(reduction->why_not());
      }
      scratch.shared_staging = {};
      reduction.emplace(some, type, levels, scale, settings, kernels, workers, scratch);
    }
    return reduction->Execute(observer);
  };
  if (IsAlone(levels)) { // it has no phases, and copies nothing to shared memory
    return reduce(tensors);
  }
  observer(Phase::kReduceScatterGram, 0);
  if (!NeedsWindows(tensors, element_bytes, levels, settings)) {
    return reduce(tensors);
  }
  int64_t explicit_tensors = 0;
  for (const std::vector<TensorView>& window : Windows(tensors, element_bytes, settings.window_bytes)) {
    observer(Phase::kReduceScatterGram, 0);
    explicit_tensors += reduce(window);
  }
  return explicit_tensors;
}

} // namespace adasum_hvd
