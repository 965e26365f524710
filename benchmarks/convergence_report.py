"""Tables and picture of benchmarks/convergence.py."""

from __future__ import annotations

import statistics
from pathlib import Path

OPS = ("sum", "average", "adasum-grad", "adasum-delta")
TARGET = 0.95  # the accuracy whose first step the tables give


def spread(values: list[float]) -> str:
    """Return mean and standard deviation, in percent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):5.1f} +- {100 * deviation:4.1f}"


def cell(runs: list[dict]) -> str:
    """Return what the table says of the runs of one reduction at one number of workers."""
    reached = [r["steps_to_target"] for r in runs if r["steps_to_target"]]
    when = f"{statistics.mean(reached):.0f} ({len(reached)})" if reached else "never"
    return (
        f"{spread([r['accuracy'] for r in runs])}; lr {runs[0]['lr']:g}; "
        f"{100 * TARGET:.0f} % at {when}"
    )


def table(results: list[dict], title: str) -> str:
    """Return one Markdown table: workers down, reductions across.

    A cell is the accuracy over the seeds, the learning rate, and the mean of the steps to
    TARGET over the seeds that reached it, with their number.
    """
    lines = [f"### {title}", "", "| workers | steps | " + " | ".join(OPS) + " |"]
    lines.append("|---" * (2 + len(OPS)) + "|")
    for workers in sorted({r["workers"] for r in results}):
        cells, steps = [], 0
        for op in OPS:
            runs = [r for r in results if r["workers"] == workers and r["op"] == op]
            steps = runs[0]["steps"] if runs else steps
            cells.append(cell(runs) if runs else "")
        lines.append(f"| {workers} | {steps} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: list[dict], output: Path) -> None:
    """Draw accuracy over workers, and AdaSum's orthogonality over time per layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for op in OPS:
        runs = [r for r in results if r["op"] == op]
        counts = sorted({r["workers"] for r in runs})
        means = [
            statistics.mean(r["accuracy"] for r in runs if r["workers"] == n)
            for n in counts
        ]
        left.plot(counts, means, "o-", label=op)
    left.set_xscale("log", base=2)
    left.set(xlabel="workers", ylabel="test accuracy", title="sequential learning rate")
    left.legend()
    most = max(r["workers"] for r in results)
    run = next(r for r in results if r["op"] == "adasum-delta" and r["workers"] == most)
    for layer in run["orthogonality"][0][1]:
        if layer.endswith("weight"):
            points = [(step, layers[layer]) for step, layers in run["orthogonality"]]
            right.plot(*zip(*points, strict=True), label=layer)
    right.set(
        xlabel="step",
        ylabel="|AdaSum|^2 / sum |delta_i|^2",
        title=f"{most} workers, delta",
    )
    right.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=110)
