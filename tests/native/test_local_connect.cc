// How the ranks of a host come to share memory: all or none, no strangers, nothing left behind.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "local_ranks.h"

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
                      {"strangers are refused", StrangersAreRefused},
#if !defined(__SANITIZE_THREAD__)
                      {"silent callers are not waited for", SilentCallersAreNotWaitedFor},
#endif
#if !defined(__SANITIZE_THREAD__)
                      {"many silent callers are not waited for", ManySilentCallersAreNotWaitedFor},
#endif
                      {"reading is allowed while it is needed", ReadingIsAllowedWhileItIsNeeded},
                      {"nothing stays behind", NothingStaysBehind},
                      {"memory keeps its size", MemoryKeepsItsSize},
                  });
}
