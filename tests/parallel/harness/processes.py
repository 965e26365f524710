"""Properties of processes that tests read from outside their code."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for a condition; it is an error if it does not hold in time."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)


def settled(number: Callable[[], int]) -> int:
    """Return a number once it has not changed for 0.3 s."""
    seen, now = -1, number()
    while seen != now:
        time.sleep(0.3)
        seen, now = now, number()
    return now


def shared_mappings() -> int:
    """Return how many mappings this process has of memory that the core shares."""
    return Path("/proc/self/maps").read_text().count("memfd:adasum_hvd")
