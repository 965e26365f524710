#include "cuda/reduce_device.h"

namespace adasum_hvd {
namespace {

class DeviceReduction {
public:
  DeviceReduction(DevicePlan& plan, const std::vector<ReduceLevel>& levels, DeviceObservation* observation,
                  cudaStream_t stream)
      : plan_(plan), transports_(levels), observation_(observation), stream_(stream) {}
  void Enqueue(const PhaseObserver& observer);

private:
  void Exchange(size_t index, bool results);
  void FindScales(const DeviceLevel& level);
  void FoldOverRanks(const DeviceLevel& level, int entries, device::FoldBy by, int set);
  device::Tier WalkTrees(const DeviceLevel& level);

  DevicePlan& plan_;
  const std::vector<ReduceLevel>& transports_;
  DeviceObservation* const observation_; // or null: no tensor is observed
  const cudaStream_t stream_;
};

void DeviceReduction::Enqueue(const PhaseObserver& observer) {
  std::deque<DeviceLevel>& levels = plan_.levels;
  device::Tier last = {};
  for (size_t index = 0; index < levels.size(); ++index) {
    const DeviceLevel& level = levels[index];
    const int entries = static_cast<int>(GramSize(level.size));
    observer(Phase::kReduceScatterGram, static_cast<int>(index));
    if (index == 0) {
      device::CopyBlocks(plan_.type(), plan_.packs.at, plan_.packs.blocks, stream_);
    }
    if (level.size > 1) {
      Exchange(index, /*results=*/false);
      if (plan_.type() == kFloat64) {
        FindScales(level);
      }
      device::GramOfBlocks(level.slice, stream_);
      device::FoldBlocks(level.slice, level.SumsOf(entries, 0), entries, device::FoldBy::kAdd, stream_);
    }
    observer(Phase::kCoefficients, static_cast<int>(index));
    FoldOverRanks(level, entries, device::FoldBy::kAdd, 0);
    device::Solve(level.slice, level.SumsOf(entries, 0), stream_);
    if (observation_ != nullptr) { // before other sums overwrite the Gram matrices
      observation_->CopyGrams(index, level, stream_);
    }
    last = WalkTrees(level);
    if (observation_ != nullptr) {
      observation_->CopyCoefficients(index, level, last, stream_);
    }
    if (index + 1 < levels.size()) {
      device::Combine(level.slice, last, level.placed.scale, stream_);
    }
  }
  for (size_t index = levels.size(); index-- > 0;) {
    observer(Phase::kCombineAllgather, static_cast<int>(index));
    if (index + 1 == levels.size()) {
      device::Combine(levels[index].slice, last, levels[index].placed.scale, stream_);
    }
    if (!plan_.replicates()) {
      Exchange(index, /*results=*/true);
    }
  }
  device::CopyBlocks(plan_.type(), plan_.unpacks.at, plan_.unpacks.blocks, stream_);
}

// Sends the other ranks their slices, or this rank's slice of the results.
void DeviceReduction::Exchange(size_t index, bool results) {
  const DeviceLevel& level = plan_.levels[index];
  const PlacedLevel& placed = level.placed;
  const auto bytes_of = [&](int rank) { return placed.slice(rank).elements * ElementBytes(plan_.type()); };
  const int64_t mine = bytes_of(level.rank);
  std::vector<Message> messages(level.size);
  for (int rank = 0; rank < level.size; ++rank) {
    messages[rank] = results ? Message{placed.result[level.rank], mine, placed.result[rank], bytes_of(rank)}
                             : Message{placed.send[rank], bytes_of(rank), placed.receive[rank], mine};
  }
  transports_[index].transport->Exchange(messages);
}

// From the group of this level, whose slices are adjacent, to the group of the first level.
void DeviceReduction::FoldOverRanks(const DeviceLevel& level, int entries, device::FoldBy by, int set) {
  const int64_t row_bytes = entries * static_cast<int64_t>(sizeof(DoubleDouble));
  for (const SumExchange& exchange : level.exchanges) {
    if (exchange.fold.count == 0) {
      continue;
    }
    std::vector<Message> messages(exchange.size);
    for (int rank = 0; rank < exchange.size; ++rank) {
      messages[rank] = {exchange.Sent(entries, set), exchange.slots[exchange.rank] * row_bytes,
                        exchange.Of(rank, entries, set), exchange.slots[rank] * row_bytes};
    }
    transports_[exchange.level].transport->Exchange(messages);
    if (!level.folds_where_read()) {
      device::Fold fold = exchange.fold;
      fold.gathered = exchange.gathered[set];
      fold.totals = level.totals[set];
      fold.next = exchange.next == nullptr ? nullptr : exchange.next->Sent(entries, set);
      device::FoldShared(fold, entries, by, stream_);
    }
  }
}

// float64 products overflow and underflow before their factors do; as in group_reduction.cc.
void DeviceReduction::FindScales(const DeviceLevel& level) {
  const device::Sums largest = level.SumsOf(1, 0);
  device::LargestOfBlocks(level.slice, stream_);
  device::FoldBlocks(level.slice, largest, 1, device::FoldBy::kMaximum, stream_);
  FoldOverRanks(level, 1, device::FoldBy::kMaximum, 0);
  device::SetScales(level.slice, largest, stream_);
}

// For the tensors that Solve has flagged on the device; the exchanges of a few sums take place also if it has
// flagged none. Returns the last tier, whose sums the next kernel reads.
device::Tier DeviceReduction::WalkTrees(const DeviceLevel& level) {
  device::Tier before = {};
  int set = 0;
  for (device::Tier tier : level.tiers) {
    set = 1 - set;
    tier.sums = level.SumsOf(3 * tier.count, set);
    device::WalkTier(level.slice, before, tier, stream_);
    FoldOverRanks(level, 3 * tier.count, device::FoldBy::kAdd, set);
    before = tier;
  }
  return before;
}

} // namespace

std::shared_ptr<DeviceObservation> ReduceOnDevice(const std::vector<TensorView>& tensors, ElementType type,
                                                  const std::vector<ReduceLevel>& levels, double scale,
                                                  const ReduceSettings& settings, DeviceScratch& scratch,
                                                  cudaStream_t stream, const PhaseObserver& observer) {
  DevicePlan& plan = scratch.plans.For(tensors, type, levels, scale, settings, scratch, stream);
  std::shared_ptr<DeviceObservation> observation;
  if (AnyObservation(tensors)) {
    observation = std::make_shared<DeviceObservation>(tensors, levels, plan, scratch);
  }
  DeviceReduction(plan, levels, observation.get(), stream).Enqueue(observer);
  return observation;
}

} // namespace adasum_hvd
