"""Results of the convergence studies, from which `adasum_lr` derives learning rates.

tests/unit/test_learning_rate.py computes the same rows from docs/convergence/raw.
"""

from __future__ import annotations

from typing import NamedTuple

from adasum_hvd.common import ops

__all__ = ["FIGURES", "MEASURED", "WORKLOAD", "Best", "Figures", "Measured"]


class Measured(NamedTuple):
    """Result of `benchmarks/convergence` for one reduction and number of workers, on test data.

    `factor` is the best rate of the grid divided by the single worker's rate. `accuracy` (a loss
    in studies that report one) and `deviation` are the mean and standard deviation at that rate.
    All three are None if the rate was not tuned for this number of workers. `unscaled` and
    `unscaled_deviation` are the same at the single worker's rate.
    """

    workers: int
    unscaled: float
    unscaled_deviation: float
    factor: float | None = None
    accuracy: float | None = None
    deviation: float | None = None


class Best(NamedTuple):
    """A rate divided by the single worker's rate, and its result."""

    factor: float
    result: float
    deviation: float


class Figures(NamedTuple):
    """One study: its workload in words, its unit and its rows.

    `trained` is the threshold of training: a worse result does not count.
    """

    workload: str
    unit: str
    is_loss: bool
    trained: float
    rows: dict[ops.ReduceOp, tuple[Measured, ...]]

    def best(self, row: Measured) -> Best | None:
        """Return the better of the row's two rates; None if untuned or below `trained`.

        The rate of the grid was chosen on validation data with one seed, so it can be worse on
        test data than the single worker's rate.
        """
        if row.factor is None or row.accuracy is None or row.deviation is None:
            return None
        sign = -1 if self.is_loss else 1
        better = Best(1.0, row.unscaled, row.unscaled_deviation)
        if sign * row.accuracy > sign * row.unscaled:
            better = Best(float(row.factor), row.accuracy, row.deviation)
        return better if sign * better.result >= sign * self.trained else None


WORKLOAD = (
    "LeNet-5 on 1437 digits, 30 epochs, 8 images per worker and step, SGD with momentum "
    "0.9, 5 seeds, rates a factor of 3 apart"
)
_ONE = Measured(1, 98.6, 0.4, 1, 98.6, 0.4)
MEASURED: dict[ops.ReduceOp, tuple[Measured, ...]] = {
    ops.Sum: (
        _ONE,
        Measured(2, 98.4, 0.3, 1, 98.4, 0.3),
        Measured(4, 98.7, 0.5, 0.3, 98.5, 0.8),
        Measured(8, 98.6, 0.3, 0.3, 98.6, 0.3),
        Measured(16, 97.8, 0.4, 0.3, 98.7, 0.4),
        Measured(32, 25.8, 38.8, 0.3, 95.6, 2.6),
        Measured(64, 9.2, 1.5, 1, 9.2, 1.5),
    ),
    ops.Average: (
        _ONE,
        Measured(2, 98.6, 0.6, 1, 98.6, 0.6),
        Measured(4, 98.4, 0.7, 3, 98.6, 0.6),
        Measured(8, 97.3, 1.0, 3, 98.7, 0.6),
        Measured(16, 78.2, 22.1, 10, 98.3, 0.7),
        Measured(32, 31.3, 19.3, 10, 96.4, 2.4),
        Measured(64, 12.9, 4.5, 10, 69.6, 28.3),
    ),
    ops.AdasumGrad: (
        _ONE,
        Measured(2, 99.1, 0.3, 1, 99.1, 0.3),
        Measured(4, 98.8, 0.4, 0.3, 98.2, 0.8),
        Measured(8, 98.8, 0.8, 1, 98.8, 0.8),
        Measured(16, 98.8, 0.7, 1, 98.8, 0.7),
        Measured(32, 98.9, 0.3, 1, 98.9, 0.3),
        Measured(64, 96.1, 1.3, 3, 98.4, 0.6),
    ),
    ops.AdasumDelta: (
        _ONE,
        Measured(2, 98.6, 0.5, 1, 98.6, 0.5),
        Measured(4, 98.8, 0.6, 3, 97.3, 0.9),
        Measured(8, 98.9, 0.4, 1, 98.9, 0.4),
        Measured(16, 98.8, 0.5, 1, 98.8, 0.5),
        Measured(32, 75.6, 26.1, 3, 97.6, 0.7),
        Measured(64, 28.8, 20.9, 10, 64.8, 29.7),
    ),
}
_ADAMW_ONE = Measured(1, 2.345, 0.017, 1, 2.345, 0.017)
_ADAM_ONE = Measured(1, 98.9, 0.5, 1, 98.9, 0.5)
FIGURES = {
    "momentum": Figures(WORKLOAD, "%", False, 50.0, MEASURED),
    "adam": Figures(
        "LeNet-5 on 1437 digits, 30 epochs, 8 images per worker and step, Adam, 3 seeds, "
        "rates a factor of 3 apart",
        "%",
        False,
        50.0,
        {
            ops.AdasumGrad: (_ADAM_ONE, Measured(32, 99.0, 0.2, 3, 98.8, 0.4)),
            ops.AdasumDelta: (_ADAM_ONE, Measured(32, 98.0, 0.6, 1, 98.0, 0.6)),
        },
    ),
    "adamw": Figures(
        "a GPT of 44 160 parameters on 2^18 bytes of text, 64 per worker and step, AdamW, 5 "
        "seeds, rates a factor of 3 apart; AdasumGrad and Average were equal within one standard "
        "deviation at 8 and 64",
        "nats per byte",
        True,
        4.0,
        {
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
