"""Studies 7 to 9 in the order in which their runs matter, until the time is up."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial

from convergence import local_outer, schedule
from convergence import runs as raw
from convergence.plan import (
    SEEDS,
    TASKS,
    WARM_UP,
    Point,
    Task,
    longer_runs,
    main_runs,
    other_runs,
    transferred,
)
from convergence.runs import Runs
from convergence.training import Setting
from convergence.tuning import Find, Record, Seeds, independent, rate

Part = Callable[[Seeds, Find], Iterator[Setting]]
PHASES = "32-8-32-16"  # workers, each for the same number of examples
ROWS = (  # reductions, the factor on the rate, and neighbours from one worker's rate
    ("average", "", 0),
    ("average", "linear", 0),
    ("average", "root", 0),
    ("adasum-grad", "", 0),
    ("adascale", "", 0),
    ("average", "", 3),  # 5.2 and 9 times: its own rates with 4 to 64 workers
    ("average", "", 4),
)


def changing(task: Task, seeds: Seeds, find: Find) -> Iterator[Setting]:
    """Yield study 8's runs, at the rate that study 7 found for one worker; none before it has."""
    index = transferred(Point(task, "average", 1), seeds, find)
    if index is None:
        return
    for seed in seeds.test:
        for op, scaling, offset in ROWS:
            yield Setting(
                task.work,
                task.optimizer,
                op,
                max(int(each) for each in PHASES.split("-")),
                rate(index + offset),
                task.budget,
                seed,
                warm_up=WARM_UP,
                phases=PHASES,
                scaling=scaling,
            )


def parts(scale: str) -> dict[str, Part]:
    """Return the runs of each part, in the order in which they matter."""
    first, *rest = TASKS[scale]
    found: dict[str, Part] = {
        first.work: partial(main_runs, first),
        f"{first.work}-longer": partial(longer_runs, first),
        f"{first.work}-changing": partial(changing, first),
        schedule.NAME: partial(schedule.settings, first),
        f"{first.work}-others": partial(other_runs, first),
    }
    for place, task in enumerate(rest):
        found[task.work] = partial(main_runs, task)
        found[f"{task.work}-longer"] = partial(longer_runs, task)
        found[f"{task.work}-changing"] = partial(changing, task)
        found[f"{task.work}-others"] = partial(other_runs, task)
        if place == 0:  # cheaper than the tasks after it
            found[local_outer.NAME] = partial(local_outer.settings, scale)
    return found


def run(
    scale: str, chosen: list[str] | None, runs: Runs, hours: float, jobs: int = 1
) -> bool:
    """Run the parts' missing runs until the time is up; return whether none is missing.

    Args:
        scale: the name of one of the scales.
        chosen: parts to run; None: all.
        runs: where a record goes as soon as its run has ended.
        hours: after which no run is started.
        jobs: processes; each runs one run at a time.
    """
    end, known = time.monotonic() + 3600 * hours, parts(scale)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        for name in chosen or known:
            part = partial(known[name], SEEDS[scale], runs.find)
            while settings := independent(part(), runs.find):
                if not run_side_by_side(settings, runs, pool, jobs, end):
                    return False
                runs.refresh()
    return True


def run_side_by_side(
    settings: list[Setting],
    runs: Runs,
    pool: ProcessPoolExecutor,
    jobs: int,
    end: float,
) -> bool:
    """Run settings that do not depend on each other; return whether there was time for all.

    Args:
        settings: in the order in which they start; started ones are removed.
        runs: where a record goes as soon as its run has ended.
        pool: of the processes that run them.
        jobs: how many run at once.
        end: the value of time.monotonic() after which no run is started.
    """
    running: dict[Future[Record], Setting] = {}
    while settings or running:
        while settings and len(running) < jobs and time.monotonic() < end:
            setting = settings.pop(0)
            running[pool.submit(raw.make, setting)] = setting
        if not running:
            return False
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            runs.add(running.pop(done), done.result())
    return True
