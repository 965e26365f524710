"""How study 7 tunes a rate: a lattice, three seeds, and no best rate at the end of a grid."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from convergence.training import Setting

FACTOR = 3**0.5  # between neighbouring rates
TUNING_SEEDS = (101, 102, 103)
TEST_SEEDS = (1, 2, 3, 4, 5)  # no tuning run has one of these
CENSORED = 2  # a run that misses the target counts as so many times its steps
WIDE = 5
REACH = (
    11  # neighbours of the first rates in one direction, after which an extension ends
)

Record = dict[str, Any]
Find = Callable[[Setting], Record | None]
Search = Generator[Setting, None, int]


class MissingRun(RuntimeError):
    """A search went on without the record of a run that it has yielded."""


class Cost(NamedTuple):
    """The cost of a rate, by its runs; `hopeless` if none reached the target."""

    hopeless: bool
    steps: float
    level: float = 0.0


class Seeds(NamedTuple):
    """Seeds of a study's scale."""

    tuning: tuple[int, ...] = TUNING_SEEDS
    test: tuple[int, ...] = TEST_SEEDS


def rate(index: int) -> float:
    """Return a rate of the lattice, which all methods, workers and workloads share."""
    return float(f"{FACTOR**index:.4g}")


def tried(setting: Setting, index: int, seeds: Seeds) -> list[Setting]:
    """Return the runs that judge a rate: on validation data, with the tuning seeds."""
    at = replace(setting, lr=rate(index), split="validation")
    return [replace(at, seed=seed) for seed in seeds.tuning]


def tested(setting: Setting, index: int, seeds: Seeds) -> list[Setting]:
    """Return the runs that measure a rate: on test data, with the test seeds."""
    at = replace(setting, lr=rate(index), split="test")
    return [replace(at, seed=seed) for seed in seeds.test]


def cost(records: list[Record]) -> Cost:
    """Return mean steps, then minus the level, of which the best rate has least.

    A run that missed the target counts as CENSORED times its steps. If it diverged, it counts as
    if all steps had been taken.
    """
    steps = [
        record["steps_to_target"]
        or CENSORED * max(record["steps"], record.get("most_steps", 0))
        for record in records
    ]
    levels = [-1e9 if (v := record["level"]) is None else v for record in records]
    hopeless = not any(record["steps_to_target"] for record in records)
    return Cost(hopeless, sum(steps) / len(steps), -sum(levels) / len(levels))


def around(start: int) -> range:
    """Return an index and its two neighbours."""
    return range(start - 1, start + 2)


def tune(
    candidates: Callable[[int], list[Setting]],
    cost: Callable[[list[Record]], Cost],
    first: range,
    find: Find,
) -> Search:
    """Yield the runs that find the rate of least cost, and return its index in the lattice.

    The first rates, then one more at an end for as long as the best is there. While all
    are hopeless, one more at both ends, at most WIDE times.

    Args:
        candidates: returns the runs that judge the rate of an index.
        cost: returns the cost of their records.
        first: the indices of the first rates; `around` has the three next to a start.
        find: has the record of each yielded setting when the iteration goes on.
    """
    low, high = first[0], first[-1]
    costs: dict[int, Cost] = {}
    while True:
        new = {k: candidates(k) for k in range(low, high + 1) if k not in costs}
        for runs in new.values():
            yield from runs
        for index, runs in new.items():
            costs[index] = cost([_kept(find, run) for run in runs])
        best = min(costs, key=lambda index: costs[index])
        if costs[best].hopeless and first[0] - low < WIDE:
            low, high = low - 1, high + 1
        elif best == low and first[0] - low < REACH:
            low -= 1
        elif best == high and high - first[-1] < REACH:
            high += 1
        else:
            return best


def _kept(find: Find, setting: Setting) -> Record:
    record = find(setting)
    if record is None:
        raise MissingRun(f"tuning: expected a run of {setting.key}, but got none")
    return record


def independent(runs: Iterator[Setting], find: Find) -> list[Setting]:
    """Return the missing ones of `runs` up to the first that depends on one of these."""
    missing: dict[str, Setting] = {}
    try:
        for setting in runs:
            if find(setting) is None:
                missing[setting.key] = setting
    except MissingRun:
        pass
    return list(missing.values())


def followed(search: Search, find: Find) -> int | None:
    """Return the result of a search in the existing runs; None if one is missing."""
    try:
        while True:
            if find(next(search)) is None:
                return None
    except StopIteration as end:
        return int(end.value)
