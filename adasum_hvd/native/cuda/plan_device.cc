#include "cuda/plan_device.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

namespace adasum_hvd {
namespace {

constexpr int64_t kAlignment = 256; // bytes, of every table

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The tensors of which this rank's slice holds a part.
const std::vector<int>& SharedOf(const PlacedLevel& level) { return level.shares.shared[level.rank()]; }

} // namespace

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

namespace {

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
  Put(counts, arena, to.blocks);
}

} // namespace

DevicePlan::DevicePlan(const Placement& placement, ElementType type, DeviceScratch& scratch,
                       cudaStream_t stream) {
  for (const PlacedLevel& placed : placement.levels()) {
    levels.push_back({placed});
  }
  Arena arena;
  for (size_t level = 0; level < levels.size(); ++level) {
    PlanSlice(level, type, arena);
  }
  Put(placement.packs(), arena, packs);
  Put(placement.unpacks(), arena, unpacks);
  char* base = scratch.work.Reserve(arena.bytes(), stream);
  arena.Resolve(base);
  for (DeviceLevel& level : levels) {
    for (SumExchange& exchange : level.exchanges) {
      exchange.fold.gathered = exchange.gathered;
      exchange.fold.totals = level.slice.totals;
    }
  }
  scratch.uploads.Copy(arena.uploaded(), base, stream);
}

// The exchanges of sums after a level's slices have been summed; returns the row of every shared tensor.
std::map<int, int> DevicePlan::PlanExchanges(size_t index, Arena& arena) {
  DeviceLevel& level = levels[index];
  std::map<int, int> rows;
  int most = 1;
  for (const std::vector<int>& merges : level.placed.tree->tiers) {
    most = std::max(most, 3 * static_cast<int>(merges.size()));
  }
  const int64_t entries = std::max<int64_t>(most, GramSize(level.placed.size()));
  for (size_t below = index + 1; below-- > 0;) {
    const PlacedLevel& group = levels[below].placed;
    const std::vector<std::vector<int>>& parts = group.shares.shared;
    std::map<int, std::vector<int32_t>> sources; // by tensor
    SumExchange& exchange = level.exchanges.emplace_back();
    exchange.transport = group.transport;
    for (int rank = 0; rank < group.size(); ++rank) {
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
    arena.Room(&exchange.gathered, int64_t{kSlots} * group.size() * entries);
  }
  for (size_t k = 0; k + 1 < level.exchanges.size(); ++k) {
    level.exchanges[k].next = &level.exchanges[k + 1];
  }
  device::Slice& slice = level.slice;
  const int64_t runs = static_cast<int64_t>(level.placed.mine().runs.size());
  arena.Room(&slice.block_sums, slice.blocks.count * entries);
  arena.Room(&slice.run_sums, runs * entries);
  arena.Room(&slice.totals, static_cast<int64_t>(rows.size()) * entries);
  return rows;
}

void DevicePlan::PlanSlice(size_t index, ElementType type, Arena& arena) {
  DeviceLevel& level = levels[index];
  const PlacedLevel& placed = level.placed;
  device::Slice& slice = level.slice;
  std::vector<int64_t> counts;
  for (const Run& run : placed.mine().runs) {
    counts.push_back(run.count);
  }
  Put(counts, arena, slice.blocks);
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
    first_block += static_cast<int32_t>((run.count + kBlockElements - 1) / kBlockElements);
  }
  slice.type = type;
  slice.rank = placed.rank();
  slice.size = placed.size();
  slice.run_count = static_cast<int>(runs.size());
  arena.Put(&slice.runs, runs);
  arena.Put(&slice.received, std::vector<const void*>(placed.receive.begin(), placed.receive.end()));
  Put(*placed.tree, arena, slice.tree);
  for (size_t k = 1; k < placed.tree->tiers.size(); ++k) {
    const std::vector<int>& merges = placed.tree->tiers[k];
    DeviceTier& tier = level.tiers.emplace_back();
    tier.count = static_cast<int>(merges.size());
    arena.Put(&tier.merges, std::vector<int32_t>(merges.begin(), merges.end()));
  }
  const int64_t count = slice.run_count;
  arena.Room(&slice.scales, type == kFloat64 ? count : 0);
  arena.Room(&slice.coefficients, count * placed.size());
  arena.Room(&slice.walk_tree, count);
  arena.Room(&slice.sides, count * slice.tree.merges);
}

} // namespace adasum_hvd
