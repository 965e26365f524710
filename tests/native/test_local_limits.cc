// Shared memory where the system limits it: descriptors, memory, address space, execution.
#include <chrono>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "local_ranks.h"
#include "ranks_as_threads.h"
#include "reduce/plan.h"
#include "reduce/reduce.h"

using namespace adasum_hvd;

namespace {

constexpr int kSealExec = 0x0020; // F_SEAL_EXEC; older headers lack it

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
constexpr uid_t kNobody = 65534;

void LimitDescriptors(rlim_t most) {
  const rlimit limit = {most, most};
  Check(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
}

// Runs body(rank) in `size` processes, and returns how many of them say true.
int InProcesses(int size, const std::function<bool(int rank)>& body) {
  for (int rank = 0; rank < size; ++rank) {
    if (fork() == 0) {
      bool good = false;
      try {
        good = body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      _exit(good ? 0 : 1);
    }
  }
  int good = 0;
  for (int rank = 0, status = 0; rank < size; ++rank) {
    Check(wait(&status) > 0, "wait");
    good += WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 1 : 0;
  }
  return good;
}

// Of a user, the kernel lets only so many descriptors be on their way at a time; root is exempt.
void ManyRanksOfAnOrdinaryUserConnect() {
  constexpr int kRanks = 128;
  constexpr std::chrono::seconds kLimit{2}, kSlack{6}; // machines of tests are busy
  Board board(kRanks);
  const int connected = InProcesses(kRanks, [&](int rank) {
    LimitDescriptors(1024);
    Check(geteuid() != 0 || setresuid(kNobody, kNobody, kNobody) == 0, "setresuid");
    std::chrono::steady_clock::time_point began;
    int calls = 0;
    const AllgatherTwo plain = board.For(rank);
    const AllgatherTwo timed = [&](int first, int second) {
      if (++calls == 2) {
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
        if (rank == 0 || taken > kLimit) {
          std::fprintf(stderr, "rank %d of %d connected after %.2f s\n", rank, kRanks, taken.count());
        }
        Check(taken < kLimit + kSlack, "it took too long");
      }
      const std::vector<int> all = plain(first, second);
      began = std::chrono::steady_clock::now();
      return all;
    };
    std::string why_not;
    const auto group = ConnectLocalRanks(Ranks(kRanks), rank, Ranks(kRanks), LocalSettings(), timed, why_not);
    Check(group != nullptr, why_not);
    return true;
  });
  Check(connected == kRanks, std::to_string(connected) + " ranks have shared memory");
}
#endif

int64_t OpenDescriptors() {
  int64_t count = 0;
  for (int one = 0; one < 4096; ++one) {
    count += fcntl(one, F_GETFD) >= 0 ? 1 : 0;
  }
  return count;
}

// However many buckets there are, they take one descriptor here, and one with every peer.
void RegionsTakeNoDescriptors() {
  constexpr int kRegions = 200;
  const int64_t before = OpenDescriptors();
  std::vector<void*> regions;
  for (int k = 0; k < kRegions; ++k) {
    regions.push_back(AllocateShared(4096));
  }
  Check(OpenDescriptors() <= before + 1, "each region takes a descriptor");
  for (void* region : regions) {
    FreeShared(region);
  }
  Check(OpenDescriptors() == before, "descriptors stay");
}

void MemoryIsReserved() {
  const SharedRegion region(8 << 20);
  struct stat status;
  Check(fstat(region.file().descriptor(), &status) == 0 && status.st_blocks * 512 >= 8 << 20,
        "its memory is not reserved");
  std::string error;
  try {
    AllocateShared(int64_t{1} << 40);
  } catch (const std::system_error& refused) {
    error = refused.what();
  }
  Check(error.find("expected 1099511627776 bytes") != std::string::npos &&
            error.find("available") != std::string::npos,
        "1 TiB was granted, or: " + error);
  FreeShared(AllocateShared(4096)); // smaller ones still are
}

// With pages of 64 KiB, too, which here is a number.
void RegionsHaveWholePages() {
  for (const int64_t page : {4 << 10, 16 << 10, 64 << 10}) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, page, page + 1, 10 * page - 1}) {
      const int64_t whole = WholePages(bytes, page);
      Check(whole % page == 0 && whole >= bytes && whole > 0 && whole < bytes + page + (bytes == 0 ? 1 : 0),
            std::to_string(whole) + " for " + std::to_string(bytes));
    }
  }
  const SharedRegion region(1);
  Check(region.bytes() % sysconf(_SC_PAGESIZE) == 0 && region.offset() % (2 << 20) == 0, "parts of pages");
}

bool KnowsNoExecution() {
  const Descriptor memory(memfd_create("test", MFD_CLOEXEC | 0x0008U));
  return memory.value() >= 0;
}

