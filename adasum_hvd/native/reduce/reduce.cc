#include "reduce/reduce.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <new>

#include <sys/mman.h>

#include "reduce/group_reduction.h"
#include "reduce/layout.h"

namespace adasum_hvd {
namespace {

constexpr int64_t kHugePageBytes = 2 << 20;

class Reduction {
public:
  Reduction(const std::vector<TensorView>& tensors, ElementType type, const std::vector<ReduceLevel>& levels,
            double scale, const ReduceSettings& settings, const Kernels& kernels, Workers& workers,
            Scratch& scratch);
  ReduceResult Execute(const PhaseObserver& observer);

private:
  // Where the slices of a level are, per rank of its group.
  struct Places {
    std::vector<char*> send;    // of this rank's elements
    std::vector<char*> receive; // of the other's elements of this rank's slice
    std::vector<char*> result;
  };

  void PlaceFirst(Scratch& scratch);
  void PlaceNext();
  void GiveRoom(size_t level, char* received);
  int64_t Chunks(const GroupReduction& level) const;
  int64_t ChunkEnd(int64_t chunk, const Slice& slice) const;
  int64_t ChunkBytes(int64_t chunk, const Slice& slice) const;

  void Send(size_t level, int64_t chunk);
  void ReceiveAndSum(size_t level);
  void Gather(size_t level);
  void Prepare(size_t level, int rank, int64_t begin, int64_t end);
  bool HasToBePacked(int rank) const;
  void Pack(int rank, int64_t begin, int64_t end);
  void Unpack(int rank, int64_t begin, int64_t end);

  char* Input(const Run& run) const;
  char* Output(const Run& run) const;
  bool IsDelta(const Run& run) const { return tensors_[run.tensor].start != nullptr; }
  // Whether a slice of the first level is used where the caller has it.
  bool InPlace(const Slice& slice) const {
    return slice.runs.empty() || (slice.runs.size() == 1 && !IsDelta(slice.runs[0]));
  }

