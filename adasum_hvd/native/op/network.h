// How a process set's ranks reach each other without shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "horovod/common/global_state.h"
#include "op/settings.h"
#include "transport/local/bootstrap.h"
#include "transport/transport.h"

namespace adasum_hvd {

// Over Horovod's own Gloo or MPI. Where `awaits` is not null: see MpiSettings.
std::unique_ptr<Transport> MakeNetwork(horovod::common::HorovodGlobalState& state,
                                       horovod::common::ProcessSet& process_set, const Settings& settings,
                                       std::atomic<int32_t>* awaits = nullptr);

// Gathers two integers of every rank. Its wait has an end with MPI too, as Controller::Allgather2Ints has
// not.
AllgatherTwo GatherOver(Transport& network);

} // namespace adasum_hvd
