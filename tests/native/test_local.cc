// Shared memory between ranks: threads for the exchanges, processes where one has to die.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "testing.h"
#include "transport/local/transport.h"
#include "transport/local/watch.h"

using namespace adasum_hvd;

// Linux's Yama module, which few test machines have: only whom a process has allowed may read its memory.
namespace yama {

enum Form { kAbsent, kRestricted, kForbidden };
std::atomic<int> form{kAbsent};
std::atomic<bool> allowed{false};
std::atomic<int> calls{0};

} // namespace yama

extern "C" int prctl(int option, ...) {
  unsigned long arguments[4];
  va_list list;
  va_start(list, option);
  for (unsigned long& argument : arguments) {
    argument = va_arg(list, unsigned long);
  }
  va_end(list);
  if (option == PR_SET_PTRACER && yama::form != yama::kAbsent) {
    ++yama::calls;
    yama::allowed = arguments[0] != 0;
    return 0;
  }
  return static_cast<int>(syscall(SYS_prctl, option, arguments[0], arguments[1], arguments[2], arguments[3]));
}

extern "C" ssize_t process_vm_readv(pid_t process, const iovec* here, unsigned long here_count,
                                    const iovec* there, unsigned long there_count, unsigned long flags) {
  if (yama::form == yama::kForbidden || (yama::form == yama::kRestricted && !yama::allowed)) {
    errno = EPERM;
    return -1;
  }
  return syscall(SYS_process_vm_readv, process, here, here_count, there, there_count, flags);
}

namespace {

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
      int values[32] = {};
    } rounds[4];
  };
  int ranks_;
  Shared* shared_;
};

std::vector<int> Ranks(int size) {
  std::vector<int> ranks(size);
  for (int rank = 0; rank < size; ++rank) {
    ranks[rank] = rank;
  }
  return ranks;
}

std::unique_ptr<LocalGroup> Join(Board& board, int rank, int size, const LocalSettings& settings,
                                 std::string& why_not) {
  return ConnectLocalRanks(Ranks(size), rank, Ranks(size), settings, board.For(rank), why_not);
}

