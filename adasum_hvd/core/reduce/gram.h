// Sums of block sums, independent of the distribution of the blocks over the ranks.
#pragma once

#include <vector>

// On functions that run on the host and on CUDA devices.
#if defined(__CUDACC__)
#define ADASUM_HOST_DEVICE __host__ __device__
#else
#define ADASUM_HOST_DEVICE
#endif

namespace adasum_hvd {

// An unevaluated sum of two doubles, about 106 bits. Block sums added in any order agree far beyond the last
// bit of the rounded total, so the result does not depend on the slices.
struct DoubleDouble {
  double high = 0;
  double low = 0;

  ADASUM_HOST_DEVICE DoubleDouble& operator+=(double value) { return *this += DoubleDouble{value, 0.0}; }
  ADASUM_HOST_DEVICE DoubleDouble& operator+=(const DoubleDouble& other) {
    const DoubleDouble highs = TwoSum(high, other.high);
    const DoubleDouble lows = TwoSum(low, other.low);
    const DoubleDouble sum = TwoSum(highs.high, highs.low + lows.high);
    return *this = TwoSum(sum.high, sum.low + lows.low);
  }
  ADASUM_HOST_DEVICE double Rounded() const { return high + low; }

private:
  // Knuth's two-sum: high + low is exactly a + b. An infinite or NaN sum has no error term.
  ADASUM_HOST_DEVICE static DoubleDouble TwoSum(double a, double b) {
    const double high = a + b;
    const double b_part = high - a;
    const double low = (a - (high - b_part)) + (b - b_part);
    return {high, low == low ? low : 0.0};
  }
};

// Sums of the entries of block sums: of a packed Gram matrix (tree.h: GramIndex), for example.
using Sums = std::vector<DoubleDouble>;

// Adds block sums, or parts of the total.
template <class Sum> void Add(const Sum* part, Sums& total) {
  for (DoubleDouble& entry : total) {
    entry += *part++;
  }
}

inline std::vector<double> Rounded(const Sums& total) {
  std::vector<double> values;
  values.reserve(total.size());
  for (const DoubleDouble& entry : total) {
    values.push_back(entry.Rounded());
  }
  return values;
}

} // namespace adasum_hvd
