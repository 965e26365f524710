#include "reduce/observation.h"

#include <algorithm>
#include <cmath>

namespace adasum_hvd {
namespace {

constexpr int64_t kSums = 5; // entries of a group before its coefficients

// The ranks of each vector that AdaSum joins: the nodes that plain addition alone has formed.
std::vector<std::vector<int>> InputsOf(const Tree& tree) {
  std::vector<bool> plain(tree.members.size(), true);
  std::vector<std::vector<int>> inputs;
  for (size_t k = 0; k < tree.merges.size(); ++k) {
    const Merge& merge = tree.merges[k];
    plain[tree.leaves + k] = !merge.adasum;
    for (int node : {merge.left, merge.right}) {
      if (merge.adasum && plain[node]) {
        inputs.push_back(tree.members[node]);
      }
    }
  }
  std::sort(inputs.begin(), inputs.end());
  return inputs;
}

double Root(double square) { return std::sqrt(std::max(square, 0.0)); } // cancellation may make it negative

} // namespace

bool AnyObservation(const std::vector<TensorView>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const TensorView& tensor) { return tensor.observation != nullptr; });
}

Observation::Observation(const std::vector<TensorView>& tensors, const std::vector<ReduceLevel>& levels,
                         bool replicated)
    : replicated_(replicated) {
  for (const TensorView& tensor : tensors) {
    rows_.push_back(tensor.observation);
  }
  bool first = true;
  for (const ReduceLevel& level : levels) {
    first = first && level.transport->rank() == 0;
    levels_.push_back({*level.tree, InputsOf(*level.tree), 0, first});
  }
  int64_t groups = 1, group = 0; // of a level, and this rank's among them
  std::vector<int64_t> lengths(levels.size());
  for (size_t k = levels.size(); k-- > 0;) {
    const auto inputs = static_cast<int64_t>(levels_[k].inputs.size());
    const int64_t length = inputs == 0 ? 0 : kSums + inputs;
    levels_[k].offset = group * length;
    lengths[k] = groups * length;
    group = group * levels[k].transport->size() + levels[k].transport->rank();
    groups *= levels[k].transport->size();
  }
  for (size_t k = 0; k < levels.size(); ++k) {
    levels_[k].offset += width_;
    width_ += lengths[k];
  }
}

std::vector<int> Observation::sizes() const {
  std::vector<int> sizes;
  for (const Level& level : levels_) {
    if (!level.inputs.empty()) {
      sizes.push_back(static_cast<int>(level.inputs.size()));
    }
  }
  return sizes;
}

double* Observation::RowOf(size_t index, const Run& run) const {
  const Level& level = levels_[index];
  const bool writes = replicated_ ? level.first : run.first == 0;
  return writes && !level.inputs.empty() ? rows_[run.tensor] : nullptr;
}

void Observation::Write(size_t index, const double* gram, double scale, const double* coefficients,
                        double* row) const {
  const Level& level = levels_[index];
  const std::vector<double>& weights = level.tree.leaf_weights;
  const size_t n = level.inputs.size();
  double* to = row + level.offset;
  const auto product = [&](size_t a, size_t b) { // of two inputs
    double sum = 0;
    for (int i : level.inputs[a]) {
      for (int j : level.inputs[b]) {
        sum += weights[i] * weights[j] * gram[GramIndex(level.tree.leaves, std::min(i, j), std::max(i, j))];
      }
    }
    return sum;
  };
  double* c = to + kSums;
  std::vector<double> norms(n);
  double squares = 0, all = 0, result = 0; // sums of |x_a|^2, x_a.x_b and c_a c_b x_a.x_b
  for (size_t a = 0; a < n; ++a) {
    const int rank = level.inputs[a].front();
    const double square = product(a, a);
    c[a] = coefficients[rank] / weights[rank];
    norms[a] = Root(square);
    squares += square;
    all += square;
    result += c[a] * c[a] * square;
    for (size_t b = 0; b < a; ++b) {
      const double dot = product(b, a);
      all += 2 * dot;
      result += 2 * c[a] * c[b] * dot;
      if (norms[a] > 0 && norms[b] > 0) {
        to[0] += dot / norms[a] / norms[b];
        to[1] += 1;
      }
    }
  }
  to[2] = Root(squares) / scale;
  to[3] = Root(all) / static_cast<double>(n) / scale;
  to[4] = Root(result) / scale;
}

void Observation::WriteWalked(size_t index, const double* gram, double scale, const Sides* sides,
                              double* row) const {
  const Tree& tree = levels_[index].tree;
  std::vector<double> coefficients = tree.leaf_weights;
  for (size_t k = 0; k < tree.merges.size(); ++k) {
    for (int i : tree.members[tree.merges[k].left]) {
      coefficients[i] *= sides[k].left;
    }
    for (int i : tree.members[tree.merges[k].right]) {
      coefficients[i] *= sides[k].right;
    }
  }
  Write(index, gram, scale, coefficients.data(), row);
}

} // namespace adasum_hvd
