// A mode of arithmetic that a framework has set on one rank changes no bit.
#include <cstring>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "ranks_as_threads.h"
#include "reduce/plan.h"
#include "reduce/reduce.h"

using namespace adasum_hvd;

namespace {

// Flushes denormal numbers to zero in this thread, as torch.set_flush_denormal(True) does.
void FlushDenormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(uint64_t{1} << 24));
#else
  throw Skipped("no such mode on this processor");
#endif
}

// Whether this thread does; the compiler must not know.
bool Flushes() {
  volatile float tiny = 3e-40f;
  volatile float sum = tiny + tiny;
  return sum == 0.0f;
}

// Replicated and sliced, by one thread and by several.
void OneRankThatFlushesHasTheSameBits() {
  for (const int64_t elements : {int64_t{1000}, int64_t{500000}}) {
    for (const int threads : {1, 4}) {
      const int ranks = 2;
      std::vector<std::vector<float>> results(ranks);
      RunRanks(ranks, [&](ThreadTransport& transport) {
        if (transport.rank() == 0) {
          FlushDenormals();
        }
        Workers workers(threads);
        std::vector<float>& values = results[transport.rank()];
        values.assign(elements, 3e-40f);
        for (int64_t k = 0; k < elements; k += 2) {
          values[k] = 1e-3f;
        }
        const Tree tree = PlanLevels({0, 0}, GroupOp::kAdasum, 0, transport.rank(), {}).front().tree;
        Scratch scratch;
        Reduce({{values.data(), values.data(), elements}}, kFloat32, {{&transport, &tree}}, 1.0,
               ReduceSettings(), *ChooseKernels(""), workers, scratch, [](Phase, int) {});
        Check(Flushes() == (transport.rank() == 0), "the thread's mode has changed");
      });
      const std::string where =
          std::to_string(elements) + " elements, " + std::to_string(threads) + " threads";
      Check(std::memcmp(results[0].data(), results[1].data(), elements * sizeof(float)) == 0,
            "other bits: " + where);
      Check(results[0][1] > 0, "flushed: " + where);
    }
  }
}

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {{"one rank that flushes has the same bits", OneRankThatFlushesHasTheSameBits}});
}
