// The transport between the ranks of a process set over Horovod's own network.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "horovod/common/global_state.h"
#include "network/network.h"
#include "op/settings.h"

namespace adasum_hvd {

namespace hvd = horovod::common;

// Returns the transport of a process set over Horovod's own Gloo or MPI. There is one, until the process set
// or the calling thread ends. Only for Horovod's background thread.
std::shared_ptr<NetworkTransport> NetworkOf(hvd::HorovodGlobalState& state, hvd::ProcessSet& process_set,
                                            const Settings& settings);

// The networks made on the calling thread, by the controllers of their process sets.
std::map<hvd::Controller*, std::shared_ptr<NetworkTransport>> KnownNetworks();

// The global ranks of a process set, in Horovod's order. (Horovod's Gloo controller fills memory that its
// vector has only reserved, so that a copy of the vector is empty.)
std::vector<int> GlobalRanks(const hvd::Controller& controller);

} // namespace adasum_hvd
