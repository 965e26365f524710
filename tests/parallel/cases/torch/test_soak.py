"""Thousands of random reductions, checked against the reference; memory and descriptors stay."""

from __future__ import annotations

import os
from pathlib import Path

import adasum_hvd.torch as hvd
from tests.parallel.cases.torch import test_fuzz as fuzz
from tests.parallel.cases.torch import test_ops as ops

ROUNDS = int(os.environ.get("ADASUM_SOAK_ROUNDS", "1200"))
WARM_ROUNDS = 200  # until every buffer has been as large as it gets, or nearly
LEAK_BYTES = 64 << 20


def start() -> None:
    ops.start()
    fuzz.start()


def _held() -> tuple[int, int]:
    """Return the bytes of memory and the number of descriptors that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def case_random_reductions() -> dict[str, int]:
    for number in range(WARM_ROUNDS):
        fuzz.reduce_round(number)
    memory, descriptors = _held()
    for number in range(WARM_ROUNDS, ROUNDS):
        fuzz.reduce_round(number)
    grown = _held()[0] - memory
    assert grown < LEAK_BYTES, f"{grown} bytes more after {ROUNDS} rounds"
    assert _held()[1] == descriptors, f"{_held()[1]} descriptors, not {descriptors}"
    return {
        "rounds": ROUNDS,
        "tensors": hvd.counters().tensors,
        "bytes more": grown,
        "descriptors": descriptors,
    }
