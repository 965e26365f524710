// What is observed of tensors, against the same from whole vectors. On devices as test_reduce.cc.
#include <cmath>

#include "reducing.h"

using namespace adasum_hvd;

namespace {

const std::vector<int64_t> kSome = {300, 12300, 0, 4096, 7};

using Vector = std::vector<double>;
using Vectors = std::vector<Vector>;

void AddTo(Vector& to, double factor, const Vector& other) {
  for (size_t k = 0; k < to.size(); ++k) {
    to[k] += factor * other[k];
  }
}

// The result of a tree over vectors, and the coefficients of its leaves.
Vector Walk(const Tree& tree, const Vectors& vectors, Vector& coefficients) {
  coefficients = tree.leaf_weights;
  Vectors nodes;
  for (int leaf = 0; leaf < tree.leaves; ++leaf) {
    AddTo(nodes.emplace_back(vectors[leaf].size()), tree.leaf_weights[leaf], vectors[leaf]);
  }
  for (const Merge& merge : tree.merges) {
    const Vector &a = nodes[merge.left], &b = nodes[merge.right];
    const double dot = Dot(a, b);
    const double left = merge.adasum ? AdasumCoefficient(dot, Dot(a, a)) : 1.0;
    const double right = merge.adasum ? AdasumCoefficient(dot, Dot(b, b)) : 1.0;
    for (int i : tree.members[merge.left]) {
      coefficients[i] *= left;
    }
    for (int i : tree.members[merge.right]) {
      coefficients[i] *= right;
    }
    Vector node(a.size());
    AddTo(node, left, a);
    AddTo(node, right, b);
    nodes.push_back(std::move(node));
  }
  return nodes.back();
}

// A group's part of a row: `size` ranks that were averaged, or summed, before are one input.
Vector Part(const Vectors& vectors, const Vector& coefficients, const Vector& result, size_t size,
            double weight) {
  Vectors inputs;
  Vector part(5), mean(result.size());
  for (size_t i = 0; i < vectors.size(); ++i) {
    if (i % size == 0) {
      inputs.emplace_back(result.size());
      part.push_back(coefficients[i] / weight);
    }
    AddTo(inputs.back(), weight, vectors[i]);
  }
  for (size_t a = 0; a < inputs.size(); ++a) {
    AddTo(mean, 1.0 / static_cast<double>(inputs.size()), inputs[a]);
    part[2] += Dot(inputs[a], inputs[a]);
    for (size_t b = 0; b < a; ++b) {
      const double norms = std::sqrt(Dot(inputs[a], inputs[a]) * Dot(inputs[b], inputs[b]));
      part[0] += norms > 0 ? Dot(inputs[a], inputs[b]) / norms : 0;
      part[1] += norms > 0 ? 1 : 0;
    }
  }
  part[2] = std::sqrt(part[2]);
  part[3] = std::sqrt(Dot(mean, mean));
  part[4] = std::sqrt(Dot(result, result));
  return part;
}

struct Form {
  std::vector<int> hosts;
  GroupOp group_op;
  int group_size;
  std::vector<int> radices;
};

Options OptionsOf(const Form& form, ElementType type) {
  Options options = For(static_cast<int>(form.hosts.size()), type);
  options.hosts = form.hosts;
  options.group_op = form.group_op;
  options.group_size = form.group_size;
  options.radices = form.radices;
  options.tree = BuildTree(form.hosts, form.group_op, form.group_size);
  return options;
}

// Ranks in the order of the tree, consecutive ones in a group.
Vector Expected(const Form& form, Vectors vectors) {
  Vector expected, coefficients;
  const bool plain = form.group_op != GroupOp::kAdasum;
  if (form.radices == std::vector<int>{0}) {
    const size_t size = plain ? Groups(form.hosts, form.group_size).front().size() : 1;
    const Tree tree = BuildTree(form.hosts, form.group_op, form.group_size);
    const Vector result = Walk(tree, vectors, coefficients);
    return Part(vectors, coefficients, result, size, tree.leaf_weights[0]);
  }
  for (size_t level = 0; level < form.radices.size(); ++level) {
    const int radix = form.radices[level];
    const bool adasum = !plain || level > 0;
    const Tree tree = BuildTree(std::vector<int>(radix, 0), adasum ? GroupOp::kAdasum : form.group_op, 0);
    Vectors results;
    for (size_t first = 0; first < vectors.size(); first += radix) {
      const Vectors group(vectors.begin() + first, vectors.begin() + first + radix);
      results.push_back(Walk(tree, group, coefficients));
      if (adasum) {
        const Vector part = Part(group, coefficients, results.back(), 1, 1.0);
        expected.insert(expected.end(), part.begin(), part.end());
      }
    }
    vectors = std::move(results);
  }
  return expected;
}

void Compare(const Form& form, ElementType type, const Maker& maker, double tolerance,
             const std::vector<int64_t>& sizes) {
  const int ranks = static_cast<int>(form.hosts.size());
  const std::vector<Tensors> tensors = MakeTensors(ranks, sizes, type, maker);
  struct Way {
    int64_t replicate_bytes;
    bool share;
  };
  for (const Way& way : {Way{0, false}, Way{int64_t{1} << 30, false}, Way{0, true}}) {
    Options options = OptionsOf(form, type);
    options.settings.replicate_bytes = way.replicate_bytes;
    options.share = way.share;
    const auto plain = ReduceAll(tensors, options);
    std::vector<Vector> rows;
    options.observed = &rows;
    Check(ReduceAll(tensors, options) == plain, "other bits when observed");
    for (size_t k = 0; k < sizes.size(); ++k) {
      Vectors vectors;
      for (const Tensors& rank : tensors) {
        vectors.push_back(rank.values[k]);
      }
      const Vector expected = sizes[k] == 0 ? Vector(rows[k].size()) : Expected(form, vectors);
      Check(rows[k].size() == expected.size(), "a row of " + std::to_string(rows[k].size()) +
                                                   " doubles, not " + std::to_string(expected.size()));
      for (size_t entry = 0; entry < expected.size(); ++entry) {
        const double error = std::fabs(rows[k][entry] - expected[entry]);
        Check(error <= tolerance * std::max(1.0, std::fabs(expected[entry])),
              std::to_string(ranks) + " ranks, type " + std::to_string(type) + ", " +
                  std::to_string(sizes[k]) + " elements, entry " + std::to_string(entry) + ": " +
                  Scientific(rows[k][entry]) + ", not " + Scientific(expected[entry]));
      }
    }
  }
}

void OnOneSliceAndOnSeveral() {
  for (ElementType type : kTypes) {
    for (int ranks : {1, 2, 3, 5}) {
      const Form flat = {std::vector<int>(ranks, 0), GroupOp::kAdasum, 0, {0}};
      if (ranks > 1) {
        Compare(flat, type, Random(31), 4 * kRounding[type], kSome);
      } else {
        std::vector<Vector> rows;
        Options options = OptionsOf(flat, type);
        options.observed = &rows;
        ReduceAll(MakeTensors(1, kSome, type, Random(31)), options);
        Check(rows[0].empty(), "one rank has nothing to tell");
      }
    }
  }
}

void InGroupsAndLevels() {
  const std::vector<Form> forms = {
      {{0, 0, 0, 0, 0, 0}, GroupOp::kAverage, 2, {0}},
      {{0, 0, 0, 0}, GroupOp::kSum, 2, {0}},
      {{0, 0, 1, 1}, GroupOp::kAdasum, 0, {2, 2}},
      {{0, 0, 0, 1, 1, 1}, GroupOp::kAdasum, 0, {3, 2}},
      {{0, 0, 1, 1, 2, 2}, GroupOp::kAverage, 0, {2, 3}},
      {{0, 0, 1, 1, 2, 2, 3, 3}, GroupOp::kAdasum, 0, {2, 2, 2}},
      {{0, 0, 1, 1, 2, 2, 3, 3}, GroupOp::kSum, 0, {2, 2, 2}},
  };
  for (const Form& form : forms) {
    Compare(form, kFloat32, Random(32), 1e-5, kSome);
  }
}

// Their coefficients come from trees that are walked on vectors.
void OfCancellingPairs() {
  const Maker opposite = [](int rank, size_t tensor, int64_t k) {
    const double base = Random(33)(rank / 2, tensor, k);
    return rank % 2 == 0 ? base : -base + 1e-4 * Random(34)(rank, tensor, k);
  };
  Compare({{0, 0, 0, 0}, GroupOp::kAdasum, 0, {0}}, kFloat32, opposite, 1e-3, {5000, 30000});
  Compare({{0, 0, 1, 1}, GroupOp::kAdasum, 0, {2, 2}}, kFloat32, opposite, 1e-3, {5000, 30000});
}

void OfLargeFloat64AndZeros() {
  const Maker large = [](int rank, size_t tensor, int64_t k) {
    return rank == 1 ? 0.0 : 1e200 * Random(35)(rank, tensor, k);
  };
  const std::vector<Tensors> tensors = MakeTensors(3, {5000}, kFloat64, large);
  std::vector<Vector> rows;
  Options options = For(3, kFloat64);
  options.observed = &rows;
  ReduceAll(tensors, options);
  Check(rows[0][1] == 1, "a zero vector is in a pair");
  Check(rows[0][2] > 1e200 && rows[0][2] < 1e203, "a norm of " + Scientific(rows[0][2]));
  Check(rows[0][5] == rows[0][6], "zeros have changed their partner's coefficient");
}

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {
                      {"tensors on one slice and on several", OnOneSliceAndOnSeveral},
                      {"in groups and levels", InGroupsAndLevels},
                      {"of cancelling pairs", OfCancellingPairs},
                      {"of large float64 and zeros", OfLargeFloat64AndZeros},
                  });
}
