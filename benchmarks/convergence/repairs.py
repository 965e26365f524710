"""Ideas for the delta variant under momentum: replacements of AdaSum of the changes.

Each worker's momentum averages its last gradients, so that the changes of two workers are more
parallel than their gradients, and AdaSum averages them. docs/convergence.md has the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adasum_hvd.distributed.coefficients import adasum
from convergence.reductions import combine, gram

Vectors = Sequence[torch.Tensor]
Repair = Callable[[Vectors, Vectors | None, float], list[torch.Tensor]]
KEPT = 0.9  # of the last change, as each worker's momentum keeps it


class FreshCoefficients:
    """Combine the changes with the coefficients that AdaSum gives to this step's gradients."""

    def __call__(
        self, changes: Vectors, gradients: Vectors | None, rate: float
    ) -> list[torch.Tensor]:
        """Return one tensor for each of the changes (workers, ...)."""
        assert gradients is not None
        return combine(changes, adasum(gram(gradients))).tensors


class Innovation:
    """AdaSum of the new part of each worker's change, plus the kept part of the last reduced one.

    The new part is the change minus the worker's own last change, times the momentum and the
    ratio of the two learning rates. For SGD with momentum that is its gradient.
    """

    def __init__(self) -> None:
        self._own: list[torch.Tensor] = []
        self._reduced: list[torch.Tensor] = []
        self._rate = 0.0

    def __call__(
        self, changes: Vectors, gradients: Vectors | None, rate: float
    ) -> list[torch.Tensor]:
        """Return one tensor for each of the changes (workers, ...)."""
        new = list(changes)
        kept = KEPT * rate / self._rate if self._rate else 0.0
        if self._own:
            new = [c - kept * own for c, own in zip(changes, self._own, strict=True)]
        reduced = combine(new, adasum(gram(new))).tensors
        if self._own:
            pairs = zip(reduced, self._reduced, strict=True)
            reduced = [one + kept * last for one, last in pairs]
        self._own, self._reduced, self._rate = list(changes), reduced, rate
        return reduced


REPAIRS: dict[str, Callable[[], Repair]] = {
    "fresh-coefficients": FreshCoefficients,
    "innovation": Innovation,
}
