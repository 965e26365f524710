// The order in which AdaSum combines ranks, and the coefficients that it gives them.
//
// adasum(a, b) = (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b   (arXiv 2006.02924, equation 7) is not
// associative, so the tree is part of the definition. reference.py holds the same two functions in NumPy.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "reduce/gram.h"

namespace adasum_hvd {

enum class GroupOp { kAdasum, kAverage, kSum };

// Joins nodes `left` and `right`: by AdaSum, or inside an averaged or summed group by plain addition.
struct Merge {
  int left;
  int right;
  bool adasum;
};

// The coefficients of the two sides of a merge that is formed on vectors.
struct Sides {
  double left = 1;
  double right = 1;
};

// Nodes 0..leaves-1 are the ranks, node leaves+k is the result of merges[k], the last one is the root.
struct Tree {
  int leaves = 0;
  std::vector<double> leaf_weights; // 1, or 1/group size under GroupOp::kAverage
  std::vector<Merge> merges;
  std::vector<std::vector<int>> members; // members[node]: its leaves, ascending
  std::vector<std::vector<int>> tiers;   // indices of independent merges, from the leaves up

  int root() const { return leaves + static_cast<int>(merges.size()) - 1; }
};

// The groups of ranks that are reduced first, in the order of their first rank: `group_size` consecutive
// ranks, or a host when group_size is 0.
std::vector<std::vector<int>> Groups(const std::vector<int>& hosts, int group_size);

// Nearest neighbours first inside a group, then over the groups in the order of their first rank; an odd
// one out moves up unpaired. hosts[r] is any id of rank r's host.
Tree BuildTree(const std::vector<int>& hosts, GroupOp group_op, int group_size);

// Entries of a packed upper triangle of an N x N matrix, and the position of (i, j), i <= j, in it.
ADASUM_HOST_DEVICE inline int64_t GramSize(int count) { return int64_t{count} * (count + 1) / 2; }
ADASUM_HOST_DEVICE inline int64_t GramIndex(int count, int i, int j) {
  return int64_t{i} * count - int64_t{i} * (i - 1) / 2 + (j - i);
}

// The coefficient of a vector with squared norm `norm` whose partner has dot product `dot` with it. A norm
// below sqrt(DBL_MIN) counts as zero and gives exactly 1.
ADASUM_HOST_DEVICE inline double AdasumCoefficient(double dot, double norm) {
  constexpr double kSmallestNorm = 1.4916681462400413e-154; // sqrt(DBL_MIN) = 2^-511
  return norm < kSmallestNorm ? 1.0 : 1.0 - dot / norm * 0.5;
}

// The power of two that scales a float64 tensor to a largest magnitude of about 1, because products overflow
// and underflow before their factors do. 1 for zeros and for values that are not finite.
ADASUM_HOST_DEVICE inline double PowerOfTwoScale(double largest) {
  if (!(largest > 0 && largest < INFINITY)) {
    return 1.0;
  }
  int exponent = 0;
  frexp(largest, &exponent);
  return ldexp(1.0, exponent < -1021 ? 1021 : exponent > 1021 ? -1021 : -exponent);
}

// Whether a result is summed in the order of the tree, not of the ranks. With identical inputs x, partial
// sums in rank order include 3/4 x, which may round; in the order of the tree they are x times powers of two.
// With shorter types the rounding to float64 does not show.
ADASUM_HOST_DEVICE constexpr bool InTreeOrder(ElementType type, int ranks) {
  return type == kFloat64 && ranks > 3;
}

// Whether the norm of a node, computed as a sum of terms, has lost too many digits by cancellation.
ADASUM_HOST_DEVICE inline bool Cancels(double norm, double sum_of_magnitudes) {
  return norm < 1e-6 * sum_of_magnitudes;
}

// Writes the c_i with which sum c_i g_i is the AdaSum of the g_i whose packed Gram matrix is `gram`.
// Returns false, with c undefined, if an inner node cancels so far that the Gram matrix does not give its
// norm (c'Gc < 1e-6 sum |c_i c_j G_ij|); in that case the node's vector has to be formed.
bool SolveCoefficients(const Tree& tree, const double* gram, double* coefficients);

} // namespace adasum_hvd
