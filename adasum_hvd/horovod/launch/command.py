"""`adasum-hvd exec`: run a program that calls plain Horovod under any launcher, or alone."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType

from adasum_hvd.horovod.launch import supervisor, variables
from adasum_hvd.horovod.launch.assignment import RankInfo
from adasum_hvd.horovod.launch.launch_context import LaunchContext, LaunchError
from adasum_hvd.horovod.launch.route import Route

_POLL_SECONDS = 0.02


def run(command: list[str], processes: int | None) -> int:
    """Run a program as one rank of the environment's job, or as several ranks on this host.

    The ranks stay in the session of this process, as mpirun's do. Autogroup scheduling shares
    processors between sessions first, so that ranks in separate sessions wait for one another.
    Each has its own process group, so that a signal reaches it once: from this process.

    Returns the program's exit status. With several ranks it is the first that is not 0, and the
    other ranks are then ended. A killed rank counts as 128 plus the signal's number, and so does a
    signal to this process, which all ranks get.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    context = variables.context_to_start(os.environ, mpi="")
    if processes is not None:
        is_rank = context is None and variables.starts_by_itself(os.environ, mpi="")
        if is_rank or (context is not None and context.size > 1):
            raise LaunchError(
                "expected a process outside of any job for --nprocs, but got one "
                "that another launcher has started; remove --nprocs"
            )
        return _Ranks(command, _local(processes)).wait()
    if context is not None:
        variables.set_for(context, variables.over_http_store(context))
    if context is None or context.rank:
        os.execvp(command[0], command)
    # Rank 0 stays in this process, which has the rendezvous server, and waits for the program.
    return _Ranks(command, [os.environ]).wait()


def _local(processes: int) -> list[dict[str, str]]:
    """Start a rendezvous server; return the environments of ranks on this host."""
    name, stays = socket.gethostname(), Route("127.0.0.1", "127.0.0.1")
    ranks = range(processes)
    place = [LaunchContext("adasum-hvd exec", r, processes, "127.0.0.1") for r in ranks]
    reply = variables.serve([RankInfo(context, name, stays) for context in place])
    return [os.environ | variables.variables_of(reply, r, os.environ) for r in ranks]


def _typed() -> int:
    """Return a pipe with the input of the terminal, which only this group may read."""
    # The terminal then stops neither ranks nor, in the background, this process.
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    source, sink = os.pipe()

    def copy() -> None:
        with suppress(OSError), os.fdopen(sink, "wb", buffering=0) as pipe:
            while typed := os.read(0, 4096):
                pipe.write(typed)

    threading.Thread(target=copy, daemon=True).start()
    return source


class _Ranks:
    """Processes that end together; standard input goes to the first, as with mpirun."""

    def __init__(self, command: list[str], environments: Sequence[Mapping[str, str]]):
        self._status = 0
        self._signal = signal.SIGTERM  # for the ranks that run when one has failed
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTSTP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's stays
                signal.signal(number, self._on_signal)
        stdin = _typed() if os.isatty(0) else None
        self._processes: list[subprocess.Popen[bytes]] = []
        for environment in environments:
            process = supervisor.start(command, env=environment, stdin=stdin)
            self._processes.append(process)
            stdin = subprocess.DEVNULL

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self._signal_groups(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._signal_groups(signal.SIGCONT)
        elif not self._status:
            self._status, self._signal = 128 + number, signal.Signals(number)

    def _signal_groups(self, number: signal.Signals) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):  # it has ended, or just begun
                os.killpg(process.pid, number)

    def wait(self) -> int:
        """Wait until all processes have ended; return their common exit status."""
        running, signalled = self._processes, False
        while running:
            failed = [process.returncode for process in running if process.poll()]
            running = [process for process in running if process.returncode is None]
            if failed and not self._status:
                self._status = failed[0] if failed[0] > 0 else 128 - failed[0]
            if self._status and not signalled:
                signalled = True
                for process in running:
                    process.send_signal(self._signal)
            time.sleep(_POLL_SECONDS)
        return self._status
