#include "op/agreement.h"

#include <algorithm>
#include <set>
#include <stdexcept>

namespace adasum_hvd {
namespace {

// The setting applies to process sets whose size it matches; the levels of others are planned.
std::vector<int> RadicesFor(const std::vector<int>& radices, int size) {
  int64_t product = 1;
  for (int radix : radices) {
    product *= radix;
    if (product > size) { // checked here, because the product of many radices would overflow
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
          "AdaSum: expected the same ADASUM_HVD_* variables on all ranks, but got different ones on rank " +
          std::to_string(controller.GetGlobalRanks()[rank]) + " and on rank " +
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
                                  RadicesFor(settings.radices, size));
  } catch (const std::invalid_argument& error) { // on every rank
    agreement.disagreement = std::string("AdaSum: ADASUM_HVD_RADICES: ") + error.what() + ", but got " +
                             RadicesText(settings.radices) + "; unset it or fix it on all ranks";
    return agreement;
  }
  return agreement;
}

} // namespace adasum_hvd
