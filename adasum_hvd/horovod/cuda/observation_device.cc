#include "cuda/observation_device.h"

#include <algorithm>
#include <iterator>

namespace adasum_hvd {
namespace {

template <class T> void Download(T* to, const T* from, int64_t count, cudaStream_t stream) {
  if (count > 0) {
    CheckCuda(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDeviceToHost, stream), "copy");
  }
}

} // namespace

DeviceObservation::DeviceObservation(const std::vector<TensorView>& tensors,
                                     const std::vector<ReduceLevel>& levels, const DevicePlan& plan,
                                     DeviceScratch& scratch)
    : observation_(tensors, levels, plan.replicates()) {
  for (size_t k = 0; k < levels.size(); ++k) {
    const DeviceLevel& planned = plan.levels[k];
    const Tree& tree = *levels[k].tree;
    Level level = {};
    level.runs = planned.placed.slice(planned.rank).runs;
    level.shared = planned.shared;
    level.last_tier = tree.tiers.size() > 1 ? tree.tiers.back() : std::vector<int>();
    for (int32_t row : level.shared) {
      level.totals = std::max<int64_t>(level.totals, row + 1);
    }
    level.size = planned.size;
    level.merges = static_cast<int64_t>(tree.merges.size());
    Place(level, plan.type(), scratch);
    levels_.push_back(std::move(level));
  }
}

// Doubles first, for alignment.
void DeviceObservation::Place(Level& level, ElementType type, DeviceScratch& scratch) const {
  const auto runs = static_cast<int64_t>(level.runs.size());
  const int64_t entries = GramSize(static_cast<int>(level.size));
  const auto last_entries = static_cast<int64_t>(3 * level.last_tier.size());
  const int64_t scales = type == kFloat64 ? runs : 0;
  const int64_t doubles =
      2 * (entries + last_entries) * (runs + level.totals) + runs * (level.size + 2 * level.merges) + scales;
  level.memory = scratch.downloads.Take(doubles * 8 + runs * 4);
  auto* at = reinterpret_cast<double*>(level.memory.get());
  const auto take = [&](int64_t count) {
    double* const taken = at;
    at += count;
    return taken;
  };
  const auto take_rows = [&](int64_t row) {
    auto* of_runs = reinterpret_cast<DoubleDouble*>(take(2 * row * runs));
    return Rows{of_runs, reinterpret_cast<DoubleDouble*>(take(2 * row * level.totals))};
  };
  level.gram = take_rows(entries);
  level.last = take_rows(last_entries);
  level.coefficients = take(runs * level.size);
  level.sides = reinterpret_cast<Sides*>(take(2 * runs * level.merges));
  level.scales = scales > 0 ? take(scales) : nullptr;
  level.walk_tree = reinterpret_cast<int32_t*>(at);
}

// If later kernels fold the totals themselves, these are not written yet.
void DeviceObservation::CopyRows(const Level& level, const DeviceLevel& on_device, int entries, int set,
                                 Rows& to, cudaStream_t stream) {
  if (on_device.folds_where_read() && level.totals > 0) {
    device::Fold fold = on_device.exchanges.front().fold;
    fold.gathered = on_device.exchanges.front().gathered[set];
    fold.totals = on_device.totals[set];
    device::FoldShared(fold, entries, device::FoldBy::kAdd, stream);
  }
  const auto runs = static_cast<int64_t>(level.runs.size());
  Download(to.runs, on_device.run_sums[set], entries * runs, stream);
  Download(to.totals, on_device.totals[set], entries * level.totals, stream);
}

void DeviceObservation::CopyGrams(size_t index, const DeviceLevel& on_device, cudaStream_t stream) {
  Level& level = levels_[index];
  CopyRows(level, on_device, static_cast<int>(GramSize(on_device.size)), 0, level.gram, stream);
}

void DeviceObservation::CopyCoefficients(size_t index, const DeviceLevel& on_device, const device::Tier& last,
                                         cudaStream_t stream) {
  Level& level = levels_[index];
  const auto runs = static_cast<int64_t>(level.runs.size());
  if (last.count > 0) {
    const int set = last.sums.runs == on_device.run_sums[0] ? 0 : 1;
    CopyRows(level, on_device, 3 * last.count, set, level.last, stream);
  }
  Download(level.coefficients, on_device.slice.coefficients, runs * level.size, stream);
  Download(level.sides, on_device.slice.sides, runs * level.merges, stream);
  Download(level.scales, on_device.slice.scales, level.scales == nullptr ? 0 : runs, stream);
  Download(level.walk_tree, on_device.slice.walk_tree, runs, stream);
  copied_.Set(stream);
}

bool DeviceObservation::Write(int seconds) {
  if (!written_ && copied_.WaitFor(seconds)) {
    for (size_t index = 0; index < levels_.size(); ++index) {
      for (size_t run = 0; run < levels_[index].runs.size(); ++run) {
        WriteRun(levels_[index], index, run);
      }
    }
    levels_.clear(); // frees the memory
    written_ = true;
  }
  return written_;
}

void DeviceObservation::WriteRun(const Level& level, size_t index, size_t run) const {
  double* row = observation_.RowOf(index, level.runs[run]);
  if (row == nullptr) {
    return;
  }
  const auto sums = [&](const Rows& rows, int64_t entries) {
    const int32_t shared = level.shared[run];
    return shared < 0 ? rows.runs + run * entries : rows.totals + shared * entries;
  };
  const int64_t entries = GramSize(static_cast<int>(level.size));
  const DoubleDouble* of_run = sums(level.gram, entries);
  std::vector<double> gram;
  std::transform(of_run, of_run + entries, std::back_inserter(gram),
                 [](const DoubleDouble& sum) { return sum.Rounded(); });
  const double scale = level.scales == nullptr ? 1.0 : level.scales[run];
  if (level.walk_tree[run] == 0) {
    observation_.Write(index, gram.data(), scale, level.coefficients + run * level.size, row);
    return;
  }
  Sides* sides = level.sides + run * level.merges;
  const auto tier = static_cast<int64_t>(level.last_tier.size());
  for (int64_t k = 0; k < tier; ++k) {
    const DoubleDouble* merge = sums(level.last, 3 * tier) + 3 * k;
    const double dot = merge[1].Rounded();
    sides[level.last_tier[k]] = {AdasumCoefficient(dot, merge[0].Rounded()),
                                 AdasumCoefficient(dot, merge[2].Rounded())};
  }
  observation_.WriteWalked(index, gram.data(), scale, sides, row);
}

} // namespace adasum_hvd
