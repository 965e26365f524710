// Statistics of a tensor from the Gram matrices of its reduction: how similar the ranks' vectors are, and the
// result that AdaSum gives. Only for tensors whose observation is requested.
//
// A row of doubles per tensor holds, by level and by group of the level:
//
//   sum over pairs i < j of cos(x_i, x_j), the number of these pairs, sqrt(sum_i |x_i|^2), |sum_i x_i / n|,
//   |AdaSum of the x_i|, and n coefficients.
//
// The x_i are the vectors that AdaSum joins: the ranks' vectors, the averages or sums of their groups, or the
// results of the level before. Zero vectors are in no pair. A level without AdaSum has no entries. One rank
// writes the entries of a group and the others leave zeros, so the rows of all ranks add up.
#pragma once

#include <cstdint>
#include <vector>

#include "reduce/layout.h"
#include "reduce/reduce.h"
#include "reduce/tree.h"

namespace adasum_hvd {

// Whether any tensor has a row.
bool AnyObservation(const std::vector<TensorView>& tensors);

class Observation {
public:
  // `tensors` may be empty, if only the width of a row is needed.
  Observation(const std::vector<TensorView>& tensors, const std::vector<ReduceLevel>& levels,
              bool replicated);

  // Per level that has AdaSum: the number of vectors that a group joins.
  std::vector<int> sizes() const;
  int64_t width() const { return width_; } // of a row

  // The row in which this rank writes the entries of its group for the run's tensor, or null.
  double* RowOf(size_t level, const Run& run) const;

  // `gram` is that of the inputs times `scale`, `coefficients` are those of the ranks of the group.
  void Write(size_t level, const double* gram, double scale, const double* coefficients, double* row) const;

  // For a tensor whose tree was walked, with `sides` by merge.
  void WriteWalked(size_t level, const double* gram, double scale, const Sides* sides, double* row) const;

private:
  struct Level {
    Tree tree;                            // a copy, because a device may complete after the op has ended
    std::vector<std::vector<int>> inputs; // the ranks of each vector; empty without AdaSum
    int64_t offset = 0;                   // of this rank's group in a row
    bool first = false;                   // this rank is the first of the ranks that hold the same values
  };

  const bool replicated_;
  std::vector<double*> rows_; // by tensor
  std::vector<Level> levels_;
  int64_t width_ = 0;
};

} // namespace adasum_hvd
