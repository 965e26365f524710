#include "reduce/placement.h"

#include <algorithm>
#include <cmath>

namespace adasum_hvd {
namespace {

constexpr int64_t kAlignment = 256; // bytes, of the memory that receives from one rank

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Between levels values are rounded to the element type. A factor below 1 is applied in the first level, so
// that float16 does not overflow earlier than necessary.
size_t ScaledLevel(double scale, size_t levels) { return std::fabs(scale) < 1 ? 0 : levels - 1; }

} // namespace

bool LiesInSharedMemory(const TensorView& tensor, int64_t element_bytes) {
  return tensor.start == nullptr && tensor.input == tensor.output &&
         FindShared(tensor.input, tensor.elements * element_bytes) != nullptr;
}

bool IsAlone(const std::vector<ReduceLevel>& levels) {
  return std::all_of(levels.begin(), levels.end(),
                     [](const ReduceLevel& level) { return level.transport->size() == 1; });
}

Placement::Placement(const std::vector<TensorView>& tensors, ElementType type,
                     const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                     const Reserve& staging, const Reserve& shared_staging, const Reserve& received)
    : tensors_(tensors), element_bytes_(ElementBytes(type)), alone_(IsAlone(levels)) {
  std::vector<int64_t> elements;
  for (const TensorView& tensor : tensors) {
    elements.push_back(tensor.elements);
    any_delta_ = any_delta_ || tensor.start != nullptr;
  }
  const Slice everything = Fused(elements);
  int64_t ranks = 1;
  for (const ReduceLevel& level : levels) {
    ranks *= level.transport->size();
  }
  replicate_ = alone_ || everything.elements * element_bytes_ * ranks <= settings.replicate_bytes;
  CutLevels(levels, everything, scale, settings.knows_all_grams());
  if (levels_.front().shared) {
    PlaceFirstShared(shared_staging);
  } else {
    PlaceFirst(staging);
  }
  PlaceNext();
  PlaceReceived(received);
  PlaceRuns();
}

void Placement::CutLevels(const std::vector<ReduceLevel>& levels, const Slice& everything, double scale,
                          bool everywhere) {
  const size_t scaled = ScaledLevel(scale, levels.size());
  for (size_t index = 0; index < levels.size(); ++index) {
    const Slice& region = index == 0 || replicate_ ? everything : levels_.back().mine();
    PlacedLevel level = {};
    level.transport = levels[index].transport;
    level.tree = levels[index].tree;
    level.scale = index == scaled ? scale : 1.0;
    level.shares = Share(region, level.size(), replicate_, everywhere);
    level.shared = !replicate_ && level.transport->shares_memory() && (index == 0 || levels_.back().shared);
    levels_.push_back(std::move(level));
  }
}

char* Placement::At(const void* tensor, const Run& run) const {
  return static_cast<char*>(const_cast<void*>(tensor)) + run.first * element_bytes_;
}

// Whether the runs of a slice are contiguous in memory. Changes of weights are not, before they are formed.
bool Placement::IsContiguous(const Slice& slice, char* (Placement::*where)(const Run& run) const) const {
  return std::all_of(slice.runs.begin(), slice.runs.end(), [&](const Run& run) {
    const char* expected = (this->*where)(slice.runs.front()) + run.offset * element_bytes_;
    return !IsDelta(run) && (this->*where)(run) == expected;
  });
}

// If every rank reduces everything, one copy in the staging memory is sent to all peers.
void Placement::PlaceFirst(const Reserve& staging) {
  PlacedLevel& first = levels_.front();
  std::vector<bool> input(first.size()), output(first.size()); // whether the slice is contiguous there
  bool staged = any_delta_ || (replicate_ && levels_.size() > 1);
  int64_t elements = 0;
  for (int rank = 0; rank < first.size(); ++rank) {
    const Slice& slice = first.slice(rank);
    input[rank] = IsContiguous(slice, &Placement::Input);
    output[rank] = IsContiguous(slice, &Placement::Output);
    staged = staged || (!alone_ && !input[rank]) || (!replicate_ && !output[rank]);
    elements = std::max(elements, first.shares.starts[rank] + slice.elements);
  }
  char* base = staged ? staging(elements * element_bytes_) : nullptr;
  for (int rank = 0; rank < first.size(); ++rank) {
    const Slice& slice = first.slice(rank);
    const bool any = !slice.runs.empty();
    const bool mine = rank == first.rank();
    char* there = staged ? base + first.shares.starts[rank] * element_bytes_ : nullptr;
    first.send.push_back(any && input[rank] ? Input(slice.runs.front()) : there);
    const bool in_place = any && output[rank] && !(replicate_ && staged);
    first.result.push_back(in_place ? Output(slice.runs.front()) : there);
    const bool sent =
        !alone_ && !input[rank] && (replicate_ || !mine); // this rank reads its own slice in place
    const bool received = !replicate_ && !output[rank];
    AddCopies(rank, [&](const Run& run) {
      char* const at = staged ? there + run.offset * element_bytes_ : nullptr;
      return Staged{at, sent || IsDelta(run), received || IsDelta(run)};
    });
  }
}

void Placement::AddCopies(int rank, const std::function<Staged(const Run& run)>& stage) {
  Copies& pack = packs_.emplace_back();
  Copies& unpack = unpacks_.emplace_back();
  if (replicate_ && rank != levels_.front().rank()) {
    return; // the same slice as this rank's
  }
  const std::vector<Run>& runs = levels_.front().slice(rank).runs;
  for (size_t index = 0; index < runs.size(); ++index) {
    const Run& run = runs[index];
    const TensorView& tensor = tensors_[run.tensor];
    const void* start = IsDelta(run) ? At(tensor.start, run) : nullptr;
    const auto [at, sent, received] = stage(run);
    if (sent) {
      pack.resize(runs.size());
      pack[index] = {Input(run), start, at, -1.0, run.count};
    }
    if (received) {
      unpack.resize(runs.size());
      unpack[index] = {at, start, Output(run), 1.0, run.count, tensor.checksum, tensor.first + run.first};
    }
  }
}

// The next level reduces this slice of the result, so it must be contiguous, and in one shared region.
void Placement::PlaceFirstShared(const Reserve& staging) {
  PlacedLevel& first = levels_.front();
  int64_t bytes = 0;
  bool staged = false;
  for (const TensorView& tensor : tensors_) {
    bytes += tensor.elements * element_bytes_;
    homes_.push_back(LiesInSharedMemory(tensor, element_bytes_) ? static_cast<char*>(tensor.output)
                                                                : nullptr);
    staged = staged || homes_.back() == nullptr;
  }
  char* next = staged ? staging(bytes) : nullptr;
  for (size_t tensor = 0; staged && tensor < tensors_.size(); ++tensor) {
    homes_[tensor] = homes_[tensor] == nullptr ? next : homes_[tensor];
    next += tensors_[tensor].elements * element_bytes_;
  }
  for (int rank = 0; rank < first.size(); ++rank) {
    AddCopies(rank, [&](const Run& run) {
      const bool away = Home(run) != Output(run) && !(rank == first.rank() && StaysInPlace(run));
      return Staged{Home(run), away, away};
    });
  }
  const Slice& mine = first.mine();
  first.result.resize(first.size());
  const auto in_one_region = [&] {
    return mine.runs.empty() ||
           FindShared(Home(mine.runs.front()), mine.elements * element_bytes_) != nullptr;
  };
  if (levels_.size() > 1 && !(IsContiguous(mine, &Placement::Home) && in_one_region())) {
    first.result[first.rank()] = staging(bytes) + first.shares.starts[first.rank()] * element_bytes_;
  } else if (!mine.runs.empty()) {
    first.result[first.rank()] = Home(mine.runs.front());
  }
}

// No other rank reads this rank's own slice of its tensors, so the slice stays in place.
bool Placement::StaysInPlace(const Run& run) const { return !IsDelta(run) && Input(run) == Output(run); }

// One piece per tensor in the first level; later one piece, the slice that is the level's region.
std::vector<MemoryPiece> Placement::MyPieces(size_t index) const {
  std::vector<MemoryPiece> pieces;
  if (index > 0) {
    const PlacedLevel& below = levels_[index - 1];
    return {{below.result[below.rank()], below.mine().elements * element_bytes_}};
  }
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    pieces.push_back({homes_[tensor], tensors_[tensor].elements * element_bytes_});
  }
  return pieces;
}

