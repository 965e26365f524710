// How a process set's ranks reach each other without shared memory.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "horovod/common/global_state.h"
#include "op/settings.h"
#include "transport/local/bootstrap.h"
#include "transport/network.h"

namespace adasum_hvd {

// Over Horovod's own Gloo or MPI: the one transport of a process set, until it or the calling thread ends.
// Only Horovod's background thread may ask.
std::shared_ptr<NetworkTransport> NetworkOf(horovod::common::HorovodGlobalState& state,
                                            horovod::common::ProcessSet& process_set,
                                            const Settings& settings);

// The networks that the calling thread has asked for, by the controllers of their process sets.
std::map<horovod::common::Controller*, std::shared_ptr<NetworkTransport>> KnownNetworks();

// What Horovod's controller knows of a process set, in Horovod's order. (Its Gloo controller fills memory
// that it has only reserved: to a copy, its vector is empty.)
std::vector<int> GlobalRanks(const horovod::common::Controller& controller);

// Gathers two integers of every rank. Its wait has an end with MPI too, as Controller::Allgather2Ints has
// not.
AllgatherTwo GatherOver(Transport& network);

} // namespace adasum_hvd
