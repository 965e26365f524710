"""A check of study 7: is the order of the methods the same with other warm-ups and momenta?

Study 7 fixes both. Here the rate is tuned again for each method and each variant, at one number
of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from convergence.plan import WARM_UP, Point, Task, best_of
from convergence.training import MOMENTUM, Setting
from convergence.tuning import (
    FACTOR,
    Cost,
    Find,
    Record,
    Search,
    Seeds,
    around,
    cost,
    followed,
    tested,
    tried,
    tune,
)

NAME = "schedule"
METHODS = ("average", "adasum-grad", "adascale")


class Variant(NamedTuple):
    """A warm-up, as a share of the budget's steps, and a momentum."""

    warm_up: float
    momentum: float


FIXED = Variant(WARM_UP, MOMENTUM)  # study 7's
VARIANTS = (FIXED, Variant(0.2, MOMENTUM), Variant(WARM_UP, 0.8))


class Cell(NamedTuple):
    """One cell of the table: a method with a variant, at the most workers of a valley."""

    task: Task
    method: str
    variant: Variant

    @property
    def point(self) -> Point:
        """Return study 7's point of the method."""
        return Point(self.task, self.method, self.task.valleys[-1])

    @property
    def setting(self) -> Setting:
        """Return its setting, without rate, seed and split."""
        warm_up, momentum = self.variant
        at = replace(self.point.setting, warm_up=warm_up)
        if momentum == MOMENTUM:
            return at
        return replace(at, optimizer=f"{at.optimizer}-{momentum}")


class Found(NamedTuple):
    """A cell's result: the index of its rate, the cost of the tuning runs, the test runs."""

    index: int
    cost: Cost
    records: list[Record]


def cells(task: Task) -> Iterator[Cell]:
    """Yield the cells, methods next to each other."""
    for variant in VARIANTS:
        for method in METHODS:
            if method in task.methods:
                yield Cell(task, method, variant)


def search(cell: Cell, seeds: Seeds, find: Find) -> Search | None:
    """Return the search for a cell's rate; None before study 7 has the point's.

    It begins where `rate / (1 - momentum)` is study 7's.
    """
    best = best_of(cell.point, seeds, find)
    if best is None:
        return None
    ratio = (1 - cell.variant.momentum) / (1 - MOMENTUM)
    start = best + round(math.log(ratio) / math.log(FACTOR))
    return tune(
        lambda index: tried(cell.setting, index, seeds), cost, around(start), find
    )


def settings(task: Task, seeds: Seeds, find: Find) -> Iterator[Setting]:
    """Yield the runs of all cells: each is tuned, then tested."""
    for cell in cells(task):
        if (runs := search(cell, seeds, find)) is not None:
            best = yield from runs
            yield from tested(cell.setting, best, seeds)


def result(cell: Cell, seeds: Seeds, find: Find) -> Found | None:
    """Return a cell's result; None if a run is missing."""
    runs = search(cell, seeds, find)
    best = None if runs is None else followed(runs, find)
    if best is None:
        return None
    judged = [find(setting) for setting in tried(cell.setting, best, seeds)]
    found = [find(setting) for setting in tested(cell.setting, best, seeds)]
    if not all(found):
        return None
    return Found(best, cost([r for r in judged if r]), [r for r in found if r])