  const std::vector<TensorView>& tensors_;
  const Arithmetic arithmetic_;
  bool alone_ = false;     // one rank
  bool replicate_ = false; // every rank reduces everything
  int64_t chunk_elements_ = 0;
  std::deque<GroupReduction> levels_; // that do not move
  std::vector<Places> places_;
  bool any_delta_ = false;
};

Reduction::Reduction(const std::vector<TensorView>& tensors, ElementType type,
                     const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                     const Kernels& kernels, Workers& workers, Scratch& scratch)
    : tensors_(tensors), arithmetic_{type, kernels, workers, tensors.size()}, places_(levels.size()) {
  std::vector<int64_t> elements;
  for (const TensorView& tensor : tensors_) {
    elements.push_back(tensor.elements);
    any_delta_ = any_delta_ || tensor.start != nullptr;
  }
  const Slice everything = Fused(elements);
  const int64_t ranks = CountRanks(levels);
  alone_ = ranks == 1;
  replicate_ = Replicates(everything.elements * arithmetic_.bytes(), ranks, settings);
  const int64_t blocks = settings.chunk_bytes / arithmetic_.bytes() / kBlockElements;
  chunk_elements_ = std::max<int64_t>(blocks, 1) * kBlockElements;
  const size_t scaled = ScaledLevel(scale, levels.size());
  for (size_t level = 0; level < levels.size(); ++level) {
    const bool first = level == 0;
    const Slice region = first || replicate_ ? everything : levels_.back().mine();
    levels_.emplace_back(arithmetic_, *levels[level].transport, *levels[level].tree, region, replicate_,
                         first ? nullptr : &levels_.back(), level == scaled ? scale : 1.0);
  }
  PlaceFirst(scratch);
  PlaceNext();
  int64_t received = 0;
  for (const GroupReduction& level : levels_) {
    received += (level.size() - 1) * level.mine().elements * arithmetic_.bytes();
  }
  char* room = scratch.received.Reserve(received);
  for (size_t level = 0; level < levels_.size(); ++level) {
    GiveRoom(level, room);
    room += (levels_[level].size() - 1) * levels_[level].mine().elements * arithmetic_.bytes();
  }
}

ReduceResult Reduction::Execute(const PhaseObserver& observer) {
  if (alone_) {
    const int64_t elements = levels_.front().mine().elements;
    Pack(0, 0, elements);
    levels_.front().Combine(0, elements);
    Unpack(0, 0, elements);
    return {};
  }
  for (size_t level = 0; level < levels_.size(); ++level) {
    observer(Phase::kExchangeAndGram, static_cast<int>(level));
    ReceiveAndSum(level);
    observer(Phase::kSharedTensors, static_cast<int>(level));
    levels_[level].Solve();
  }
  for (size_t level = levels_.size(); level-- > 0;) {
    observer(Phase::kCombineAndGather, static_cast<int>(level));
    Gather(level);
  }
  ReduceResult result;
  for (const GroupReduction& level : levels_) {
    result.explicit_tensors += level.explicit_tensors();
  }
  return result;
}

// ---- where things are ----

char* Reduction::Input(const Run& run) const {
  return static_cast<char*>(const_cast<void*>(tensors_[run.tensor].input)) + run.first * arithmetic_.bytes();
}

char* Reduction::Output(const Run& run) const {
  return static_cast<char*>(tensors_[run.tensor].output) + run.first * arithmetic_.bytes();
}

// A slice that is a piece of one tensor is sent from there and received there; of others a copy is made in
// the staging memory, chunk by chunk. What every rank reduces by itself has one copy there for all peers.
void Reduction::PlaceFirst(Scratch& scratch) {
  GroupReduction& first = levels_.front();
  Places& places = places_.front();
  bool staged = replicate_ && levels_.size() > 1;
  int64_t elements = 0;
  for (int rank = 0; rank < first.size(); ++rank) {
    staged = staged || (replicate_ ? HasToBePacked(rank) : !InPlace(first.slice(rank)));
    elements = std::max(elements, first.start(rank) + first.slice(rank).elements);
  }
  char* staging = staged ? scratch.staging.Reserve(elements * arithmetic_.bytes()) : nullptr;
  for (int rank = 0; rank < first.size(); ++rank) {
    const Slice& slice = first.slice(rank);
    const bool in_place = InPlace(slice) && !slice.runs.empty();
    char* there = staged ? staging + first.start(rank) * arithmetic_.bytes() : nullptr;
    places.send.push_back(in_place ? Input(slice.runs.front()) : there);
    places.result.push_back(in_place && !(replicate_ && staged) ? Output(slice.runs.front()) : there);
  }
}

// The next level's slices are parts of the result of the one before.
void Reduction::PlaceNext() {
  for (size_t level = 1; level < levels_.size(); ++level) {
    char* region = places_[level - 1].result[levels_[level - 1].rank()];
    for (int rank = 0; rank < levels_[level].size(); ++rank) {
      places_[level].send.push_back(region + levels_[level].start(rank) * arithmetic_.bytes());
    }
    places_[level].result = places_[level].send;
  }
}

void Reduction::GiveRoom(size_t index, char* received) {
  GroupReduction& level = levels_[index];
  Places& places = places_[index];
  for (int rank = 0; rank < level.size(); ++rank) {
    places.receive.push_back(rank == level.rank() ? nullptr : received);
    received += rank == level.rank() ? 0 : level.mine().elements * arithmetic_.bytes();
  }
  std::vector<const char*> own;
  std::vector<char*> result;
  const bool last = index + 1 == levels_.size();
  for (const Run& run : level.mine().runs) {
    const int64_t offset = run.offset * arithmetic_.bytes();
    own.push_back(index == 0 && !IsDelta(run) ? Input(run) : places.send[level.rank()] + offset);
    result.push_back(replicate_ && last && !IsDelta(run) ? Output(run)
                                                         : places.result[level.rank()] + offset);
  }
  level.Place(std::move(own), std::move(result), places.receive);
}

// ---- chunks ----

int64_t Reduction::Chunks(const GroupReduction& level) const {
  int64_t longest = 0;
  for (int rank = 0; rank < level.size(); ++rank) {
    longest = std::max(longest, level.slice(rank).elements);
  }
  return (longest + chunk_elements_ - 1) / chunk_elements_;
}

int64_t Reduction::ChunkEnd(int64_t chunk, const Slice& slice) const {
  return std::min((chunk + 1) * chunk_elements_, slice.elements);
}

int64_t Reduction::ChunkBytes(int64_t chunk, const Slice& slice) const {
  return std::max<int64_t>(ChunkEnd(chunk, slice) - chunk * chunk_elements_, 0) * arithmetic_.bytes();
}

// ---- out to the owners of the slices ----

// Makes elements [begin, end) of what this rank sends to `rank`, or keeps if that is itself.
void Reduction::Prepare(size_t level, int rank, int64_t begin, int64_t end) {
  if (level == 0) {
    Pack(rank, begin, end);
  } else {
    const int64_t start = levels_[level].start(rank);
    levels_[level - 1].Combine(start + begin, start + end);
  }
}

// What a rank keeps is read where it is, unless it has to be computed.
bool Reduction::HasToBePacked(int rank) const {
  const GroupReduction& level = levels_.front();
  const bool sent = alone_ ? false : replicate_ || rank != level.rank();
  return !InPlace(level.slice(rank)) && (sent || any_delta_);
}

void Reduction::Pack(int rank, int64_t begin, int64_t end) {
  const Slice& slice = levels_.front().slice(rank);
  if (!HasToBePacked(rank)) {
    return;
  }
  char* to = places_.front().send[rank];
  const std::vector<Block> blocks = Blocks(slice, begin, end);
  arithmetic_.workers.Run(blocks.size(), [&](int64_t job, int) {
    const Block& block = blocks[job];
    const Run& run = slice.runs[block.run];
    const int64_t offset = block.position * arithmetic_.bytes();
    char* there = to + run.offset * arithmetic_.bytes() + offset;
    if (IsDelta(run)) {
      const void* both[] = {Input(run) + offset, static_cast<const char*>(tensors_[run.tensor].start) +
                                                     run.first * arithmetic_.bytes() + offset};
      const double difference[] = {1.0, -1.0};
      arithmetic_.kernels.combine[arithmetic_.type](both, difference, 2, block.n, there);
    } else {
      std::memcpy(there, Input(run) + offset, block.n * arithmetic_.bytes());
    }
  });
}

void Reduction::Send(size_t index, int64_t chunk) {
  GroupReduction& level = levels_[index];
  const Places& places = places_[index];
  const int64_t begin = chunk * chunk_elements_;
  std::vector<Message> messages(level.size());
  for (int rank = 0; rank < level.size(); ++rank) {
    const Slice& slice = level.slice(rank);
    if (begin < slice.elements && (!replicate_ || rank == level.rank())) {
      Prepare(index, rank, begin, ChunkEnd(chunk, slice));
    }
    const int64_t offset = begin * arithmetic_.bytes();
    if (rank != level.rank()) {
      messages[rank] = {places.send[rank] + offset, ChunkBytes(chunk, slice), places.receive[rank] + offset,
                        ChunkBytes(chunk, level.mine())};
    }
  }
  level.transport().Start(messages);
}

// Sums what has come while the next chunk is on its way.
void Reduction::ReceiveAndSum(size_t index) {
  GroupReduction& level = levels_[index];
  const int64_t chunks = Chunks(level);
  const bool sum_at_once = arithmetic_.type != kFloat64; // which needs the largest element first
  for (int64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      Send(index, chunk);
    }
    if (chunk > 0) {
      level.transport().Wait();
      if (sum_at_once) {
        level.GramUpTo(ChunkEnd(chunk - 1, level.mine()));
      }
    }
  }
  if (!sum_at_once) {
    level.FindScales();
    level.GramUpTo(level.mine().elements);
  }
}

// ---- back from them ----

void Reduction::Gather(size_t index) {
  GroupReduction& level = levels_[index];
  const Places& places = places_[index];
  const bool last = index + 1 == levels_.size();
  const bool unpack = index == 0;
  const Slice& mine = level.mine();
  const int64_t chunks = replicate_ && !last ? 0 : Chunks(level);
  auto finish = [&](int64_t chunk) {
    level.transport().Wait();
    for (int rank = 0; unpack && rank < level.size(); ++rank) {
      if (rank != level.rank()) {
        Unpack(rank, chunk * chunk_elements_, ChunkEnd(chunk, level.slice(rank)));
      }
    }
  };
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = chunk * chunk_elements_;
    if (last) {
      level.Combine(begin, ChunkEnd(chunk, mine));
    }
    if (replicate_) {
      continue;
    }
    std::vector<Message> messages(level.size());
    for (int rank = 0; rank < level.size(); ++rank) {
      const int64_t offset = begin * arithmetic_.bytes();
      messages[rank] = {places.result[level.rank()] + offset, ChunkBytes(chunk, mine),
                        places.result[rank] + offset, ChunkBytes(chunk, level.slice(rank))};
    }
    level.transport().Start(messages);
    if (unpack) {
      Unpack(level.rank(), begin, ChunkEnd(chunk, mine));
    }
    if (chunk > 0) {
      finish(chunk - 1);
    }
  }
  if (chunks > 0 && !replicate_) {
    finish(chunks - 1);
  }
  if (replicate_ && unpack && any_delta_) {
    Unpack(level.rank(), 0, mine.elements);
  }
}

