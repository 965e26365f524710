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
    "better with tuned rates",
)


class Pair(NamedTuple):
    """The outcomes of both reductions at one point."""

    average: Outcome
    adasum: Outcome

    @property
    def better(self) -> str:
        """Return the one with fewer steps to the target; "equal" within the larger deviation."""
        counts = [_counted(outcome) for outcome in self]
        means = [statistics.mean(each) for each in counts]
        if abs(means[0] - means[1]) <= max(map(statistics.stdev, counts)):
            return "equal"
        return "Average" if means[0] < means[1] else "AdasumGrad"


class Compared(NamedTuple):
    """One point: the advice, and the outcomes at one worker's rate and at tuned ones."""

    task: Task
    workers: int
    advice: Advice
    alone: Outcome
    carried: Pair
    tuned: Pair

    @property
    def fewer(self) -> float:
        """Return one worker's steps over AdasumGrad's at one worker's rate."""
        alone, adasum = map(_counted, (self.alone, self.carried.adasum))
        return statistics.mean(alone) / statistics.mean(adasum)

    def is_right(self, found: Pair) -> bool:
        """Return whether the advice names what none beats: Average, if both are equal."""
        better = "Average" if found.better == "equal" else found.better
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
        both = [Point(task, method, workers) for method in ("average", "adasum-grad")]
        carried = [found for point in both if (found := results.carried(point))]
        tuned = [found for point in both if (found := results.tuned(point))]
        if workers == 1 or alone is None or len(carried + tuned) < 4:
            continue
        records = [record for run in carried[1].records for record in records_of(run)]
        advice = advise(records, optimizer=_STUDIES[task.optimizer])
        rows.append(
            Compared(task, workers, advice, alone, Pair(*carried), Pair(*tuned))
        )
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
            f"{row.advice.speedup:.1f}",
            f"{row.fewer:.1f}",
            f"{row.advice.lengthening:.1f}",
            row.advice.use.name,
            row.carried.better,
            "yes" if row.is_right(row.carried) else "no",
            row.tuned.better,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    right = sum(row.is_right(row.carried) for row in rows)
    right_tuned = sum(row.is_right(row.tuned) for row in rows)
    within = sum(row.fewer <= row.advice.speedup for row in rows)
    return "\n".join(
        [
            "## Advice against the runs\n",
            "At one worker's rate. `expected`: by `adasum_hvd.advise`, from the noise of "
            "AdasumGrad's runs until their target. `AdasumGrad`: one worker's steps over its. If "
            "both are equal within the larger deviation, Average is right. Right in "
            f"{right} of {len(rows)}; against the runs with tuned rates, which the advice is not "
            f"about, in {right_tuned}. Within the expected number: {within} of {len(rows)}.\n",
            "| " + " | ".join(_COLUMNS) + " |",
            "|---" * len(_COLUMNS) + "|",
            *lines,
            "",
        ]
    )
