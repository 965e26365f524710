// How long one tensor's row takes (reduce/observation.h), on a processor; monitor.py builds and runs it.
#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "reduce/observation.h"
#include "reduce/tree.h"

using namespace adasum_hvd;

namespace {

// The first of so many ranks, which sends nothing.
class Nobody : public Transport {
public:
  explicit Nobody(int size) : size_(size) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }
  void Start(const std::vector<Message>&) override {}
  void Wait() override {}

private:
  int size_;
};

double MicrosecondsFor(int ranks) {
  Nobody transport(ranks);
  const Tree tree = BuildTree(std::vector<int>(ranks, 0), GroupOp::kAdasum, 0);
  std::mt19937 random;
  std::normal_distribution<> normal;
  std::vector<double> gram(GramSize(ranks)), coefficients(ranks, 0.7);
  for (int i = 0; i < ranks; ++i) {
    for (int j = i; j < ranks; ++j) {
      gram[GramIndex(ranks, i, j)] = i == j ? 10 : normal(random);
    }
  }
  const Observation observation({}, {{&transport, &tree}}, false);
  std::vector<double> row(observation.width());
  const int repetitions = 1'000'000 / (ranks * ranks);
  const auto started = std::chrono::steady_clock::now();
  for (int k = 0; k < repetitions; ++k) {
    observation.Write(0, gram.data(), 1.0, coefficients.data(), row.data());
  }
  const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - started;
  return taken.count() / repetitions;
}

} // namespace

int main() {
  for (int ranks : {2, 4, 8, 16, 64}) {
    std::printf("a row of %2d ranks: %6.2f microseconds\n", ranks, MicrosecondsFor(ranks));
  }
}
