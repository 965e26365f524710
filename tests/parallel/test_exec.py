"""`adasum-hvd exec` in a terminal, and the processes that its ranks have started."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.parallel.harness.launch import environment

RANKS = 2
# A rank prints its signals, and the line that it reads; its child takes no notice of anything.
RANK = """
import os, signal, subprocess, sys, time
rank = os.environ["HOROVOD_RANK"]
def show(*words):
    os.write(1, " ".join(["@", rank, *map(str, words), "\\n"]).encode())
def note(number, _):
    show("got", int(number))
    if sys.argv[1] == "ends":
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, note)
child = subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"])
show("began", os.getpid(), child.pid)
line = sys.stdin.readline()
show("read", repr(line))
while True:
    time.sleep(0.05)
"""


class Terminal:
    """`adasum-hvd exec` as the foreground job of a terminal of its own."""

    def __init__(self, *words: str):
        self.output = ""
        command = [sys.executable, "-m", "adasum_hvd", "exec", "--nprocs", str(RANKS)]
        command += ["--", sys.executable, "-c", RANK, *words]
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            os.execvpe(command[0], command, environment())
        os.set_blocking(self._terminal, False)
        self.until(lambda: len(self.all("began")) == RANKS)

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def all(self, what: str) -> list[list[str]]:
        """Return the words after `what` of all ranks, sorted by rank."""
        lines = re.findall(rf"@ (\d) {what} (.*?)\s*\n", self.output)
        return sorted([rank, *words.split()] for rank, words in lines)

    def processes(self) -> list[int]:
        return [int(pid) for _, *both in self.all("began") for pid in both]

    def until(self, holds: Callable[[], bool], seconds: float = 120) -> None:
        limit = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < limit, self.output
            with suppress(
                OSError
            ):  # nothing to read, or nobody has the terminal any more
                self.output += os.read(self._terminal, 1 << 16).decode()
            time.sleep(0.01)

    def status(self) -> int:
        """Return the exit status; nothing may be left."""
        ended: list[int] = []

        def has_ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            ended.extend([status] * bool(pid))
            return bool(pid)

        self.until(has_ended, 60)
        self.until(lambda: not any(map(lives, self.processes())), 30)
        return os.waitstatus_to_exitcode(ended[0])


def state(process: int) -> str:
    """Return a process's state as /proc has it, "" after its end."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def lives(process: int) -> bool:
    return state(process) not in ("", "Z")


def test_control_c_is_one_signal_for_each_rank() -> None:
    terminal = Terminal("ends")
    terminal.press("\x03")
    assert terminal.status() == 128 + signal.SIGINT
    interrupt = str(int(signal.SIGINT))
    assert terminal.all("got") == [[str(r), interrupt] for r in range(RANKS)]


def test_ranks_that_do_not_end_are_killed_with_their_children() -> None:
    terminal = Terminal("stays")
    terminal.press("\x03\x03")
    assert terminal.status() == 128 + signal.SIGINT
    assert [rank for rank, _ in terminal.all("got")] == list(map(str, range(RANKS)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_exec_reaches_each_rank_once(number: signal.Signals) -> None:
    terminal = Terminal("ends")
    os.kill(terminal.pid, number)
    assert terminal.status() == 128 + number
    assert terminal.all("got") == [[str(r), str(int(number))] for r in range(RANKS)]


def test_exec_that_is_killed_leaves_nothing() -> None:
    terminal = Terminal("stays")
    os.kill(terminal.pid, signal.SIGKILL)
    assert terminal.status() == -signal.SIGKILL


def test_a_rank_that_is_killed_leaves_nothing() -> None:
    terminal = Terminal("ends")
    os.kill(terminal.processes()[0], signal.SIGKILL)
    assert terminal.status() == 128 + signal.SIGKILL
    assert terminal.all("got") == [["1", str(int(signal.SIGTERM))]]


def test_rank_0_reads_what_is_typed_and_stops_with_control_z() -> None:
    terminal = Terminal("ends")
    terminal.press("a line\n")
    terminal.until(lambda: ["0", "'a", "line\\n'"] in terminal.all("read"))
    assert ["1", "''"] in terminal.all("read")
    ranks = terminal.processes()
    for key, expected in (("\x1a", {"T"}), ("", {"S", "R"})):
        if key:
            terminal.press(key)
        else:
            os.kill(terminal.pid, signal.SIGCONT)
        terminal.until(lambda e=expected: {state(rank) for rank in ranks} <= e, 30)
    terminal.press("\x03")
    assert terminal.status() == 128 + signal.SIGINT


def test_input_that_is_no_terminal_goes_to_rank_0() -> None:
    code = "import os, sys; rank = os.environ['HOROVOD_RANK']; "
    code += "os.write(1, f'{rank} {sys.stdin.read().upper()}\\n'.encode())"
    words = [sys.executable, "-m", "adasum_hvd", "exec", "--nprocs", "2", "--"]
    shown = subprocess.run(
        [*words, sys.executable, "-c", code], env=environment(), input="some input",
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert sorted(shown.stdout.split("\n")) == ["", "0 SOME INPUT", "1 "]
