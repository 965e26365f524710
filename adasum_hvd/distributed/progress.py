"""How far backward has come with each unit: the hooks that have fired, and how many will."""

from __future__ import annotations

from adasum_hvd.distributed.units import Unit


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
