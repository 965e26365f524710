"""Studies 7 to 9 in the order in which their runs matter, until the time is up."""

from __future__ import annotations

import time
from collections.abc import Iterator

from convergence import local_outer
from convergence.plan import SEEDS, TASKS, WARM_UP, Point, Task, transferred, wanted
from convergence.runs import Runs
from convergence.training import Setting
from convergence.tuning import Find, Seeds, rate

PHASES = "32-8-32-16"  # workers, each for the same number of examples
ROWS = (  # reductions, and what multiplies one worker's rate
    ("average", ""),
    ("average", "linear"),
    ("average", "root"),
    ("adasum-grad", ""),
    ("adascale", ""),
)


def changing(task: Task, seeds: Seeds, find: Find) -> Iterator[Setting]:
    """Yield study 8's runs, at the rate that study 7 found for one worker; none before it has."""
    index = transferred(Point(task, "average", 1), seeds, find)
    if index is None:
        return
    for seed in seeds.test:
        for op, scaling in ROWS:
            yield Setting(
                task.work,
                task.optimizer,
                op,
                max(int(each) for each in PHASES.split("-")),
                rate(index),
                task.budget,
                seed,
                warm_up=WARM_UP,
                phases=PHASES,
                scaling=scaling,
            )


def settings(scale: str, works: list[str] | None, find: Find) -> Iterator[Setting]:
    """Yield all runs of a scale: a workload's points, then its run with changing workers.

    Study 9 follows the first two workloads, because it is cheaper than the others.
    """
    seeds = SEEDS[scale]
    for place, task in enumerate(TASKS[scale]):
        if not works or task.work in works:
            yield from wanted(task, seeds, find)
            yield from changing(task, seeds, find)
        if place == 1 and (not works or local_outer.NAME in works):
            yield from local_outer.settings(scale, seeds, find)


def run(scale: str, works: list[str] | None, runs: Runs, hours: float) -> bool:
    """Run what is missing, until the time is up; return whether all is there."""
    end = time.monotonic() + 3600 * hours
    for setting in settings(scale, works, runs.find):
        if runs.find(setting) is None and time.monotonic() > end:
            return False
        runs.get(setting)
    return True
