#include "reduce/tree.h"

#include <algorithm>
#include <map>

namespace adasum_hvd {
namespace {

// Pairs neighbours tier by tier until one node is left, and returns that node.
int ReduceNeighbours(std::vector<int> nodes, bool adasum, Tree& tree) {
  while (nodes.size() > 1) {
    std::vector<int> next;
    for (size_t k = 0; k + 1 < nodes.size(); k += 2) {
      next.push_back(tree.leaves + static_cast<int>(tree.merges.size()));
      tree.merges.push_back({nodes[k], nodes[k + 1], adasum});
    }
    if (nodes.size() % 2 == 1) {
      next.push_back(nodes.back());
    }
    nodes = std::move(next);
  }
  return nodes.front();
}

void FindMembersAndTiers(Tree& tree) {
  std::vector<size_t> depth(tree.leaves, 0);
  for (int leaf = 0; leaf < tree.leaves; ++leaf) {
    tree.members.push_back({leaf});
  }
  for (size_t k = 0; k < tree.merges.size(); ++k) {
    const Merge& merge = tree.merges[k];
    std::vector<int> members = tree.members[merge.left];
    members.insert(members.end(), tree.members[merge.right].begin(), tree.members[merge.right].end());
    std::sort(members.begin(), members.end());
    tree.members.push_back(std::move(members));
    size_t tier = std::max(depth[merge.left], depth[merge.right]);
    depth.push_back(tier + 1);
    if (tree.tiers.size() <= tier) {
      tree.tiers.resize(tier + 1);
    }
    tree.tiers[tier].push_back(static_cast<int>(k));
  }
}

// c_left' G c_right over the members of two nodes, and the sum of the terms' magnitudes. In double-double, so
// that the norm of a node of identical inputs is exactly the norm of an input.
struct Form {
  DoubleDouble sum;
  double magnitude = 0;
  double value() const { return sum.Rounded(); }
};

Form BilinearForm(const Tree& tree, const double* gram, const double* c, int left, int right) {
  Form form;
  for (int i : tree.members[left]) {
    for (int j : tree.members[right]) {
      double term = c[i] * c[j] * gram[GramIndex(tree.leaves, std::min(i, j), std::max(i, j))];
      form.sum += term;
      form.magnitude += std::fabs(term);
    }
  }
  return form;
}

} // namespace

std::vector<std::vector<int>> Groups(const std::vector<int>& hosts, int group_size) {
  std::vector<std::vector<int>> groups;
  std::map<int, size_t> group_of;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    int key = group_size > 0 ? rank / group_size : hosts[rank];
    auto found = group_of.emplace(key, groups.size());
    if (found.second) {
      groups.emplace_back();
    }
    groups[found.first->second].push_back(rank);
  }
  return groups;
}

Tree BuildTree(const std::vector<int>& hosts, GroupOp group_op, int group_size) {
  Tree tree;
  tree.leaves = static_cast<int>(hosts.size());
  tree.leaf_weights.assign(hosts.size(), 1.0);
  std::vector<int> tops;
  for (const std::vector<int>& group : Groups(hosts, group_size)) {
    if (group_op == GroupOp::kAverage) {
      for (int rank : group) {
        tree.leaf_weights[rank] = 1.0 / static_cast<double>(group.size());
      }
    }
    tops.push_back(ReduceNeighbours(group, group_op == GroupOp::kAdasum, tree));
  }
  ReduceNeighbours(tops, true, tree);
  FindMembersAndTiers(tree);
  return tree;
}

bool SolveCoefficients(const Tree& tree, const double* gram, double* c) {
  std::copy(tree.leaf_weights.begin(), tree.leaf_weights.end(), c);
  for (const Merge& merge : tree.merges) {
    if (!merge.adasum) {
      continue; // plain addition does not change the coefficients
    }
    Form left = BilinearForm(tree, gram, c, merge.left, merge.left);
    Form right = BilinearForm(tree, gram, c, merge.right, merge.right);
    if (Cancels(left.value(), left.magnitude) || Cancels(right.value(), right.magnitude)) {
      return false;
    }
    double dot = BilinearForm(tree, gram, c, merge.left, merge.right).value();
    for (int i : tree.members[merge.left]) {
      c[i] *= AdasumCoefficient(dot, left.value());
    }
    for (int i : tree.members[merge.right]) {
      c[i] *= AdasumCoefficient(dot, right.value());
    }
  }
  return true;
}

} // namespace adasum_hvd
