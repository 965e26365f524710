#include "gram.h"

namespace adasum_hvd {
namespace {

// Knuth's two-sum: high + low is exactly a + b. An infinite or NaN sum has no error term.
inline DoubleDouble TwoSum(double a, double b) {
  DoubleDouble sum;
  sum.high = a + b;
  double b_part = sum.high - a;
  double low = (a - (sum.high - b_part)) + (b - b_part);
  sum.low = low == low ? low : 0.0;
  return sum;
}

} // namespace

DoubleDouble& DoubleDouble::operator+=(double value) { return *this += DoubleDouble{value, 0.0}; }

DoubleDouble& DoubleDouble::operator+=(const DoubleDouble& other) {
  DoubleDouble highs = TwoSum(high, other.high);
  DoubleDouble lows = TwoSum(low, other.low);
  DoubleDouble sum = TwoSum(highs.high, highs.low + lows.high);
  return *this = TwoSum(sum.high, sum.low + lows.low);
}

void Add(const double* block_sums, GramSum& total) {
  for (DoubleDouble& entry : total) {
    entry += *block_sums++;
  }
}

void Add(const DoubleDouble* part, GramSum& total) {
  for (DoubleDouble& entry : total) {
    entry += *part++;
  }
}

std::vector<double> Rounded(const GramSum& total) {
  std::vector<double> values;
  values.reserve(total.size());
  for (const DoubleDouble& entry : total) {
    values.push_back(entry.Rounded());
  }
  return values;
}

} // namespace adasum_hvd
