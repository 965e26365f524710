// Why Horovod shuts down, in the errors that its callers get.
#pragma once

#include <functional>
#include <string>

#include "horovod/common/common.h"
#include "horovod/common/controller.h"
#include "horovod/common/global_state.h"
#include "op/network.h"
#include "transport/last_words.h"

namespace adasum_hvd {

// Horovod starts anew, on the calling thread, which will be that of its loop.
//
// Bounds how long ranks of any process set wait for one another before a tensor is reduced, gathered or
// broadcast, where Horovod would for ever: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, when that is not set. Horovod
// looks now and then; after `stall_seconds` it has found any tensor that some rank has not submitted. 0
// leaves it as it is.
void BeginLoop(const horovod::common::HorovodGlobalState& state, int stall_seconds);

// On the coordinator, when Horovod is to shut down for tensors that some ranks have not submitted: keeps and
// tells the other ranks which, and who. True.
bool NoteStalled(horovod::common::Controller& controller);

// Why this process is about to shut down; the others hear it when it does.
void Leave(const std::string& why);

// In every turn of Horovod's loop; `leaving` when this process is to shut down by its own script, and
// afterwards also when a reduction has failed on it. True.
bool NoteLeaving(horovod::common::Controller& controller, bool& leaving);

// Whether this turn of Horovod's loop is its last by agreement of all ranks: of the `controller` of a process
// set.
void NoteTurn(const horovod::common::Controller& controller, bool is_last);

// Tells all ranks why this one takes part no more.
void TellEverybody(const LastWords& words);

// Horovod's own error, and what this rank knows of the cause. On Horovod's own thread this is the end of its
// loop: where the ranks have not agreed on it, other process sets than all ranks' are gone afterwards, since
// Horovod would negotiate that over connections that are closed; else those that not all ranks have yet.
horovod::common::Status ShutDownError(horovod::common::HorovodGlobalState& state,
                                      const horovod::common::Status& horovods);

// Whether it has, and is about to empty its queues for the last time, or has done so. On any thread.
bool LoopHasEnded();

// When Horovod's loop has ended. Horovod keeps its connections until it starts anew; where the ranks have not
// agreed on the end, others may wait for this one.
void CloseConnections();

// Logs why Horovod, and where it `ends` also this process, is about to end on a global rank.
void LogEnd(int rank, const std::string& why, bool ends = true);

// Ends the process so that the launcher ends the job.
[[noreturn]] void EndProcess();

// A reduction of this rank has failed.
void NoteFailure(const std::string& why);

// Asked when Horovod shuts down, whether all ranks have `agreed` or not: what is wrong with a rank, or an
// empty string.
using Witness = std::function<std::string(bool agreed)>;
void SetWitness(Witness witness);

} // namespace adasum_hvd
