#include "cuda/reduce_device.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/device.h"
#include "reduce/layout.h"

namespace adasum_hvd {
namespace {

constexpr int64_t kAlignment = 256; // bytes, of everything in the work buffer
constexpr int kSlots = 2;           // sums that a rank sends at most: a slice has two ends

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Puts arrays into one piece of device memory of which the address is not known yet.
class Arena {
public:
  // `*where` will point to a copy of `values`.
  template <class T> void Put(const T** where, const std::vector<T>& values) {
    const int64_t offset = Aligned(static_cast<int64_t>(uploaded_.size()));
    uploaded_.resize(offset);
    const char* bytes = reinterpret_cast<const char*>(values.data());
    uploaded_.insert(uploaded_.end(), bytes, bytes + values.size() * sizeof(T));
    Remember(where, offset, uploads_);
  }
  // `*where` will point to room for `count` elements.
  template <class T> void Room(T** where, int64_t count) {
    Remember(where, room_, rooms_);
    room_ = Aligned(room_ + count * static_cast<int64_t>(sizeof(T)));
  }

  int64_t bytes() const { return Aligned(static_cast<int64_t>(uploaded_.size())) + room_; }
  const std::vector<char>& uploaded() const { return uploaded_; }

  void Resolve(char* base) const {
    for (const auto& [where, offset] : uploads_) {
      Point(where, base + offset);
    }
    char* rooms = base + Aligned(static_cast<int64_t>(uploaded_.size()));
    for (const auto& [where, offset] : rooms_) {
      Point(where, rooms + offset);
    }
  }

private:
  using Pointers = std::vector<std::pair<void*, int64_t>>;
  template <class T> static void Remember(T** where, int64_t offset, Pointers& pointers) {
    pointers.emplace_back(const_cast<void*>(static_cast<const void*>(where)), offset);
  }
  static void Point(void* where, const char* at) { std::memcpy(where, &at, sizeof at); }

  std::vector<char> uploaded_;
  int64_t room_ = 0;
  Pointers uploads_;
  Pointers rooms_;
};

std::vector<device::BlockOf> BlocksOf(const std::vector<int64_t>& counts) {
  std::vector<device::BlockOf> blocks;
  for (size_t run = 0; run < counts.size(); ++run) {
    const int64_t in_run = (counts[run] + kBlockElements - 1) / kBlockElements;
    for (int64_t block = 0; block < in_run; ++block) {
      blocks.push_back({static_cast<int32_t>(run), static_cast<int32_t>(block)});
    }
  }
  return blocks;
}

void Put(const std::vector<int64_t>& counts, Arena& arena, device::Blocks& blocks) {
  const std::vector<device::BlockOf> all = BlocksOf(counts);
  blocks.count = static_cast<int>(all.size());
  arena.Put(&blocks.at, all);
}

// A tree as device.h wants it.
void Put(const Tree& tree, Arena& arena, device::TreeOf& to) {
  const int nodes = tree.root() + 1;
  std::vector<int32_t> members, first_member, program, first_step(nodes);
  for (const std::vector<int>& of_node : tree.members) {
    first_member.push_back(static_cast<int32_t>(members.size()));
    members.insert(members.end(), of_node.begin(), of_node.end());
  }
  first_member.push_back(static_cast<int32_t>(members.size()));
  int deepest = 0;
  std::function<void(int, int)> emit = [&](int node, int depth) {
    deepest = std::max(deepest, depth + 1);
    first_step[node] = static_cast<int32_t>(program.size());
    if (node < tree.leaves) {
      program.push_back(node);
      return;
    }
    const Merge& merge = tree.merges[node - tree.leaves];
    emit(merge.left, depth);
    emit(merge.right, depth + 1);
    program.push_back(~(node - tree.leaves));
  };
  emit(tree.root(), 0);
  if (deepest > device::kMostStack) {
    throw std::logic_error("AdaSum: required a tree of at most " + std::to_string(device::kMostStack) +
                           " levels, got " + std::to_string(deepest));
  }
  to.leaves = tree.leaves;
  to.merges = static_cast<int>(tree.merges.size());
  arena.Put(&to.leaf_weights, tree.leaf_weights);
  arena.Put(&to.merge, tree.merges);
  arena.Put(&to.members, members);
  arena.Put(&to.first_member, first_member);
  arena.Put(&to.program, program);
  arena.Put(&to.first_step, first_step);
}

} // namespace

class DeviceReduction {
public:
  DeviceReduction(const std::vector<TensorView>& tensors, ElementType type,
                  const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                  DeviceScratch& scratch, cudaStream_t stream);
  void Enqueue(const PhaseObserver& observer);

private:
  // The exchange of sums among the ranks of one group.
  struct Stage {
    Transport* transport;
    std::vector<int64_t> slots; // per rank: how many sums it sends
    device::Fold fold = {};
    DoubleDouble* gathered = nullptr;
    Stage* next = nullptr;