// Systems with vm.memfd_noexec=2 refuse memory that might be executed.
void MemoryIsNotExecutable() {
  if (!KnowsNoExecution()) {
    throw Skipped("the kernel has no MFD_NOEXEC_SEAL");
  }
  const Descriptor memory = MakeSharedMemory();
  Check((fcntl(memory.value(), F_GET_SEALS) & kSealExec) != 0, "it may be executed");
}

bool Deny() {
  FILE* file = std::fopen("/proc/sys/vm/memfd_noexec", "w");
  const bool done = file != nullptr && std::fputs("2", file) >= 0;
  return file != nullptr && std::fclose(file) == 0 && done;
}

// The setting is one of a namespace of processes, so a child has it of its own.
void MemoryIsGrantedWhereExecutionIsDenied() {
  int status = -1;
  constexpr int kCannotTest = 7;
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWPID) != 0) {
      _exit(kCannotTest);
    }
    const pid_t inside = fork();
    if (inside == 0) {
      if (!Deny()) {
        _exit(kCannotTest);
      }
      try {
        const SharedRegion region(4096);
        _exit(region.begin()[0]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        _exit(1);
      }
    }
    waitpid(inside, &status, 0);
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
  }
  Check(waitpid(child, &status, 0) == child && WIFEXITED(status), "waitpid");
  if (WEXITSTATUS(status) == kCannotTest) {
    throw Skipped("needs root, and vm.memfd_noexec");
  }
  Check(WEXITSTATUS(status) == 0, "it was refused");
}

// A transport on which one rank cannot map what the others have.
class WithoutRoom : public ThreadTransport {
public:
  using ThreadTransport::ThreadTransport;
  MemorySpan Reach(int peer, int64_t offset, int64_t bytes) override {
    if (rank() == 1 && peer == 3) {
      throw std::runtime_error("mapping of shared memory: Cannot allocate memory");
    }
    return ThreadTransport::Reach(peer, offset, bytes);
  }
};

// Where one rank cannot map a tensor, all of them, and all levels, agree on going without; the bits stay.
void RanksAgreeOnGoingWithoutSharedMemory() {
  constexpr int kRanks = 4;
  constexpr int64_t kElements = 100000;
  const auto fill = [](float* values, int rank) {
    for (int64_t k = 0; k < kElements; ++k) {
      values[k] = static_cast<float>((k * 31 + rank * 17) % 101 - 50) / 7;
    }
  };
  for (const std::vector<int>& radices : {std::vector<int>{0}, std::vector<int>{2, 2}}) {
    std::vector<std::vector<float>> results[2];
    for (const bool fails : {false, true}) {
      results[fails].resize(kRanks);
      Mailboxes mail;
      InThreads(kRanks, [&](int rank) {
        WithoutRoom lacking(mail, rank, kRanks, true);
        ThreadTransport whole(mail, rank, kRanks, true);
        ThreadTransport& transport = fails ? lacking : whole;
        const std::vector<GroupPlan> plan =
            PlanLevels(std::vector<int>(kRanks, 0), GroupOp::kAdasum, 0, rank, radices);
        std::vector<GroupTransport> groups;
        std::vector<ReduceLevel> levels;
        groups.reserve(plan.size());
        for (const GroupPlan& level : plan) {
          groups.emplace_back(transport, level.group);
          levels.push_back({&groups.back(), &level.tree});
        }
        auto* values = static_cast<float*>(AllocateShared(kElements * sizeof(float)));
        Scratch scratch;
        Workers workers(1);
        ReduceSettings settings;
        settings.replicate_bytes = 0;
        for (int round = 0; round < 2; ++round) {
          fill(values, rank);
          Reduce({{values, values, kElements}}, kFloat32, levels, 1.0, settings, *ChooseKernels(""), workers,
                 scratch, [](Phase, int) {});
        }
        results[fails][rank].assign(values, values + kElements);
        FreeShared(values);
        Check(transport.shares_memory() == !fails, "the ranks do not agree");
        Check(transport.why_not_shared().empty() == !(fails && rank == 1), transport.why_not_shared());
      });
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      Check(results[1][rank] == results[0][0], "other bits on rank " + std::to_string(rank));
    }
  }
}

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
                      {"many ranks of an ordinary user connect", ManyRanksOfAnOrdinaryUserConnect},
#endif
                      {"regions take no descriptors", RegionsTakeNoDescriptors},
                      {"memory is reserved", MemoryIsReserved},
                      {"regions have whole pages", RegionsHaveWholePages},
                      {"memory is not executable", MemoryIsNotExecutable},
                      {"memory is granted where execution is denied", MemoryIsGrantedWhereExecutionIsDenied},
                      {"ranks agree on going without shared memory", RanksAgreeOnGoingWithoutSharedMemory},
                  });
}
