"""The tables and pictures of study 7, from the raw runs that are there."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from convergence.plan import (
    LAYERWISE,
    Point,
    Task,
    best_of,
    longer,
    points,
    transferred,
)
from convergence.runs import Runs
from convergence.training import Setting
from convergence.tuning import Record, Seeds, rate, tested

COLOURS = {
    "average": "tab:gray",
    "adasum-grad": "tab:blue",
    "adasum-delta": "tab:orange",
    "mean-direction": "tab:cyan",
    "adascale": "tab:green",
    "rda": "tab:purple",
    "grafted": "tab:pink",
    LAYERWISE: "tab:red",
}
_MARKS = dict(zip(COLOURS, "osDv^PX<", strict=True))
_POWERS = [2**k for k in range(2, 14)]
_COLUMNS = (
    "workers",
    "method",
    "rate, over one worker's",
    "steps to target",
    "after the budget",
    "steps at one worker's rate",
    "after the budget",
)


class Outcome(NamedTuple):
    """The results of a point's test seeds at one rate."""

    index: int  # of the rate, in the lattice
    records: list[Record]

    @property
    def steps(self) -> list[int]:
        """Return the steps to the target of the seeds that reached it."""
        found = [record["steps_to_target"] for record in self.records]
        return [each for each in found if each]

    @property
    def counted(self) -> list[int]:
        """Return each seed's steps; all that it took if it missed the target."""
        return [r["steps_to_target"] or r["steps"] for r in self.records]

    @property
    def levels(self) -> list[float]:
        """Return accuracies or losses when the budget was used up; a diverged run has none."""
        return [abs(r["level"]) for r in self.records if r["level"] is not None]


class Results:
    """Outcomes of a scale's points."""

    def __init__(self, runs: Runs, seeds: Seeds) -> None:
        self.runs, self.seeds = runs, seeds

    def tuned(self, point: Point) -> Outcome | None:
        """Return the outcome at the point's own rate; None if its runs are not all there."""
        return self._at(point, best_of(point, self.seeds, self.runs.find))

    def carried(self, point: Point) -> Outcome | None:
        """Return the outcome at one worker's best rate for the method."""
        return self._at(point, transferred(point, self.seeds, self.runs.find))

    def longer(self, task: Task, workers: int) -> Outcome | None:
        """Return Average's outcome at one worker's rate in the runs that may take more steps."""
        alone = transferred(Point(task, "average", workers), self.seeds, self.runs.find)
        return self._of(alone, longer(task, workers, self.seeds, self.runs.find))

    def carried_longer(self, point: Point) -> Outcome | None:
        """Return `longer`'s outcome for Average if there is one, else `carried`'s."""
        found = None
        if point.method == "average":
            found = self.longer(point.task, point.workers)
        return found or self.carried(point)

    def _at(self, point: Point, index: int | None) -> Outcome | None:
        if index is None:
            return None
        return self._of(index, tested(point.setting, index, self.seeds))

    def _of(self, index: int | None, settings: list[Setting]) -> Outcome | None:
        """Return the outcome of runs at a rate; None if one is missing, or if there are none."""
        records = [record for each in settings if (record := self.runs.find(each))]
        if index is None or not records or len(records) < len(settings):
            return None
        return Outcome(index, records)

    def over_rates(self, point: Point) -> dict[float, list[float]]:
        """Return the levels of the tuning runs at each rate that was tried."""
        setting = point.setting
        names = "work", "optimizer", "op", "workers", "warm_up"
        found: dict[float, list[float]] = {}
        for r in self.runs.all():
            same = all(r.get(name) == getattr(setting, name) for name in names)
            if same and r.get("target") and r.get("split") == "validation":
                level = r["level"]
                found.setdefault(r["lr"], []).append(
                    float("nan") if level is None else abs(level)
                )
        return dict(sorted(found.items()))


