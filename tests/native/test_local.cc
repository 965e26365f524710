// Messages through shared memory, and the rank that is named if none arrive: ranks are threads, or processes
// if one has to be killed.
#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <stdexcept>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "failure/heartbeat_monitor.h"
#include "local_ranks.h"

using namespace adasum_hvd;

namespace {

// Its end waits for the other ranks' ends, also when a check has failed: until then they see this rank alive.
class EndTogether {
public:
  explicit EndTogether(std::atomic<int>& left) : left_(left) {}
  ~EndTogether() {
    for (--left_; left_ > 0;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

private:
  std::atomic<int>& left_;
};

char ByteOf(int from, int to, int exchange, size_t position) {
  return static_cast<char>(31 * from + 17 * to + 7 * exchange + position + position / 251);
}

// Every pair exchanges messages of lengths of its own, several exchanges in flight.
void ExchangeAndCheck(int ranks, const LocalSettings& settings) {
  const std::vector<size_t> lengths = {1, 0, 7, 4096, 16384, 16385, 30001, 64, 70000, 5};
  auto length = [&](int from, int to, int exchange) {
    return lengths[(3 * from + 5 * to + exchange) % lengths.size()];
  };
  constexpr int kExchanges = 12, kInFlight = 3;
  Board board(ranks);
  InThreads(ranks, [&](int rank) {
    auto transport = Connect(board, rank, ranks, settings);
    std::vector<std::vector<std::vector<char>>> sent(kExchanges), received(kExchanges);
    auto check = [&](int exchange) {
      transport->Wait();
      for (int peer = 0; peer < ranks; ++peer) {
        for (size_t k = 0; k < received[exchange][peer].size() && peer != rank; ++k) {
          Check(received[exchange][peer][k] == ByteOf(peer, rank, exchange, k),
                "exchange " + std::to_string(exchange) + ", byte " + std::to_string(k));
        }
      }
      sent[exchange].clear(); // the buffers are ours again
    };
    for (int exchange = 0; exchange < kExchanges; ++exchange) {
      std::vector<Message> messages(ranks);
      sent[exchange].resize(ranks);
      received[exchange].resize(ranks);
      for (int peer = 0; peer < ranks; ++peer) {
        std::vector<char>& out = sent[exchange][peer];
        out.resize(length(rank, peer, exchange));
        for (size_t k = 0; k < out.size(); ++k) {
          out[k] = ByteOf(rank, peer, exchange, k);
        }
        std::vector<char>& in = received[exchange][peer];
        in.resize(length(peer, rank, exchange));
        messages[peer] = {out.data(), static_cast<int64_t>(out.size()), in.data(),
                          static_cast<int64_t>(in.size())};
      }
      transport->Start(messages);
      if (exchange >= kInFlight) {
        check(exchange - kInFlight);
      }
    }
    for (int exchange = kExchanges - kInFlight; exchange < kExchanges; ++exchange) {
      check(exchange);
    }
  });
}

void MessagesArrive() {
  for (int ranks : {2, 3, 5}) {
    for (int64_t ring_bytes : {320, 4096, 256 << 10}) {
      LocalSettings settings;
      settings.ring_bytes = ring_bytes;
      ExchangeAndCheck(ranks, settings);
    }
  }
}

// What Wait throws on this rank, which expects a message of rank 1.
std::string ErrorOf(LocalTransport& transport, int64_t bytes) {
  std::vector<char> buffer(bytes);
  std::vector<Message> messages(transport.size());
  messages[1] = {buffer.data(), bytes, buffer.data(), bytes};
  try {
    transport.Exchange(messages);
  } catch (const std::runtime_error& error) {
    try {
      transport.Start(messages);
    } catch (const std::runtime_error& again) {
      Check(std::string(error.what()) == again.what(), "another error the second time");
      return error.what();
    }
  }
  return "";
}

void CheckNames(const std::string& error, const std::string& problem) {
  Check(error.find("rank 1 " + problem) == 0, "the error is \"" + error + "\"");
}

void EndedPeerIsNamed() {
  Board board(2);
  InThreads(2, [&](int rank) {
    auto transport = Connect(board, rank, 2, LocalSettings());
    if (rank == 0) {
      CheckNames(ErrorOf(*transport, 100), "ended (rank 0 reported it)");
    }
  });
}

void UnresponsivePeerIsNamed() {
  Board board(2);
  std::atomic<int> left{2};
  InThreads(2, [&](int rank) {
    LocalSettings settings;
    settings.timeout_seconds = 1;
    auto transport = Connect(board, rank, 2, settings);
    const EndTogether end(left);
    if (rank == 0) {
      CheckNames(ErrorOf(*transport, 100), "did not respond for 1 s");
    }
  });
}

// One rank's own error ends the transport for the others too.
void FailedPeerIsNamed() {
  Board board(2);
  std::atomic<int> left{2};
  InThreads(2, [&](int rank) {
    auto transport = Connect(board, rank, 2, LocalSettings());
    const EndTogether end(left);
    if (rank == 0) {
      CheckNames(ErrorOf(*transport, 100), "failed: out of memory (rank 1 reported it)");
    } else {
      transport->Abort({rank, rank, "rank 1 failed: out of memory"});
    }
  });
}

// A peer that writes nonsense over its positions does not get others to read or write elsewhere.
void NonsenseInPositionsIsRefused() {
  std::vector<char> memory(64);
  RingPositions positions;
  Ring ring(memory.data(), 64, positions);
  ring.Write(memory.data(), 40);
  Check(ring.Space() == 24 && ring.Unread() == 40, "a ring in order");
  for (const uint64_t read : {uint64_t{41}, uint64_t{1} << 40}) {
    positions.read = read;
    for (const auto ask : {&Ring::Space, &Ring::Unread}) {
      bool refused = false;
      try {
        (ring.*ask)();
      } catch (const std::runtime_error&) {
        refused = true;
      }
      Check(refused, "read up to " + std::to_string(read));
    }
  }
}

// Being woken is no progress: what counts is the time.
void UnresponsivePeerThatWakesOthersIsNamed() {
  Board board(2);
  std::atomic<int> left{2};
  InThreads(2, [&](int rank) {
    LocalSettings settings;
    settings.timeout_seconds = 1;
    std::string why_not;
    std::unique_ptr<LocalGroup> group = Join(board, rank, 2, settings, why_not);
    Check(group != nullptr, why_not);
    SegmentHeader& header = group->header(0);
    if (rank == 1) {
      const EndTogether end(left);
      while (left == 2) {
        header.bell.Wake();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      return;
    }
    LocalTransport transport(std::move(group));
    const EndTogether end(left);
    const auto started = std::chrono::steady_clock::now();
    CheckNames(ErrorOf(transport, 100), "did not respond for 1 s");
    Check(std::chrono::steady_clock::now() - started < std::chrono::seconds(3), "it took too long");
  });
}

// Rank 2 waits for rank 0, which waits for rank 1.
void EndOfAChainIsNamed() {
  Board board(3);
  std::atomic<int> left{3};
  InThreads(3, [&](int rank) {
    LocalSettings settings;
    settings.timeout_seconds = rank == 0 ? 3 : 1; // so that rank 0 does not notify rank 2
    auto transport = Connect(board, rank, 3, settings);
    const EndTogether end(left);
    std::vector<char> buffer(100);
    std::vector<Message> messages(3);
    messages[rank == 0 ? 1 : 0] = {nullptr, 0, buffer.data(), 100};
    std::string error;
    try {
      if (rank != 1) {
        transport->Exchange(messages);
      }
    } catch (const UnresponsiveRank& unresponsive) {
      error = unresponsive.what();
      Check(unresponsive.cause.rank == 1, "another rank was found: " + error);
    }
    if (rank != 1) {
      CheckNames(error, rank == 0 ? "did not respond for 3 s" : "did not respond for 1 s");
      Check(error.find("(rank 0 reported it)") != std::string::npos, error);
    }
  });
}

// Ranks that are in different reductions, or in one of different sizes, never mix their bytes.
void OtherReductionsAreNoticed() {
  for (bool other_size : {false, true}) {
    Board board(2);
    std::atomic<int> left{2};
    InThreads(2, [&](int rank) {
      auto transport = Connect(board, rank, 2, LocalSettings());
      const EndTogether end(left);
      transport->BeginOperation();
      if (rank == 1 && !other_size) {
        transport->BeginOperation();
      }
      std::vector<char> buffer(100), received(100);
      const int64_t bytes = rank == 1 && other_size ? 99 : 100;
      std::vector<Message> messages(2);
      messages[1 - rank] = {buffer.data(), bytes, received.data(), bytes};
      std::string error;
      try {
        transport->Exchange(messages);
      } catch (const std::runtime_error& thrown) {
        error = thrown.what();
      }
      Check(error.find("is in another reduction") != std::string::npos, "the error is \"" + error + "\"");
    });
  }
}

// The peer is killed while long messages go to and fro; a child of it keeps its descriptors open.
#if !defined(__SANITIZE_THREAD__) // which cannot follow a fork
void KilledPeerIsNamed() {
  Board board(2);
  LocalSettings settings;
  const pid_t child = fork();
  if (child == 0) {
    auto transport = Connect(board, 1, 2, settings);
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      sleep(5);
      _exit(0);
    }
    std::vector<char> buffer(1 << 20), other(1 << 20);
    for (int k = 0; k < 5; ++k) {
      transport->Exchange({{buffer.data(), 1 << 20, other.data(), 1 << 20}, {}});
    }
    raise(SIGKILL);
  }
  auto transport = Connect(board, 0, 2, settings);
  std::vector<char> buffer(1 << 20), other(1 << 20);
  for (int k = 0; k < 5; ++k) {
    transport->Exchange({{}, {buffer.data(), 1 << 20, other.data(), 1 << 20}});
  }
  const auto started = std::chrono::steady_clock::now();
  CheckNames(ErrorOf(*transport, 1 << 20), "");
  Check(std::chrono::steady_clock::now() - started < std::chrono::seconds(3), "it took too long");
  waitpid(child, nullptr, 0);
}
#endif

// A loop in place of Horovod's, and the actions of its monitor.
struct Loop {
  std::atomic<int64_t> cycles{0}, operations{0};
  std::atomic<bool> leaving{false}, program_ended{false}, ended{false};
  std::mutex mutex;
  std::string reported;

  MonitoredLoop Monitored() {
    return {[this] { return cycles.load(); },
            [this] { return operations.load(); },
            [this] { return leaving.load(); },
            [this] { return program_ended.load(); },
            [this](const std::string& reason) {
              std::lock_guard<std::mutex> guard(mutex);
              reported = reason;
            },
            [this] { ended = true; }};
  }
  std::string Reported() {
    std::lock_guard<std::mutex> guard(mutex);
    return reported;
  }
};

constexpr std::chrono::seconds kCheckpoint{2};

void WaitUntil(const std::function<bool()>& holds, const std::string& what) {
  for (int k = 0; !holds(); ++k) {
    Check(k < 1000, what);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void AMonitorEndsAStuckLoop() {
  for (const bool runs : {false, true}) {
    Loop loop;
    HeartbeatMonitor monitor(loop.Monitored(), std::chrono::seconds(1), std::chrono::seconds(0), kCheckpoint);
    monitor.NoteFailure("rank 1 failed");
    if (runs) {
      for (int k = 0; k < 250; ++k) {
        ++loop.cycles;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      Check(!loop.ended && loop.Reported().empty(), "a loop that runs was ended");
      continue;
    }
    WaitUntil([&] { return loop.ended.load(); }, "a loop that is stuck was not ended");
    Check(loop.Reported() == "rank 1 failed", loop.Reported());
  }
}

// An error has been raised by then: the script has time to save what it has.
void AMonitorLeavesTimeForACheckpoint() {
  Loop loop;
  HeartbeatMonitor monitor(loop.Monitored(), std::chrono::seconds(1), std::chrono::seconds(0),
                           std::chrono::seconds(5));
  monitor.NoteFailure("rank 1 failed");
  loop.leaving = true;
  WaitUntil([&] { return !loop.Reported().empty(); }, "a loop that is stuck was not seen");
  std::this_thread::sleep_for(std::chrono::milliseconds(4500));
  Check(!loop.ended, "the process was ended too soon");
  WaitUntil([&] { return loop.ended.load(); }, "a loop that is stuck was not ended");
}

// It has nothing left to save, whether it ends before or after the report.
void AMonitorLeavesNoTimeToAProgramThatHasEnded() {
  for (const bool before : {true, false}) {
    Loop loop;
    const auto started = std::chrono::steady_clock::now();
    HeartbeatMonitor monitor(loop.Monitored(), std::chrono::seconds(1), std::chrono::seconds(0),
                             std::chrono::seconds(60));
    monitor.NoteFailure("rank 1 failed");
    loop.leaving = loop.program_ended = before;
    WaitUntil([&] { return !loop.Reported().empty(); }, "a loop that is stuck was not seen");
    loop.program_ended = true;
    WaitUntil([&] { return loop.ended.load(); }, "a loop that is stuck was not ended");
    Check(std::chrono::steady_clock::now() - started < std::chrono::seconds(8), "it was ended too late");
  }
}

// One long operation on all ranks: their heartbeats arrive.
void AMonitorEndsNoLongOperation() {
  Board board(2);
  InThreads(2, [&](int rank) {
    std::string why_not;
    std::shared_ptr<LocalGroup> group = Join(board, rank, 2, LocalSettings(), why_not);
    Check(group != nullptr, why_not);
    Loop loop;
    HeartbeatMonitor monitor(loop.Monitored(), std::chrono::seconds(1), std::chrono::seconds(1),
                             std::chrono::seconds(1));
    monitor.MonitorHost(group);
    std::this_thread::sleep_for(std::chrono::seconds(4));
    Check(!loop.ended && loop.Reported().empty(), "a healthy rank was ended: " + loop.Reported());
  });
}

// A loop that runs again just before its process would be ended stays monitored.
void AMonitorEndsALoopThatIsStuckAgain() {
  Loop loop;
  HeartbeatMonitor monitor(loop.Monitored(), std::chrono::seconds(1), std::chrono::seconds(0), kCheckpoint);
  monitor.NoteFailure("rank 1 failed");
  WaitUntil([&] { return !loop.Reported().empty(); }, "a loop that is stuck was not seen");
  for (int k = 0; k < 250; ++k) {
    ++loop.cycles;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  Check(!loop.ended, "a loop that runs again was ended");
  WaitUntil([&] { return loop.ended.load(); }, "a loop that is stuck again was not ended");
}

void AMonitorEndsAStuckLoopWithoutAReason() {
  Loop loop;
  const auto started = std::chrono::steady_clock::now();
  HeartbeatMonitor monitor(loop.Monitored(), std::chrono::seconds(1), std::chrono::seconds(3), kCheckpoint);
  for (int k = 0; k < 20; ++k) { // one cycle of many operations
    ++loop.operations;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  WaitUntil([&] { return loop.ended.load(); }, "a loop that is stuck was not ended");
  Check(std::chrono::steady_clock::now() - started > std::chrono::seconds(5), "it was ended too soon");
  Check(loop.Reported().find("ADASUM_HVD_STALL_SECONDS") != std::string::npos, loop.Reported());
}

// Without a failed reduction, too: Horovod itself may wait for an unresponsive rank. Three ranks monitor each
// other, without rank 1: it `leaves` after a while, or has never begun.
void ThreeMonitorsWithoutOne(bool leaves) {
  Board board(3);
  std::vector<Loop> loops(3);
  std::atomic<int> left{3};
  InThreads(3, [&](int rank) {
    std::string why_not;
    std::shared_ptr<LocalGroup> group = Join(board, rank, 3, LocalSettings(), why_not);
    Check(group != nullptr, why_not);
    auto monitor = std::make_unique<HeartbeatMonitor>(loops[rank].Monitored(), std::chrono::seconds(1),
                                                      std::chrono::seconds(0), kCheckpoint);
    const EndTogether end(left);
    if (rank != 1 || leaves) {
      monitor->MonitorHost(group);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    if (rank == 1) {
      monitor.reset();
    } else if (leaves) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2500));
      Check(loops[rank].Reported().empty(), loops[rank].Reported());
    } else {
      WaitUntil([&] { return loops[rank].ended.load(); }, "nothing was noticed");
      const std::string reported = loops[rank].Reported();
      const std::string problem = "did not respond for "; // 1 s, or longer on a busy machine
      CheckNames(reported, problem);
      Check(std::stoi(reported.substr(reported.find(problem) + problem.size())) >= 1, reported);
      Check(reported.find("(rank " + std::to_string(rank) + " reported it") != std::string::npos, reported);
    }
  });
}

void AMonitorNamesAnUnresponsiveRank() { ThreeMonitorsWithoutOne(false); }

void AMonitorNamesNoRankThatHasLeft() { ThreeMonitorsWithoutOne(true); }

} // namespace

int main(int argc, char** argv) {
  return RunTests(
      argc, argv,
      {
          {"nonsense in positions is refused", NonsenseInPositionsIsRefused},
          {"messages arrive", MessagesArrive},
          {"an ended peer is named", EndedPeerIsNamed},
          {"an unresponsive peer is named", UnresponsivePeerIsNamed},
          {"a failed peer is named", FailedPeerIsNamed},
          {"an unresponsive peer that wakes others is named", UnresponsivePeerThatWakesOthersIsNamed},
          {"the end of a chain is named", EndOfAChainIsNamed},
          {"other reductions are noticed", OtherReductionsAreNoticed},
#if !defined(__SANITIZE_THREAD__)
          {"a killed peer is named", KilledPeerIsNamed},
#endif
          {"a monitor ends a stuck loop", AMonitorEndsAStuckLoop},
          {"a monitor leaves time for a checkpoint", AMonitorLeavesTimeForACheckpoint},
          {"a monitor leaves no time to a program that has ended",
           AMonitorLeavesNoTimeToAProgramThatHasEnded},
          {"a monitor ends no long operation", AMonitorEndsNoLongOperation},
          {"a monitor ends a loop that is stuck again", AMonitorEndsALoopThatIsStuckAgain},
          {"a monitor ends a stuck loop without a reason", AMonitorEndsAStuckLoopWithoutAReason},
          {"a monitor names an unresponsive rank", AMonitorNamesAnUnresponsiveRank},
          {"a monitor names no rank that has left", AMonitorNamesNoRankThatHasLeft},
      });
}
