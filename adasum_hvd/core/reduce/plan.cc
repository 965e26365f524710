#include "reduce/plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace adasum_hvd {
namespace {

// The cluster that the costs assume (docs/cost_model.md). Only the ratios matter. A model is needed because
// no fixed rule is right: one level of N ranks computes (N + 1) / 2 products per element, and more levels add
// messages and roundings, or send more bytes between hosts.
constexpr double kBytes = 16e6;          // reduced at once
constexpr double kLocalLatency = 2e-6;   // seconds per message inside a host
constexpr double kLatency = 20e-6;       // and between hosts
constexpr double kLocalBandwidth = 10e9; // bytes per second of a rank inside a host
constexpr double kBandwidth = 25e9 / 8;  // out of a host, all its ranks together
constexpr double kMultiplyAdds = 6e9;    // pairs of elements per second of a rank
constexpr double kElementBytes = 4;      // float32
constexpr double kCostPerLevel = 0.1;    // another level rounds once more, so it has to save this share
constexpr int kLargestUnsplitOnHost = 8; // up to so many ranks of a host reduce in one level at any cost

// The ranks in the order in which the tree pairs them, and the size of its groups.
struct Order {
  std::vector<int> ranks;
  int group = 0; // 0 if the groups have different sizes
};

struct Division {
  std::vector<int> radices;
  size_t inner = 0; // the number of levels inside the tree's groups
};

Order OrderOf(const std::vector<int>& hosts, int group_size) {
  Order order;
  const std::vector<std::vector<int>> groups = Groups(hosts, group_size);
  order.group = static_cast<int>(groups.front().size());
  for (const std::vector<int>& group : groups) {
    order.ranks.insert(order.ranks.end(), group.begin(), group.end());
    order.group = group.size() == groups.front().size() ? order.group : 0;
  }
  return order;
}

// All ways to write `size` as a product in which every factor but the last is a power of two, so that no
// neighbour is unpaired before the last level.
std::vector<std::vector<int>> Factors(int size) {
  if (size == 1) {
    return {{}};
  }
  std::vector<std::vector<int>> all = {{size}};
  for (int first = 2; first < size; first *= 2) {
    if (size % first == 0) {
      for (std::vector<int> rest : Factors(size / first)) {
        rest.insert(rest.begin(), first);
        all.push_back(std::move(rest));
      }
    }
  }
  return all;
}

// The positions, in the order of the tree, of the group of `place` in a level of `radix`; the levels before
// have groups of `stride` ranks in total.
std::vector<int> GroupOf(int place, int stride, int radix) {
  std::vector<int> group(radix);
  const int first = place - place / stride % radix * stride;
  for (int k = 0; k < radix; ++k) {
    group[k] = first + k * stride;
  }
  return group;
}

int MostOnOneHost(const std::vector<int>& hosts) {
  std::map<int, int> count;
  int most = 0;
  for (int host : hosts) {
    most = std::max(most, ++count[host]);
  }
  return most;
}

// The hosts of the ranks in an order, with a cache of the shares that the costs need repeatedly.
class Cluster {
public:
  Cluster(const Order& order, const std::vector<int>& hosts)
      : order_(order), hosts_(hosts), most_on_one_host_(MostOnOneHost(hosts)) {}

  int most_on_one_host() const { return most_on_one_host_; }

  // The largest share of peers on other hosts that a rank has in a level.
  double ShareAway(int stride, int radix) {
    const auto [known, is_new] = shares_.try_emplace({stride, radix}, 0.0);
    if (is_new) {
      known->second = static_cast<double>(MostAway(stride, radix)) / std::max(radix - 1, 1);
    }
    return known->second;
  }

private:
  int MostAway(int stride, int radix) const {
    int most = 0;
    for (int place = 0; place < static_cast<int>(hosts_.size()); ++place) {
      if (place / stride % radix != 0) {
        continue; // not the first of its group
      }
      std::map<int, int> on_host;
      for (int member : GroupOf(place, stride, radix)) {
        ++on_host[hosts_[order_.ranks[member]]];
      }
      for (const auto& [host, count] : on_host) {
        most = std::max(most, radix - count);
      }
    }
    return most;
  }

