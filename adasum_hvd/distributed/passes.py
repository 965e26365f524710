"""Records of backward passes: the hooks that have fired, and the gradients already reduced."""

from __future__ import annotations

import weakref

import torch

from adasum_hvd.distributed.sharding import local_of
from adasum_hvd.distributed.units import Unit

# States of a gradient before a reduction.
MISSING, REDUCED, NEW = range(3)


class Reduced:
    """A gradient that was reduced, and how often it had been written in place by then."""

    def __init__(self, gradient: torch.Tensor):
        self._gradient, self._version = weakref.ref(gradient), _version(gradient)

    def writes_to(self, gradient: torch.Tensor | None) -> int | None:
        """Return how often it was written in place since; None if `gradient` is another tensor.

        Backward that adds to it writes once, and `zero_grad(set_to_none=False)` before it once
        more.
        """
        if gradient is None or self._gradient() is not gradient:
            return None
        return _version(gradient) - self._version


def _version(gradient: torch.Tensor) -> int:
    """Return the count of a gradient's writes in place.

    FSDP accumulates into the local tensor, which does not count as a write to the DTensor.
    """
    local = local_of(gradient)
    return gradient._version + (0 if local is gradient else local._version)


class Progress:
    """How far a backward pass has come with a unit."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.expected = [1] * len(unit.parameters)  # the most hooks of any pass so far
        self.passes = 0
        self.begin_pass()

    @property
    def is_complete(self) -> bool:
        """Whether this pass has fired as many hooks as any pass so far."""
        return self.passes > 0 and self.fired == self.expected

    def begin_pass(self) -> None:
        """Begin a pass, also after one that broke off."""
        self.fired = [0] * len(self.unit.parameters)  # hooks in this pass
        self.reduced = False

    def end_pass(self) -> None:
        """Keep the number of hooks that this pass has fired."""
        self.expected = list(map(max, self.expected, self.fired))
        self.passes += 1
