"""How far backward has come with a unit, and the reduction of its gradients, in a lane.

A small header goes first: pass, unit, and the state of each gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.reduction import reduce_tensors
from adasum_hvd.distributed.rules import Rule
from adasum_hvd.distributed.units import Unit

__all__ = ["MISSING", "NEW", "REDUCED", "Progress", "UnitReducer"]

MISSING, REDUCED, NEW = range(3)  # states of a gradient before a reduction
_EXPECTED = (
    "adasum_replicate: expected gradients of one pass and unit from all replicas"
)


class Progress:
    """How far a backward pass has come with a unit."""

    def __init__(self, unit: Unit):
        self.unit = unit
        # The most hooks of any pass of a kind so far, if there was one.
        self._most: dict[bool, list[int]] = {}
        self.begin_pass(accumulated=False)

    @property
    def expected(self) -> list[int]:
        """The most hooks of any pass of this kind so far, at least one for each parameter."""
        return self._most.get(self._accumulated, [1] * len(self.unit.parameters))

    @property
    def is_complete(self) -> bool:
        """Whether this pass has fired as many hooks as any pass of its kind so far."""
        return self._accumulated in self._most and self.fired == self.expected

    def begin_pass(self, accumulated: bool) -> None:
        """Begin a pass, also after one that broke off.

        Args:
            accumulated: passes without a reduction came before it. FSDP then fires the hooks of
                a module that runs twice two times, and otherwise once.
        """
        self._accumulated = accumulated
        self.fired = [0] * len(self.unit.parameters)  # hooks in this pass
        self.reduced = False

    def end_pass(self) -> None:
        """Keep the number of hooks that this pass has fired."""
        if any(self.fired):
            self._most[self._accumulated] = list(map(max, self.expected, self.fired))


class UnitReducer:
    """Reduces units, and stops for good if the replicas do not reduce the same one.

    Args:
        rule: how gradients are joined.
        widest: the most parameters of a unit. Rows of all units have one length, so that replicas
            which reduce different ones can tell.
    """

    def __init__(self, rule: Rule, widest: int):
        self._rule, self._widest = rule, widest
        self._problem = ""

    def reduce(
        self,
        unit: Unit,
        gradients: list[torch.Tensor],
        states: list[int],
        place: tuple[int, int],
        communicator: Communicator,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Reduce a unit's gradients in place.

        Gradients that an earlier pass has reduced, and this one has not touched on any replica,
        stay as they are: a sum of equal gradients is not the gradient.

        Args:
            unit: the unit.
            gradients: this rank's shards of them.
            states: of the gradients.
            place: the number of the pass, and of the unit in it.
            communicator: the replicas.

        Returns:
            The gradients, and int64 [replicas, parameters]: their states before.

        Raises:
            RuntimeError: a replica reduces, or has reduced, another unit or pass; on all replicas,
                and nothing is sent any more. On a CUDA device that is an assertion of the device's.

        Collective: the replicas, and the ranks that hold the other shards; blocks on a CPU.
        """
        if self._problem:
            raise RuntimeError(self._problem)
        device = gradients[0].device
        row = [*place, *states, *[0] * (self._widest - len(states))]
        rows = communicator.all_gather(torch.tensor(row, device=device))
        self._check(rows[:, :2])
        everywhere = rows[:, 2 : 2 + len(states)]
        is_new = (everywhere == NEW).any(0)
        if device.type == "cpu" and not is_new.any():
            return gradients, everywhere
        kept = {
            number: gradients[number].clone()
            for number, state in enumerate(states)
            if state == REDUCED
        }
        reduce_tensors(gradients, communicator, self._rule, unit.shards)
        for number, before in kept.items():
            found = torch.where(is_new[number], gradients[number], before)
            gradients[number].copy_(found)
        return gradients, everywhere

    def _check(self, places: torch.Tensor) -> None:
        """Raise unless all replicas are at one place; a device's values are not waited for."""
        is_equal = (places == places[0]).all()
        if places.device.type == "cuda":
            torch._assert_async(is_equal, _EXPECTED)
        elif places.device.type == "cpu" and not is_equal:
            got = ", ".join(f"pass {one} unit {unit}" for one, unit in places.tolist())
            self._problem = (
                f"{_EXPECTED}, but got those of {got} (by replica; rank {dist.get_rank()}); if a "
                "pass fails on one replica, end the job on all of them"
            )
            raise RuntimeError(self._problem)
