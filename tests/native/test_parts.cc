// The parts of a reduction on the host: what goes over the wire, plans, placement, slices, threads, settings
// and roundings.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <stdexcept>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "host/abort_notice.h"
#include "host/shared_memory.h"
#include "op/settings.h"
#include "reduce/layout.h"
#include "reduce/placement.h"
#include "reducing.h"

using namespace adasum_hvd;

namespace {

// What goes over the wire: 2 n (N - 1) / N per rank, and one exchange where everything is small.
void BytesAndRounds() {
  const std::vector<int64_t> sizes = {1 << 20};
  const std::vector<Tensors> tensors = MakeTensors(4, sizes, kFloat32, Random(18));
  RunRanks(4, [&](ThreadTransport& transport) {
    Scratch scratch;
    ReduceSettings settings;
    std::vector<char> output = tensors[transport.rank()].bytes[0];
    const Tree tree = BuildTree({0, 0, 0, 0}, GroupOp::kAdasum, 0);
    const std::vector<ReduceLevel> flat = {{&transport, &tree}};
    Workers workers(1);
    Reduce({{output.data(), output.data(), sizes[0]}}, kFloat32, flat, 1.0, settings, Portable(), workers,
           scratch, [](Phase, int) {});
    const double payload = 2.0 * 3 / 4 * static_cast<double>(output.size());
    Check(static_cast<double>(transport.sent_bytes()) <= 1.01 * payload, "more bytes than 2n(N-1)/N");
    settings.replicate_bytes = 64 * 4 * transport.size();
    for (const int64_t elements : {64, 65}) {
      const int64_t before = transport.exchanges();
      Reduce({{output.data(), output.data(), elements}}, kFloat32, flat, 1.0, settings, Portable(), workers,
             scratch, [](Phase, int) {});
      const bool one = transport.exchanges() == before + 1;
      Check(one == (elements == 64), std::to_string(elements) + " elements took another way");
    }
  });
}

// Of the Gram matrices of tensors that cross slice borders, a rank sends each to those that share the tensor.
void SumsGoWhereTheyAreNeeded() {
  constexpr int kRanks = 40;
  const std::vector<int64_t> sizes(3 * kRanks, 700); // so a border tensor has two owners
  const std::vector<Tensors> tensors = MakeTensors(kRanks, sizes, kFloat32, Random(26));
  const Tree tree = BuildTree(std::vector<int>(kRanks, 0), GroupOp::kAdasum, 0);
  RunRanks(kRanks, [&](ThreadTransport& transport) {
    Scratch scratch;
    Workers workers(1);
    ReduceSettings settings;
    settings.replicate_bytes = 0;
    std::vector<std::vector<char>> output = tensors[transport.rank()].bytes;
    std::vector<TensorView> views;
    int64_t bytes = 0;
    for (std::vector<char>& one : output) {
      views.push_back({one.data(), one.data(), static_cast<int64_t>(one.size() / sizeof(float))});
      bytes += static_cast<int64_t>(one.size());
    }
    Reduce(views, kFloat32, {{&transport, &tree}}, 1.0, settings, Portable(), workers, scratch,
           [](Phase, int) {});
    const int64_t gram = kRanks * (kRanks + 1) / 2 * static_cast<int64_t>(2 * sizeof(double));
    const auto payload = static_cast<int64_t>(1.1 * 2 * bytes * (kRanks - 1) / kRanks);
    Check(transport.sent_bytes() <= payload + 2 * gram,
          "sent " + std::to_string(transport.sent_bytes()) + " bytes, more than " + std::to_string(payload) +
              " of elements and two Gram matrices of " + std::to_string(gram));
  });
}

void RootCauseIsFound() {
  using Ranks = std::vector<int>;
  const auto found = [](const AbortNotices& notices, const Ranks& awaited) {
    const RootCause cause = FindRootCause(notices, 0, awaited, "did not respond");
    return std::to_string(cause.rank) + (cause.final ? ", final, by " : ", by ") +
           std::to_string(cause.reporter) + ": " + cause.reason;
  };
  Check(found({}, {2, 3}) == "2, by 0: rank 2 did not respond", "a rank without a notice");
  Check(found({{1, {{1}, "no memory"}}}, {1}) == "1, final, by 1: no memory", "a self-reported failure");
  Check(found({{1, {{2}, "rank 2 is closed"}}}, {1}) == "2, by 1: rank 2 is closed",
        "the suspect of a notice");
  Check(found({{1, {{2, 3}, "late"}}, {2, {{3}, "late"}}, {3, {{3}, "no memory"}}}, {1}) ==
            "3, final, by 3: no memory",
        "the end of a chain");
  Check(found({{1, {{}, "it left"}}}, {1}) == "1, final, by 1: it left", "a notice without suspects");
  Check(found({{1, {{0}, "late"}}}, {1}) ==
            "1, final, by 0: rank 1 did not respond: the ranks wait for one another",
        "a circle");
  const std::string failure = "3, final, by 3: an exception";
  const std::pair<const int, AbortNotice> self_reported{3, {{3}, "an exception"}};
  Check(found({self_reported}, {2}) == failure, "a self-reported failure before a rank without a notice");
  Check(found({{1, {{0}, "late"}}, self_reported}, {1}) == failure,
        "a self-reported failure next to a circle");
  const AbortNotice longest(Ranks(100, 7), std::string(1000, 'x'));
  Check(longest.Suspects().size() < 100 && std::string(longest.reason).size() < 1000, "a notice has a limit");
  std::string accented = "x"; // one byte, then characters of two
  while (accented.size() < 1000) {
    accented += "\xC3\xA9";
  }
  const std::string cut = AbortNotice({7}, accented).reason;
  Check(cut.size() % 2 == 1 && cut == accented.substr(0, cut.size()), "a notice ends after a character");
  Check(AbortNotice({7}, cut).reason == cut, "a notice that fits is whole");
}

// What a rank sends to other hosts in two levels: 2 (n / L) (H - 1) / H.
void LevelsKeepBytesInsideTheHost() {
  const std::vector<Tensors> tensors = MakeTensors(4, {1 << 20}, kFloat32, Random(25));
  RunRanks(4, [&](ThreadTransport& transport) {
    const std::vector<GroupPlan> planned =
        PlanLevels({0, 0, 1, 1}, GroupOp::kAdasum, 0, transport.rank(), {2, 2});
    GroupTransport inside(transport, planned[0].group), between(transport, planned[1].group);
    std::vector<char> output = tensors[transport.rank()].bytes[0];
    Scratch scratch;
    Workers workers(2);
    Reduce({{output.data(), output.data(), 1 << 20}}, kFloat32,
           {{&inside, &planned[0].tree}, {&between, &planned[1].tree}}, 1.0, ReduceSettings(), Portable(),
           workers, scratch, [](Phase, int) {});
    const auto n = static_cast<double>(output.size());
    const int away = (transport.rank() + 2) % 4;
    Check(static_cast<double>(transport.sent_bytes(away)) <= 1.01 * n / 2,
          "more bytes than n/2 to another host");
    Check(static_cast<double>(transport.sent_bytes()) <= 1.01 * 1.5 * n, "more bytes than n + n/2");
  });
}

// Every process plans once; a cluster of tens of thousands must not wait for it.
void PlansOfManyRanksAreQuick() {
  std::vector<int> hosts;
  for (int rank = 0; rank < 32768; ++rank) {
    hosts.push_back(rank / 8);
  }
  const auto started = std::chrono::steady_clock::now();
  const std::vector<GroupPlan> planned = PlanLevels(hosts, GroupOp::kAdasum, 0, 1234, {});
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  Check(planned.size() > 1, "one level over 32768 ranks");
  Check(seconds.count() < 60, "it took " + std::to_string(seconds.count()) + " s");
}

void PlansFollowHostsAndCosts() {
  auto radices = [](const std::vector<int>& hosts, int group_size, const std::vector<int>& expected) {
    std::vector<int> sizes;
    for (const GroupPlan& level : PlanLevels(hosts, GroupOp::kAdasum, group_size, 0, expected)) {
      sizes.push_back(static_cast<int>(level.group.size()));
    }
    return sizes;
  };
  auto hosts_of = [](int hosts, int ranks) {
    std::vector<int> all;
    for (int rank = 0; rank < hosts * ranks; ++rank) {
      all.push_back(rank / ranks);
    }
    return all;
  };
  using Sizes = std::vector<int>;
  Check(radices(hosts_of(1, 1), 0, {}) == Sizes{1}, "one rank is one level");
  Check(radices(hosts_of(1, 8), 0, {}) == Sizes{8}, "8 ranks of a host are one level");
  Check(radices(hosts_of(2, 2), 0, {}) == Sizes({2, 2}), "2 x 2");
  Check(radices(hosts_of(2, 8), 0, {}) == Sizes({8, 2}), "8 x 2");
  Check(radices(hosts_of(3, 2), 0, {}) == Sizes({2, 3}), "2 x 3");
  Check(radices({0, 0, 1}, 0, {}) == Sizes{3}, "uneven hosts are flat");
  Check(radices(hosts_of(2, 2), 0, {0}) == Sizes{4}, "flat where it is asked for");
  Check(radices(hosts_of(1, 16), 0, {}) == Sizes({4, 4}), "16 ranks of a host are split");
  Check(radices(hosts_of(8, 2), 0, {}) == Sizes({2, 8}), "8 hosts save too little by another level");
  Check(radices(hosts_of(16, 1), 0, {}) == Sizes({4, 4}), "16 hosts save enough");
  Check(radices(hosts_of(512, 8), 0, {}).size() > 2, "512 hosts are split");
  for (const Sizes& wrong : {Sizes{3, 2}, Sizes{4, 4}, Sizes{16, 1}, Sizes{3, 3}}) {
    bool refused = false;
    try {
      radices(hosts_of(2, 8), 0, wrong);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    Check(refused, "levels that do not fit were not refused");
  }
  // Every rank is in exactly one group of each level, and any two ranks share at most one group.
  for (const std::vector<int>& hosts : {hosts_of(4, 8), std::vector<int>{0, 1, 2, 3, 3, 2, 1, 0}}) {
    const int ranks = static_cast<int>(hosts.size());
    std::map<std::pair<int, int>, int> shared;
    for (int rank = 0; rank < ranks; ++rank) {
      for (const GroupPlan& level : PlanLevels(hosts, GroupOp::kAdasum, 0, rank, {})) {
        Check(std::count(level.group.begin(), level.group.end(), rank) == 1,
              "a rank is not in its own group");
        for (int member : level.group) {
          shared[{rank, member}] += member == rank ? 0 : 1;
        }
      }
    }
    for (const auto& [pair, groups] : shared) {
      Check(groups <= 1, "two ranks share two groups");
      Check(groups == shared[{pair.second, pair.first}], "groups differ between their members");
    }
  }
}

void WorkersDoEveryJobOnce() {
  for (int threads : {1, 2, 5, 32}) { // some of them always come late
    Workers workers(threads);
    for (int round = 0; round < 300; ++round) {
      const int jobs = round % 70;
      std::vector<std::atomic<int>> done(jobs);
      std::vector<std::atomic<int>> busy(threads);
      workers.Run(jobs, [&](int64_t job, int worker) {
        Check(busy[worker].fetch_add(1) == 0, "two jobs of one worker at once");
        done[job] += 1;
        busy[worker] -= 1;
      });
      for (const std::atomic<int>& count : done) {
        Check(count == 1, "a job was done " + std::to_string(count) + " times");
      }
    }
  }
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) // which need address space themselves
// In a child with room for a few more stacks.
bool FewerThreadsDoEveryJob() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t bytes = static_cast<rlim_t>(pages) * sysconf(_SC_PAGESIZE) + (64 << 20);
  const rlimit limit = {bytes, bytes};
  if (setrlimit(RLIMIT_AS, &limit) != 0) {
    return false;
  }
  constexpr int kWanted = 512, kJobs = 1000;
  Workers workers(kWanted);
  std::atomic<int> done{0};
  workers.Run(kJobs, [&](int64_t, int) { ++done; });
  return workers.threads() < kWanted && done == kJobs;
}

void WorkersDoWithFewerThreads() {
  const pid_t child = fork();
  if (child == 0) {
    bool good = false;
    try {
      good = FewerThreadsDoEveryJob();
    } catch (const std::exception&) { // says enough by its status
    }
    _exit(good ? 0 : 1);
  }
  int status = -1;
  Check(waitpid(child, &status, 0) == child, "waitpid");
  Check(status == 0, "the child ended with status " + std::to_string(status));
}
#endif

void SettingsNameTheirBounds() {
  const auto error_of = [](const char* name, const char* value) {
    setenv(name, value, 1);
    const Settings settings = Settings::FromEnvironment();
    unsetenv(name);
    return settings.error;
  };
  const auto expected = [](const std::string& name, const std::string& bounds, const std::string& value) {
    return name + ": expected an integer from " + bounds + ", but got \"" + value +
           "\"; unset it or fix it on all ranks";
  };
  const char* threads = "ADASUM_HVD_NUM_THREADS";
  const char* chunk = "ADASUM_HVD_CHUNK_BYTES";
  const char* group = "ADASUM_HVD_GROUP_SIZE";
  Check(error_of(threads, "1024").empty(), "1024 threads are refused");
  Check(error_of(threads, "1025") == expected(threads, "1 to 1024", "1025"), error_of(threads, "1025"));
  Check(error_of(threads, "0") == expected(threads, "1 to 1024", "0"), error_of(threads, "0"));
  Check(error_of(chunk, "1073741825") == expected(chunk, "1 to 2^30", "1073741825"), error_of(chunk, "2 GB"));
  Check(error_of(group, "-1") == expected(group, "0 to 2^30", "-1"), error_of(group, "-1"));
}

void TwoBytesRoundOnce() {
  for (const Kernels* kernels : AllKernels()) {
    for (ElementType type : {kFloat16, kBfloat16}) {
      const uint16_t infinity = type == kFloat16 ? 0x7c00 : 0x7f80;
      const uint16_t smallest = type == kFloat16 ? 0 : 0x0080; // below it bfloat16 rounds twice
      for (int number = 0; number < 65536; ++number) {
        const uint16_t bits = static_cast<uint16_t>(number);
        double value;
        kernels->widen[type](&bits, 1, 1.0, &value);
        uint16_t back;
        kernels->narrow[type](&value, 1, 1.0, &back);
        if (std::isnan(value)) {
          double again;
          kernels->widen[type](&back, 1, 1.0, &again);
          Check(std::isnan(again), std::string(kernels->name) + ": NaN became a number");
          continue;
        }
        Check(back == bits, std::string(kernels->name) + ": an element does not survive");
        const int magnitude = bits & 0x7fff;
        if (magnitude >= smallest && magnitude + 1 < infinity) {
          // A hair above the midpoint to the next one rounds away from zero, at it to even, below it down.
          const uint16_t next_bits = static_cast<uint16_t>(bits + 1);
          double next;
          kernels->widen[type](&next_bits, 1, 1.0, &next);
          const double middle = (value + next) / 2;
          const double points[] = {std::nextafter(middle, next), middle, std::nextafter(middle, value)};
          const uint16_t expected[] = {next_bits, number % 2 == 0 ? bits : next_bits, bits};
          for (int k = 0; k < 3; ++k) {
            kernels->narrow[type](&points[k], 1, 1.0, &back);
            Check(back == expected[k], std::string(kernels->name) + ": rounded twice");
          }
        }
      }
    }
  }
}

// The same from every build, from parts in any order, and another one after a change of few bits.
void ChecksumsAddUp() {
  constexpr int64_t kElements = 10'001;
  std::mt19937 random(3);
  std::vector<uint32_t> words(2 * kElements);
  for (uint32_t& word : words) {
    word = random();
  }
  for (ElementType type : {kFloat16, kFloat32, kFloat64, kBfloat16}) {
    const int64_t bytes = ElementBytes(type);
    auto of = [&](const Kernels& kernels, int64_t first, int64_t end) {
      const char* at = reinterpret_cast<const char*>(words.data()) + first * bytes;
      return kernels.checksum(type, at, end - first, 77 + first);
    };
    const uint64_t whole = of(Portable(), 0, kElements);
    for (const Kernels* kernels : AllKernels()) {
      uint64_t sum = 0;
      for (int64_t first = 0, end = 0; first < kElements; first = end) {
        end = std::min<int64_t>(kElements, first + 1 + random() % 700);
        sum += of(*kernels, first, end);
      }
      Check(sum == whole && of(*kernels, 0, kElements) == whole, kernels->name);
      for (int changed = 0; changed < 1000; ++changed) {
        uint32_t* at = &words[random() % (kElements * bytes / 4 - 3)];
        const uint32_t before[] = {at[0], at[1], at[2]};
        if (changed % 3 == 0) {
          at[0] ^= 1u << random() % 32;
        } else if (changed % 3 == 1) {
          std::swap(at[0], at[1]);
        } else {
          at[0] += 1, at[1] -= 2, at[2] += 1;
        }
        Check(of(*kernels, 0, kElements) != whole, "a change is not seen");
        std::copy_n(before, 3, at);
      }
    }
  }
}

void SlicesCoverEverythingOnce() {
  std::mt19937 generator(19);
  for (int round = 0; round < 300; ++round) {
    const int ranks = 1 + static_cast<int>(generator() % 15);
    std::vector<int64_t> sizes(generator() % 20);
    for (int64_t& size : sizes) {
      size = static_cast<int64_t>(generator() % (round % 3 == 0 ? 100 : 40000));
    }
    std::vector<int64_t> covered(sizes.size());
    for (const Slice& slice : Cut(Fused(sizes), ranks)) {
      int64_t offset = 0;
      for (const Run& run : slice.runs) {
        Check(run.offset == offset && run.first == covered[run.tensor] && run.count > 0, "gap or overlap");
        Check(run.first % kBlockElements == 0, "a border inside a block");
        Check(run.whole == (run.count == sizes[run.tensor]), "wrong `whole`");
        covered[run.tensor] += run.count;
        offset += run.count;
      }
      Check(offset == slice.elements, "wrong slice length");
    }
    Check(covered == sizes, "not everything is covered");
  }
}

// What lies contiguously is moved from where it is; of everything else a copy is made.
void PlacementFollowsAddresses() {
  const int64_t n = 2 * kBlockElements;
  std::vector<float> in(2 * n + 1), out(2 * n + 1), before(n);
  const Tree tree = BuildTree({0, 0}, GroupOp::kAdasum, 0);
  Mailboxes mail;
  ThreadTransport transport(mail, 0, 2);
  for (const int64_t gap : {0, 1}) {
    for (const bool delta : {false, true}) {
      for (const int64_t replicate_bytes : {0, 1 << 30}) {
        std::vector<float> staging(2 * n), received(2 * n + kBlockElements);
        bool staged = false;
        // Slices are [a, half of b] and [the other half of b, c].
        const std::vector<TensorView> tensors = {
            {&in[0], &out[0], n / 2},
            {&in[n / 2], &out[n / 2], n},
            {&in[n / 2 + n + gap], &out[n / 2 + n + gap], n / 2, delta ? before.data() : nullptr}};
        ReduceSettings settings;
        settings.replicate_bytes = replicate_bytes;
        const Placement placement(
            tensors, kFloat32, {{&transport, &tree}}, 1.0, settings,
            [&](int64_t bytes) {
              Check(bytes == 2 * n * 4, "other staging memory than all elements take");
              staged = true;
              return reinterpret_cast<char*>(staging.data());
            },
            [](int64_t) -> char* { throw std::logic_error("shared memory was asked for"); },
            [&](int64_t) { return reinterpret_cast<char*>(received.data()); });
        const PlacedLevel& level = placement.levels().front();
        const bool replicated = replicate_bytes > 0, contiguous = gap == 0 && !delta;
        Check(placement.replicates() == replicated, "other form than asked for");
        Check(staged == !contiguous, contiguous ? "staged for nothing" : "not staged");
        const int other = replicated ? 0 : 1; // the rank whose slice has the last tensor
        const void* last = level.send[other];
        const float* first = replicated ? &in[0] : &in[n];
        Check((last == first) == contiguous, "sent from elsewhere");
        Check(replicated || level.send[0] == reinterpret_cast<char*>(&in[0]), "a contiguous slice was moved");
        const Placement::Copies& packs = placement.packs()[other];
        int64_t copied = 0;
        for (const Copy& copy : packs) {
          copied += copy.to == nullptr ? 0 : copy.count;
          Check(copy.to == nullptr || (copy.other != nullptr) == (delta && &copy == &packs.back()),
                "another tensor holds weights");
        }
        Check(copied == (contiguous ? 0 : level.slice(other).elements), "copied " + std::to_string(copied));
        for (size_t run = 0; run < level.own.size(); ++run) {
          const Run& mine = level.mine().runs[run];
          const auto* input = static_cast<const char*>(tensors[mine.tensor].input) + 4 * mine.first;
          Check((level.own[run] == input) == (tensors[mine.tensor].start == nullptr),
                "own elements are read elsewhere");
        }
      }
    }
  }
}

// Only what does not lie in shared memory, or must not be overwritten, is copied there.
void PlacementFollowsSharedMemory() {
  const int64_t n = 2 * kBlockElements;
  auto* shared = static_cast<float*>(AllocateShared(3 * n * sizeof(float)));
  auto* staging = static_cast<char*>(AllocateShared(5 * n * sizeof(float)));
  std::vector<float> mine(n), before(n);
  const std::vector<TensorView> tensors = {{shared, shared, n},
                                           {mine.data(), mine.data(), n},
                                           {shared + n, mine.data(), n},
                                           {shared + 2 * n, shared + 2 * n, n, before.data()}};
  const Tree tree = BuildTree({0, 0}, GroupOp::kAdasum, 0);
  Mailboxes mail;
  ThreadTransport transport(mail, 0, 2, /*shares=*/true);
  ReduceSettings settings;
  settings.replicate_bytes = 0;
  const auto none = [](int64_t) -> char* { throw std::logic_error("memory of its own was asked for"); };
  const auto received = [](int64_t bytes) -> char* {
    Check(bytes == 0, "something is received");
    return nullptr;
  };
  for (size_t count = 1; count <= tensors.size(); ++count) {
    const std::vector<TensorView> some(tensors.begin(), tensors.begin() + static_cast<std::ptrdiff_t>(count));
    bool staged = false;
    const auto reserve = [&](int64_t) {
      staged = true;
      return staging;
    };
    const Placement placement(some, kFloat32, {{&transport, &tree}}, 1.0, settings, none, reserve, received);
    int64_t packed = 0;
    for (const Placement::Copies& packs : placement.packs()) {
      for (const Copy& copy : packs) {
        packed += copy.to == nullptr ? 0 : copy.count;
      }
    }
    Check(placement.levels().front().shared, "the level is not in shared memory");
    // Of the second, which is private but reduced in place, what is not in this rank's slice, the first half.
    const int64_t expected[] = {0, n, n / 2 + n, n + n};
    Check(staged == (count > 1) && packed == expected[count - 1],
          "copied " + std::to_string(packed) + " of " + std::to_string(count) + " tensors");
  }
  FreeShared(shared);
  FreeShared(staging);
}

// The next level maps the result as one piece, which FindShared finds in one region only.
void AResultOfTwoRegionsIsStaged() {
  constexpr int64_t kBytes = 1 << 16, n = kBytes / sizeof(float);
  std::vector<char*> regions;
  for (int k = 0; k < 16; ++k) {
    regions.push_back(static_cast<char*>(AllocateShared(kBytes)));
  }
  std::sort(regions.begin(), regions.end());
  const auto lower = std::adjacent_find(
      regions.begin(), regions.end(), [](const char* one, const char* next) { return one + kBytes == next; });
  Check(lower != regions.end(), "no two regions are neighbours");
  auto* rest = static_cast<char*>(AllocateShared(2 * kBytes));
  auto* staging = static_cast<char*>(AllocateShared(4 * kBytes));
  const std::vector<TensorView> tensors = {
      {lower[0], lower[0], n}, {lower[1], lower[1], n}, {rest, rest, 2 * n}};
  const Tree tree = BuildTree({0, 0}, GroupOp::kAdasum, 0);
  Mailboxes mail, far_mail;
  ReduceSettings settings;
  settings.replicate_bytes = 0;
  for (const int rank : {0, 1}) {
    ThreadTransport near(mail, rank, 2, /*shares=*/true), far(far_mail, 0, 2);
    std::vector<char> received(8 * kBytes);
    const auto staged = [&](int64_t) { return staging; };
    const Placement placement(tensors, kFloat32, {{&near, &tree}, {&far, &tree}}, 1.0, settings, staged,
                              staged, [&](int64_t) { return received.data(); });
    const char* result = placement.levels().front().result[rank];
    Check(result == (rank == 0 ? staging : rest), "rank " + std::to_string(rank) + "'s result is elsewhere");
  }
  for (char* region : regions) {
    FreeShared(region);
  }
  FreeShared(rest);
  FreeShared(staging);
}

// A peer's message may name only memory that it has offered.
void SpansKeepToTheirBounds() {
  char memory[100];
  const MemorySpan span = {memory, sizeof memory};
  Check(span.At(0, 100) == memory && span.At(40, 60) == memory + 40 && span.At(100, 0) == memory + 100,
        "what was offered is refused");
  const std::pair<uint64_t, int64_t> outside[] = {{0, 101}, {40, 61}, {101, 0}, {0, -1}};
  for (const auto& [offset, count] : outside) {
    bool refused = false;
    try {
      span.At(offset, count);
    } catch (const std::runtime_error&) {
      refused = true;
    }
    Check(refused, std::to_string(count) + " bytes at " + std::to_string(offset) + " are not refused");
  }
}

} // namespace

int main(int argc, char** argv) {
  return RunTests(argc, argv,
                  {
                      {"bytes and rounds", BytesAndRounds},
                      {"sums go where they are needed", SumsGoWhereTheyAreNeeded},
                      {"the root cause is found", RootCauseIsFound},
                      {"levels keep bytes inside the host", LevelsKeepBytesInsideTheHost},
                      {"plans follow hosts and costs", PlansFollowHostsAndCosts},
                      {"plans of many ranks are quick", PlansOfManyRanksAreQuick},
                      {"workers do every job once", WorkersDoEveryJobOnce},
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
                      {"workers do with fewer threads", WorkersDoWithFewerThreads},
#endif
                      {"settings name their bounds", SettingsNameTheirBounds},
                      {"two bytes round once", TwoBytesRoundOnce},
                      {"checksums add up", ChecksumsAddUp},
                      {"slices cover everything once", SlicesCoverEverythingOnce},
                      {"placement follows addresses", PlacementFollowsAddresses},
                      {"placement follows shared memory", PlacementFollowsSharedMemory},
                      {"a result of two regions is staged", AResultOfTwoRegionsIsStaged},
                      {"spans keep to their bounds", SpansKeepToTheirBounds},
                  });
}
