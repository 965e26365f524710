#include "cuda/plan_device.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>

namespace adasum_hvd {

// Lays out arrays in one piece of device memory whose address is not known yet.
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
  // `*where` will point to uninitialized memory for `count` elements.
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
  static constexpr int64_t kAlignment = 256; // bytes, of every table
  static int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

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

namespace {

// The tensors that lie partly on this rank's slice.
const std::vector<int>& SharedOf(const PlacedLevel& level) { return level.shares.parts[level.rank()]; }

// Whether node k of every tier is joined with its neighbour, as SumOverRanks of combine.cu does.
bool MergesNearest(const Tree& tree) {
  std::vector<int> nodes(tree.leaves);
  std::iota(nodes.begin(), nodes.end(), 0);
  for (int apart = 1; apart < tree.leaves; apart *= 2) {
    for (int i = 0; i + apart < tree.leaves; i += 2 * apart) {
      const auto found = std::find_if(tree.merges.begin(), tree.merges.end(), [&](const Merge& merge) {
        return merge.left == nodes[i] && merge.right == nodes[i + apart];
      });
      if (found == tree.merges.end()) {
        return false;
      }
      nodes[i] = tree.leaves + static_cast<int>(found - tree.merges.begin());
    }
  }
  return true;
}

// The blocks of `width` elements of runs.
void Put(const std::vector<int64_t>& counts, int64_t width, Arena& arena, device::Blocks& to) {
  std::vector<device::BlockOf> blocks;
  for (size_t run = 0; run < counts.size(); ++run) {
    for (int64_t block = 0; block * width < counts[run]; ++block) {
      blocks.push_back({static_cast<int32_t>(run), static_cast<int32_t>(block)});
    }
  }
  to.count = static_cast<int>(blocks.size());
  arena.Put(&to.at, blocks);
}

// Converts a tree to the form of device.h.
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
    throw std::logic_error("AdaSum: expected a tree of at most " + std::to_string(device::kMostStack) +
                           " levels, but got " + std::to_string(deepest));
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

// The copies of all slices.
void Put(const std::vector<Placement::Copies>& by_rank, Arena& arena, DeviceCopies& to) {
  std::vector<Copy> copies;
  std::vector<int64_t> counts;
  for (const Placement::Copies& of_slice : by_rank) {
    for (const Copy& copy : of_slice) {
      if (copy.to != nullptr) {
        copies.push_back(copy);
        counts.push_back(copy.count);
      }
    }
  }
  arena.Put(&to.at, copies);
  Put(counts, kBlockElements, arena, to.blocks);
}

} // namespace

device::Sums DeviceLevel::SumsOf(int entries, int set) const {
  device::Sums sums = {run_sums[set], exchanges.front().Sent(entries, set), totals[set], {}};
  if (folds_where_read()) {
    sums.fold = exchanges.front().fold;
    sums.fold.gathered = exchanges.front().gathered[set];
  }
  return sums;
}

DevicePlan::DevicePlan(const std::vector<TensorView>& tensors, ElementType type,
                       const std::vector<ReduceLevel>& requested, double scale,
                       const ReduceSettings& settings, std::unique_ptr<DeviceBuffer> memory,
                       DeviceScratch& scratch, cudaStream_t stream)
    : tensors_(tensors), type_(type), scale_(scale), replicate_bytes_(settings.replicate_bytes),
      placement_(
          tensors_, type, requested, scale, settings,
          [&](int64_t bytes) { return staging_ = scratch.staging.Reserve(bytes, stream); },
          [](int64_t) { return nullptr; }, // ranks of NCCL share no memory
          [&](int64_t bytes) { return received_ = scratch.received.Reserve(bytes, stream); }),
      memory_(std::move(memory)) {
  for (const ReduceLevel& level : requested) {
    trees_.push_back(*level.tree);
    ranks_.push_back(level.transport->rank());
  }
  for (const PlacedLevel& placed : placement_.levels()) {
    levels.push_back({placed, placed.rank(), placed.size()});
  }
  Arena arena;
  for (size_t level = 0; level < levels.size(); ++level) {
    PlanSlice(level, arena);
  }
  Put(placement_.packs(), arena, packs);
  Put(placement_.unpacks(), arena, unpacks);
  char* base = memory_->Reserve(arena.bytes(), stream);
  arena.Resolve(base);
  scratch.uploads.Copy(arena.uploaded(), base, stream);
  for (DeviceLevel& level : levels) {
    level.slice.explicit_tensors = scratch.explicit_tensors.OnDevice();
    const int64_t counters = level.slice.run_count * level.entries;
    CheckCuda(cudaMemsetAsync(level.slice.arrived, 0, counters * sizeof(int32_t), stream), "clear memory");
  }
}

// Plans the exchanges of sums after a level's slices are summed; returns the row of every shared tensor.
std::map<int, int> DevicePlan::PlanExchanges(size_t index, Arena& arena) {
  DeviceLevel& level = levels[index];
  std::map<int, int> rows;
  for (size_t below = index + 1; below-- > 0;) {
    const PlacedLevel& group = levels[below].placed;
    const std::vector<std::vector<int>>& parts = group.shares.parts;
    std::map<int, std::vector<int32_t>> sources; // by tensor
    SumExchange& exchange = level.exchanges.emplace_back();
    exchange.level = below;
    exchange.rank = levels[below].rank;
    exchange.size = levels[below].size;
    for (int rank = 0; rank < exchange.size; ++rank) {
      exchange.slots.push_back(static_cast<int64_t>(parts[rank].size()));
      for (size_t slot = 0; slot < parts[rank].size(); ++slot) {
        sources[parts[rank][slot]].push_back(static_cast<int32_t>(kSlots * rank + slot));
      }
    }
    const std::vector<int> next = below > 0 ? SharedOf(levels[below - 1].placed) : std::vector<int>();
    std::vector<int32_t> row, first_source, source, next_slot;
    for (const auto& [tensor, from] : sources) {
      row.push_back(rows.emplace(tensor, static_cast<int>(rows.size())).first->second);
      first_source.push_back(static_cast<int32_t>(source.size()));
      source.insert(source.end(), from.begin(), from.end());
      const auto found = std::find(next.begin(), next.end(), tensor);
      next_slot.push_back(found == next.end() ? -1 : static_cast<int32_t>(found - next.begin()));
    }
    first_source.push_back(static_cast<int32_t>(source.size()));
    exchange.fold.count = static_cast<int>(row.size());
    arena.Put(&exchange.fold.row, row);
    arena.Put(&exchange.fold.first_source, first_source);
    arena.Put(&exchange.fold.source, source);
    arena.Put(&exchange.fold.next_slot, next_slot);
    for (DoubleDouble*& gathered : exchange.gathered) {
      arena.Room(&gathered, int64_t{kSlots} * exchange.size * level.entries);
    }
  }
  for (size_t k = 0; k + 1 < level.exchanges.size(); ++k) {
    level.exchanges[k].next = &level.exchanges[k + 1];
  }
  for (DoubleDouble*& totals : level.totals) {
    arena.Room(&totals, static_cast<int64_t>(rows.size()) * level.entries);
  }
  return rows;
}

void DevicePlan::PlanSlice(size_t index, Arena& arena) {
  DeviceLevel& level = levels[index];
  const PlacedLevel& placed = level.placed;
  device::Slice& slice = level.slice;
  level.entries = GramSize(level.size);
  for (const std::vector<int>& merges : placed.tree->tiers) {
    level.entries = std::max<int64_t>(level.entries, 3 * static_cast<int64_t>(merges.size()));
  }
  std::vector<int64_t> counts;
  for (const Run& run : placed.mine().runs) {
    counts.push_back(run.count);
  }
  Put(counts, kBlockElements, arena, slice.blocks);
  Put(counts, kBlockElements * device::kStretch, arena, slice.stretches);
  const std::map<int, int> rows = PlanExchanges(index, arena);
  const std::vector<int>& sent = SharedOf(placed);
  std::vector<device::Run> runs;
  int32_t first_block = 0;
  for (size_t k = 0; k < counts.size(); ++k) {
    const Run& run = placed.mine().runs[k];
    const auto row = rows.find(run.tensor);
    const auto slot = std::find(sent.begin(), sent.end(), run.tensor);
    runs.push_back({placed.own[k], placed.out[k], run.offset, run.count, first_block,
                    row == rows.end() || run.whole ? -1 : row->second,
                    slot == sent.end() ? -1 : static_cast<int32_t>(slot - sent.begin())});
    level.shared.push_back(runs.back().shared);
    first_block += runs.back().blocks();
  }
  slice.type = type_;
  slice.rank = level.rank;
  slice.size = level.size;
  slice.run_count = static_cast<int>(runs.size());
  slice.nearest = MergesNearest(*placed.tree);
  arena.Put(&slice.runs, runs);
  arena.Put(&slice.received, std::vector<const void*>(placed.receive.begin(), placed.receive.end()));
  Put(*placed.tree, arena, slice.tree);
  for (size_t k = 1; k < placed.tree->tiers.size(); ++k) {
    const std::vector<int>& merges = placed.tree->tiers[k];
    device::Tier& tier = level.tiers.emplace_back();
    tier.count = static_cast<int>(merges.size());
    tier.sums = {};
    arena.Put(&tier.merges, std::vector<int32_t>(merges.begin(), merges.end()));
  }
  const int64_t count = slice.run_count;
  arena.Room(&slice.scales, type_ == kFloat64 ? count : 0);
  arena.Room(&slice.block_sums, slice.blocks.count * level.entries);
  arena.Room(&slice.stretch_sums, slice.stretches.count * level.entries);
  arena.Room(&slice.arrived, count * level.entries);
  arena.Room(&slice.coefficients, count * level.size);
  arena.Room(&slice.walk_tree, count);
  arena.Room(&slice.sides, count * slice.tree.merges);
  for (DoubleDouble*& sums : level.run_sums) {
    arena.Room(&sums, count * level.entries);
  }
}

} // namespace adasum_hvd
