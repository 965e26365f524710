"""`adasum-hvd exec`: run a program that calls plain Horovod under any launcher, or alone."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from adasum_hvd.launch import start
from adasum_hvd.launch.assignment import RankInfo
from adasum_hvd.launch.launch_context import LaunchContext, LaunchError
from adasum_hvd.launch.route import Route

GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL for the other ranks after one has failed
_POLL_SECONDS = 0.02
# PR_SET_PDEATHSIG ends the program with its parent, however the parent ends. A separate process
# sets it, because a process with threads must not run Python between fork and exec.
_TETHERED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def run(command: list[str], processes: int | None) -> int:
    """Run a program as one rank of the environment's job, or as several ranks on this host.

    The ranks stay in the session of this process, as mpirun's do. Autogroup scheduling shares
    processors between sessions first, so that ranks in separate sessions wait for one another.

    Args:
        command: the program and its arguments.
        processes: ranks to start on this host; None if a launcher has started them.

    Returns:
        The program's exit status. With several ranks it is the first that is not 0, and the
        other ranks are then ended. A killed rank counts as 128 plus the signal's number.

    Raises:
        LaunchError: the environment does not tell which rank this is, or it describes a job
            although `processes` is given.
        OSError: there is no such program.
    """
    context = start.context_to_start(os.environ, mpi="")
    if processes is not None:
        is_rank = context is None and start.starts_by_itself(os.environ, mpi="")
        if is_rank or (context is not None and context.size > 1):
            raise LaunchError(
                "expected a process outside of any job for --nprocs, but got one "
                "that another launcher has started; remove --nprocs"
            )
        return _Ranks(command, _local(processes)).wait()
    if context is not None:
        start.start(context, start.over_http_store(context))
    if context is None or context.rank:
        os.execvp(command[0], command)
    # Rank 0 stays in this process, which has the rendezvous server, and waits for the program.
    return _Ranks(command, [os.environ]).wait()


def _local(processes: int) -> list[dict[str, str]]:
    """Start a rendezvous server; return the environments of ranks on this host."""
    name, stays = socket.gethostname(), Route("127.0.0.1", "127.0.0.1")
    contexts = [
        LaunchContext("adasum-hvd exec", rank, processes, "127.0.0.1")
        for rank in range(processes)
    ]
    infos = [RankInfo(context, name, stays) for context in contexts]
    reply = start.serve(infos)
    return [
        {**os.environ, **start.variables_of(reply, rank, os.environ)}
        for rank in range(processes)
    ]


class _Ranks:
    """Processes that end together; standard input goes to the first, as with mpirun."""

    def __init__(self, command: list[str], environments: Sequence[Mapping[str, str]]):
        self._status = 0
        self._kill_at = float("inf")
        self._processes: list[subprocess.Popen[bytes]] = []
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        words = [sys.executable, "-S", "-c", _TETHERED, str(os.getpid()), *command]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's stays
                signal.signal(number, self._on_signal)
        for environment in environments:
            stdin = subprocess.DEVNULL if self._processes else None
            self._processes.append(
                subprocess.Popen(words, env=environment, stdin=stdin)
            )

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._fail(128 + number)

    def _fail(self, status: int) -> None:
        """End all processes; keep the first failure's status."""
        self._status = self._status or status
        self._kill_at = min(self._kill_at, time.monotonic() + GRACE_SECONDS)
        for process in self._processes:
            process.terminate()

    def wait(self) -> int:
        """Wait until all processes have ended; return their common exit status."""
        running = self._processes
        while running:
            ended = [process for process in running if process.poll() is not None]
            failed = [process.returncode for process in ended if process.returncode]
            if failed and not self._status:
                status = failed[0]
                self._fail(status if status > 0 else 128 - status)
            if time.monotonic() > self._kill_at:
                for process in running:
                    process.kill()
            running = [process for process in running if process not in ended]
            time.sleep(_POLL_SECONDS)
        return self._status