  const Order& order_;
  const std::vector<int>& hosts_;
  const int most_on_one_host_;
  std::map<std::pair<int, int>, double> shares_; // by stride and radix
};

double Seconds(const std::vector<int>& radices, Cluster& cluster) {
  double total = 0, n = kBytes;
  int stride = 1;
  for (int radix : radices) {
    const double away = cluster.ShareAway(stride, radix);
    stride *= radix;
    const double speed = away > 0 ? kBandwidth / cluster.most_on_one_host() / away : kLocalBandwidth;
    const double messages = 2.0 * (radix - 1) + std::log2(stride);
    const double pairs = n / kElementBytes / radix * (0.5 * radix * (radix + 1) + radix);
    total += messages * (away > 0 ? kLatency : kLocalLatency) + 2 * n * (radix - 1) / radix / speed +
             pairs / kMultiplyAdds;
    n /= radix;
  }
  return total * (1 + kCostPerLevel * (static_cast<double>(radices.size()) - 1));
}

Division Cheapest(const Order& order, const std::vector<int>& hosts) {
  const int size = static_cast<int>(hosts.size());
  Cluster cluster(order, hosts);
  Division best = {{size}, 1};
  double lowest = Seconds(best.radices, cluster);
  for (const std::vector<int>& inner : Factors(order.group)) {
    if (inner.size() > 1 && order.group <= kLargestUnsplitOnHost) {
      continue;
    }
    for (const std::vector<int>& outer : Factors(size / order.group)) {
      Division cut = {inner, inner.size()};
      cut.radices.insert(cut.radices.end(), outer.begin(), outer.end());
      const double seconds = Seconds(cut.radices, cluster);
      if (seconds < lowest) {
        lowest = seconds;
        best = std::move(cut);
      }
    }
  }
  return best;
}

Division FromRadices(const std::vector<int>& radices, const Order& order, const std::vector<int>& hosts) {
  const int size = static_cast<int>(hosts.size());
  int product = 1;
  Division cut = {radices, 0};
  for (size_t level = 0; level < radices.size(); ++level) {
    const bool last_of_part = product * radices[level] == order.group || level + 1 == radices.size();
    if (!last_of_part && (radices[level] & (radices[level] - 1)) != 0) {
      product = 0;
      break;
    }
    product *= radices[level];
    if (product == order.group) {
      cut.inner = level + 1;
    }
  }
  if (product != size || (cut.inner == 0 && order.group > 1 && radices.size() > 1)) {
    throw std::invalid_argument("expected levels whose sizes multiply to groups of " +
                                std::to_string(order.group) + " and then to " + std::to_string(size) +
                                " ranks, with powers of two before the last of each");
  }
  return cut;
}

} // namespace

std::vector<GroupPlan> PlanLevels(const std::vector<int>& hosts, GroupOp group_op, int group_size, int rank,
                                  const std::vector<int>& radices) {
  const int size = static_cast<int>(hosts.size());
  const Order order = OrderOf(hosts, group_size);
  Division cut = {{size}, 1};
  if (order.group > 0 && size > 1 && radices.empty()) {
    cut = Cheapest(order, hosts);
  } else if (order.group > 0 && !radices.empty() && radices != std::vector<int>{0}) {
    cut = FromRadices(radices, order, hosts);
  }
  if (cut.radices.size() == 1) { // the whole tree, over the ranks as they are
    std::vector<int> everyone(size);
    std::iota(everyone.begin(), everyone.end(), 0);
    return {{everyone, BuildTree(hosts, group_op, group_size)}};
  }
  const int place =
      static_cast<int>(std::find(order.ranks.begin(), order.ranks.end(), rank) - order.ranks.begin());
  std::vector<GroupPlan> levels;
  int stride = 1;
  for (size_t level = 0; level < cut.radices.size(); ++level) {
    const int radix = cut.radices[level];
    GroupPlan planned;
    for (int member : GroupOf(place, stride, radix)) {
      planned.group.push_back(order.ranks[member]);
    }
    planned.tree = BuildTree(std::vector<int>(radix, 0), level < cut.inner ? group_op : GroupOp::kAdasum, 0);
    levels.push_back(std::move(planned));
    stride *= radix;
  }
  return levels;
}

std::string Describe(const std::vector<GroupPlan>& levels) {
  std::string text;
  for (const GroupPlan& level : levels) {
    text += (text.empty() ? "" : " x ") + std::to_string(level.group.size());
  }
  return text;
}

} // namespace adasum_hvd
