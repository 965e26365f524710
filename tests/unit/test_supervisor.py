"""Commands end with all that they have started, whatever ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from adasum_hvd.horovod.launch import supervisor
from tests.parallel.harness.processes import until

# Notes its signals, and starts a process of its own session, deaf to all signals, and an orphan.
FAMILY = """
import os, signal, subprocess, sys, time
folder, ends = sys.argv[1], sys.argv[2] == "ends"
def note(number, _):
    with open(f"{folder}/signals", "a") as file:
        print(number, file=file)
    if ends:
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, note)
deaf = "trap '' TERM INT HUP; echo $$ >> {0}/family; sleep 600; :".format(folder)
subprocess.Popen(["sh", "-c", deaf], start_new_session=True)
subprocess.run(["sh", "-c", "sleep 600 & echo $! >> {0}/family".format(folder)])
with open(f"{folder}/family", "a") as file:
    print(os.getpid(), file=file)
while True:
    time.sleep(0.1)
"""


def lives(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def family(folder: Path) -> list[int]:
    file = folder / "family"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def words(folder: Path, kind: str = "ends") -> list[str]:
    return [sys.executable, "-c", FAMILY, str(folder), kind]


def begun(folder: Path) -> bool:
    return len(family(folder)) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_gets_one_signal_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = supervisor.start(words(tmp_path))
    until(lambda: begun(tmp_path))
    for _ in range(3):
        process.send_signal(number)
    assert process.wait(supervisor.GRACE_SECONDS) == 0  # as the command wants it
    assert (tmp_path / "signals").read_text().split() == [str(int(number))]
    assert not any(map(lives, family(tmp_path)))


def test_a_deaf_command_is_killed_after_a_grace(tmp_path: Path) -> None:
    process = supervisor.start(words(tmp_path, "stays"))
    until(lambda: begun(tmp_path))
    started = time.monotonic()
    process.terminate()
    assert process.wait() == 128 + signal.SIGKILL
    assert time.monotonic() - started >= supervisor.GRACE_SECONDS
    assert not any(map(lives, family(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_command_that_dies_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = supervisor.start(words(tmp_path))
    until(lambda: begun(tmp_path))
    os.kill(family(tmp_path)[-1], number)
    assert process.wait(30) == 128 + number
    assert not any(map(lives, family(tmp_path)))


def test_a_command_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys; from adasum_hvd.horovod.launch import supervisor; "
        "supervisor.start(sys.argv[1:]).wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, *words(tmp_path)])
    until(lambda: begun(tmp_path))
    parent.kill()
    until(lambda: not any(map(lives, family(tmp_path))))
    assert (tmp_path / "signals").read_text().split() == [str(int(signal.SIGTERM))]


def test_what_a_command_leaves_on_purpose_stays(tmp_path: Path) -> None:
    """A tracker's process that still uploads, for example."""
    leave = ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/family"]
    assert supervisor.start(leave).wait() == 0
    (left,) = family(tmp_path)
    assert lives(left)
    os.kill(left, signal.SIGKILL)


def test_statuses_and_signals_of_a_command_are_its_own() -> None:
    for code, expected in [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)]:
        command = [sys.executable, "-c", f"import os, sys; {code}"]
        assert supervisor.start(command).wait() == expected
    mask = "import signal; assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])"
    assert supervisor.start([sys.executable, "-c", mask]).wait() == 0
    missing = supervisor.start(["no-such-program"], stderr=subprocess.PIPE, text=True)
    assert "no-such-program" in missing.communicate()[1] and missing.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_block_ends_its_command_when_a_signal_ends_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Afterwards the signal has its own effect again."""
    before = signal.getsignal(number)
    raised = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(raised), supervisor.running(words(tmp_path)):
        until(lambda: begun(tmp_path))
        os.kill(os.getpid(), number)
        time.sleep(30)
    assert not any(map(lives, family(tmp_path)))
    assert signal.getsignal(number) is before


def test_a_block_in_a_thread_ends_its_command(tmp_path: Path) -> None:
    def run() -> None:
        with supervisor.running(words(tmp_path)):
            until(lambda: begun(tmp_path))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert begun(tmp_path) and not any(map(lives, family(tmp_path)))
