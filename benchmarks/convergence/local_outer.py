"""Study 9: local steps of AdamW, with the outer rate tuned for each method."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from convergence.training import Setting
from convergence.tuning import (
    Cost,
    Find,
    Record,
    Search,
    Seeds,
    around,
    followed,
    rate,
    tune,
)

NAME = "local_outer"
METHODS = ("average", "rda", "adasum")
MOMENTA = (0.9, 0.0, 0.5)  # the outer optimizer's; 0.9 is DiLoCo's, 0.0 has no state
INNER = 0.003  # study 1's rate for one worker


class Outer(NamedTuple):
    """One cell of the table."""

    work: str
    budget: int
    method: str
    workers: int
    local_steps: int
    momentum: float

    @property
    def setting(self) -> Setting:
        """Return its setting, without an outer rate and a seed."""
        return Setting(
            self.work,
            "adamw",
            f"{self.method}-delta",
            self.workers,
            INNER,
            self.budget,
            local_steps=self.local_steps,
            outer=self.momentum,
        )


def cells(scale: str) -> Iterator[Outer]:
    """Yield the cells, methods next to each other."""
    tiny = scale == "tiny"
    work, budget = ("gpt-tiny", 2**14) if tiny else ("gpt-small", 2**18)
    for workers in (8,) if tiny else (8, 32):
        for momentum in (0.5,) if tiny else MOMENTA:
            for steps in (1, 16) if tiny else (16, 4, 1, 64):
                for method in METHODS:
                    yield Outer(work, budget, method, workers, steps, momentum)


def tried(cell: Outer, index: int, seeds: tuple[int, ...]) -> list[Setting]:
    """Return the runs of an outer rate."""
    at = replace(cell.setting, outer_lr=rate(index))
    return [replace(at, seed=seed) for seed in seeds]


def cost(records: list[Record]) -> Cost:
    """Return the mean validation loss; a run that diverged counts as ten."""
    losses = [10.0 if "diverged" in r else r["validation"] for r in records]
    return Cost(False, statistics.mean(losses))


def search(cell: Outer, seeds: Seeds, find: Find) -> Search:
    """Return the search for a cell's outer rate; it begins at 1, and at 0.58."""
    start = 0 if not cell.momentum else -1
    return tune(
        lambda index: tried(cell, index, seeds.tuning), cost, around(start), find
    )


def settings(scale: str, seeds: Seeds, find: Find) -> Iterator[Setting]:
    """Yield the runs of all cells: each is tuned, then tested."""
    for cell in cells(scale):
        best = yield from search(cell, seeds, find)
        yield from tried(cell, best, seeds.test)


def results(cell: Outer, seeds: Seeds, find: Find) -> tuple[float, list[float]] | None:
    """Return a cell's outer rate and test losses; None if its runs are not all there."""
    best = followed(search(cell, seeds, find), find)
    if best is None:
        return None
    found = [find(setting) for setting in tried(cell, best, seeds.test)]
    if not all(found):
        return None
    ends = [r["test"] for r in found if r and "diverged" not in r]
    return rate(best), ends
