"""The pictures of the convergence studies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convergence.runs import Runs
from convergence.studies import OPS, Study
from convergence.training import is_trained

_COLOURS = dict(zip(OPS, ("tab:red", "tab:gray", "tab:blue", "tab:orange"), strict=True))


def draw(made: Sequence[Study], runs: Runs, output: Path) -> None:
    """Draw what the studies of momentum and AdamW found, into `output`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for study in made:
        if study.name not in ("adamw", "momentum"):
            continue
        figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5))
        for axis, rate in zip(axes, ("sequential", "own"), strict=False):
            _results(axis, study, runs, rate)
        _agreement(axes[2], study, runs)
        figure.tight_layout()
        figure.savefig(output / f"{study.name}.png", dpi=90)
        pyplot.close(figure)


def _results(axis: Any, study: Study, runs: Runs, rate: str) -> None:
    """Draw the test figure over the workers, one line per reduction."""
    digits = study.sequential.work == "digits"
    single = study.records(study.rows[0], runs)
    for op in OPS:
        points = [(1, single)] if single else []
        for row in study.rows[1:]:
            if row.rate == rate and row.setting.op == op:
                points.append((row.setting.workers, study.records(row, runs)))
        good = [
            (n, [_figure(r) for r in kept if is_trained(r)]) for n, kept in sorted(points, key=lambda p: p[0])
        ]
        good = [(n, values) for n, values in good if values]
        if len(good) > 1:
            means = [statistics.mean(values) for _, values in good]
            low = [m - min(v) for m, (_, v) in zip(means, good, strict=True)]
            high = [max(v) - m for m, (_, v) in zip(means, good, strict=True)]
            counts = [n for n, _ in good]
            axis.errorbar(counts, means, (low, high), fmt="o-", capsize=3, label=op, color=_COLOURS[op])
    axis.set_xscale("log", base=2)
    axis.set(
        xlabel="workers",
        ylabel="test accuracy, %" if digits else "test loss, nats per byte",
        title="one worker's learning rate" if rate == "sequential" else "its own best learning rate",
    )
    axis.legend()


def _agreement(axis: Any, study: Study, runs: Runs) -> None:
    """Draw |AdaSum|^2 / sum |v_i|^2 over the steps of the first seed, at the most workers."""
    most = max(row.setting.workers for row in study.rows)
    for row in study.rows:
        setting = row.setting
        if setting.workers != most or row.rate != "sequential":
            continue
        for record in study.records(row, runs)[:1]:
            points = [
                (point["step"], point["orthogonality"])
                for point in record.get("curve", [])
                if "orthogonality" in point
            ]
            if points and setting.op in OPS[2:]:
                axis.plot(*zip(*points, strict=True), label=setting.op, color=_COLOURS[setting.op])
    axis.axhline(1 / most, color="black", linewidth=0.5)
    axis.set(xlabel="step", ylabel="|AdaSum|^2 / sum |v_i|^2", title=f"{most} workers: 1 orthogonal, 1/{most} parallel")
    if axis.lines:
        axis.legend()


def _figure(record: dict[str, Any]) -> float:
    return 100 * record["accuracy"] if "accuracy" in record else record["test"]
