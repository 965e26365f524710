// Sums of block sums that do not depend on how the blocks were dealt out to the ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace adasum_hvd {

// An unevaluated sum of two doubles, about 106 bits: block sums added in any order agree to far below the
// last bit of the rounded total, so slicing does not show in the result.
struct DoubleDouble {
  double high = 0;
  double low = 0;

  DoubleDouble& operator+=(double value);
  DoubleDouble& operator+=(const DoubleDouble& other);
  double Rounded() const { return high + low; }
};

// One packed Gram matrix (tree.h: GramIndex) being summed.
using GramSum = std::vector<DoubleDouble>;

void Add(const double* block_sums, GramSum& total);
void Add(const DoubleDouble* part, GramSum& total);
std::vector<double> Rounded(const GramSum& total);

} // namespace adasum_hvd
