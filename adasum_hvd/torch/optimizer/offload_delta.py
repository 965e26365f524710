"""The delta variant over `AdamOffload`: changes of the float32 masters on the host.

If the op forms the change (`buckets.weight_change.op_takes`), the bucket's flat tensor holds the
start. The op reads the new masters in place and writes the reduced ones there.

Otherwise the flat tensor holds the masters, and another tensor holds the start. A step updates the
masters, replaces them by their change, reduces it, and adds the start. Parameters are written last.
Nothing of this is on the device.
"""

from __future__ import annotations

from typing import Any

import torch

from adasum_hvd.torch.optimizer.buckets import ChangeBucket
from adasum_hvd.torch.optimizer.delta import DeltaReducer


class OffloadDeltaReducer(DeltaReducer):
    """`DeltaReducer` of masters. A float32 parameter may be its own master."""

    keeps_masters = True

    def weights_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter's master."""
        return self.optimizer.master(parameter)

    def _make_bucket(self, *args: Any) -> ChangeBucket:
        bucket = super()._make_bucket(*args)
        for index, parameter in enumerate(self.members[-1]):
            weights, view = bucket.params[index], bucket.views[index]
            # A float16 bucket is too coarse for masters. If the op forms the change, the
            # bucket holds the start.
            if (
                weights is not parameter
                and weights.dtype == view.dtype
                and not bucket.flat_is_start
            ):
                self.optimizer.adopt_master(parameter, view)
                bucket.params[index] = view
        return bucket

    def own_tensors(self) -> list[torch.Tensor]:
        """As the base's, without buckets that hold only masters."""
        flats = [
            bucket.flat
            for bucket in self.buckets
            if not bucket.flat_is_start
            and any(
                p is not v for p, v in zip(bucket.params, bucket.views, strict=True)
            )
        ]
        return [*flats, *(bucket.start_weights for bucket in self.buckets)]

    def _begin_bucket(self, index: int) -> bool:
        # The user may have changed parameters; their masters follow, as new tensors maybe.
        self.buckets[index].params = [
            self.optimizer.master(p) for p in self.members[index]
        ]
        return super()._begin_bucket(index)

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
