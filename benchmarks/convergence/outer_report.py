"""The tables of studies 8 and 9 and of the schedule: workers that change, outer rates, warm-ups."""

from __future__ import annotations

import statistics

from convergence import local_outer, program, schedule
from convergence.plan import Task
from convergence.target_report import Outcome, Results, steps_of, unit
from convergence.tuning import rate

_SCALINGS = {"": "fixed", "linear": "times N", "root": "times the root of N"}


def changing(task: Task, results: Results) -> str:
    """Return a workload's table of study 8; nothing if it was not run."""
    kept: dict[tuple[str, str], list[list[float]]] = {}
    settings = list(program.changing(task, results.seeds, results.runs.find))
    for setting in settings:
        if record := results.runs.find(setting):
            times = setting.lr / settings[0].lr
            of_rate = _SCALINGS[setting.scaling]
            of_rate += f", {times:.3g}x" if times > 1 else ""
            kept.setdefault((setting.op, of_rate), []).append(record["levels"])
    if not kept:
        return ""
    phases = program.PHASES.split("-")
    head = ["method", "one worker's rate", *(f"after {n} workers" for n in phases)]
    lines = [
        "| " + " | ".join([*row, *_cells(levels, len(phases))]) + " |"
        for row, levels in kept.items()
    ]
    title = f"### {task.work}: {unit(task)} when workers change\n"
    return "\n".join(
        [title, "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines, ""]
    )


def _cells(levels: list[list[float]], phases: int) -> list[str]:
    """Return mean and deviation of each phase, and how many runs did not get there."""
    cells = []
    for phase in range(phases):
        there = [abs(each[phase]) for each in levels if len(each) > phase]
        lost = len(levels) - len(there)
        text = f"{statistics.mean(there):.3f}" if there else ""
        text += f" ± {statistics.stdev(there):.3f}" if there[1:] else ""
        cells.append(f"{text} {lost} diverged".strip() if lost else text)
    return cells


def schedules(task: Task, results: Results) -> str:
    """Return the table of other warm-ups and momenta; nothing if no cell was run."""
    rows: dict[schedule.Variant, dict[str, str]] = {}
    for cell in schedule.cells(task):
        found = schedule.result(cell, results.seeds, results.runs.find)
        if found is not None:
            steps = steps_of(Outcome(found.index, found.records))
            rows.setdefault(cell.variant, {})[cell.method] = (
                f"{steps} ({rate(found.index):g})"
            )
    if len(rows) < 2:  # the first variant is study 7's own
        return ""
    head = ["warm-up", "momentum", *schedule.METHODS]
    lines = [
        f"| {variant.warm_up:.0%} | {variant.momentum} | "
        + " | ".join(row.get(method, "not run") for method in schedule.METHODS)
        + " |"
        for variant, row in rows.items()
    ]
    title = f"## {task.work}, {task.valleys[-1]} workers: other warm-ups and momenta\n"
    return "\n".join(
        [title, "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines, ""]
    )


def outer(scale: str, results: Results) -> str:
    """Return the table of study 9; nothing if no cell of it was run."""
    rows: dict[tuple[int, float, int], dict[str, str]] = {}
    for cell in local_outer.cells(scale):
        found = local_outer.results(cell, results.seeds, results.runs.find)
        if found is not None:
            key = (cell.workers, cell.momentum, cell.local_steps)
            rows.setdefault(key, {})[cell.method] = _outer_cell(*found)
    if not rows:
        return ""
    head = ["workers", "outer momentum", "local steps", *local_outer.METHODS]
    lines = [
        f"| {workers} | {momentum} | {steps} | "
        + " | ".join(row.get(method, "") for method in local_outer.METHODS)
        + " |"
        for (workers, momentum, steps), row in sorted(rows.items())
    ]
    title = "## Local steps with the outer rate tuned\n"
    return "\n".join(
        [title, "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines, ""]
    )


def _outer_cell(outer_rate: float, losses: list[float]) -> str:
    if len(losses) < 2:
        return f"{losses[0]:.3f} ({outer_rate:g})" if losses else "diverged"
    mean, deviation = statistics.mean(losses), statistics.stdev(losses)
    return f"{mean:.3f} ± {deviation:.3f} ({outer_rate:g})"
