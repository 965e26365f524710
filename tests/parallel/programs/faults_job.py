"""A rank of a job in which something happens to rank 1; the others write what they learn, and when.

faults_job.py FAULT PHASE SET END FOLDER: what happens, where rank 1 is then, and whether all ranks
reduce, or in process sets "01" and "12"; by AdaSum, or in a "first" phase by Horovod's average.
The script "exits" after an error, as most scripts do, or "goes-on" to shut down and wait.
It writes the time to FOLDER/fault, every rank its error and the time to FOLDER/rank-R.json.
"""

import atexit
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import horovod.torch as horovod_torch
import torch
from horovod.common.exceptions import HorovodInternalError

import adasum_hvd.torch as hvd

RANKS = 3
VICTIM = 1
PAUSE_SECONDS = (
    4  # longer than others wait (3), shorter than until MPI jobs end for it (5)
)
FAULT, PHASE, SETS, END, FOLDER = *sys.argv[1:5], Path(sys.argv[5])
IS_FIRST = PHASE.startswith("first")
# What the op holds must be more than malloc may have in reserve.
ELEMENTS = 50_000_000 if FAULT == "memory" else 20_000_000


def now() -> float:
    """Return seconds on a clock that all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def strike() -> None:
    """Let it happen to this process."""
    (FOLDER / "fault").write_text(f"{now()} {os.getpid()}")
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "pause":
        words = f"sleep {PAUSE_SECONDS}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", words])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "raise":
        # Longer than what the others are sent, and neither ASCII nor UTF-8.
        raise RuntimeError("the training step of rank 1 failed: \udce9" + "é" * 300)


def strike_in_phase(begun: threading.Event) -> None:
    """Strike when this rank's op is in a phase of a reduction; read from its counters."""
    before = hvd.counters()
    begun.set()
    while True:
        counters = hvd.counters()
        inside = counters.calls > before.calls
        if PHASE == "gather":
            inside = (
                counters.reduce_scatter_nanoseconds > before.reduce_scatter_nanoseconds
            )
        if inside:
            strike()
            return
        time.sleep(0.0005)  # a thread that sleeps runs soon, also on a busy machine


def limit_memory() -> None:
    """Let the op's next allocation of many bytes fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 20_000_000
    (FOLDER / "fault").write_text(f"{now()} {os.getpid()}")
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def process_set() -> hvd.ProcessSet:
    """Return the ranks that reduce with this one; rank 1 and those that wait for it are in two."""
    if SETS == "all":
        return hvd.global_process_set
    both = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
    for one in both:
        if one.included() and not IS_FIRST:
            hvd.allreduce(torch.ones(10), op=hvd.Adasum, name="set", process_set=one)
    return both[hvd.rank() // 2]


def reduce(together: hvd.ProcessSet) -> None:
    """Reduce what the ranks have in common, with the fault on one of them."""
    tensor = torch.full((ELEMENTS,), 1.0 + hvd.rank())
    reduction = functools.partial(
        horovod_torch.allreduce_ if IS_FIRST else hvd.allreduce_,
        tensor,
        op=hvd.Average if IS_FIRST else hvd.Adasum,
        name="gradient",
        process_set=together,
    )
    if hvd.rank() != VICTIM:
        reduction()
        return
    if "negotiation" in PHASE:
        strike()
        if FAULT == "missing":
            time.sleep(3600)
    elif FAULT == "memory":
        limit_memory()
    else:
        begun = threading.Event()
        threading.Thread(target=strike_in_phase, args=(begun,), daemon=True).start()
        begun.wait()
    reduction()


def wait_for(files: str = "rank-[02].json", count: int = 2) -> None:
    """Let the others write, if they come to it soon: a launcher ends all with the first."""
    limit = now() + 10
    while len(list(FOLDER.glob(files))) < count and now() < limit:
        time.sleep(0.02)


def wait_for_all() -> None:
    """Return when all ranks have imported everything, however slow the machine is.

    The rendezvous has the short time limit of the job's later waits.
    """
    (FOLDER / f"imported-{os.getpid()}").touch()
    while len(list(FOLDER.glob("imported-*"))) < RANKS:
        time.sleep(0.02)


def main() -> None:
    """Run until there is an error, and write it."""
    wait_for_all()
    if FAULT == "raise":
        atexit.register(wait_for)  # which is when Horovod has shut down
    (horovod_torch if IS_FIRST else hvd).init()  # ours reduces, too
    if hvd.rank() != VICTIM:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers end the others early
    if not IS_FIRST:
        hvd.allreduce(torch.ones(1000), op=hvd.Adasum, name="small")
    together = process_set()
    hvd.barrier()
    try:
        reduce(together)
        hvd.barrier()  # a rank that comes back has what the others gave up
    except HorovodInternalError as error:
        report = {"seconds_at": now(), "error": str(error)}
        rank = hvd.rank()
        (FOLDER / f"rank-{rank}.json").write_text(json.dumps(report))
        if END == "exits":
            sys.exit(3)
        if SETS != "all":
            hvd.shutdown()
            (FOLDER / f"ended-{rank}").touch()
            wait_for("ended-[02]")
        if FAULT == "pause":
            wait_for("rank-*.json", 3)
        else:
            wait_for()
        os._exit(1)
    print("DONE")


if __name__ == "__main__":
    main()
