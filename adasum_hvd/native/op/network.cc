#include "op/network.h"

#include <stdexcept>
#include <vector>

#include "horovod/common/controller.h"

#if HAVE_GLOO
#include "transport/gloo.h"
#endif
#if HAVE_MPI
#include "transport/mpi.h"
#endif

namespace adasum_hvd {

namespace hvd = horovod::common;

std::unique_ptr<Transport> MakeNetwork(hvd::HorovodGlobalState& state, hvd::ProcessSet& process_set,
                                       const Settings& settings, std::atomic<int32_t>* awaits) {
  // Horovod's Gloo controller fills memory that it has only reserved: to a copy, its vector is empty.
  const hvd::Controller& controller = *process_set.controller;
  const int* first = controller.GetGlobalRanks().data();
  const std::vector<int> ranks(first, first + controller.GetSize());
#if HAVE_MPI
  if (state.control_operation == hvd::LibType::MPI) {
    return std::make_unique<MpiTransport>(
        process_set.mpi_context.GetMPICommunicator(hvd::Communicator::GLOBAL),
        MpiSettings{settings.max_message_bytes, std::chrono::seconds(settings.local.timeout_seconds), ranks,
                    awaits});
  }
#endif
  (void)state;
  (void)settings;
  (void)awaits;
#if HAVE_GLOO
  return std::make_unique<GlooTransport>(process_set.gloo_context.GetGlooContext(hvd::Communicator::GLOBAL),
                                         ranks);
#else
  throw std::logic_error("AdaSum: required a Horovod with Gloo or MPI, got neither");
#endif
}

AllgatherTwo GatherOver(Transport& network) {
  return [&network](int first, int second) {
    const int mine[2] = {first, second};
    std::vector<int> all(2 * network.size());
    std::vector<Message> messages(network.size());
    for (int rank = 0; rank < network.size(); ++rank) {
      messages[rank] = {mine, sizeof mine, &all[2 * rank], sizeof mine};
    }
    network.Exchange(messages);
    all[2 * network.rank()] = first;
    all[2 * network.rank() + 1] = second;
    return all;
  };
}

} // namespace adasum_hvd
