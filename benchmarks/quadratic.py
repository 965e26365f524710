"""The quadratic problem of Horovod's AdaSum guide: steps until it is solved, rates swept.

    python benchmarks/quadratic.py

y = x^2 - 20 x + 50, model x^2 + p0 x + p1, p = (1, -1), one sample per worker and step. Its
rows are in docs/convergence.md.
"""

from __future__ import annotations

import statistics

import numpy as np

from adasum_hvd import reference


def quadratic_steps(workers: int, x_max: float, lr: float, seed: int, op: str) -> int:
    """Return the steps until both gradients are 0 twice running; 100 when 50 do not do.

    The guide computes in float32, where they become exactly 0; here, in float64, 1e-7 is 0.
    """
    generators = [np.random.default_rng([seed, 1 + rank]) for rank in range(workers)]
    p, still = np.array([1.0, -1.0]), 0
    for step in range(1, 51):
        gradients = []
        for generator in generators:
            x = generator.uniform(-x_max, x_max)
            error = (p[0] * x + p[1]) - (-20 * x + 50)
            gradients.append(np.array([2 * error * x, 2 * error]))
        reduced = (
            np.mean(gradients, 0) if op == "average" else reference.adasum(gradients)
        )
        still = still + 1 if np.all(np.abs(reduced) < 1e-7) else 0
        if still == 2:
            return step
        p = p - lr * reduced
        if not np.all(np.isfinite(p)):
            return 100
    return 100


def quadratic(quick: bool) -> list[dict]:
    """Sweep workers, x_max and learning rates; return the best rate of each."""
    rows = []
    rates = np.arange(0.10, 1.595, 0.1 if quick else 0.01)
    seeds = range(2 if quick else 10)
    for x_max in (1.0, 2.0):
        for workers in (1, 2, 4, 8, 16):
            for op in ("average", "adasum"):
                means = [
                    statistics.mean(
                        quadratic_steps(workers, x_max, lr, seed, op) for seed in seeds
                    )
                    for lr in rates
                ]
                best = int(np.argmin(means))
                rows.append({"x_max": x_max, "workers": workers, "op": op,
                             "lr": round(float(rates[best]), 2), "steps": means[best]})  # fmt: skip
    return rows


if __name__ == "__main__":
    for found in quadratic(quick=False):
        print(found)
