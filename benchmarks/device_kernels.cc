// Bandwidth of the kernels and of a copy on the same device; gpu.py builds and runs it.
//
// Prints one JSON line per case: element type, ranks, megabytes of one rank's slice, and gigabytes read and
// written per second (medians) of the copy, the Gram kernel and the combine kernel. A slice has one tensor.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/device_memory.h"

using namespace adasum_hvd;

namespace {

template <class T> T* OnDevice(const std::vector<T>& values) {
  void* memory = nullptr;
  CheckCuda(cudaMalloc(&memory, values.size() * sizeof(T) + 256), "allocate");
  CheckCuda(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return static_cast<T*>(memory);
}

double MedianSeconds(const std::function<void()>& enqueue, cudaStream_t stream) {
  std::vector<double> seconds;
  for (int repetition = -3; repetition < 15; ++repetition) {
    CheckCuda(cudaStreamSynchronize(stream), "wait");
    const auto started = std::chrono::steady_clock::now();
    constexpr int kAtOnce = 10; // so that launching is not what is measured
    for (int k = 0; k < kAtOnce; ++k) {
      enqueue();
    }
    CheckCuda(cudaStreamSynchronize(stream), "wait");
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
    if (repetition >= 0) {
      seconds.push_back(taken.count() / kAtOnce);
    }
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

void Measure(ElementType type, int ranks, int64_t bytes, cudaStream_t stream) {
  const int64_t elements = bytes / ElementBytes(type);
  const int64_t blocks = (elements + kBlockElements - 1) / kBlockElements;
  const std::vector<char> zeros(static_cast<size_t>(bytes), 1); // 0x0101 and so on: small, finite
  std::vector<void*> vectors;
  for (int rank = 0; rank < ranks; ++rank) {
    vectors.push_back(OnDevice(zeros));
  }
  void* result = OnDevice(zeros);
  std::vector<device::BlockOf> places;
  for (int64_t block = 0; block < blocks; ++block) {
    places.push_back({0, static_cast<int32_t>(block)});
  }
  device::Slice slice = {};
  slice.type = type;
  slice.rank = 0;
  slice.size = ranks;
  const std::vector<device::Run> runs = {{vectors[0], result, 0, elements, 0, -1, -1}};
  slice.runs = OnDevice(runs);
  slice.run_count = 1;
  slice.blocks = {OnDevice(places), static_cast<int>(blocks)};
  slice.received = OnDevice(std::vector<const void*>(vectors.begin(), vectors.end()));
  slice.nearest = true;
  slice.scales = OnDevice(std::vector<double>{1.0});
  slice.block_sums = OnDevice(std::vector<double>(static_cast<size_t>(blocks * GramSize(ranks))));
  slice.coefficients = OnDevice(std::vector<double>(static_cast<size_t>(ranks), 0.5));
  slice.walk_tree = OnDevice(std::vector<int32_t>{0});
  const auto all = static_cast<size_t>(bytes);
  const double copy = MedianSeconds(
      [&] { CheckCuda(cudaMemcpyAsync(result, vectors[1], all, cudaMemcpyDeviceToDevice, stream), "copy"); },
      stream);
  const double gram = MedianSeconds([&] { device::GramOfBlocks(slice, stream); }, stream);
  const double combine = MedianSeconds([&] { device::Combine(slice, {}, 1.0, stream); }, stream);
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  std::printf("{\"type\": \"float%d\", \"ranks\": %d, \"megabytes\": %.0f, \"copy\": %.1f, \"gram\": %.1f, "
              "\"combine\": %.1f}\n",
              static_cast<int>(8 * ElementBytes(type)), ranks, 1e3 * gigabytes, 2 * gigabytes / copy,
              ranks * gigabytes / gram, (ranks + 1) * gigabytes / combine);
  std::fflush(stdout);
  for (void* memory : vectors) {
    CheckCuda(cudaFree(memory), "free");
  }
  for (const void* memory :
       {static_cast<const void*>(result), static_cast<const void*>(slice.runs),
        static_cast<const void*>(slice.blocks.at), static_cast<const void*>(slice.received),
        static_cast<const void*>(slice.scales), static_cast<const void*>(slice.block_sums),
        static_cast<const void*>(slice.coefficients), static_cast<const void*>(slice.walk_tree)}) {
    CheckCuda(cudaFree(const_cast<void*>(memory)), "free");
  }
}

} // namespace

// Arguments: megabytes of a slice, one or more.
int main(int argc, char** argv) {
  cudaStream_t stream = nullptr;
  CheckCuda(cudaStreamCreate(&stream), "create a stream");
  for (int k = 1; k < argc; ++k) {
    for (ElementType type : {kFloat32, kFloat16, kFloat64}) {
      for (int ranks : {2, 4, 8, 16}) {
        Measure(type, ranks, std::atoll(argv[k]) * 1000 * 1000, stream);
      }
    }
  }
  return 0;
}
