"""Results of the convergence studies, from which `adasum_lr` derives learning rates.

tests/unit/test_learning_rate.py computes the same rows from docs/convergence/raw.
"""

from __future__ import annotations

from typing import NamedTuple

from adasum_hvd.base import ops

__all__ = ["FIGURES", "RIVALS", "Best", "Figures", "Measured", "ratio"]


def ratio(one: int, other: int) -> float:
    """Return the larger number of workers over the smaller one."""
    return max(one, other) / min(one, other)


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

    def rows_of(self, op: ops.ReduceOp) -> tuple[Measured, ...]:
        """Return a reduction's rows; `Sum` has those of `Average`."""
        return self.rows[ops.Average if op is ops.Sum else op]

    def nearest(self, op: ops.ReduceOp, workers: int) -> tuple[Measured, Best]:
        """Return the row with a result whose number of workers is nearest in ratio, and its best.

        Of two that are equally near it is the one with fewer workers.
        """
        known = [(row, best) for row in self.rows_of(op) if (best := self.best(row))]
        return min(known, key=lambda of: ratio(of[0].workers, workers))

    def best(self, row: Measured) -> Best | None:
        """Return the better of the row's two rates; None if a seed missed at the best one.

        The rate of the grid was chosen on validation data with other seeds, so it can be worse on
        test data than the single worker's rate.
        """
        if row.result is None:
            return None
        known = []
        if row.unscaled is not None and row.unscaled_deviation is not None:
            known.append(Best(1.0, row.unscaled, row.unscaled_deviation))
        if row.factor and row.deviation is not None:
            known.append(Best(row.factor, row.result, row.deviation))
        sign = -1 if self.lower_is_better else 1
        return max(known, key=lambda best: sign * best.result, default=None)


_MOMENTUM_ONE = Measured(1, 826, 85, 1, 826, 85)
_ADAMW_ONE = Measured(1, 1629, 161, 1, 1629, 161)
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
                Measured(128, None, None, 5.2, 129, 13),
            ),
            ops.AdasumGrad: (
                _MOMENTUM_ONE,
                Measured(2, 451, 19, 1.73, 478, 178),
                Measured(4, 321, 107, 1, 321, 107),
                Measured(8, 179, 42, 1.73, 152, 14),
                Measured(16, 136, 18, 1.73, 114, 25),
                Measured(32, 103, 13, 1.73, 80, 7),
                Measured(64, 87, 11, 1.73, 76, 13),
                Measured(128, 72, 11, 1.73, 68, 8),
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
        "seeds, rates a factor of 1.73 apart",
        "steps to 2.5 nats per byte",
        lower_is_better=True,
        is_linear=False,
        rows={
            ops.Average: (
                _ADAMW_ONE,
                Measured(2, 850, 36, 1.73, 831, 121),
                Measured(4, 504, 21, 1.73, 440, 36),
                Measured(8, 343, 15, 3, 295, 30),
                Measured(16, 257, 2, 3, None, None),
                Measured(32, 213, 9, 5.2, 152, 19),
                Measured(64, 185, 8, 5.2, 135, 33),
                Measured(128, 162, 5, 5.2, 121, 23),
            ),
            ops.AdasumGrad: (
                _ADAMW_ONE,
                Measured(2, 824, 0, 1.73, 804, 98),
                Measured(4, 504, 21, 1.73, 434, 45),
                Measured(8, 328, 18, 3, 291, 34),
                Measured(16, 240, 12, 5.2, 198, 18),
                Measured(32, 191, 0, 3, 135, 14),
                Measured(64, 164, 9, 5.2, 103, 13),
                Measured(128, 143, 5, 3, 94, 11),
            ),
            ops.AdasumDelta: (
                _ADAMW_ONE,
                Measured(8, 388, 24, 1.73, 327, 0),
                Measured(16, None, None, 1.73, None, None),
                Measured(32, 240, 12, 3, 227, 27),
            ),
        },
    ),
}
# Other rules at one worker's rate: steps and deviation, by study, workers and rule.
RIVALS: dict[str, dict[int, dict[str, tuple[int, int]]]] = {
    "momentum": {
        2: {"adascale": (540, 138), "mean_direction": (599, 82)},
        4: {"adascale": (310, 53), "mean_direction": (311, 84)},
        8: {"adascale": (186, 30), "mean_direction": (186, 28)},
        16: {"adascale": (161, 44), "mean_direction": (137, 14)},
        32: {"adascale": (111, 26), "mean_direction": (106, 23), "rda": (227, 35)},
        64: {"adascale": (92, 14), "mean_direction": (89, 8)},
        128: {"adascale": (86, 14), "mean_direction": (84, 10)},
    },
    "adamw": {
        2: {"adascale": (853, 76), "mean_direction": (789, 70)},
        4: {"adascale": (536, 23), "mean_direction": (489, 17)},
        8: {"adascale": (333, 22), "mean_direction": (328, 18)},
        16: {"adascale": (237, 8), "mean_direction": (247, 8)},
        32: {"adascale": (188, 12), "mean_direction": (194, 7)},
        64: {"adascale": (162, 5), "mean_direction": (164, 9)},
        128: {"adascale": (145, 6), "mean_direction": (145, 6)},
    },
}
