"""Study 7: steps to a target over the number of workers, with the rate tuned at every point."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from convergence.training import Job, Setting
from convergence.tuning import (
    Find,
    Search,
    Seeds,
    around,
    cost,
    followed,
    tested,
    tried,
    tune,
)

NAME = "steps_to_target"
VALLEY = range(-3, 6)  # rates around one worker's best, for one tuning seed
WARM_UP = 0.05  # of the steps in which one pass over the budget ends
RULES = ("average", "adasum-grad", "adascale", "mean-direction", "rda", "adasum-delta")
MAIN = RULES[:4]  # run first
LAYERWISE = "layerwise"  # LARS or LAMB, with Average
LONGER = 4  # times the most steps, for runs of Average that end before their target


@dataclass(frozen=True)
class Task:
    """A workload, its target, and the numbers of workers in the order of their importance."""

    work: str
    optimizer: str
    layerwise: str  # the optimizer that the method LAYERWISE takes instead
    counts: tuple[int, ...]
    budget: int  # epochs or tokens of all workers together
    target: float
    most_steps: int  # of a run that has used up its budget before it reached the target
    start: int  # of the lattice, for one worker
    layerwise_start: int
    valleys: tuple[int, ...] = (8, 32)  # workers for which all rates of VALLEY are run
    methods: tuple[str, ...] = (*RULES, LAYERWISE)

    def setting(self, method: str, workers: int) -> Setting:
        """Return a point's setting, without rate, seed and split.

        All rules are the same with one worker; it is the average's there.
        """
        layerwise = method == LAYERWISE
        return Setting(
            self.work,
            self.layerwise if layerwise else self.optimizer,
            "average" if layerwise or workers == 1 else method,
            workers,
            0.0,
            self.budget,
            target=self.target,
            most_steps=self.most_steps,
            warm_up=WARM_UP,
        )


class Point(NamedTuple):
    """One mark of the plot."""

    task: Task
    method: str
    workers: int

    @property
    def setting(self) -> Setting:
        """Return its setting."""
        return self.task.setting(self.method, self.workers)


ALL = (1, 32, 8, 16, 64, 4, 2, 128)
DIGITS = Task(
    work="digits",
    optimizer="momentum",
    layerwise="lars",
    counts=ALL,
    budget=15,
    target=0.97,
    most_steps=256,
    start=-8,
    layerwise_start=-12,
    methods=(*RULES, "grafted", LAYERWISE),
)
GLYPHS = Task(
    work="glyphs",
    optimizer="momentum-decay",
    layerwise="lars-decay",
    counts=(1, 32, 8, 128),
    budget=1,
    target=0.7,
    most_steps=1600,
    start=-10,
    layerwise_start=-10,
)
GPT_SMALL = Task(
    work="gpt-small",
    optimizer="adamw",
    layerwise="lamb",
    counts=ALL,
    budget=2**18,
    target=2.5,
    most_steps=256,
    start=-12,
    layerwise_start=-8,
)
GPT_FULL = replace(
    GPT_SMALL, work="gpt-full", counts=(1, 32, 8), budget=2**19, target=2.4
)
TASKS = {
    "small": (DIGITS, GPT_SMALL, GLYPHS, GPT_FULL),
    "tiny": (
        replace(DIGITS, counts=(1, 16), budget=4, target=0.7, most_steps=40, valleys=(16,)),
        replace(
            GPT_SMALL, work="gpt-tiny", counts=(1, 8), budget=2**14, target=3.5,
            most_steps=80, valleys=(8,),
        ),
    ),
}  # fmt: skip
TASKS["full"] = TASKS["small"]
SEEDS = {"small": Seeds(), "full": Seeds(), "tiny": Seeds((101,), (1,))}


def points(task: Task) -> Iterator[Point]:
    """Yield a task's points, all methods of a number of workers next to each other."""
    for workers in task.counts:
        for method in task.methods:
            if workers > 1 or method in ("average", LAYERWISE):
                yield Point(task, method, workers)


def start_of(point: Point, seeds: Seeds, find: Find) -> int:
    """Return the start of a search: the best rate of the nearest number that came before.

    That of grafted, which has the mean's length, is the mean's best rate, if there is one.
    """
    task = point.task
    if point.method == "grafted":
        best = best_of(Point(task, "average", point.workers), seeds, find)
        if best is not None:
            return best
    if point.workers == 1:
        return task.layerwise_start if point.method == LAYERWISE else task.start
    before = task.counts[: task.counts.index(point.workers)]
    nearest = min(
        before, key=lambda n: abs(n.bit_length() - point.workers.bit_length())
    )
    best = followed(first_search(_at(point, nearest), seeds, find), find)
    return task.start if best is None else best


def _at(point: Point, workers: int) -> Point:
    shared = workers == 1 and point.method != LAYERWISE
    return Point(point.task, "average" if shared else point.method, workers)


def first_search(point: Point, seeds: Seeds, find: Find) -> Search:
    """Return the search that begins at the best rate of a number of workers before."""
    return _tune(point, around(start_of(point, seeds, find)), seeds, find)


