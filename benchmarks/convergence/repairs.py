"""Ideas for the delta variant under momentum: what stands in the place of AdaSum of the changes.

Each worker's momentum averages its last gradients, so that the changes of two workers are more
parallel than their gradients, and AdaSum averages them. docs/convergence.md says what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from convergence.methods import adasum
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
    """AdaSum of what is new in each worker's change, plus what is kept of the last reduced one.

    New is what the worker's own last change, times the momentum and the ratio of the two
    learning rates, does not foretell. For SGD with momentum that is its gradient.
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
