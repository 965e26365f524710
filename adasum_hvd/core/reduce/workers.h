// The threads of one rank that share the arithmetic of a reduction.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace adasum_hvd {

class Workers {
public:
  // body(job, worker), worker in 0 .. threads() - 1; must not throw.
  using Body = std::function<void(int64_t job, int worker)>;

  explicit Workers(int threads); // at most; includes the calling thread
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Sets the number of threads from the next Run on; fewer if the system refuses more. Threads are kept.
  void UseThreads(int threads);
  int threads() const { return threads_; }

  // Calls body once for every job in 0 .. jobs - 1, in any order, and returns when all are done. Helper
  // threads take jobs if they wake in time; no thread waits for a helper that has none.
  void Run(int64_t jobs, const Body& body);

private:
  void Help(int worker);
  void TakeJobs(int worker);
  uint64_t AwaitRound(uint64_t seen);
  bool Enter(uint64_t round);

  // A round is a Run. The gate holds its number, the number of helpers inside, and whether it is open.
  static constexpr uint64_t kOpen = 1, kHelper = 2, kRound = 1 << 16;
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int64_t> next_{0}; // job
  alignas(64) int64_t jobs_ = 0;
  const Body* body_ = nullptr;
  int threads_ = 1; // in use; written while no helper is inside
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> asleep_{0}; // helpers
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

} // namespace adasum_hvd