def search(point: Point, seeds: Seeds, find: Find) -> Search:
    """Yield the runs that find a point's best rate, and return its index.

    A seed that misses its target can end a search early. So all rates from the best one to those
    of the next smaller and larger number of workers are tried, as far as these have one.
    """
    best = yield from first_search(point, seeds, find)
    others = [
        other
        for each in _next_to(point)
        if (other := followed(first_search(each, seeds, find), find)) is not None
    ]
    known = (*around(best), *others)
    wider = range(min(known), max(known) + 1)
    return (yield from _tune(point, wider, seeds, find))


def _tune(point: Point, first: range, seeds: Seeds, find: Find) -> Search:
    return tune(lambda index: tried(point.setting, index, seeds), cost, first, find)


def _next_to(point: Point) -> list[Point]:
    """Return the same method's points at the next smaller and larger number of workers, above 1."""
    if point.workers == 1:
        return []
    counts = sorted(n for n in point.task.counts if n > 1)
    place = counts.index(point.workers)
    return [
        _at(point, n)
        for n in counts[max(0, place - 1) : place + 2]
        if n != point.workers
    ]


def best_of(point: Point, seeds: Seeds, find: Find) -> int | None:
    """Return the index of a point's best rate; None if its search has not ended yet."""
    return followed(search(point, seeds, find), find)


def transferred(point: Point, seeds: Seeds, find: Find) -> int | None:
    """Return the index of one worker's best rate, for the same method."""
    return best_of(_at(point, 1), seeds, find)


def main_runs(task: Task, seeds: Seeds, find: Find) -> Iterator[Setting]:
    """Yield the runs of the task's MAIN methods: tune, test, test at one worker's rate."""
    yield from _runs_of([p for p in points(task) if p.method in MAIN], seeds, find)


def other_runs(task: Task, seeds: Seeds, find: Find) -> Iterator[Setting]:
    """Yield the runs of the other methods, then the valleys of all."""
    yield from _runs_of([p for p in points(task) if p.method not in MAIN], seeds, find)
    for point in points(task):
        if point.workers in task.valleys:
            yield from valley(point, seeds, find)


def _runs_of(chosen: list[Point], seeds: Seeds, find: Find) -> Iterator[Setting]:
    """Yield each point's runs; after a number of workers, those that it adds to the ones before."""
    known: list[Point] = []
    for _, block in groupby(chosen, key=lambda point: point.workers):
        for point in block:
            known.append(point)
            yield from _runs(point, first_search(point, seeds, find), seeds, find)
        for point in known:
            yield from _runs(point, search(point, seeds, find), seeds, find)


def _runs(point: Point, found: Search, seeds: Seeds, find: Find) -> Iterator[Setting]:
    best = yield from found
    yield from tested(point.setting, best, seeds)
    alone = transferred(point, seeds, find)
    if alone is not None:
        yield from tested(point.setting, alone, seeds)


def longer(task: Task, workers: int, seeds: Seeds, find: Find) -> list[Setting]:
    """Return runs of Average at one worker's rate with LONGER times the steps.

    There are none if all runs with the usual steps reach the target, or if one is missing.
    """
    point = Point(task, "average", workers)
    alone = transferred(point, seeds, find)
    if workers == 1 or alone is None:
        return []
    usual = [find(setting) for setting in tested(point.setting, alone, seeds)]
    if not all(usual) or all(record["steps_to_target"] for record in usual if record):
        return []
    setting = replace(point.setting, most_steps=LONGER * task.most_steps)
    return tested(setting, alone, seeds)


def longer_runs(task: Task, seeds: Seeds, find: Find) -> Iterator[Setting]:
    """Yield the runs of `longer` for all numbers of workers."""
    for workers in task.counts:
        yield from longer(task, workers, seeds, find)


def valley(point: Point, seeds: Seeds, find: Find) -> Iterator[Setting]:
    """Yield one tuning run for each rate of VALLEY."""
    alone = transferred(point, seeds, find)
    for offset in VALLEY if alone is not None else ():
        yield tried(point.setting, alone + offset, seeds)[0]


class Estimate(NamedTuple):
    """The cost of one number of workers of a task."""

    work: str
    workers: int
    runs: int
    hours: float


def estimates(task: Task, seeds: Seeds) -> Iterator[Estimate]:
    """Yield core-hours by timing steps of AdaSum: no run ends early, 4 rates are tried."""
    for workers in task.counts:
        count = 2 if workers == 1 else len(task.methods)
        count *= 4 * len(seeds.tuning) + 2 * len(seeds.test)
        job = Job(replace(task.setting("adasum-grad", workers), lr=1e-4))
        horizon = job.horizon(workers)
        draws = job.work.draws(1, workers, job.work.batch)
        job.step(next(draws), 1e-4, look=False)
        began = time.process_time()
        for _ in range(3):
            job.step(next(draws), 1e-4, look=False)
        step = (time.process_time() - began) / 3
        most = max(horizon, task.most_steps)
        yield Estimate(task.work, workers, count, count * most * step / 3600)
