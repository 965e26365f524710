"""The threads of a step: this rank's share of the launcher's cores."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

# The number of ranks on the host, as launchers tell it; the innermost launcher first.
LOCAL_SIZES = (
    *("HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)


def launched() -> tuple[str, int]:
    """Return a variable of the launcher and its value, the ranks on this host, or ("", 1)."""
    sizes = ((name, os.environ.get(name, "")) for name in LOCAL_SIZES)
    return next(((n, int(size)) for n, size in sizes if size.isdecimal()), ("", 1))


@functools.cache
def cores_of_launcher(variable: str) -> int:
    """Return the cores that this host's ranks have together: those of their launcher.

    It binds ranks, but not itself. Processes between it and a rank, such as a shell that sets up
    the rank's environment, are bound as the rank; all of these have its `variable`.
    """
    pid, mark = os.getppid(), f"\0{variable}=".encode()
    with suppress(OSError):  # the process of another user, or of another container
        while mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
            pid = int(fields.split()[1])
    return len(os.sched_getaffinity(pid))


def cores_of_rank() -> int:
    """Return this rank's share of the launcher's cores, at most those that it is bound to."""
    bound, (variable, ranks) = len(os.sched_getaffinity(0)), launched()
    if ranks < 2:
        return bound
    return max(1, min(bound, cores_of_launcher(variable) // ranks))


def thread_budget() -> int:
    """Return the cores of this rank, at most the number of threads that torch uses."""
    return min(torch.get_num_threads(), cores_of_rank())


def hint_of_threads() -> str:
    """Return how to use this rank's cores if torchrun restricts torch to one; "" otherwise."""
    cores, variables = cores_of_rank(), os.environ
    by_torchrun = "TORCHELASTIC_RUN_ID" in variables
    restricted = by_torchrun and variables.get("OMP_NUM_THREADS") == "1"
    if not restricted or thread_budget() == cores:
        return ""
    return (
        f"AdamOffload: a step uses 1 of this rank's {cores} cores, because torchrun sets "
        f"OMP_NUM_THREADS=1; pass num_threads={cores}"
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads inside the context."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)
