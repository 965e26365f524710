"""Compares `adasum_hvd.advise` with study 7's runs: the steps that it expects, the choice it makes.

A run's records of its gradients' noise become a monitor's records; the advice sees no outcome.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from adasum_hvd.advice.run import Advice, advise
from convergence.plan import Point, Task
from convergence.target_report import Outcome, Results
from convergence.tuning import Record

_STUDIES = {"momentum": "momentum", "momentum-decay": "momentum", "adamw": "adamw"}
_COLUMNS = (
    "workload",
    "workers",
    "fewer steps: expected",
    "AdasumGrad",
    "AdaSum's lengthening",
    "advice",
    "better in the runs",
    "right",
)


class Compared(NamedTuple):
    """One point at one worker's rate: the advice, and the outcomes of both reductions."""

    task: Task
    workers: int
    advice: Advice
    alone: Outcome
    average: Outcome
    adasum: Outcome

    @property
    def better(self) -> str:
        """Return the reduction with fewer steps to the target; "equal" within a deviation."""
        counts = [_counted(outcome) for outcome in (self.average, self.adasum)]
        means = [statistics.mean(each) for each in counts]
        if abs(means[0] - means[1]) <= max(map(statistics.stdev, counts)):
            return "equal"
        return "Average" if means[0] < means[1] else "AdasumGrad"

    @property
    def is_right(self) -> bool:
        """Whether the advice names a reduction that none beats: Average, if both are equal."""
        better = "Average" if self.better == "equal" else self.better
        return self.advice.use.name == better


def _counted(outcome: Outcome) -> list[int]:
    """Return each seed's steps; all that it took if it missed the target."""
    return [r["steps_to_target"] or r["steps"] for r in outcome.records]


def records_of(run: Record) -> list[dict[str, Any]]:
    """Return a run's noise until its target as a monitor's records, one per kept step.

    Records are further apart later in a run, so each stands for the steps since the last one.
    """
    workers, found, before = run["workers"], [], 0
    for step, squares, squared_mean, squared_length in run["noise"]:
        variance = (squares - workers * squared_mean) / (workers - 1)
        values = {
            "variance": variance,
            "squared_mean": squared_mean - variance / workers,
            "length": squared_length**0.5,
            "gain": (squared_length / squared_mean) ** 0.5,
        }
        record = {"joined": workers, "inputs": "gradients", "tensors": {"all": values}}
        if step <= (run["steps_to_target"] or run["steps"]):
            found += [record] * (step - before)
            before = step
    return found


def compared(task: Task, results: Results) -> list[Compared]:
    """Return the points of a task whose runs at one worker's rate are all there."""
    rows = []
    alone = results.tuned(Point(task, "average", 1))
    for workers in sorted(task.counts):
        average, adasum = (
            results.carried(Point(task, method, workers))
            for method in ("average", "adasum-grad")
        )
        if workers == 1 or not (alone and average and adasum):
            continue
        records = [record for run in adasum.records for record in records_of(run)]
        advice = advise(records, optimizer=_STUDIES[task.optimizer])
        rows.append(Compared(task, workers, advice, alone, average, adasum))
    return rows


def table(tasks: tuple[Task, ...], results: Results) -> str:
    """Return the section of tables.md; nothing if no point has its runs."""
    rows = [row for task in tasks for row in compared(task, results)]
    if not rows:
        return ""
    lines = []
    for row in rows:
        steps = [statistics.mean(_counted(each)) for each in (row.alone, row.adasum)]
        cells = [
            row.task.work,
            str(row.workers),
            f"{row.advice.speedup:.1f}",
            f"{steps[0] / steps[1]:.1f}",
            f"{row.advice.lengthening:.1f}",
            row.advice.use.name,
            row.better,
            "yes" if row.is_right else "no",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    right = sum(row.is_right for row in rows)
    return "\n".join(
        [
            "## Advice against the runs\n",
            "At one worker's rate. `expected`: by `adasum_hvd.advise`, from the noise of "
            "AdasumGrad's runs until their target. `AdasumGrad`: one worker's steps over its. If "
            "both are equal within a deviation, Average is right. "
            f"Right in {right} of {len(rows)}.\n",
            "| " + " | ".join(_COLUMNS) + " |",
            "|---" * len(_COLUMNS) + "|",
            *lines,
            "",
        ]
    )
