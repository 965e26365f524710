// How the ranks of a host come to share memory: all or none, no strangers, nothing left behind.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "local_ranks.h"
#include "reduce/mapping.h"

using namespace adasum_hvd;

namespace {

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

void UnknownPeersAreRefused() {
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

// The listening socket of a rank of this process.
int ListenerCalled(int name) {
  char digits[6];
  std::snprintf(digits, sizeof digits, "%05x", name);
  for (int descriptor = 0; descriptor < 1024; ++descriptor) {
    sockaddr_un address = {};
    socklen_t length = sizeof address;
    if (getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
        address.sun_family == AF_UNIX && length == offsetof(sockaddr_un, sun_path) + 6 &&
        std::equal(digits, digits + 5, address.sun_path + 1)) {
      return descriptor;
    }
  }
  throw std::runtime_error("nobody listens");
}

// Ranks whose calls another one has dropped, as if too many had called.
void DroppedRanksCallAgain() {
  constexpr int kRanks = 3, kDropped = 20;
  Board board(kRanks);
  InThreads(kRanks, [&](int rank) {
    const AllgatherTwo plain = board.For(rank);
    int calls = 0;
    const AllgatherTwo dropping = [&](int first, int second) {
      std::vector<int> all = plain(first, second);
      if (rank == 0 && ++calls == 1) {
        pollfd listening = {ListenerCalled(first), POLLIN, 0};
        for (int dropped = 0; dropped < kDropped; ++dropped) {
          Check(poll(&listening, 1, 10000) == 1, "ranks do not call again");
          const int caller = accept(listening.fd, nullptr, nullptr);
          Check(caller >= 0, "no rank called");
          close(caller);
        }
      }
      return all;
    };
    std::string why_not;
    const auto group =
        ConnectLocalRanks(Ranks(kRanks), rank, Ranks(kRanks), LocalSettings(), dropping, why_not);
    Check(group != nullptr, why_not);
  });
}

// Rank 0 gives up at once, and rank 1 calls it after that.
void NobodyWaitsForARankThatHasFailed() {
  Board board(2);
  const auto started = std::chrono::steady_clock::now();
  InThreads(2, [&](int rank) {
    const AllgatherTwo plain = board.For(rank);
    int calls = 0;
    const AllgatherTwo late = [&](int first, int second) {
      std::vector<int> all = plain(first, second);
      if (rank == 1 && ++calls == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
      }
      return all;
    };
    LocalSettings settings;
    settings.handshake_seconds = rank == 0 ? 0 : 10;
    std::string why_not;
    Check(ConnectLocalRanks(Ranks(2), rank, Ranks(2), settings, late, why_not) == nullptr, "connected");
    Check(!why_not.empty(), "no reason");
  });
  Check(std::chrono::steady_clock::now() - started < std::chrono::seconds(5), "it took too long");
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
  InThreads(1, [](int) {}); // the thread sanitizer keeps one of its own behind the first
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

// A region that one rank makes is the others' too, until it is freed; and no longer after the next is
// offered.
void RegionsAreMapped() {
  constexpr int64_t kBytes = 5 << 20;
  const size_t descriptors = CountIn("/proc/self/fd");
  for (int ranks : {2, 3}) {
    Board board(ranks);
    InThreads(ranks, [&](int rank) {
      const auto transport = Connect(board, rank, ranks, LocalSettings());
      Check(transport->shares_memory(), "no memory is shared");
      for (int round = 0; round < 5; ++round) {
        auto* mine = static_cast<char*>(AllocateShared(kBytes));
        std::fill(mine, mine + kBytes, static_cast<char>(10 * round + rank));
        for (int again = 0; again < 2; ++again) {
          std::string why_not;
          const auto pieces =
              MapPieces(*transport, {{mine, 100}, {mine + 4097, kBytes - 4097}, {nullptr, 0}}, why_not);
          Check(why_not.empty(), why_not);
          Barrier(*transport);
          for (int peer = 0; peer < ranks; ++peer) {
            const auto expected = static_cast<char>(10 * round + peer);
            Check(pieces[peer][0][99] == expected && pieces[peer][1][kBytes - 4098] == expected,
                  "rank " + std::to_string(peer) + "'s memory holds something else");
            Check(pieces[peer][1] - pieces[peer][0] == 4097, "another place");
          }
          Barrier(*transport);
        }
        FreeShared(mine);
      }
      const size_t maps = MapsOfSharedMemory(); // of all threads
      Check(maps <= static_cast<size_t>(ranks * (2 * ranks + ranks)),
            std::to_string(maps) + " maps are left");
    });
    Check(MapsOfSharedMemory() == 0 && CountIn("/proc/self/fd") == descriptors, "something stays behind");
  }
}

// The first region of a process is at offset 0 of its file, which is also the location of an empty piece.
void AnEmptyPieceIsNoRegion() {
  constexpr int64_t kBytes = 4096;
  Board board(2);
  InThreads(2, [&](int rank) {
    const auto transport = Connect(board, rank, 2, LocalSettings());
    char* first = rank == 0 ? static_cast<char*>(AllocateShared(kBytes)) : nullptr;
    Check(first == nullptr || FindShared(first, kBytes)->offset() == 0, "it is not the first region");
    Barrier(*transport);
    first = rank == 0 ? first : static_cast<char*>(AllocateShared(kBytes));
    auto* second = static_cast<char*>(AllocateShared(kBytes));
    first[7] = static_cast<char>(10 + rank);
    second[7] = static_cast<char>(20 + rank);
    std::string why_not;
    const auto pieces =
        MapPieces(*transport, {{second, kBytes}, {nullptr, 0}, {first, kBytes}}, why_not)[1 - rank];
    Check(why_not.empty(), why_not);
    Barrier(*transport);
    Check(pieces[0][7] == 20 + 1 - rank && pieces[2][7] == 10 + 1 - rank, "another region is mapped");
    Check(pieces[1] == nullptr, "an empty piece is mapped");
    Barrier(*transport);
    FreeShared(first);
    FreeShared(second);
  });
}

// More than a socket holds the offers of, on one rank only and on all; then what was freed is told, too.
void ManyRegionsAreMapped() {
  constexpr int64_t kBytes = 4096;
  constexpr int kRegions = 300, kRanks = 3;
  Board board(kRanks);
  InThreads(kRanks, [&](int rank) {
    const auto transport = Connect(board, rank, kRanks, LocalSettings());
    for (const bool all : {false, true, true}) {
      std::vector<char*> areas;
      std::vector<MemoryPiece> mine;
      const bool one = rank > 0 && !all;
      for (int k = 0; k < kRegions; ++k) {
        if (!one || k == 0) {
          areas.push_back(static_cast<char*>(AllocateShared(one ? kRegions * kBytes : kBytes)));
        }
        mine.push_back({one ? areas[0] + k * kBytes : areas[k], kBytes});
        mine.back().at[7] = static_cast<char>(k + rank);
      }
      std::string why_not;
      const auto pieces = MapPieces(*transport, mine, why_not);
      Check(why_not.empty(), why_not);
      Barrier(*transport);
      for (int peer = 0; peer < kRanks; ++peer) {
        for (int k = 0; k < kRegions; ++k) {
          Check(pieces[peer][k][7] == static_cast<char>(k + peer), "region " + std::to_string(k));
        }
      }
      Barrier(*transport);
      for (char* area : areas) {
        FreeShared(area);
      }
    }
  });
}

void FreedMemoryIsGivenBack() {
  auto owner = std::make_unique<SharedRegion>(1 << 20);
  owner->begin()[1] = 1;
  const int theirs = dup(owner->file().descriptor());
  struct stat status;
  Check(fstat(theirs, &status) == 0 && status.st_blocks > 0, "it takes no memory");
  const MappedRegion mapped(theirs, owner->offset(), owner->bytes());
  owner.reset();
  Check(fstat(theirs, &status) == 0 && status.st_blocks == 0, "a peer that has it mapped keeps it");
  Check(mapped.span().begin[1] == 0, "it holds what it held");
  close(theirs);
}

// What a peer says is not trusted.
void ForeignMemoryIsRefused() {
  const SharedRegion region(1 << 20);
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, int64_t>>{
           {1 << 20, 1}, {0, (1 << 20) + 1}, {UINT64_MAX, 2}, {(1 << 20) - 4, 8}}) {
    try {
      MemorySpan{region.begin(), region.bytes()}.At(offset, bytes);
      Check(false, "a place outside was taken");
    } catch (const std::runtime_error&) {
    }
  }
  const int unsealed = memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  Check(ftruncate(unsealed, 1 << 20) == 0, "ftruncate");
  const int file = region.file().descriptor();
  for (const auto& [descriptor, bytes] : std::vector<std::pair<int, int64_t>>{
           {unsealed, 1 << 20}, {file, 2 << 20}, {file, -1}, {file, INT64_MAX}}) {
    try {
      const MappedRegion mapped(descriptor, region.offset(), bytes);
      Check(false, "memory of another size, or whose size may shrink, was taken");
    } catch (const std::runtime_error&) {
    }
  }
  close(unsealed);
}

void OnlyWholeRegionsAreFound() {
  auto* mine = static_cast<char*>(AllocateShared(10000));
  Check(FindShared(mine, 10000) != nullptr && FindShared(mine + 9999, 1) != nullptr, "it is not found");
  Check(FindShared(mine - 1, 1) == nullptr && FindShared(mine + 1, 1 << 20) == nullptr, "more is found");
  FreeShared(mine);
  Check(FindShared(mine, 1) == nullptr, "it is found after it was freed");
}

void MemoryKeepsItsSize() {
  const LocalSegment segment(2, 4096);
  const SharedRegion region(4096);
  Check(ftruncate(segment.descriptor(), 0) != 0 && errno == EPERM, "it was shrunk");
  Check(ftruncate(region.file().descriptor(), 0) != 0 && errno == EPERM, "the regions' file was shrunk");
  const Descriptor unsealed(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  struct stat status;
  Check(fstat(segment.descriptor(), &status) == 0 && ftruncate(unsealed.value(), status.st_size) == 0,
        "ftruncate");
  try {
    LocalSegment(unsealed.value(), 2, 4096);
  } catch (const std::runtime_error& error) {
    Check(std::string(error.what()).find("may still shrink") != std::string::npos, error.what());
    return;
  }
  Check(false, "memory that may shrink was mapped");
}

// The memory of all rings of a host does not grow with the square of its ranks.
void RingsFitManyRanks() {
  Check(RingBytes(1) == 256 << 10 && RingBytes(16) == 256 << 10, "few ranks");
  for (const int64_t ranks : {17, 64, 100, 128}) {
    const int64_t bytes = RingBytes(static_cast<int>(ranks));
    Check(bytes % 64 == 0 && bytes * ranks * ranks <= 64 << 20, std::to_string(ranks) + " ranks");
  }
  Check(RingBytes(1000) == 4 << 10, "very many ranks");
}

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {
                      {"rings fit many ranks", RingsFitManyRanks},
                      {"all ranks or none", AllOrNone},
                      {"unknown peers are refused", UnknownPeersAreRefused},
#if !defined(__SANITIZE_THREAD__)
                      {"silent callers are not waited for", SilentCallersAreNotWaitedFor},
#endif
#if !defined(__SANITIZE_THREAD__)
                      {"many silent callers are not waited for", ManySilentCallersAreNotWaitedFor},
#endif
                      {"ranks that are dropped call again", DroppedRanksCallAgain},
                      {"nobody waits for a rank that has failed", NobodyWaitsForARankThatHasFailed},
                      {"nothing stays behind", NothingStaysBehind},
                      {"memory keeps its size", MemoryKeepsItsSize},
                      {"regions are mapped", RegionsAreMapped},
                      {"an empty piece is no region", AnEmptyPieceIsNoRegion},
                      {"many regions are mapped", ManyRegionsAreMapped},
                      {"freed memory is given back", FreedMemoryIsGivenBack},
                      {"foreign memory is refused", ForeignMemoryIsRefused},
                      {"only whole regions are found", OnlyWholeRegionsAreFound},
                  });
}