std::unique_ptr<LocalTransport> Connect(Board& board, int rank, int size, const LocalSettings& settings) {
  std::string why_not;
  std::unique_ptr<LocalGroup> group = Join(board, rank, size, settings, why_not);
  Check(group != nullptr, "not connected: " + why_not);
  return std::make_unique<LocalTransport>(std::move(group));
}

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
    Check(transport->direct() == (settings.mode == LocalMode::kDirect), "another mode than asked for");
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
    for (LocalMode mode : {LocalMode::kDirect, LocalMode::kStaged}) {
      for (int64_t ring_bytes : {320, 4096, 256 << 10}) {
        LocalSettings settings;
        settings.mode = mode;
        settings.ring_bytes = ring_bytes;
        ExchangeAndCheck(ranks, settings);
      }
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

void CheckNames(const std::string& error, const std::string& why) {
  Check(error.find("got none of rank 1 on rank 0") != std::string::npos &&
            error.find(why) != std::string::npos,
        "the error is \"" + error + "\"");
}

void EndedPeerIsNamed() {
  Board board(2);
  InThreads(2, [&](int rank) {
    auto transport = Connect(board, rank, 2, LocalSettings());
    if (rank == 0) {
      CheckNames(ErrorOf(*transport, 100), "has ended");
    }
  });
}

void SilentPeerIsNamed() {
  Board board(2);
  std::atomic<bool> done{false};
  InThreads(2, [&](int rank) {
    LocalSettings settings;
    settings.timeout_seconds = 1;
    auto transport = Connect(board, rank, 2, settings);
    if (rank == 0) {
      CheckNames(ErrorOf(*transport, 100), "nothing came from it for 1 s");
      done = true;
    }
    while (!done) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
}

// One rank's own error ends the transport for the others too.
void FailedPeerIsNamed() {
  Board board(2);
  std::atomic<bool> done{false};
  InThreads(2, [&](int rank) {
    auto transport = Connect(board, rank, 2, LocalSettings());
    if (rank == 0) {
      CheckNames(ErrorOf(*transport, 100), "a reduction failed there");
      done = true;
    } else {
      transport->Break("out of memory");
    }
    while (!done) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
}

// Being woken is no progress: what counts is the time.
void SilentPeerThatWakesOthersIsNamed() {
  Board board(2);
  std::atomic<bool> done{false};
  InThreads(2, [&](int rank) {
    LocalSettings settings;
    settings.timeout_seconds = 1;
    std::string why_not;
    std::unique_ptr<LocalGroup> group = Join(board, rank, 2, settings, why_not);
    Check(group != nullptr, why_not);
    SegmentHeader& header = group->header(0);
    if (rank == 1) {
      while (!done) {
        header.bell.Wake();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      return;
    }
    LocalTransport transport(std::move(group));
    const auto started = std::chrono::steady_clock::now();
    CheckNames(ErrorOf(transport, 100), "nothing came from it for 1 s");
    Check(std::chrono::steady_clock::now() - started < std::chrono::seconds(3), "it took too long");
    done = true;
  });
}

// Rank 2 waits for rank 0, which waits for rank 1.
void EndOfAChainIsNamed() {
  Board board(3);
  std::atomic<int> done{0};
  InThreads(3, [&](int rank) {
    LocalSettings settings;
    settings.timeout_seconds = rank == 0 ? 3 : 1; // so that nobody tells rank 2
    auto transport = Connect(board, rank, 3, settings);
    std::vector<char> buffer(100);
    std::vector<Message> messages(3);
    messages[rank == 0 ? 1 : 0] = {nullptr, 0, buffer.data(), 100};
    std::string error;
    try {
      if (rank != 1) {
        transport->Exchange(messages);
      }
    } catch (const SilentRank& silent) {
      error = silent.what();
      Check(silent.rank == 1, "another rank was found: " + error);
    }
    if (rank != 1) {
      Check(error.find("got none of rank 1 on rank " + std::to_string(rank)) != std::string::npos,
            "the error is \"" + error + "\"");
    }
    ++done;
    while (done < 3) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
}

// What a watch sees of Horovod, and what it did.
struct Loop {
  std::atomic<int64_t> turns{0};
  std::atomic<bool> leaving{false}, ended{false};
  std::mutex mutex;
  std::string said;

  WatchedLoop Watched() {
    return {[this] { return turns.load(); }, [this] { return leaving.load(); },
            [this](const std::string& why) {
              std::lock_guard<std::mutex> guard(mutex);
              said = why;
            },
            [this] { ended = true; }};
  }
  std::string Said() {
    std::lock_guard<std::mutex> guard(mutex);
    return said;
  }
};

void WaitUntil(const std::function<bool()>& holds, const std::string& what) {
  for (int k = 0; !holds(); ++k) {
    Check(k < 1000, what);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void AWatchEndsWhatIsStuck() {
  for (const bool turns : {false, true}) {
    Loop loop;
    Watch watch(loop.Watched(), std::chrono::seconds(1));
    watch.NoteFailure("rank 1 is silent");
    if (turns) {
      for (int k = 0; k < 250; ++k) {
        ++loop.turns;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      Check(!loop.ended && loop.Said().empty(), "a loop that turns was ended");
      continue;
    }
    WaitUntil([&] { return loop.ended.load(); }, "a loop that is stuck was not ended");
    Check(loop.Said() == "rank 1 is silent", loop.Said());
  }
}

// Without a failed reduction, too: where Horovod itself waits for a rank that does not run.
void AWatchNamesARankThatDoesNotRun() {
  Board board(3);
  std::vector<Loop> loops(3);
  std::atomic<int> done{0};
  InThreads(3, [&](int rank) {
    std::string why_not;
    std::shared_ptr<LocalGroup> group = Join(board, rank, 3, LocalSettings(), why_not);
    Check(group != nullptr, why_not);
    auto watch = std::make_unique<Watch>(loops[rank].Watched(), std::chrono::seconds(1));
    watch->Include(group);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    if (rank == 1) {
      watch.reset();
    } else {
      WaitUntil([&] { return loops[rank].ended.load(); }, "nothing was noticed");
      Check(loops[rank].Said().find("got none of rank 1 on rank " + std::to_string(rank)) !=
                std::string::npos,
            loops[rank].Said());
    }
    ++done;
    while (done < 3) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
}

// Ranks that are in different reductions, or in one of different sizes, never mix their bytes.
void OtherReductionsAreNoticed() {
  for (bool other_size : {false, true}) {
    Board board(2);
    std::atomic<int> done{0};
    InThreads(2, [&](int rank) {
      auto transport = Connect(board, rank, 2, LocalSettings());
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
      Check(error.find("another reduction") != std::string::npos ||
                error.find("has given up on it") != std::string::npos,
            "the error is \"" + error + "\"");
      ++done;
      while (done < 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
  }
}

// The peer is killed while long messages go to and fro; a child of it keeps its descriptors open.
#if !defined(__SANITIZE_THREAD__) // which cannot follow a fork
void KilledPeerIsNamed() {
  for (LocalMode mode : {LocalMode::kDirect, LocalMode::kStaged}) {
    Board board(2);
    LocalSettings settings;
    settings.mode = mode;
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
}
#endif

void AllOrNone() {
  Board board(3);
  InThreads(3, [&](int rank) {
    AllgatherTwo plain = board.For(rank);
    int calls = 0;
    // Rank 2 says that it has no socket.
    const AllgatherTwo broken = [&](int first, int second) {
      return plain(rank == 2 && calls++ == 0 ? -1 : first, second);
    };
    std::string why_not;
    auto group = ConnectLocalRanks(Ranks(3), rank, Ranks(3), LocalSettings(), broken, why_not);
    Check(group == nullptr && !why_not.empty(), "connected without rank 2");
  });
}

void StrangersAreRefused() {
  Board board(2);
  InThreads(2, [&](int rank) {
    AllgatherTwo plain = board.For(rank);
    int calls = 0;
    // Rank 1 sees another nonce than the one rank 0 gave.
    const AllgatherTwo forged = [&](int first, int second) {
      std::vector<int> all = plain(first, second);
      all[1] ^= rank == 1 && calls++ == 0 ? 1 : 0;
      return all;
    };
    std::string why_not;
    LocalSettings settings;
    settings.handshake_seconds = 1;
    auto group = ConnectLocalRanks(Ranks(2), rank, Ranks(2), settings, forged, why_not);
    Check(group == nullptr, "a wrong nonce was taken");
    Check(!why_not.empty(), "no reason");
  });
}

#if !defined(__SANITIZE_THREAD__)
// A process, of another user where this one may change its own, that calls `name` so often and says nothing.
// It has called once, at least, when this is made.
class SilentCaller {
public:
  SilentCaller(int name, int calls, bool another_user) {
    int called[2];
    Check(pipe2(called, O_CLOEXEC) == 0, "pipe");
    process_ = fork();
    if (process_ == 0) {
      bool done = !another_user || setresuid(65534, 65534, 65534) == 0;
      for (int call = 0; call < calls; ++call) {
        const int caller = socket(AF_UNIX, SOCK_SEQPACKET, 0);
        sockaddr_un address = {};
        address.sun_family = AF_UNIX;
        std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "%05x", name);
        done = done && connect(caller, reinterpret_cast<sockaddr*>(&address),
                               offsetof(sockaddr_un, sun_path) + 6) == 0;
        if (call == 0) {
          [[maybe_unused]] const ssize_t told = write(called[1], done ? "y" : "n", 1);
        }
      }
      pause();
      _exit(0);
    }
    close(called[1]);
    char answer = 0;
    const bool told = read(called[0], &answer, 1) == 1;
    close(called[0]);
    Check(told && answer == 'y', "the caller could not call");
  }
  ~SilentCaller() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  SilentCaller(const SilentCaller&) = delete;
  SilentCaller& operator=(const SilentCaller&) = delete;

private:
  pid_t process_;
};

// Processes that call in front of the ranks take nothing from them, not even time.
void SilentCallersAreNotWaitedFor() {
  for (const bool another_user : {false, true}) {
    Board board(3);
    const auto started = std::chrono::steady_clock::now();
    std::unique_ptr<SilentCaller> caller;
    InThreads(3, [&](int rank) {
      const AllgatherTwo plain = board.For(rank);
      int calls = 0;
      const AllgatherTwo disturbed = [&](int first, int second) {
        if (rank == 0 && ++calls == 1) { // the other ranks know no name yet
          caller = std::make_unique<SilentCaller>(first, 3, another_user && geteuid() == 0);
        }
        return plain(first, second);
      };
      std::string why_not;
      const auto group = ConnectLocalRanks(Ranks(3), rank, Ranks(3), LocalSettings(), disturbed, why_not);
      Check(group != nullptr, why_not);
    });
    Check(std::chrono::steady_clock::now() - started < std::chrono::seconds(3), "it took too long");
  }
}

// More of them than a rank keeps, and than can wait to be accepted.
void ManySilentCallersAreNotWaitedFor() {
  Board board(2);
  std::unique_ptr<SilentCaller> caller;
  InThreads(2, [&](int rank) {
    const AllgatherTwo plain = board.For(rank);
    int calls = 0;
    const AllgatherTwo disturbed = [&](int first, int second) {
      if (rank == 0 && ++calls == 1) {
        caller = std::make_unique<SilentCaller>(first, 300, false);
      }
      return plain(first, second);
    };
    std::string why_not;
    const auto group = ConnectLocalRanks(Ranks(2), rank, Ranks(2), LocalSettings(), disturbed, why_not);
    Check(group != nullptr, why_not);
  });
}
#endif

// Memory may be read by others only while ranks read it.
void ReadingIsAllowedWhileItIsNeeded() {
  struct Case {
    LocalMode mode;
    yama::Form form;
    bool connected, allowed;
  };
  const std::vector<Case> cases = {
      {LocalMode::kStaged, yama::kRestricted, true, false},
      {LocalMode::kDirect, yama::kRestricted, true, true},
      {LocalMode::kDirect, yama::kForbidden, false, false},
  };
  for (const Case& one : cases) {
    yama::form = one.form;
    yama::calls = 0;
    Board board(2), other(2);
    std::atomic<int> looked{0};
    InThreads(2, [&](int rank) {
      LocalSettings settings;
      settings.mode = one.mode;
      std::string why_not;
      auto group = Join(board, rank, 2, settings, why_not);
      auto second = Join(other, rank, 2, settings, why_not); // of another process set
      second.reset();
      ++looked;
      while (looked < 2) {
        std::this_thread::yield();
      }
      Check((group != nullptr) == one.connected, "connected: " + why_not);
      Check(yama::allowed == one.allowed, "while connected");
      ++looked;
      while (looked < 4) {
        std::this_thread::yield();
      }
    });
    yama::form = yama::kAbsent;
    Check(!yama::allowed, "afterwards");
    Check((yama::calls > 0) == (one.mode == LocalMode::kDirect), "asked without need");
  }
}

cpu_set_t Allowed() {
  cpu_set_t allowed;
  Check(sched_getaffinity(0, sizeof allowed, &allowed) == 0, "sched_getaffinity");
  return allowed;
}

cpu_set_t FirstOf(const cpu_set_t& allowed, int count) {
  cpu_set_t first;
  CPU_ZERO(&first);
  for (int one = 0; CPU_COUNT(&first) < count; ++one) {
    if (CPU_ISSET(one, &allowed)) {
      CPU_SET(one, &first);
    }
  }
  return first;
}

// Ranks bound to one processor or free on two: what counts is what they have together.
void DirectWhereRanksTakeTurns(int processors) {
  const cpu_set_t all = Allowed();
  if (CPU_COUNT(&all) < processors) {
    throw Skipped("needs " + std::to_string(processors) + " processors");
  }
  const cpu_set_t few = FirstOf(all, processors);
  for (int ranks = 2; ranks <= 3; ++ranks) {
    Board board(ranks);
    InThreads(ranks, [&](int rank) {
      cpu_set_t mine = few;
      if (rank == 0 && processors == 2) {
        mine = FirstOf(all, 1);
      }
      Check(sched_setaffinity(0, sizeof mine, &mine) == 0, "sched_setaffinity");
      std::string why_not;
      const auto group = Join(board, rank, ranks, LocalSettings(), why_not);
      Check(group != nullptr, why_not);
      Check(group->crowded == (ranks > processors) && group->direct == group->crowded,
            std::to_string(ranks) + " ranks on " + std::to_string(processors) + " processors");
    });
  }
}

void DirectOnOneProcessor() { DirectWhereRanksTakeTurns(1); }
void DirectOnTwoProcessors() { DirectWhereRanksTakeTurns(2); }

void ARankThatMovesIsNotBound() {
  const cpu_set_t all = Allowed();
  const cpu_set_t one = FirstOf(all, 1);
  Board board(2);
  InThreads(2, [&](int rank) {
    auto transport = Connect(board, rank, 2, LocalSettings());
    char sent = 1, received = 0;
    std::vector<Message> messages(2);
    messages[1 - rank] = {&sent, 1, &received, 1};
    for (int exchange = 0; exchange < 20; ++exchange) {
      sched_setaffinity(0, sizeof one, &one); // both on one processor, and free again
      sched_setaffinity(0, sizeof all, &all);
      transport->Exchange(messages);
      const cpu_set_t now = Allowed();
      Check(received == 1 && CPU_EQUAL(&now, &all), "bound after exchange " + std::to_string(exchange));
    }
  });
}

size_t CountIn(const char* folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++count;
  }
  return count;
}

size_t MapsOfSharedMemory() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:adasum_hvd") != std::string::npos ? 1 : 0;
  }
  return count;
}

void NothingStaysBehind() {
  const size_t descriptors = CountIn("/proc/self/fd"), threads = CountIn("/proc/self/task");
  for (int round = 0; round < 3; ++round) {
    Board board(3);
    InThreads(3, [&](int rank) {
      const auto transport = Connect(board, rank, 3, LocalSettings());
      Check(MapsOfSharedMemory() > 0, "no shared memory");
    });
    Check(CountIn("/proc/self/fd") == descriptors, "descriptors");
    Check(CountIn("/proc/self/task") == threads, "threads");
    Check(MapsOfSharedMemory() == 0, "mapped memory");
  }
}

void MemoryKeepsItsSize() {
  const LocalSegment segment(2, 4096);
  for (int bytes : {0, 1 << 20}) {
    Check(ftruncate(segment.descriptor(), bytes) != 0 && errno == EPERM, "its size was changed");
  }
  const int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  struct stat status;
  Check(fstat(segment.descriptor(), &status) == 0 && ftruncate(unsealed, status.st_size) == 0, "ftruncate");
  try {
    LocalSegment(unsealed, 2, 4096);
  } catch (const std::runtime_error& error) {
    Check(std::string(error.what()).find("may still change") != std::string::npos, error.what());
    return;
  }
  Check(false, "memory that may shrink was mapped");
}

// A folder that goes with its owner, and what lies in it; also of a control group, whose files are the
// kernel's.
class Folder {
public:
  explicit Folder(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code error;
    if (!std::filesystem::create_directories(path_, error)) {
      throw Skipped(path_.string() + ": " + error.message());
    }
  }
  ~Folder() {
    std::error_code ignored;
    if (!std::filesystem::remove(path_, ignored)) {
      std::filesystem::remove_all(path_, ignored);
    }
  }
  std::string Put(const std::string& name, const std::string& text) const {
    const std::filesystem::path file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream out(file);
    out << text << '\n';
    return file;
  }
  std::string path() const { return path_; }

private:
  std::filesystem::path path_;
};

std::string OwnName() { return "adasum_hvd_test_" + std::to_string(getpid()); }

void QuotasAreRead() {
  const Folder root(std::filesystem::temp_directory_path() / OwnName());
  const auto processors = [&](const std::string& membership) {
    return ReadProcessorQuota(root.Put("membership", membership), root.path()).processors;
  };
  const double none = ProcessorQuota().processors;
  Check(ReadProcessorQuota(root.path() + "/nothing", root.path()).processors == none, "no file");
  root.Put("job/cpu.max", "250000 100000");
  root.Put("job/rank/cpu.max", "max 100000");
  Check(processors("0::/job/rank") == 2.5, "v2: the quota of the group above");
  Check(processors("0::/elsewhere") == none, "v2: another group's");
  root.Put("cpu.max", "150000 100000");
  Check(processors("0::/job/rank") == 1.5, "v2: the tightest");
  Check(processors("0::/not/seen/from/inside") == 1.5, "v2: the container's root");
  Check(processors("7:memory:/job\n12:cpuset:/job") == none, "v1: other controllers");
  root.Put("cpu,cpuacct/job/cpu.cfs_quota_us", "50000");
  root.Put("cpu,cpuacct/job/cpu.cfs_period_us", "100000");
  root.Put("cpu,cpuacct/cpu.cfs_quota_us", "-1");
  root.Put("cpu,cpuacct/cpu.cfs_period_us", "100000");
  Check(processors("3:cpu,cpuacct:/job\n2:memory:/") == 0.5, "v1");
  Check(processors("3:cpu,cpuacct:/") == none, "v1: -1 is no limit");
  Check(processors("nonsense\n3:cpu") == none, "lines of another form");
}

void QuotasOfTheKernelAreRead() {
  Check(ReadProcessorQuota().processors > 0, "this process's");
  const std::string mount = "/sys/fs/cgroup";
  const bool v1 = std::filesystem::exists(mount + "/cpu/cpu.cfs_quota_us");
  const Folder group((v1 ? mount + "/cpu/" : mount + "/") + OwnName());
  if (!std::filesystem::exists(group.path() + (v1 ? "/cpu.cfs_quota_us" : "/cpu.max"))) {
    throw Skipped("no control group of this process may set a quota");
  }
  group.Put(v1 ? "cpu.cfs_quota_us" : "cpu.max", v1 ? "150000" : "150000 100000");
  const Folder folder(std::filesystem::temp_directory_path() / OwnName());
  const std::string membership = folder.Put("membership", (v1 ? "1:cpu:/" : "0::/") + OwnName());
  Check(ReadProcessorQuota(membership, mount).processors == 1.5, "the kernel's own files");
}

// Ranks in one container share its quota; a rank in another has that one's.
void QuotasAreShared() {
  constexpr int kRanks = 3;
  for (const double processors : {1.0, 3.0}) {
    Board board(kRanks);
    InThreads(kRanks, [&](int rank) {
      const AllgatherTwo allgather = board.For(rank);
      std::string why_not;
      std::unique_ptr<LocalGroup> group =
          ConnectLocalRanks(Ranks(kRanks), rank, Ranks(kRanks), LocalSettings(), allgather, why_not);
      Check(group != nullptr, why_not);
      group->mine->header().allowed = {};
      for (int one = 0; one < 64; ++one) {
        CPU_SET(one, &group->mine->header().allowed);
      }
      group->mine->header().quota = {processors, uint64_t{rank < 2 ? 1u : 2u}};
      allgather(0, 0);
      Check(group->Crowded() == (processors < 2), "ranks that have to take turns");
      const LocalTransport transport(std::move(group));
      const double share = processors / (rank < 2 ? 2 : 1);
      Check(std::abs(transport.ShareOfProcessors() - share) < 1e-6, "share of a quota");
    });
  }
}

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {
                      {"messages arrive", MessagesArrive},
                      {"an ended peer is named", EndedPeerIsNamed},
                      {"a silent peer is named", SilentPeerIsNamed},
                      {"a silent peer that wakes others is named", SilentPeerThatWakesOthersIsNamed},
#if !defined(__SANITIZE_THREAD__)
                      {"a killed peer is named", KilledPeerIsNamed},
#endif
                      {"a failed peer is named", FailedPeerIsNamed},
                      {"the end of a chain is named", EndOfAChainIsNamed},
                      {"a watch ends what is stuck", AWatchEndsWhatIsStuck},
                      {"a watch names a rank that does not run", AWatchNamesARankThatDoesNotRun},
                      {"other reductions are noticed", OtherReductionsAreNoticed},
                      {"all ranks or none", AllOrNone},
                      {"strangers are refused", StrangersAreRefused},
#if !defined(__SANITIZE_THREAD__)
                      {"silent callers are not waited for", SilentCallersAreNotWaitedFor},
                      {"many silent callers are not waited for", ManySilentCallersAreNotWaitedFor},
#endif
                      {"reading is allowed while it is needed", ReadingIsAllowedWhileItIsNeeded},
                      {"direct where ranks take turns on one processor", DirectOnOneProcessor},
                      {"direct where ranks take turns on two processors", DirectOnTwoProcessors},
                      {"a rank that moves is not bound", ARankThatMovesIsNotBound},
                      {"nothing stays behind", NothingStaysBehind},
                      {"memory keeps its size", MemoryKeepsItsSize},
                      {"quotas are read", QuotasAreRead},
                      {"quotas of the kernel are read", QuotasOfTheKernelAreRead},
                      {"quotas are shared", QuotasAreShared},
                  });
}
