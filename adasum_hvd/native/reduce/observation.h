// What the Gram matrices of a reduction tell about its tensors: how much the ranks' vectors have in common,
// and what AdaSum makes of them. For people who watch a training; nothing is done for other tensors.
//
// Of each tensor there is a row of doubles. In it stands, by level and by group of the level:
//
//   sum over pairs i < j of cos(x_i, x_j), the number of these pairs, sqrt(sum_i |x_i|^2), |sum_i x_i / n|,
//   |AdaSum of the x_i|, and n coefficients.
//
// The x_i are what AdaSum joins there: the ranks' vectors, what their groups have averaged or summed, or the
// results of the level below. Zero vectors are in no pair. A level without AdaSum has no place in the row.
// One rank writes what a group has found, all others leave zeros: the rows' sum over the ranks is complete.
#pragma once

#include <cstdint>
#include <vector>

#include "reduce/layout.h"
#include "reduce/reduce.h"
#include "reduce/tree.h"

namespace adasum_hvd {

// Whether there is a row for any of them.
bool AnyObserved(const std::vector<TensorView>& tensors);

class Observation {
public:
  // `tensors` may be empty, if only the size of a row is wanted.
  Observation(const std::vector<TensorView>& tensors, const std::vector<ReduceLevel>& levels,
              bool replicated);

  // Of every level with AdaSum, outwards: how many vectors a group joins.
  std::vector<int> sizes() const;
  int64_t width() const { return width_; } // of a row

  // Where this rank writes what its group has found of the run's tensor; null where it does not.
  double* RowOf(size_t level, const Run& run) const;

  // `gram` is that of the inputs times `scale`, `coefficients` are those of the ranks of the group.
  void Write(size_t level, const double* gram, double scale, const double* coefficients, double* row) const;

  // Where the tree was walked, with `sides` by merge.
  void WriteWalked(size_t level, const double* gram, double scale, const Sides* sides, double* row) const;

private:
  struct Level {
    Tree tree;                            // a copy: a device may come to it when the op has gone
    std::vector<std::vector<int>> inputs; // the ranks of each; none where there is no AdaSum
    int64_t offset = 0;                   // of this rank's group in a row
    bool first = false;                   // this rank is the first of those that hold the same
  };

  const bool replicated_;
  std::vector<double*> rows_; // by tensor
  std::vector<Level> levels_;
  int64_t width_ = 0;
};

} // namespace adasum_hvd