void Reduction::Unpack(int rank, int64_t begin, int64_t end) {
  const Slice& slice = levels_.front().slice(rank);
  if (InPlace(slice)) {
    return;
  }
  const char* from = places_.front().result[rank];
  const std::vector<Block> blocks = Blocks(slice, begin, end);
  arithmetic_.workers.Run(blocks.size(), [&](int64_t job, int) {
    const Block& block = blocks[job];
    const Run& run = slice.runs[block.run];
    const int64_t offset = block.position * arithmetic_.bytes();
    const char* there = from + run.offset * arithmetic_.bytes() + offset;
    if (IsDelta(run)) {
      const void* both[] = {static_cast<const char*>(tensors_[run.tensor].start) +
                                run.first * arithmetic_.bytes() + offset,
                            there};
      const double sum[] = {1.0, 1.0};
      arithmetic_.kernels.combine[arithmetic_.type](both, sum, 2, block.n, Output(run) + offset);
    } else if (!replicate_) {
      std::memcpy(Output(run) + offset, there, block.n * arithmetic_.bytes());
    }
  });
}

} // namespace

char* ScratchBuffer::Reserve(int64_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    const int64_t rounded = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    memory_.reset(static_cast<char*>(std::aligned_alloc(kHugePageBytes, rounded)));
    if (memory_ == nullptr) {
      bytes_ = 0;
      throw std::bad_alloc();
    }
    madvise(memory_.get(), rounded, MADV_HUGEPAGE); // a hint: where it is refused, small pages do
    bytes_ = rounded;
  }
  return memory_.get();
}

ReduceResult Reduce(const std::vector<TensorView>& tensors, ElementType type,
                    const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                    const Kernels& kernels, Workers& workers, Scratch& scratch,
                    const PhaseObserver& observer) {
  return Reduction(tensors, type, levels, scale, settings, kernels, workers, scratch).Execute(observer);
}

} // namespace adasum_hvd
