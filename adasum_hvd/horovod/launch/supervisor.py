"""Commands that end with all processes that they have started.

This file is also the program between this process and the command. Orphans that the command leaves
become children of that program, so that it finds all of them, whatever their session is.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

GRACE_SECONDS = 5.0  # from a signal to SIGKILL for all processes
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def start(words: Sequence[str], **arguments: Any) -> subprocess.Popen[Any]:
    """Start a command in a process group of its own; return the process that supervises it.

    The supervisor sends the command the first SIGTERM, SIGINT or SIGHUP that it gets, and kills
    all that is left `GRACE_SECONDS` later. It ends with the command's status, 128 plus its number
    for a signal. After a signal or a status that is not 0 it first kills what the command has
    left. The end of the thread that calls this function is a SIGTERM.
    """
    # Without `site`, whose packages may take long to load.
    supervisor = [sys.executable, "-S", __file__, str(os.getpid())]
    return subprocess.Popen([*supervisor, *words], **arguments)


@contextmanager
def running(words: Sequence[str], **arguments: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a command in a session of its own, without standard input, and end it with the block.

    In the main thread, SIGTERM and SIGHUP raise SystemExit in the block.
    """
    arguments = {"stdin": subprocess.DEVNULL, "start_new_session": True, **arguments}
    with _signals_raise(), start(words, **arguments) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


@contextmanager
def _signals_raise() -> Iterator[None]:
    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    usual = [n for n in numbers if signal.getsignal(n) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        usual = []
    for number in usual:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)


def _supervise(parent: int, words: list[str]) -> int:
    """Run a command, and return its status when all that must end has ended."""
    control = ctypes.CDLL(None).prctl
    control(_PR_SET_CHILD_SUBREAPER, 1)
    control(_PR_SET_PDEATHSIG, signal.SIGTERM)
    ends = {n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}  # nohup's
    awaited = {signal.SIGCHLD, *ends}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide statuses
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    if os.getppid() != parent:
        return 1
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)

    def tether() -> None:
        control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)

    command = subprocess.Popen(words, preexec_fn=tether)
    status, kill_at = None, math.inf
    while status is None and (seconds := kill_at - time.monotonic()) > 0:
        received = signal.sigtimedwait(awaited, min(seconds, 3600))
        if received and received.si_signo in ends and kill_at == math.inf:
            kill_at = time.monotonic() + GRACE_SECONDS
            os.kill(command.pid, received.si_signo)
        status = _reap(command.pid)
    if status != 0 or kill_at < math.inf:
        _kill_descendants()
    status = -signal.SIGKILL if status is None else status
    return status if status >= 0 else 128 - status


def _reap(command: int) -> int | None:
    """Reap the children that have ended; return the command's status if it is one of them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                status = os.waitstatus_to_exitcode(ended[1])
    return status


def _kill_descendants() -> None:
    """Kill children until there are none; those of a killed one become this process's."""
    while killed := list(filter(_kill, _children())):
        os.waitpid(killed[0], 0)


def _children() -> Iterator[int]:
    # Not by glob, which looks at a path again, and raises if the process has just ended.
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # the same
            fields = Path("/proc", process, "stat").read_text().rpartition(")")[2]
            if int(fields.split()[1]) == os.getpid():
                yield int(process)


def _kill(process: int) -> bool:
    """Kill a process; return whether this user may."""
    with suppress(PermissionError):
        os.kill(process, signal.SIGKILL)
        return True
    return False


if __name__ == "__main__":
    try:
        sys.exit(_supervise(int(sys.argv[1]), sys.argv[2:]))
    except OSError as error:
        sys.exit(str(error))
