"""Functions that DDP's hooks run after each reduced backward pass, in both engines."""

from __future__ import annotations

from collections.abc import Callable


class Rounds:
    """A base of the hooks' states."""

    def __init__(self) -> None:
        self._on_round: list[Callable[[], None]] = []

    def on_round(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call` after each fully reduced backward pass; return a function that stops it."""
        self._on_round.append(call)
        return lambda: self._on_round.remove(call)

    def end_round(self) -> None:
        """Run the functions of `on_round` when a pass is reduced, or queued on the device."""
        for call in self._on_round:
            call()
