#include "reduce/gram.h"

namespace adasum_hvd {
void Add(const double* block_sums, Sums& total) {
  for (DoubleDouble& entry : total) {
    entry += *block_sums++;
  }
}

void Add(const DoubleDouble* part, Sums& total) {
  for (DoubleDouble& entry : total) {
    entry += *part++;
  }
}

std::vector<double> Rounded(const Sums& total) {
  std::vector<double> values;
  values.reserve(total.size());
  for (const DoubleDouble& entry : total) {
    values.push_back(entry.Rounded());
  }
  return values;
}

} // namespace adasum_hvd