def name_of(point: Point) -> str:
    """Return the method as the tables call it."""
    if point.method != LAYERWISE:
        return point.method
    return f"{point.task.layerwise.split('-')[0].upper()}, average"


def unit(task: Task) -> str:
    """Return the unit of a level."""
    return "accuracy" if task.target <= 1 else "loss, nats per byte"


def _spread(values: list[float], task: Task) -> str:
    if not values:
        return "diverged"
    scale, digits = (100, 1) if task.target <= 1 else (1, 3)
    return _mean([scale * value for value in values], digits)


def _mean(values: list[Any], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if values[1:] else mean


def steps_of(outcome: Outcome) -> str:
    """Return mean and deviation of the steps; a bound of the mean if a seed missed the target."""
    reached, count = len(outcome.steps), len(outcome.records)
    if reached == count:
        return _mean(outcome.steps, 0)
    if not reached:
        return f"missed by all {count} seeds"
    least = statistics.mean(outcome.counted)
    return f"at least {least:.0f} ({reached} of {count} seeds)"


def rows(task: Task, results: Results) -> Iterator[list[str]]:
    """Yield a task's rows, all methods of a number of workers next to each other."""
    for point in sorted(points(task), key=lambda point: point.workers):
        own, alone = results.tuned(point), results.carried(point)
        if own is None or alone is None:
            continue
        yield [
            str(point.workers),
            "all" if (point.workers, point.method) == (1, "average") else name_of(point),
            f"{rate(own.index - alone.index):.3g}x ({rate(own.index):g})",
            steps_of(own),
            _spread(own.levels, task),
            steps_of(alone),
            _spread(alone.levels, task),
        ]  # fmt: skip


def missing(task: Task, results: Results) -> str:
    """Return which points have no result yet."""
    every: dict[int, list[str]] = {}
    none: dict[int, list[str]] = {}
    for point in points(task):
        name = name_of(point)
        every.setdefault(point.workers, []).append(name)
        if results.carried(point) is None:
            none.setdefault(point.workers, []).append(name)
    parts = [
        f"{n} workers" + ("" if names == every[n] else f" ({'; '.join(names)})")
        for n, names in sorted(none.items())
    ]
    return f"Not run yet: {', '.join(parts)}.\n" if parts else ""


def table(task: Task, results: Results) -> str:
    """Return a task's section."""
    kind = f"{task.target:.0%}" if task.target <= 1 else f"{task.target} nats per byte"
    title, found = f"### {task.work}: steps to {kind}\n", list(rows(task, results))
    if not found:
        return f"{title}\nNot run yet.\n"
    head = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    lines = ["| " + " | ".join(cells) + " |" for cells in found]
    parts = [title, *head, *lines, "", longer_table(task, results)]
    return "\n".join([*parts, missing(task, results)])


def longer_table(task: Task, results: Results) -> str:
    """Return the table of the runs with more steps; "" if there are none."""
    lines = []
    for workers in sorted(task.counts):
        if (found := results.longer(task, workers)) is not None:
            most = found.records[0]["most_steps"]
            lines.append(f"| {workers} | {most} | {steps_of(found)} |")
    if not lines:
        return ""
    head = ["| workers | most steps | steps to target |", "|---|---|---|"]
    title = "Average at one worker's rate, in runs that may take more steps:\n"
    return "\n".join([title, *head, *lines, ""])


def section(tasks: tuple[Task, ...], results: Results) -> str:
    """Return the section of tables.md."""
    kept = [r for r in results.runs.all() if r.get("target")]
    hours = sum(record["seconds"] for record in kept) / 3600
    return "\n".join(
        [
            "## Steps to a target",
            "",
            "`python benchmarks/convergence steps_to_target`. Mean ± standard deviation over "
            f"{len(results.seeds.test)} test seeds, at the rate that {len(results.seeds.tuning)} "
            "other seeds chose, and at the rate that they chose for one worker. `after the "
            "budget`: accuracy in per cent or loss in nats per byte, after as many examples as "
            f"one worker has. {len(kept)} runs, {hours:.1f} core-hours.",
            "",
            *(table(task, results) for task in tasks),
        ]
    )


def draw(tasks: tuple[Task, ...], results: Results, output: Path) -> None:
    """Draw both pictures of each task that has runs, into `output`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for task in tasks:
        at_one = results.tuned(Point(task, "average", 1))
        if at_one is None or not at_one.steps:
            continue
        figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
        for axis, title, of in (
            (axes[0], "rate tuned at every point", results.tuned),
            (axes[1], "at one worker's rate", results.carried_longer),
        ):
            _draw_steps(axis, task, of)
            axis.set_title(f"{task.work}: {title}")
        _save(figure, output / f"steps-{task.work}.png")
        counts = [n for n in sorted(task.valleys) if _has_valley(task, n, results)]
        if counts:
            shape = {"figsize": (6 * len(counts), 5), "sharey": True, "squeeze": False}
            figure, grid = pyplot.subplots(1, len(counts), **shape)
            for axis, workers in zip(grid[0], counts, strict=True):
                _draw_valley(axis, task, workers, results)
            _save(figure, output / f"rates-{task.work}.png")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _draw_steps(axis: Any, task: Task, of: Any) -> None:
    """Draw steps over workers; a hollow mark at the top is a point that seeds missed."""
    for method in task.methods:
        xs, ys, hollow = [], [], []
        for workers in sorted(task.counts):
            shared = workers == 1 and method != LAYERWISE
            outcome = of(Point(task, "average" if shared else method, workers))
            if outcome is None:
                continue
            whole = len(outcome.steps) == len(outcome.records)
            if whole:
                xs.append(workers)
                ys.append(statistics.mean(outcome.steps))
            else:
                most = max(record["steps"] for record in outcome.records)
                hollow.append((workers, most))
        style = {"color": COLOURS[method], "marker": _MARKS[method]}
        label = name_of(Point(task, method, 2))
        axis.plot(xs, ys, label=label, markersize=5, **style)
        for x, y in hollow:
            axis.plot(x, y, fillstyle="none", markersize=9, **style)
    alone = of(Point(task, "average", 1))
    one = statistics.mean(alone.steps)
    counts = sorted(task.counts)
    axis.plot(counts, [one / n for n in counts], "k--", linewidth=0.8, label="perfect")
    for scaled, places in ((axis.xaxis, counts), (axis.yaxis, _POWERS)):
        scaled.axes.set(**{f"{scaled.axis_name}scale": "log"})
        scaled.set_ticks(places, [str(place) for place in places])
        scaled.set_ticks([], minor=True)
    axis.set(xlabel="workers", ylabel="steps to target (hollow: missed by a seed)")
    axis.legend(fontsize=8)


def _has_valley(task: Task, workers: int, results: Results) -> bool:
    return all(results.over_rates(Point(task, m, workers)) for m in task.methods)


def _draw_valley(axis: Any, task: Task, workers: int, results: Results) -> None:
    """Draw the level after the budget over the rate, and mark one worker's best."""
    for method in task.methods:
        found = results.over_rates(Point(task, method, workers))
        means = [statistics.mean(levels) for levels in found.values()]
        style = {"color": COLOURS[method], "marker": _MARKS[method], "markersize": 4}
        axis.plot(list(found), means, label=name_of(Point(task, method, 2)), **style)
    alone = transferred(
        Point(task, "average", workers), results.seeds, results.runs.find
    )
    if alone is not None:
        axis.axvline(rate(alone), color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    ylabel = f"validation {unit(task)} after the budget"
    axis.set(xlabel="rate (dotted: one worker's best)", ylabel=ylabel)
    axis.set_title(f"{task.work}, {workers} workers")
    axis.legend(fontsize=8)
