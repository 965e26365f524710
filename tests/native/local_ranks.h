// Ranks of one host that share memory, as threads or as forked processes.
#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "host/local_transport.h"
#include "testing.h"

namespace adasum_hvd {

// Gathers two integers of each rank, in memory that forked processes share too.
class Board {
public:
  explicit Board(int ranks) : ranks_(ranks) {
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared_ = new (memory) Shared();
  }
  ~Board() { munmap(shared_, sizeof(Shared)); }

  AllgatherTwo For(int rank) {
    auto round = std::make_shared<int>(0);
    return [this, rank, round](int first, int second) {
      Shared::Round& here = shared_->rounds[(*round)++];
      here.values[2 * rank] = first;
      here.values[2 * rank + 1] = second;
      here.arrived.fetch_add(1);
      while (here.arrived.load() < ranks_) {
        std::this_thread::yield();
      }
      return std::vector<int>(here.values, here.values + 2 * ranks_);
    };
  }

private:
  struct Shared {
    struct Round {
      std::atomic<int> arrived{0};
      int values[512] = {};
    } rounds[4];
  };
  int ranks_;
  Shared* shared_;
};

inline std::vector<int> Ranks(int size) {
  std::vector<int> ranks(size);
  for (int rank = 0; rank < size; ++rank) {
    ranks[rank] = rank;
  }
  return ranks;
}

inline std::unique_ptr<LocalGroup> Join(Board& board, int rank, int size, const LocalSettings& settings,
                                        std::string& why_not) {
  return ConnectLocalRanks(Ranks(size), rank, Ranks(size), settings, board.For(rank), why_not);
}

inline std::unique_ptr<LocalTransport> Connect(Board& board, int rank, int size,
                                               const LocalSettings& settings) {
  std::string why_not;
  std::unique_ptr<LocalGroup> group = Join(board, rank, size, settings, why_not);
  Check(group != nullptr, "not connected: " + why_not);
  return std::make_unique<LocalTransport>(std::move(group));
}

} // namespace adasum_hvd
