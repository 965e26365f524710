"""Results of the convergence studies, from which `adasum_lr` derives learning rates.

tests/unit/test_learning_rate.py computes the same rows from docs/convergence/raw.
"""

from __future__ import annotations

from typing import NamedTuple

from adasum_hvd.common import ops

__all__ = ["FIGURES", "Best", "Figures", "Measured"]


class Measured(NamedTuple):
    """Result of `benchmarks/convergence` for one reduction and number of workers, on test data.

    `factor` is the best rate of the grid divided by the single worker's rate. `result` (steps to a
    target, accuracy or loss) and `deviation` are the mean and standard deviation at that rate.
    `unscaled` and `unscaled_deviation` are the same at the single worker's rate. None: a seed
    missed the target, or the rate was not tuned for this number of workers.
    """

    workers: int
    unscaled: float | None
    unscaled_deviation: float | None
    factor: float | None = None
    result: float | None = None
    deviation: float | None = None


class Best(NamedTuple):
    """A rate divided by the single worker's rate, and its result."""

    factor: float
    result: float
    deviation: float


class Figures(NamedTuple):
    """One study: its workload in words, its unit and its rows.

    `is_linear`: a sum at a rate is the average at that rate times the number of workers.
    """

    workload: str
    unit: str
    lower_is_better: bool
    is_linear: bool
    rows: dict[ops.ReduceOp, tuple[Measured, ...]]

    def covers(self, op: ops.ReduceOp) -> bool:
        """Return whether there are results for a reduction."""
        return op in self.rows or (self.is_linear and op is ops.Sum)

    def best(self, row: Measured) -> Best | None:
        """Return the better of the row's two rates; None if it has no result at either.

        The rate of the grid was chosen on validation data with other seeds, so it can be worse on
        test data than the single worker's rate.
        """
        known = []
        if row.unscaled is not None and row.unscaled_deviation is not None:
            known.append(Best(1.0, row.unscaled, row.unscaled_deviation))
        if row.factor and row.result is not None and row.deviation is not None:
            known.append(Best(row.factor, row.result, row.deviation))
        sign = -1 if self.lower_is_better else 1
        return max(known, key=lambda best: sign * best.result, default=None)


_MOMENTUM_ONE = Measured(1, 826, 85, 1, 826, 85)
_ADAMW_ONE = Measured(1, 2.345, 0.017, 1, 2.345, 0.017)
_ADAM_ONE = Measured(1, 98.9, 0.5, 1, 98.9, 0.5)
FIGURES = {
    "momentum": Figures(
        "LeNet-5 on 1437 digits, 8 images per worker and step, SGD with momentum 0.9, 5 seeds, "
        "rates a factor of 1.73 apart",
        "steps to 97 %",
        lower_is_better=True,
        is_linear=True,
        rows={
            ops.Average: (
                _MOMENTUM_ONE,
                Measured(2, 662, 133, 3, 551, 107),
                Measured(4, 552, 121, 5.2, 217, 33),
                Measured(8, 526, 97, 9, 167, 52),
                Measured(16, 469, 58, 5.2, 146, 13),
                Measured(32, 490, 50, 9, 142, 44),
                Measured(64, 478, 76, 5.2, 156, 57),
            ),
            ops.AdasumGrad: (
                _MOMENTUM_ONE,
                Measured(2, 451, 19, 1.73, 478, 178),
                Measured(4, 321, 107, 1, 321, 107),
                Measured(8, 179, 42, 1.73, 152, 14),
                Measured(16, 136, 18, 1.73, 114, 25),
                Measured(32, 103, 13, 1.73, 80, 7),
                Measured(64, 87, 11, 1.73, 76, 13),
            ),
            ops.AdasumDelta: (
                _MOMENTUM_ONE,
                Measured(8, 255, 52, 1, 255, 52),
                Measured(16, 220, 27, 1, 220, 27),
                Measured(32, 193, 33, 1, 193, 33),
            ),
        },
    ),
    "adam": Figures(
        "LeNet-5 on 1437 digits, 30 epochs, 8 images per worker and step, Adam, 3 seeds, "
        "rates a factor of 3 apart",
        "%",
        lower_is_better=False,
        is_linear=False,
        rows={
            ops.AdasumGrad: (_ADAM_ONE, Measured(32, 99.0, 0.2, 3, 98.8, 0.4)),
            ops.AdasumDelta: (_ADAM_ONE, Measured(32, 98.0, 0.6, 1, 98.0, 0.6)),
        },
    ),
    "adamw": Figures(
        "a GPT of 44 160 parameters on 2^18 bytes of text, 64 per worker and step, AdamW, 5 "
        "seeds, rates a factor of 3 apart; AdasumGrad and Average were equal within one standard "
        "deviation at 8 and 64",
        "nats per byte",
        lower_is_better=True,
        is_linear=False,
        rows={
            ops.Average: (
                _ADAMW_ONE,
                Measured(8, 2.396, 0.002, 3.333, 2.381, 0.030),
                Measured(32, 2.756, 0.032, 3.333, 2.713, 0.099),
                Measured(64, 3.081, 0.035, 3.333, 2.877, 0.061),
            ),
            ops.AdasumGrad: (
                _ADAMW_ONE,
                Measured(8, 2.396, 0.005, 3.333, 2.371, 0.010),
                Measured(32, 2.661, 0.016, 3.333, 2.549, 0.015),
                Measured(64, 3.045, 0.023, 10, 2.834, 0.065),
            ),
            ops.AdasumDelta: (
                _ADAMW_ONE,
                Measured(8, 2.417, 0.013, 1, 2.417, 0.013),
                Measured(32, 2.773, 0.045, 10, 2.689, 0.046),
                Measured(64, 3.086, 0.022, 10, 2.876, 0.051),
            ),
        },
    ),
}
