// Which processors ranks of a host have, and what they make of it: affinity, and quotas of control groups.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <sched.h>
#include <unistd.h>

#include "local_ranks.h"

using namespace adasum_hvd;

namespace {

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
void CrowdedOn(int processors) {
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
      Check(group->Crowded() == (ranks > processors),
            std::to_string(ranks) + " ranks on " + std::to_string(processors) + " processors");
    });
  }
}

void CrowdedOnOneProcessor() { CrowdedOn(1); }
void CrowdedOnTwoProcessors() { CrowdedOn(2); }

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
  root.Put("cpu/alone/cpu.cfs_quota_us", "25000");
  root.Put("cpu/alone/cpu.cfs_period_us", "100000");
  Check(processors("7:memory:/alone\n12:cpuset:/alone") == none, "v1: other controllers");
  Check(processors("7:cpu:/alone") == 0.25, "v1: the controller alone");
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

// Bound ranks have their processors to themselves; unbound ranks share them.
void SharesWithoutSharedMemory() {
  const cpu_set_t all = Allowed();
  const int processors = CPU_COUNT(&all);
  constexpr int kRanks = 2;
  if (processors < kRanks || ReadProcessorQuota().processors < processors) {
    throw Skipped("needs two processors and no quota");
  }
  for (const bool bound : {false, true}) {
    Board board(kRanks);
    InThreads(kRanks, [&](int rank) {
      cpu_set_t mine = all;
      if (bound) {
        const cpu_set_t first = FirstOf(all, 1), both = FirstOf(all, 2);
        mine = first;
        if (rank == 1) {
          CPU_XOR(&mine, &both, &first);
        }
      }
      Check(sched_setaffinity(0, sizeof mine, &mine) == 0, "sched_setaffinity");
      const double share = ShareOfProcessors(Ranks(kRanks), board.For(rank));
      Check(std::abs(share - (bound ? 1 : processors / 2.0)) < 1e-6, "share of processors");
    });
  }
}

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {
                      {"crowded on one processor", CrowdedOnOneProcessor},
                      {"crowded on two processors", CrowdedOnTwoProcessors},
                      {"a rank that moves is not bound", ARankThatMovesIsNotBound},
                      {"quotas are read", QuotasAreRead},
                      {"quotas of the kernel are read", QuotasOfTheKernelAreRead},
                      {"quotas are shared", QuotasAreShared},
                      {"shares without shared memory", SharesWithoutSharedMemory},
                  });
}
