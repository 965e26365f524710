#include "cuda/reduce_device.h"

#include "cuda/plan_device.h"

namespace adasum_hvd {
namespace {

class DeviceReduction {
public:
  DeviceReduction(const std::vector<TensorView>& tensors, ElementType type,
                  const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                  DeviceScratch& scratch, cudaStream_t stream)
      : type_(type), stream_(stream),
        placement_(
            tensors, type, levels, scale, settings,
            [&](int64_t bytes) { return scratch.staging.Reserve(bytes, stream); },
            [](int64_t) -> char* { return nullptr; }, // NCCL's ranks share none
            [&](int64_t bytes) { return scratch.received.Reserve(bytes, stream); }),
        plan_(placement_, type, scratch, stream) {}
  void Enqueue(const PhaseObserver& observer);

private:
  void Exchange(const PlacedLevel& level);
  void FoldOverRanks(DeviceLevel& level, int entries, device::FoldBy by);
  void SumBlocks(DeviceLevel& level, int entries, device::FoldBy by, bool walked_only);
  void FindScales(DeviceLevel& level);
  void WalkTrees(DeviceLevel& level);
  void Gather(const PlacedLevel& level);

  const ElementType type_;
  const cudaStream_t stream_;
  const Placement placement_;
  DevicePlan plan_;
};

void DeviceReduction::Enqueue(const PhaseObserver& observer) {
  std::deque<DeviceLevel>& levels = plan_.levels;
  for (size_t index = 0; index < levels.size(); ++index) {
    DeviceLevel& level = levels[index];
    const int size = level.placed.size();
    const int entries = static_cast<int>(GramSize(size));
    observer(Phase::kExchangeAndGram, static_cast<int>(index));
    if (index == 0) {
      device::CopyBlocks(type_, plan_.packs.at, plan_.packs.blocks, stream_);
    }
    if (size > 1) {
      Exchange(level.placed);
      if (type_ == kFloat64) {
        FindScales(level);
      }
      device::GramOfBlocks(level.slice, stream_);
      SumBlocks(level, entries, device::FoldBy::kAdd, false);
    }
    observer(Phase::kSharedTensors, static_cast<int>(index));
    FoldOverRanks(level, entries, device::FoldBy::kAdd);
    device::Solve(level.slice, stream_);
    WalkTrees(level);
    if (index + 1 < levels.size()) {
      device::Combine(level.slice, level.placed.scale, stream_);
    }
  }
  for (size_t index = levels.size(); index-- > 0;) {
    observer(Phase::kCombineAndGather, static_cast<int>(index));
    if (index + 1 == levels.size()) {
      device::Combine(levels[index].slice, levels[index].placed.scale, stream_);
    }
    Gather(levels[index].placed);
  }
  device::CopyBlocks(type_, plan_.unpacks.at, plan_.unpacks.blocks, stream_);
}

void DeviceReduction::Exchange(const PlacedLevel& level) {
  const int64_t bytes = ElementBytes(type_);
  std::vector<Message> messages(level.size());
  for (int rank = 0; rank < level.size(); ++rank) {
    messages[rank] = {level.send[rank], level.slice(rank).elements * bytes, level.receive[rank],
                      level.mine().elements * bytes};
  }
  level.transport->Exchange(messages);
}

void DeviceReduction::Gather(const PlacedLevel& level) {
  if (placement_.replicates()) {
    return;
  }
  const int64_t bytes = ElementBytes(type_);
  std::vector<Message> messages(level.size());
  for (int rank = 0; rank < level.size(); ++rank) {
    messages[rank] = {level.result[level.rank()], level.mine().elements * bytes, level.result[rank],
                      level.slice(rank).elements * bytes};
  }
  level.transport->Exchange(messages);
}

void DeviceReduction::SumBlocks(DeviceLevel& level, int entries, device::FoldBy by, bool walked_only) {
  device::Slice slice = level.slice;
  slice.sent = level.exchanges.front().Sent(entries);
  device::FoldBlocks(slice, entries, by, walked_only, stream_);
}

// From the ranks whose slices lie side by side, the group of this level, to those of the lowest level.
void DeviceReduction::FoldOverRanks(DeviceLevel& level, int entries, device::FoldBy by) {
  for (SumExchange& exchange : level.exchanges) {
    if (exchange.fold.count == 0) {
      continue;
    }
    const int64_t row_bytes = entries * static_cast<int64_t>(sizeof(DoubleDouble));
    Transport& transport = *exchange.transport;
    std::vector<Message> messages(transport.size());
    for (int rank = 0; rank < transport.size(); ++rank) {
      messages[rank] = {exchange.Sent(entries), exchange.slots[transport.rank()] * row_bytes,
                        exchange.Of(rank, entries), exchange.slots[rank] * row_bytes};
    }
    transport.Exchange(messages);
    exchange.fold.next = exchange.next == nullptr ? nullptr : exchange.next->Sent(entries);
    device::FoldShared(exchange.fold, entries, by, stream_);
  }
}

// float64 products overflow and underflow where their inputs do not; as in group_reduction.cc.
void DeviceReduction::FindScales(DeviceLevel& level) {
  device::LargestOfBlocks(level.slice, stream_);
  SumBlocks(level, 1, device::FoldBy::kMaximum, false);
  FoldOverRanks(level, 1, device::FoldBy::kMaximum);
  device::SetScales(level.slice, stream_);
}

// For what Solve has flagged, on the device; the exchanges of a few sums take place whatever it has found.
void DeviceReduction::WalkTrees(DeviceLevel& level) {
  for (const DeviceTier& tier : level.tiers) {
    const int entries = 3 * tier.count;
    device::NodesOfBlocks(level.slice, tier.merges, tier.count, stream_);
    SumBlocks(level, entries, device::FoldBy::kAdd, true);
    FoldOverRanks(level, entries, device::FoldBy::kAdd);
    device::SetSides(level.slice, tier.merges, tier.count, stream_);
  }
}

} // namespace

void ReduceOnDevice(const std::vector<TensorView>& tensors, ElementType type,
                    const std::vector<ReduceLevel>& levels, double scale, const ReduceSettings& settings,
                    DeviceScratch& scratch, cudaStream_t stream, const PhaseObserver& observer) {
  DeviceReduction(tensors, type, levels, scale, settings, scratch, stream).Enqueue(observer);
}

} // namespace adasum_hvd
