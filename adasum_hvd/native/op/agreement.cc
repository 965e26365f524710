#include "op/agreement.h"

#include <algorithm>
#include <set>
#include <stdexcept>

namespace adasum_hvd {
namespace {

namespace hvd = horovod::common;

// Up to so many bytes, times ranks, every rank reduces everything itself: (N - 1) n bytes sent instead of
// 2 n (N - 1) / N, for one exchange instead of two or three. Inside a host a waiting rank costs more than
// the bytes do; a 1 Gbit/s link carries 32 KiB in the time of one exchange.
constexpr int64_t kReplicateOnHostBytes = 1 << 20;
constexpr int64_t kReplicateOverHostsBytes = 32 << 10;

// Settings are for process sets of that many ranks; smaller ones are planned.
std::vector<int> WantedRadices(const std::vector<int>& radices, int size) {
  int64_t product = 1;
  for (int radix : radices) {
    product *= radix;
    if (product > size) { // or many large ones would overflow
      return {};
    }
  }
  return product == 0 || product == size ? radices : std::vector<int>();
}

} // namespace

hvd::Status Agreement::Usable() const {
  return !disagreement.empty() ? hvd::Status::InvalidArgument(disagreement)
         : !failure.empty()    ? hvd::Status::UnknownError(failure)
                               : hvd::Status::OK();
}

Agreement Agree(const std::shared_ptr<hvd::Controller>& shared_controller, const Settings& settings,
                const AllgatherTwo& allgather) {
  hvd::Controller& controller = *shared_controller;
  const std::vector<int>& local = controller.GetLocalCommRanks();
  const int host = *std::min_element(local.begin(), local.end());
  const std::vector<int> gathered = allgather(host, settings.Fingerprint());
  std::vector<int> hosts;
  Agreement agreement;
  agreement.controller = shared_controller;
  agreement.reduce = settings.reduce;
  agreement.disagreement = settings.error;
  const int size = controller.GetSize();
  for (int rank = 0; rank < size; ++rank) {
    hosts.push_back(gathered[2 * rank]);
    if (gathered[2 * rank + 1] != gathered[1]) {
      agreement.disagreement =
          "AdaSum: required the same ADASUM_HVD_* variables on all ranks, got other ones on rank " +
          std::to_string(controller.GetGlobalRanks()[rank]) + " than on rank " +
          std::to_string(controller.GetGlobalRanks()[0]) + "; export them on every host";
      return agreement;
    }
    if (gathered[2 * rank] == host) {
      agreement.host.push_back(rank);
    }
  }
  agreement.one_host = static_cast<int>(agreement.host.size()) == size;
  agreement.have_neighbours = static_cast<int>(std::set<int>(hosts.begin(), hosts.end()).size()) < size;
  try {
    agreement.levels = PlanLevels(hosts, settings.group_op, settings.group_size, controller.GetRank(),
                                  WantedRadices(settings.radices, size));
  } catch (const std::invalid_argument& error) { // on every rank
    agreement.disagreement = std::string("AdaSum: ADASUM_HVD_RADICES: ") + error.what() + ", got " +
                             RadicesText(settings.radices) + "; unset it or mend it on all ranks";
    return agreement;
  }
  if (agreement.reduce.replicate_bytes < 0) {
    agreement.reduce.replicate_bytes = agreement.one_host ? kReplicateOnHostBytes : kReplicateOverHostsBytes;
  }
  return agreement;
}

} // namespace adasum_hvd
