"""Properties of processes that tests read from outside their code, or limit."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def descriptors(spare: int) -> Iterator[None]:
    """Leave this process so many descriptors that it can open."""
    numbers = itertools.count()
    free = (n for n in numbers if not Path(f"/proc/self/fd/{n}").exists())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = next(itertools.islice(free, spare, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
