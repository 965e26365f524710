"""The delta variant over `AdamOffload`: changes of the float32 masters on the host."""

from __future__ import annotations

from typing import Any

import torch

from adasum_hvd.torch.optimizer.delta import DeltaReducer


class OffloadDeltaReducer(DeltaReducer):
    """`DeltaReducer` of masters; parameters are written last. One may be its own master."""

    def _connect(self) -> None:
        super()._connect()
        self._copies.places = ()  # the masters are the weights

    def weights_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter's master."""
        return self.optimizer.master(parameter)

    def _begin_window(self) -> None:
        # The user may have changed parameters; their masters follow, as new tensors maybe.
        for bucket, members in zip(self.buckets, self.members, strict=True):
            bucket.params = list(map(self.optimizer.master, members))
        super()._begin_window()

    def _publish(self) -> None:
        self.optimizer.publish(p for members in self.members for p in members)

    @torch.no_grad()
    def _restore(self) -> None:
        super()._restore()
        self._publish()

    def step(self, *closure: Any) -> Any:
        """As the base's. Masters change before the reduction, parameters after it."""
        if self.reducing and self._local_step + 1 >= self.options.local_steps:
            self.optimizer.hold_back()
        return super().step(*closure)

    def _apply(self) -> None:
        super()._apply()
        self._publish()
