"""Compares `adasum_hvd.advise` with study 7's runs: the steps that it expects, the choice it makes.

A run's records of its gradients' noise become a monitor's records. Each run is advised alone, from
the records until its target: the advice sees the step of the target, and no other outcome.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from adasum_hvd.advice.run import Advice, advise
from convergence.plan import Point, Task
from convergence.target_report import Outcome, Results
from convergence.tuning import Record

_STUDIES = {"momentum": "momentum", "momentum-decay": "momentum", "adamw": "adamw"}
NEAR = 0.15
_COLUMNS = (
    "workload",
    "workers",
    "fewer steps: expected",
    "from the whole run",
    "AdasumGrad",
    "AdaSum's lengthening",
    "advice",
    "better in the runs",
    "right",
    "better with tuned rates",
)


class Pair(NamedTuple):
    """The outcomes of both reductions at one point."""

    average: Outcome
    adasum: Outcome

    @property
    def better(self) -> str:
        """Return the one with fewer steps to the target; "equal" within the larger deviation."""
        counts = [outcome.counted for outcome in self]
        means = [statistics.mean(each) for each in counts]
        spreads = [statistics.stdev(each) if each[1:] else 0.0 for each in counts]
        if abs(means[0] - means[1]) <= max(spreads):
            return "equal"
        return "Average" if means[0] < means[1] else "AdasumGrad"


class Compared(NamedTuple):
    """One point: each run's advice, and the outcomes at one worker's rate and at tuned ones."""

    task: Task
    workers: int
    advice: list[Advice]
    whole: list[Advice]  # from all records of each run
    alone: Outcome
    carried: Pair
    tuned: Pair

    @property
    def fewer(self) -> float:
        """Return one worker's steps over AdasumGrad's at one worker's rate."""
        return statistics.mean(self.alone.counted) / statistics.mean(
            self.carried.adasum.counted
        )

    @property
    def expected(self) -> float:
        """Return by how many times fewer steps the advice expects, the mean over the runs."""
        return _mean(self.advice)

    def is_near(self, expected: float) -> bool:
        """Return whether the runs took an expected factor but for NEAR."""
        return abs(self.fewer / expected - 1) <= NEAR

    @property
    def use(self) -> str:
        """Return the reduction that all runs' advice names, or "" if they differ."""
        names = {each.use.name for each in self.advice}
        return names.pop() if len(names) == 1 else ""

    def is_right(self, found: Pair) -> bool:
        """Return whether the advice names what none beats: Average, if both are equal."""
        better = "Average" if found.better == "equal" else found.better
        return self.use == better


def _mean(advice: list[Advice]) -> float:
    """Return the mean over runs of the factors that their advice expects."""
    return statistics.mean(each.speedup for each in advice)


def records_of(run: Record, whole: bool = False) -> list[dict[str, Any]]:
    """Return a run's noise until its target as a monitor's records; `whole`: of all its steps.

    Records are further apart later in a run, so each stands for the steps since the last one.
    """
    workers, found, before = run["workers"], [], 0
    last = run["steps"] if whole else run["steps_to_target"] or run["steps"]
    for step, squares, squared_mean, squared_length in run["noise"]:
        variance = (squares - workers * squared_mean) / (workers - 1)
        values = {
            "variance": variance,
            "squared_mean": squared_mean - variance / workers,
            "length": squared_length**0.5,
            "gain": (squared_length / squared_mean) ** 0.5,
        }
        record = {"joined": workers, "inputs": "gradients", "tensors": {"all": values}}
        if step <= last:
            found += [record] * (step - before)
            before = step
    return found


def compared(task: Task, results: Results) -> list[Compared]:
    """Return the points of a task whose runs at one worker's rate are all there."""
    rows = []
    alone = results.tuned(Point(task, "average", 1))
    for workers in sorted(task.counts):
        both = [Point(task, method, workers) for method in ("average", "adasum-grad")]
        carried = [found for point in both if (found := results.carried(point))]
        tuned = [found for point in both if (found := results.tuned(point))]
        if workers == 1 or alone is None or len(carried + tuned) < 4:
            continue
        advice, of_whole = (
            [
                advise(records_of(run, whole), optimizer=_STUDIES[task.optimizer])
                for run in carried[1].records
            ]
            for whole in (False, True)
        )
        outcomes = alone, Pair(*carried), Pair(*tuned)
        rows.append(Compared(task, workers, advice, of_whole, *outcomes))
    return rows


def table(tasks: tuple[Task, ...], results: Results) -> str:
    """Return the section of tables.md; nothing if no point has its runs."""
    rows = [row for task in tasks for row in compared(task, results)]
    if not rows:
        return ""
    lines = []
    for row in rows:
        cells = [
            row.task.work,
            str(row.workers),
            f"{row.expected:.1f}",
            f"{_mean(row.whole):.1f}",
            f"{row.fewer:.1f}",
            f"{statistics.mean(each.lengthening for each in row.advice):.1f}",
            row.use or "differs",
            row.carried.better,
            "yes" if row.is_right(row.carried) else "no",
            row.tuned.better,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    right = sum(row.is_right(row.carried) for row in rows)
    right_tuned = sum(row.is_right(row.tuned) for row in rows)
    near = sum(row.is_near(row.expected) for row in rows)
    near_whole = sum(row.is_near(_mean(row.whole)) for row in rows)
    single = [row.is_near(each.speedup) for row in rows for each in row.advice]
    return "\n".join(
        [
            "## Advice against the runs\n",
            "At one worker's rate. `expected`: by `adasum_hvd.advise`, from the noise of each of "
            "AdasumGrad's runs until its target, the mean over the runs; then the same from all "
            "records. `AdasumGrad`: one worker's steps over its. If both are equal within the "
            f"larger deviation, Average is right. Right in {right} of {len(rows)}; against the "
            f"runs with tuned rates, which the advice is not about, in {right_tuned}. Within "
            f"{NEAR:.0%} of the expected number: {near} of {len(rows)}; from all records of the "
            f"runs, {near_whole} of {len(rows)}; by the advice from a single run, {sum(single)} of "
            f"{len(single)}.\n",
            "| " + " | ".join(_COLUMNS) + " |",
            "|---" * len(_COLUMNS) + "|",
            *lines,
            "",
        ]
    )