bool Placement::MapPeers(std::string& why_not) {
  std::vector<std::vector<std::vector<char*>>> pieces;
  for (size_t index = 0; index < levels_.size() && levels_[index].shared; ++index) {
    pieces.push_back(MapPieces(*levels_[index].transport, MyPieces(index), why_not));
  }
  bool fails = !why_not.empty();
  for (size_t index = 0; index < pieces.size(); ++index) { // groups of different levels may have common ranks
    fails = AnyRank(*levels_[index].transport, fails);
  }
  for (size_t index = 0; index < pieces.size() && !fails; ++index) {
    PointAtTheirs(index, pieces[index]);
  }
  return !fails;
}

void Placement::PointAtTheirs(size_t index, const std::vector<std::vector<char*>>& pieces) {
  PlacedLevel& level = levels_[index];
  const int64_t start = level.shares.starts[level.rank()];
  for (const Run& run : level.mine().runs) {
    for (int rank = 0; rank < level.size(); ++rank) {
      const std::vector<char*>& there = pieces[rank];
      if (index > 0) {
        level.by_rank.push_back(there[0] + (start + run.offset) * element_bytes_);
      } else if (rank == level.rank() && StaysInPlace(run)) {
        level.by_rank.push_back(Output(run));
      } else {
        level.by_rank.push_back(there[run.tensor] + run.first * element_bytes_);
      }
    }
  }
}

