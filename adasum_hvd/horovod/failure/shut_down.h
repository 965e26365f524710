// Why Horovod shuts down: the cause is collected from all ranks, and added to the errors that callers get.
#pragma once

#include <functional>
#include <string>

#include "horovod/common/common.h"
#include "horovod/common/controller.h"
#include "horovod/common/global_state.h"
#include "host/abort_notice.h"

namespace adasum_hvd {

namespace hvd = horovod::common;

// Called when Horovod shuts down, with whether all ranks have agreed: returns a problem as a sentence, or "".
using FailureProbe = std::function<std::string(bool agreed)>;

// To be called at init, on the thread of Horovod's loop, which may call `probe` until it ends.
//
// Also limits how long ranks of any process set wait for one another before a tensor is reduced, gathered or
// broadcast; Horovod's own default is no limit. Sets HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, unless the user has
// set it, so that Horovod finds a tensor that some rank has not submitted for `stall_seconds`. 0: no limit.
void BeginLoop(const hvd::HorovodGlobalState& state, int stall_seconds, FailureProbe probe);

// Adds to the cause: a failure on this rank.
void NoteFailure(const std::string& reason);

// Adds to the cause, and sends to all ranks: the tensors that some ranks have not submitted. To be called on
// the coordinator of a process set when Horovod would shut the set down because of them. Returns whether the
// set may: only that of all ranks may, the others shut down with it in the next cycle.
bool NoteStalled(hvd::Controller& controller);

// The script has called Horovod's shutdown, itself or at the interpreter's exit.
void NoteProgramEnd();
bool ProgramHasEnded();

// Sets the reason that the other ranks get when this process shuts down by its own script.
void SetLeaveReason(const std::string& reason);

// To be called in every cycle, with Horovod's flag whether this process shuts down by its own script. Sets
// the flag also after a failed reduction. Returns true.
bool NoteLeaving(hvd::Controller& controller, bool& leaving);

// To be called after every cycle of a process set: whether all its ranks have agreed that it is the last one.
void NoteCycle(const hvd::Controller& controller, bool is_last);

// Sends a notice to the ranks of all process sets.
void NotifyAll(const AbortNotice& notice);

// Returns Horovod's error for a shutdown, with the cause. On Horovod's own thread it also removes process
// sets: Horovod would negotiate that, over connections that are closed unless all ranks have agreed to shut
// down. Then only the process sets are removed that not all ranks have added yet.
hvd::Status ShutDownError(hvd::HorovodGlobalState& state, const hvd::Status& horovod_error);

// Whether Horovod's loop has ended, so that it will not empty its queues again. Thread-safe.
bool LoopHasEnded();

// Closes the connections that Horovod keeps until it starts again, unless all ranks have agreed to shut down:
// other ranks may wait for this one.
void CloseConnections();

// Logs why Horovod, or this process, is about to end.
void LogEnd(int rank, const std::string& reason, bool ends_process = true);

// Ends the process so that the launcher ends the job.
[[noreturn]] void EndProcess();

} // namespace adasum_hvd