    DoubleDouble* Sent(int entries) const { return gathered + int64_t{kSlots} * transport->rank() * entries; }
  };

  struct WalkedTier {
    const int32_t* merges = nullptr;
    int count = 0;
  };

  struct Level {
    Level(Transport* transport_, const Tree* tree_, const Slice& region, bool replicate, double scale_)
        : transport(transport_), tree(tree_), shares(Share(region, transport_->size(), replicate)),
          scale(scale_) {}

    Transport* transport;
    const Tree* tree;
    Shares shares;
    double scale;
    std::vector<char*> send;    // per rank: this rank's elements of its slice
    std::vector<char*> receive; // per rank: its elements of this rank's slice
    std::vector<char*> result;  // per rank: its slice of the result
    device::Slice slice = {};
    std::deque<Stage> stages;      // from this level's group to the lowest level's
    std::deque<WalkedTier> walked; // the tree's tiers above the first

    int rank() const { return transport->rank(); }
    int size() const { return transport->size(); }
    const Slice& mine() const { return shares.slices[rank()]; }
  };

  void PlaceFirst();
  void PlaceNext();
  void PlaceReceived();
  std::map<int, int> PlanStages(size_t level, Arena& arena);
  void PlanSlice(size_t level, Arena& arena);
  void PlanCopies();

  void Exchange(Level& level);
  void FoldOverRanks(Level& level, int entries, device::FoldBy by);
  void SumBlocks(Level& level, int entries, device::FoldBy by, bool walked_only);
  void FindScales(Level& level);
  void WalkTrees(Level& level);
  void Gather(Level& level);

  int64_t bytes() const { return ElementBytes(type_); }
  bool IsDelta(const Run& run) const { return tensors_[run.tensor].start != nullptr; }
  char* Input(const Run& run) const {
    return static_cast<char*>(const_cast<void*>(tensors_[run.tensor].input)) + run.first * bytes();
  }
  char* Output(const Run& run) const {
    return static_cast<char*>(tensors_[run.tensor].output) + run.first * bytes();
  }
  char* Staged(int rank, const Run& run) const {
    return staging_ + (levels_.front().shares.starts[rank] + run.offset) * bytes();
  }
  // Whether the runs of a slice lie one behind the other in the caller's memory.
  template <class Where> bool IsContiguous(const Slice& slice, Where where) const {
    for (size_t k = 0; k < slice.runs.size(); ++k) {
      const char* expected = where(slice.runs.front()) + slice.runs[k].offset * bytes();
      if (IsDelta(slice.runs[k]) || where(slice.runs[k]) != expected) {
        return false;
      }
    }
    return true;
  }
  bool HasContiguousInput(const Slice& slice) const {
    return IsContiguous(slice, [this](const Run& run) { return Input(run); });
  }
  bool HasContiguousOutput(const Slice& slice) const {
    return IsContiguous(slice, [this](const Run& run) { return Output(run); });
  }