void Placement::PlaceNext() {
  for (size_t index = 1; index < levels_.size(); ++index) {
    PlacedLevel& level = levels_[index];
    char* region = levels_[index - 1].result[levels_[index - 1].rank()];
    for (int64_t start : level.shares.starts) {
      level.send.push_back(region + start * element_bytes_);
    }
    level.result = level.send;
  }
}

void Placement::PlaceReceived(const Reserve& received) {
  int64_t bytes = 0;
  for (const PlacedLevel& level : levels_) {
    const int others = level.shared ? 0 : level.size() - 1;
    bytes += others * Aligned(level.mine().elements * element_bytes_);
  }
  char* room = received(bytes);
  for (PlacedLevel& level : levels_) {
    if (level.shared) {
      continue;
    }
    for (int rank = 0; rank < level.size(); ++rank) {
      const bool mine = rank == level.rank();
      level.receive.push_back(mine ? nullptr : room);
      room += mine ? 0 : Aligned(level.mine().elements * element_bytes_);
    }
  }
}

// If every rank reduces everything, the last level writes directly to the caller's output.
void Placement::PlaceRuns() {
  for (PlacedLevel& level : levels_) {
    const bool first = &level == &levels_.front(), last = &level == &levels_.back();
    for (const Run& run : level.mine().runs) {
      const int64_t offset = run.offset * element_bytes_;
      const bool delta = IsDelta(run);
      if (level.shared) {
        level.out.push_back(level.result[level.rank()] + offset);
        continue;
      }
      level.own.push_back(first && !delta ? Input(run) : level.send[level.rank()] + offset);
      level.out.push_back(replicate_ && last && !delta ? Output(run) : level.result[level.rank()] + offset);
    }
  }
}

} // namespace adasum_hvd
