"""`adasum-hvd plot`: draw a monitor's records, the orthogonality of tensors over training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from adasum_hvd.monitor.files import records

_MOST_LABELS = 40  # next to a heat map, so that they stay readable


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "plot", help="draw the records of hvd.AdasumMonitor: a heat map and curves"
    )
    parser.add_argument("file", type=Path, help="a .jsonl file", metavar="run.jsonl")
    parser.add_argument(
        "-o", "--output", type=Path, help="picture (default: next to the records, .png)"
    )
    parser.set_defaults(run=run, errors=(OSError, ValueError))


def run(arguments: argparse.Namespace) -> None:
    """Draw a file."""
    found = records(arguments.file)
    target = arguments.output or arguments.file.with_suffix(".png")
    draw(found, target)
    print(f"picture: {target}")


def new_figure(**arguments: Any) -> Any:
    """Return a new figure of matplotlib, without a window, or None if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(**arguments)


def draw(found: list[dict[str, Any]], target: Path) -> None:
    """Draw the orthogonality of every tensor as a heat map, and as curves with their mean.

    The suffix of `target` gives the format. As figure 1 of arXiv 2006.02924.
    """
    import numpy as np

    names = list(dict.fromkeys(name for one in found for name in one["tensors"]))
    height = 3 + 0.16 * min(len(names), _MOST_LABELS)
    figure = new_figure(figsize=(9, 3 + height), layout="constrained")
    if figure is None:
        raise ValueError("expected matplotlib, but got none; pip install matplotlib")
    above, below = figure.subplots(2, height_ratios=[height, 3])
    tensors, steps = [one["tensors"] for one in found], [one["step"] for one in found]
    drawn = [[t.get(name, {}).get("orthogonality") for t in tensors] for name in names]
    values = np.array(drawn, float)
    joined = found[-1]["joined"]
    last = steps[-1] - steps[-2] if steps[1:] else 1
    edges = [*steps, steps[-1] + last]
    mesh = above.pcolormesh(
        edges, np.arange(len(names) + 1) - 0.5, values, vmin=1 / joined, vmax=1
    )
    every = -(-len(names) // _MOST_LABELS)
    above.set_yticks(range(0, len(names), every), names[::every], fontsize=7)
    above.invert_yaxis()
    above.set_title("|AdaSum|² / Σ|g|²")
    figure.colorbar(mesh, ax=above, label=f"1/{joined}: parallel    1: orthogonal")
    below.plot(steps, values.T, linewidth=0.6, color="grey", alpha=0.6)
    with np.errstate(invalid="ignore"):
        mean = np.nansum(values, 0) / np.isfinite(values).sum(0)
    below.plot(steps, mean, linewidth=2, color="black", label="mean over tensors")
    below.set(xlabel="step", ylabel="orthogonality", ylim=(0, 1.05))
    below.axhline(1 / joined, linestyle=":", linewidth=0.8, color="grey")
    below.legend(loc="lower right")
    figure.savefig(target, dpi=120)