  const std::vector<TensorView>& tensors_;
  const ElementType type_;
  const cudaStream_t stream_;
  DeviceScratch& scratch_;
  bool alone_ = false;
  bool replicate_ = false; // every rank reduces everything
  char* staging_ = nullptr;
  std::deque<Level> levels_;
  std::vector<device::Copy> packs_, unpacks_;
  const device::Copy *pack_ = nullptr, *unpack_ = nullptr;
  device::Blocks pack_blocks_ = {}, unpack_blocks_ = {};
};

DeviceReduction::DeviceReduction(const std::vector<TensorView>& tensors, ElementType type,
                                 const std::vector<ReduceLevel>& levels, double scale,
                                 const ReduceSettings& settings, DeviceScratch& scratch, cudaStream_t stream)
    : tensors_(tensors), type_(type), stream_(stream), scratch_(scratch) {
  std::vector<int64_t> elements;
  for (const TensorView& tensor : tensors) {
    elements.push_back(tensor.elements);
  }
  const Slice everything = Fused(elements);
  const int64_t ranks = CountRanks(levels);
  alone_ = ranks == 1;
  replicate_ = Replicates(everything.elements * bytes(), ranks, settings);
  const size_t scaled = ScaledLevel(scale, levels.size());
  for (size_t level = 0; level < levels.size(); ++level) {
    const Slice region = level == 0 || replicate_ ? everything : levels_.back().mine();
    levels_.emplace_back(levels[level].transport, levels[level].tree, region, replicate_,
                         level == scaled ? scale : 1.0);
  }
  PlaceFirst();
  PlaceNext();
  PlaceReceived();
  PlanCopies();
  Arena arena;
  for (size_t level = 0; level < levels_.size(); ++level) {
    PlanSlice(level, arena);
  }
  std::vector<int64_t> packed, unpacked;
  for (const device::Copy& copy : packs_) {
    packed.push_back(copy.count);
  }
  for (const device::Copy& copy : unpacks_) {
    unpacked.push_back(copy.count);
  }
  arena.Put(&pack_, packs_);
  arena.Put(&unpack_, unpacks_);
  Put(packed, arena, pack_blocks_);
  Put(unpacked, arena, unpack_blocks_);
  char* base = scratch_.work.Reserve(arena.bytes(), stream_);
  arena.Resolve(base);
  for (Level& level : levels_) {
    for (Stage& stage : level.stages) {
      stage.fold.gathered = stage.gathered;
      stage.fold.totals = level.slice.totals;
    }
  }
  scratch_.uploads.Copy(arena.uploaded(), base, stream_);
}

// ---- where things are ----

void DeviceReduction::PlaceFirst() {
  Level& first = levels_.front();
  bool staged = replicate_ && levels_.size() > 1;
  for (const TensorView& tensor : tensors_) {
    staged = staged || tensor.start != nullptr;
  }
  int64_t elements = 0;
  for (int rank = 0; rank < first.size(); ++rank) {
    const Slice& slice = first.shares.slices[rank];
    staged =
        staged || (!alone_ && !HasContiguousInput(slice)) || (!replicate_ && !HasContiguousOutput(slice));
    elements = std::max(elements, first.shares.starts[rank] + slice.elements);
  }
  staging_ = staged ? scratch_.staging.Reserve(elements * bytes(), stream_) : nullptr;
  for (int rank = 0; rank < first.size(); ++rank) {
    const Slice& slice = first.shares.slices[rank];
    char* there = staged ? staging_ + first.shares.starts[rank] * bytes() : nullptr;
    const bool any = !slice.runs.empty();
    first.send.push_back(any && HasContiguousInput(slice) ? Input(slice.runs.front()) : there);
    const bool in_place = any && !(replicate_ && staged) && HasContiguousOutput(slice);
    first.result.push_back(in_place ? Output(slice.runs.front()) : there);
  }
}

// The next level's slices are parts of the result of the one before.
void DeviceReduction::PlaceNext() {
  for (size_t index = 1; index < levels_.size(); ++index) {
    Level& level = levels_[index];
    char* region = levels_[index - 1].result[levels_[index - 1].rank()];
    for (int rank = 0; rank < level.size(); ++rank) {
      level.send.push_back(region + level.shares.starts[rank] * bytes());
    }
    level.result = level.send;
  }
}

void DeviceReduction::PlaceReceived() {
  int64_t received = 0;
  for (const Level& level : levels_) {
    received += (level.size() - 1) * Aligned(level.mine().elements * bytes());
  }
  char* room = scratch_.received.Reserve(received, stream_);
  for (Level& level : levels_) {
    for (int rank = 0; rank < level.size(); ++rank) {
      level.receive.push_back(rank == level.rank() ? nullptr : room);
      room += rank == level.rank() ? 0 : Aligned(level.mine().elements * bytes());
    }
  }
}

// What is sent is packed where it is not contiguous, and so are changes of weights.
void DeviceReduction::PlanCopies() {
  const Level& first = levels_.front();
  for (int rank = 0; rank < first.size(); ++rank) {
    const Slice& slice = first.shares.slices[rank];
    const bool mine = rank == first.rank();
    if (replicate_ && !mine) {
      continue; // the same as this rank's
    }
    const bool sent = !alone_ && (replicate_ || !mine) && !HasContiguousInput(slice);
    const bool back = !replicate_ && !HasContiguousOutput(slice);
    for (const Run& run : slice.runs) {
      const void* start =
          IsDelta(run) ? static_cast<const char*>(tensors_[run.tensor].start) + run.first * bytes() : nullptr;
      if (sent || start != nullptr) {
        packs_.push_back({Input(run), start, Staged(rank, run), -1.0, run.count});
      }
      if (back || start != nullptr) {
        unpacks_.push_back({Staged(rank, run), start, Output(run), 1.0, run.count});
      }
    }
  }
}

// ---- what the device is told ----

// The exchanges of sums after a level's slices have been summed; returns the row of every shared tensor.
std::map<int, int> DeviceReduction::PlanStages(size_t index, Arena& arena) {
  Level& level = levels_[index];
  std::map<int, int> rows;
  int most = 1;
  for (const std::vector<int>& merges : level.tree->tiers) {
    most = std::max(most, 3 * static_cast<int>(merges.size()));
  }
  const int64_t entries = std::max<int64_t>(most, GramSize(level.size()));
  for (size_t below = index + 1; below-- > 0;) {
    const Level& group = levels_[below];
    const std::vector<std::vector<int>>& parts = group.shares.shared;
    std::map<int, std::vector<int32_t>> sources; // by tensor
    Stage& stage = level.stages.emplace_back();
    stage.transport = group.transport;
    for (int rank = 0; rank < group.size(); ++rank) {
      stage.slots.push_back(static_cast<int64_t>(parts[rank].size()));
      for (size_t slot = 0; slot < parts[rank].size(); ++slot) {
        sources[parts[rank][slot]].push_back(static_cast<int32_t>(kSlots * rank + slot));
      }
    }
    const std::vector<int> next =
        below > 0 ? levels_[below - 1].shares.shared[levels_[below - 1].rank()] : std::vector<int>();
    std::vector<int32_t> row, first_source, source, next_slot;
    for (const auto& [tensor, from] : sources) {
      row.push_back(rows.emplace(tensor, static_cast<int>(rows.size())).first->second);
      first_source.push_back(static_cast<int32_t>(source.size()));
      source.insert(source.end(), from.begin(), from.end());
      const auto found = std::find(next.begin(), next.end(), tensor);
      next_slot.push_back(found == next.end() ? -1 : static_cast<int32_t>(found - next.begin()));
    }
    first_source.push_back(static_cast<int32_t>(source.size()));
    stage.fold.count = static_cast<int>(row.size());
    arena.Put(&stage.fold.row, row);
    arena.Put(&stage.fold.first_source, first_source);
    arena.Put(&stage.fold.source, source);
    arena.Put(&stage.fold.next_slot, next_slot);
    arena.Room(&stage.gathered, int64_t{kSlots} * group.size() * entries);
  }
  for (size_t k = 0; k + 1 < level.stages.size(); ++k) {
    level.stages[k].next = &level.stages[k + 1];
  }
  device::Slice& slice = level.slice;
  const int64_t runs = static_cast<int64_t>(level.mine().runs.size());
  arena.Room(&slice.block_sums, slice.blocks.count * entries);
  arena.Room(&slice.run_sums, runs * entries);
  arena.Room(&slice.totals, static_cast<int64_t>(rows.size()) * entries);
  return rows;
}

void DeviceReduction::PlanSlice(size_t index, Arena& arena) {
  Level& level = levels_[index];
  device::Slice& slice = level.slice;
  const bool last = index + 1 == levels_.size();
  std::vector<int64_t> counts;
  for (const Run& run : level.mine().runs) {
    counts.push_back(run.count);
  }
  Put(counts, arena, slice.blocks);
  const std::map<int, int> rows = PlanStages(index, arena);
  const std::vector<int>& sent = level.shares.shared[level.rank()];
  std::vector<device::Run> runs;
  int32_t first_block = 0;
  for (const Run& run : level.mine().runs) {
    const int64_t offset = run.offset * bytes();
    char* own = level.send[level.rank()] + offset;
    if (index == 0) {
      own = IsDelta(run) ? Staged(level.rank(), run) : Input(run);
    }
    char* result = replicate_ && last && !IsDelta(run) ? Output(run) : level.result[level.rank()] + offset;
    const auto row = rows.find(run.tensor);
    const auto slot = std::find(sent.begin(), sent.end(), run.tensor);
    runs.push_back({own, result, run.offset, run.count, first_block,
                    row == rows.end() || run.whole ? -1 : row->second,
                    slot == sent.end() ? -1 : static_cast<int32_t>(slot - sent.begin())});
    first_block += static_cast<int32_t>((run.count + kBlockElements - 1) / kBlockElements);
  }
  slice.type = type_;
  slice.rank = level.rank();
  slice.size = level.size();
  slice.run_count = static_cast<int>(runs.size());
  arena.Put(&slice.runs, runs);
  arena.Put(&slice.received, std::vector<const void*>(level.receive.begin(), level.receive.end()));
  Put(*level.tree, arena, slice.tree);
  for (size_t k = 1; k < level.tree->tiers.size(); ++k) {
    const std::vector<int>& merges = level.tree->tiers[k];
    WalkedTier& walked = level.walked.emplace_back();
    walked.count = static_cast<int>(merges.size());
    arena.Put(&walked.merges, std::vector<int32_t>(merges.begin(), merges.end()));
  }
  const int64_t count = slice.run_count;
  arena.Room(&slice.scales, type_ == kFloat64 ? count : 0);
  arena.Room(&slice.coefficients, count * level.size());
  arena.Room(&slice.walk_tree, count);
  arena.Room(&slice.sides, count * slice.tree.merges);
  slice.explicit_counter = scratch_.counter(stream_);
}

// ---- enqueue ----

void DeviceReduction::Enqueue(const PhaseObserver& observer) {
  for (size_t index = 0; index < levels_.size(); ++index) {
    Level& level = levels_[index];
    observer(Phase::kExchangeAndGram, static_cast<int>(index));
    if (index == 0) {
      device::CopyBlocks(type_, pack_, pack_blocks_, stream_);
    }
    if (level.size() > 1) {
      Exchange(level);
      if (type_ == kFloat64) {
        FindScales(level);
      }
      device::GramOfBlocks(level.slice, stream_);
      SumBlocks(level, static_cast<int>(GramSize(level.size())), device::FoldBy::kAdd, false);
    }
    observer(Phase::kSharedTensors, static_cast<int>(index));
    FoldOverRanks(level, static_cast<int>(GramSize(level.size())), device::FoldBy::kAdd);
    device::Solve(level.slice, stream_);
    WalkTrees(level);
    if (index + 1 < levels_.size()) {
      device::Combine(level.slice, level.scale, stream_);
    }
  }
  for (size_t index = levels_.size(); index-- > 0;) {
    observer(Phase::kCombineAndGather, static_cast<int>(index));
    if (index + 1 == levels_.size()) {
      device::Combine(levels_[index].slice, levels_[index].scale, stream_);
    }
    Gather(levels_[index]);
  }
  device::CopyBlocks(type_, unpack_, unpack_blocks_, stream_);
  scratch_.CopyCounter(stream_);
}

void DeviceReduction::Exchange(Level& level) {
  std::vector<Message> messages(level.size());
  for (int rank = 0; rank < level.size(); ++rank) {
    messages[rank] = {level.send[rank], level.shares.slices[rank].elements * bytes(), level.receive[rank],
                      level.mine().elements * bytes()};
  }
  level.transport->Exchange(messages);
}

void DeviceReduction::Gather(Level& level) {
  if (replicate_) {
    return;
  }
  std::vector<Message> messages(level.size());
  for (int rank = 0; rank < level.size(); ++rank) {
    messages[rank] = {level.result[level.rank()], level.mine().elements * bytes(), level.result[rank],
                      level.shares.slices[rank].elements * bytes()};
  }
  level.transport->Exchange(messages);
}

void DeviceReduction::SumBlocks(Level& level, int entries, device::FoldBy by, bool walked_only) {
  device::Slice slice = level.slice;
  slice.sent = level.stages.front().Sent(entries);
  device::FoldBlocks(slice, entries, by, walked_only, stream_);
}

// From the ranks whose slices lie side by side, the group of this level, to those of the lowest level.
void DeviceReduction::FoldOverRanks(Level& level, int entries, device::FoldBy by) {
  for (Stage& stage : level.stages) {
    if (stage.fold.count == 0) {
      continue;
    }
    const int64_t row = entries * static_cast<int64_t>(sizeof(DoubleDouble));
    Transport& transport = *stage.transport;
    std::vector<Message> messages(transport.size());
    for (int rank = 0; rank < transport.size(); ++rank) {
      messages[rank] = {stage.Sent(entries), stage.slots[transport.rank()] * row,
                        stage.gathered + int64_t{kSlots} * rank * entries, stage.slots[rank] * row};
    }
    transport.Exchange(messages);
    stage.fold.next = stage.next == nullptr ? nullptr : stage.next->Sent(entries);
    device::FoldShared(stage.fold, entries, by, stream_);
  }
}

// float64 products overflow and underflow where their inputs do not; as in group_reduction.cc.
void DeviceReduction::FindScales(Level& level) {
  device::LargestOfBlocks(level.slice, stream_);
  SumBlocks(level, 1, device::FoldBy::kMaximum, false);
  FoldOverRanks(level, 1, device::FoldBy::kMaximum);
  device::SetScales(level.slice, stream_);
}

// For what Solve has flagged, on the device; the exchanges of a few sums take place whatever it has found.
void DeviceReduction::WalkTrees(Level& level) {
  for (const WalkedTier& walked : level.walked) {
    const int entries = 3 * walked.count;
    device::NodesOfBlocks(level.slice, walked.merges, walked.count, stream_);
    SumBlocks(level, entries, device::FoldBy::kAdd, true);
    FoldOverRanks(level, entries, device::FoldBy::kAdd);
    device::SetSides(level.slice, walked.merges, walked.count, stream_);
  }
}

void ReduceOnDevice(const std::vector<TensorView>& tensors, ElementType type,
                    const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                    DeviceScratch& scratch, cudaStream_t stream, const PhaseObserver& observer) {
  DeviceReduction(tensors, type, levels, scale, settings, scratch, stream).Enqueue(observer);
}

} // namespace adasum_hvd
