"""Every fault at every phase on every transport; and a hundred crashes that leave nothing."""

from __future__ import annotations

import os
import random
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.parallel.harness.faults import EVERY, JOB, Fault, check, run

# What other programs of this machine open ends by then; a leak does not.
PASSING_SECONDS = 60


@pytest.mark.parametrize("fault", EVERY, ids=str)
def test_the_others_know(fault: Fault) -> None:
    check(fault, run(fault))


def _left() -> dict[str, list[str]]:
    """Return what a job could leave on this machine: processes, shared memory, ports."""
    processes = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended
            words = Path("/proc", process, "cmdline").read_bytes().split(b"\0")
            if str(JOB).encode() in words:
                processes.append(process)
    listening = [
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    sockets = re.findall(r"@?\S*adasum\S*", Path("/proc/net/unix").read_text())
    memory = [path.name for path in Path("/dev/shm").iterdir()]
    return {
        "processes": processes,
        "ports": listening,
        "sockets": sockets,
        "shared memory": memory,
    }


def test_a_hundred_crashes_leave_nothing() -> None:
    before = _left()
    draw = random.Random(7)
    kinds = [fault for fault in EVERY if fault.fault in ("kill", "memory", "raise")]
    for _ in range(100):
        fault = draw.choice(kinds)
        check(fault, run(fault))
    until = time.monotonic() + PASSING_SECONDS
    while any((new := _new(before)).values()) and time.monotonic() < until:
        time.sleep(1)
    assert not any(new.values()), new


def _new(before: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what was not there before."""
    after = _left()
    return {
        what: [one for one in after[what] if one not in before[what]] for what in after
    }
