"""Draw what AdaSum does to gradients: the pictures of docs/explained.md and README.

python benchmarks/pictures.py docs/pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from adasum_hvd import reference

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"Sum": "tab:orange", "Average": "tab:blue", "AdaSum": "tab:green"}


def results(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Return what each reduction makes of two gradients."""
    return {"Sum": a + b, "Average": (a + b) / 2, "AdaSum": reference.adasum([a, b])}


def towards(degrees: float, length: float = 1.0) -> np.ndarray:
    """Return a vector of that length, so many degrees from the first axis."""
    angle = np.deg2rad(degrees)
    return length * np.array([np.cos(angle), np.sin(angle)])


def arrow(axes: Any, vector: np.ndarray, **style: Any) -> None:
    """Draw a vector from the origin."""
    axes.annotate("", vector, (0, 0), arrowprops={"arrowstyle": "-|>", **style})


def draw_pairs(target: Path) -> None:
    """Draw two gradients at three angles, and the three reductions of them."""
    figure, places = pyplot.subplots(1, 3, figsize=(9, 3.2), sharey=True)
    for axes, between in zip(places, (0, 60, 90), strict=True):
        a, b = towards(45 - between / 2), towards(45 + between / 2, 0.6)
        for vector in (a, b):
            arrow(axes, vector, color="black", linewidth=1.5)
        for name, vector in results(a, b).items():
            linestyle = "-" if name == "AdaSum" else "--"
            arrow(axes, vector, color=COLOURS[name], linewidth=2, linestyle=linestyle)
            axes.plot(*vector, "o", color=COLOURS[name], label=name)
        axes.set(xlim=(-0.1, 1.6), ylim=(-0.1, 1.6), aspect="equal")
        axes.set_title(
            {0: "parallel: the mean", 60: "60 degrees", 90: "orthogonal: the sum"}[
                between
            ]
        )
    places[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def draw_angles(target: Path) -> None:
    """Draw the length of the result over the angle between two unit gradients, and with ranks."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    angles = np.linspace(0, 180, 181)
    lengths = [
        {name: np.linalg.norm(v) for name, v in results(towards(0), towards(t)).items()}
        for t in angles
    ]
    for name, colour in COLOURS.items():
        left.plot(angles, [found[name] for found in lengths], color=colour, label=name)
    left.set(
        xlabel="angle between two unit gradients, degrees",
        ylabel="length of the result",
    )
    left.legend()
    ranks = [1, 2, 4, 8, 16, 32, 64]
    generator = np.random.default_rng(0)
    for shared, style in ((0.0, ":"), (0.5, "--"), (1.0, "-")):
        lengths_by_ranks = [
            np.linalg.norm(reference.adasum(gradients(generator, count, shared)))
            for count in ranks
        ]
        right.plot(ranks, lengths_by_ranks, style, color=COLOURS["AdaSum"],
                   label=f"{shared:.0%} of each gradient in common")  # fmt: skip
    right.plot(
        ranks,
        np.sqrt(ranks),
        color="grey",
        linewidth=0.8,
        label="sum of orthogonal ones",
    )
    right.set(xlabel="ranks", ylabel="length of AdaSum", xscale="log", yscale="log")
    right.set_xticks(ranks, map(str, ranks))
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def gradients(
    generator: np.random.Generator, count: int, shared: float
) -> list[np.ndarray]:
    """Return unit vectors of 2000 elements whose squares have that share in common."""
    common = generator.normal(size=2000)
    common /= np.linalg.norm(common)
    noise = generator.normal(size=(count, 2000))
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    return list(np.sqrt(shared) * common + np.sqrt(1 - shared) * noise)


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    draw_pairs(folder / "pair.png")
    draw_angles(folder / "angles.png")


if __name__ == "__main__":
    main()
