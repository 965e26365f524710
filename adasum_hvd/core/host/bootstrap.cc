#include "host/bootstrap.h"

#include <algorithm>
#include <random>
#include <stdexcept>

namespace adasum_hvd {

int64_t RingBytes(int ranks) {
  constexpr int64_t kGranule = 64, kAllRings = 64 << 20;
  const int64_t share = kAllRings / ranks / ranks / kGranule * kGranule;
  return std::clamp<int64_t>(share, 4 << 10, 256 << 10);
}

bool LocalGroup::Crowded() const {
  cpu_set_t together = {};
  for (int one = 0; one < static_cast<int>(peers.size()); ++one) {
    CPU_OR(&together, &together, &header(one).allowed);
    if (header(one).quota.processors < RanksUnder(header(one).quota)) {
      return true;
    }
  }
  return CPU_COUNT(&together) < static_cast<int>(peers.size());
}

int LocalGroup::RanksUnder(const ProcessorQuota& quota) const {
  int ranks = 0;
  for (int one = 0; one < static_cast<int>(peers.size()); ++one) {
    ranks += header(one).quota.group == quota.group ? 1 : 0;
  }
  return ranks;
}

std::unique_ptr<LocalGroup> MakeLocalGroup(int rank, const std::vector<int>& global_ranks,
                                           const LocalSettings& settings) {
  auto group = std::make_unique<LocalGroup>();
  const int size = static_cast<int>(global_ranks.size());
  group->rank = rank;
  group->peers.resize(size);
  group->global_ranks = global_ranks;
  group->settings = settings;
  group->shares = settings.mode == LocalMode::kAuto;
  group->settings.ring_bytes = settings.ring_bytes > 0 ? settings.ring_bytes : RingBytes(size);
  group->mine = std::make_unique<LocalSegment>(size, group->settings.ring_bytes);
  group->file = group->shares ? SharedFile::OfThisProcess() : nullptr;
  group->nonce = static_cast<int>(std::random_device()() & 0x7fffffff);
  group->listening = Listen(size, group->name);
  return group;
}

std::unique_ptr<LocalGroup> ConnectLocalRanks(const std::vector<int>& members, int member,
                                              const std::vector<int>& global_ranks,
                                              const LocalSettings& settings, const AllgatherTwo& allgather,
                                              std::string& why_not) {
  std::unique_ptr<LocalGroup> group;
  try {
    group = MakeLocalGroup(member, global_ranks, settings);
  } catch (const std::exception& error) {
    why_not = error.what();
  }
  const std::vector<int> all = allgather(group ? group->name : kNoName, group ? group->nonce : 0);
  std::vector<int> names, nonces;
  for (int rank : members) {
    names.push_back(all[2 * rank]);
    nonces.push_back(all[2 * rank + 1]);
  }

  bool joined = std::find(names.begin(), names.end(), kNoName) == names.end();
  try {
    if (joined) {
      ConnectPeers(*group, names, nonces);
    }
  } catch (const std::exception& error) {
    joined = false;
    why_not = error.what();
  }
  const std::vector<int> outcomes = allgather(joined, 0);
  bool all_joined = true;
  for (size_t k = 0; k < outcomes.size(); k += 2) {
    all_joined = all_joined && outcomes[k] != 0;
  }
  if (!all_joined && why_not.empty()) {
    why_not = "another rank could not connect";
  }
  return all_joined ? std::move(group) : nullptr;
}

} // namespace adasum_hvd
