"""Which tests `make test` runs, and which ones `make check` runs after it: one rule for all.

A test is a function and its parameters. Some parameters are only a way in which the same thing is
run: a configuration of ranks, the number of threads as ranks, a launcher, sanitizers, the transport
below a fault. `make test` runs every test once, in the first of its ways, and `make check` in the
others, too.
"""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from tests.parallel.harness.configurations import Configuration
from tests.parallel.harness.faults import Fault

TIERS = QUICK, REST, ALL = "quick", "rest", "all"
WAYS = (
    "backend",
    "controller",
    "engine",
    "form",
    "streams",
    "thread_ranks",
    "three_and_one",
)


def subject(item: pytest.Item) -> Hashable:
    """Return what a test runs, without the way."""
    if case := getattr(item, "case", None):
        return str(case)
    function = item.nodeid.partition("[")[0]
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if any(isinstance(value, Configuration) for value in parameters.values()):
        return function
    kinds = {k: v.fault if isinstance(v, Fault) else v for k, v in parameters.items()}
    return function, *(f"{k}={v}" for k, v in kinds.items() if k not in WAYS)


def split(items: list[pytest.Item], tier: str) -> tuple[list, list]:
    """Return the items of a tier, and the others, in their order."""
    seen: set[Hashable] = set()
    quick, rest = [], []
    for item in items:
        (rest if (name := subject(item)) in seen else quick).append(item)
        seen.add(name)
    return (quick, rest) if tier == QUICK else (rest, quick)
