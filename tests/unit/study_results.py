"""Means and deviations of the convergence studies, from docs/convergence/raw."""

from __future__ import annotations

import statistics
from pathlib import Path

from convergence import plan, report, studies
from convergence.runs import Runs
from convergence.studies import Row
from convergence.target_report import Outcome, Results
from convergence.tuning import rate

from adasum_hvd.base import ops

RUNS = Runs(Path(__file__).parents[2] / "docs/convergence/raw", "none", only_kept=True)
SEEDS = {"momentum": 5, "adam": 3, "adamw": 5}  # at least
STUDIES = {name: getattr(studies, name)(studies.SCALES["small"]) for name in SEEDS}
METHODS = {
    ops.Average: "average",
    ops.AdasumGrad: "adasum-grad",
    ops.AdasumDelta: "adasum-delta",
}


def at_the_end(
    name: str, tuned: str, op: ops.ReduceOp, workers: int
) -> tuple[float, ...]:
    """Return a study's factor, mean and deviation over the seeds, rounded as in the tables.

    Args:
        name: the study.
        tuned: "own", the reduction's tuned rate, or "sequential", one worker's.
        op: the reduction.
        workers: how many.
    """
    study = STUDIES[name]
    (row,) = (
        row
        for row in study.rows
        if row.setting.workers == workers
        and (workers == 1 or (row.rate == tuned and ops.parse(row.setting.op) is op))
    )
    kept = study.records(row, RUNS)
    if not kept:
        return ()
    assert len(kept) >= SEEDS[name]
    values = [report.result(record) for record in kept]
    single = study.rate(Row(study.sequential), RUNS)
    factor = round(kept[0]["lr"] / single, 3)
    places = 3 if name == "adamw" else 1
    deviation = statistics.stdev(values) if values[1:] else 0.0
    return factor, round(statistics.mean(values), places), round(deviation, places)


def steps_to_target(
    task: plan.Task, op: ops.ReduceOp, workers: int
) -> tuple[float | None, ...]:
    """Return study 7's mean and deviation at one worker's rate, and the factor, mean and deviation.

    The last three are at the reduction's own rate. An empty tuple: not run for the task.
    """
    results = Results(RUNS, plan.SEEDS["small"])
    method = "average" if workers == 1 else METHODS[op]
    point = plan.Point(task, method, workers)
    own, alone = results.tuned(point), results.carried_longer(point)
    if own is None or alone is None:
        return ()
    factor = float(f"{rate(own.index - alone.index):.3g}")
    return *mean_of(alone), factor, *mean_of(own)


def mean_of(outcome: Outcome) -> tuple[int | None, int | None]:
    """Return mean and deviation of the steps; None if a seed missed the target."""
    steps = outcome.steps
    if len(steps) < len(outcome.records):
        return None, None
    return round(statistics.mean(steps)), round(statistics.stdev(steps))
