"""AdaScale: the mean, a gain that multiplies the learning rate, and a schedule that counts it.

References:
    Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", arXiv
    2007.05105: algorithm 1 and appendix B.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from adasum_hvd.base.frames import is_making_state
from adasum_hvd.distributed.coefficients import mean


class AdaScale:
    """A rule: the mean; in addition it estimates the gain of N ranks, over all tensors.

    With unbiased estimates of the variance `v` of one rank's gradient and the squared norm `m` of
    its mean, the gain is `(v + m) / (v / N + m)`.
    """

    def __init__(self) -> None:
        self.variance = self.squared_mean = 0.0
        self.count, self.ranks = 0, 1  # recorded steps; N of the last one
        # Of this pass and of the last one: sums of squares over ranks, and of their mean's.
        self._sums: list[torch.Tensor] = []
        self._finished: list[torch.Tensor] = []

    def __call__(self, gram: torch.Tensor) -> torch.Tensor:
        """Return 1 / N for each, and keep the sums."""
        self.ranks = gram.shape[1]
        squares = _total(gram.diagonal(dim1=1, dim2=2))
        self._sums.append(torch.stack([squares, _total(gram) / self.ranks**2]))
        return mean(gram)

    def begin_pass(self) -> None:
        """Forget a pass that broke off."""
        self._sums = []

    def end_pass(self) -> None:
        """Note that all tensors of a pass are reduced, or queued on the device."""
        self._read()
        self._finished, self._sums = self._sums, []

    @property
    def gain(self) -> float:
        """The gain after the last pass; blocks on a device."""
        self._read()
        below = self.variance / self.ranks + self.squared_mean
        return (self.variance + self.squared_mean) / below if below > 0 else 1.0

    def _read(self) -> None:
        if self._finished:
            columns = torch.stack([one.cpu() for one in self._finished]).T
            self._finished = []
            # Sorted, because lanes of several devices end in any order.
            rows = columns.sort().values
            squares, squared_mean = (float(_total(row)) for row in rows)
            self.update(squares, squared_mean, self.ranks)

    def update(self, squares: float, squared_mean: float, ranks: int) -> None:
        """Take in a step of N ranks, with `sum |g_i|^2` and `|mean g_i|^2`, if they are finite.

        Moving averages, which are plain means of the first steps. They keep `max(0, 1 - N / 1000)`
        of the past (appendix B.3).
        """
        if ranks == 1 or not math.isfinite(squares + squared_mean):
            return
        variance = max((squares - ranks * squared_mean) / (ranks - 1), 0.0)
        fresh = variance, max(squared_mean - variance / ranks, 0.0)
        self.count, self.ranks = self.count + 1, ranks
        kept = min(max(0.0, 1.0 - ranks / 1000), 1.0 - 1.0 / self.count)
        self.variance, self.squared_mean = (
            kept * old + (1 - kept) * new
            for old, new in zip((self.variance, self.squared_mean), fresh, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the estimates."""
        self._read()
        names = "variance", "squared_mean", "count"
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved estimates; with another number of ranks they hold as well."""
        self._finished = []
        self.ranks = 1  # until the next pass: a lone rank has no gain
        vars(self).update(state)


def _total(values: torch.Tensor) -> torch.Tensor:
    """Return the sum in one order on every processor, so that all ranks have the same gain."""
    values = values.flatten()
    while len(values) > 1:
        half = len(values) // 2
        rest = values[2 * half :]
        values = torch.cat([values[:half] + values[half : 2 * half], rest])
    return values.sum()


class AdaScaleLR(LambdaLR):
    """AdaScale's learning rate: `gain * lr * schedule(floor(sum of the gains before))`.

    Schedule and rate are those of one rank: docs/distributed.md, "Rules". `param_groups` have that
    rate between steps.

    Args:
        optimizer: any; for `LocalSGD` its outer optimizer.
        state: made with `rule="adascale"`: an `AdasumState`, the handle of `adasum_replicate` or a
            `LocalSGD`.
        schedule: a function from one rank's step number, an int, to a factor of the rate; or one
            function for each group of parameters. By default the rate is constant.

    Attributes:
        gained: one rank's steps so far.

    Raises:
        ValueError: the state has another rule.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        state: Any,
        schedule: Callable[[int], float] | list[Callable[[int], float]] = lambda _: 1.0,
    ):
        self._adascale: AdaScale = state.rule.adascale
        self.gained = 0.0
        self._rates: list[Any] = []  # during a step
        super().__init__(optimizer, schedule)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def get_lr(self) -> list[float]:
        """Return one rank's rate for each group."""
        step = math.floor(self.gained)
        pairs = zip(self.base_lrs, self.lr_lambdas, strict=True)
        return [rate * schedule(step) for rate, schedule in pairs]

    # torch runs both twice if a step calls `super().step()`.
    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if is_making_state():
            return
        groups = optimizer.param_groups
        self._rates = self._rates or [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate * self._adascale.gain

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._rates:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
            self._rates = []
            self.gained += self._adascale.gain

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state and the estimates of the gain."""
        state = dict(super().state_dict())
        del state["_rates"]
        return state | {"_adascale": self._adascale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        state = dict(state)
        self._adascale.load_state_dict(state.pop("_adascale"))
        super().load_state_dict(state)
