#include "op/network.h"

#include <stdexcept>

#include "horovod/common/controller.h"

#if HAVE_GLOO
#include "network/gloo.h"
#endif
#if HAVE_MPI
#include "network/mpi.h"
#endif

namespace adasum_hvd {
namespace {

std::shared_ptr<NetworkTransport> MakeNetwork(hvd::HorovodGlobalState& state, hvd::ProcessSet& process_set,
                                              const Settings& settings) {
  NetworkSettings network = {settings.max_message_bytes, std::chrono::seconds(settings.local.timeout_seconds),
                             GlobalRanks(*process_set.controller)};
#if HAVE_MPI
  if (state.control_operation == hvd::LibType::MPI) {
    return std::make_shared<MpiTransport>(
        process_set.mpi_context.GetMPICommunicator(hvd::Communicator::GLOBAL), std::move(network));
  }
#endif
  (void)state;
#if HAVE_GLOO
  return std::make_shared<GlooTransport>(process_set.gloo_context.GetGlooContext(hvd::Communicator::GLOBAL),
                                         std::move(network));
#else
  throw std::logic_error("AdaSum: expected a Horovod with Gloo or MPI, but got neither");
#endif
}

struct Known {
  std::weak_ptr<hvd::Controller> controller; // identifies a process set
  std::shared_ptr<NetworkTransport> network;
};
thread_local std::map<hvd::Controller*, Known> networks;

} // namespace

std::vector<int> GlobalRanks(const hvd::Controller& controller) {
  const int* first = controller.GetGlobalRanks().data();
  return {first, first + controller.GetSize()};
}

std::map<hvd::Controller*, std::shared_ptr<NetworkTransport>> KnownNetworks() {
  std::map<hvd::Controller*, std::shared_ptr<NetworkTransport>> known;
  for (const auto& [controller, one] : networks) {
    if (!one.controller.expired()) { // else the process set was removed, with its MPI communicator
      known[controller] = one.network;
    }
  }
  return known;
}

std::shared_ptr<NetworkTransport> NetworkOf(hvd::HorovodGlobalState& state, hvd::ProcessSet& process_set,
                                            const Settings& settings) {
  for (auto known = networks.begin(); known != networks.end();) {
    known = known->second.controller.expired() ? networks.erase(known) : std::next(known);
  }
  Known& known = networks[process_set.controller.get()];
  if (known.network == nullptr) {
    known = {process_set.controller, MakeNetwork(state, process_set, settings)};
  }
  return known.network;
}

} // namespace adasum_hvd
