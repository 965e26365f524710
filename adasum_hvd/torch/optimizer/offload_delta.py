"""The delta variant over `AdamOffload`: deltas are those of the masters, on the host.

Where the op forms the change (`buckets.weight_change.op_takes`), the bucket's flat tensor holds the
start, and the op reads newer masters and writes final ones where they are. Elsewhere a master
lives in the flat tensor, next to a start: a step updates it in place, turns it into the delta,
reduces that and makes weights of it again. Only then are parameters written. The device holds
nothing for any of this.
"""

from __future__ import annotations

from typing import Any

import torch

from adasum_hvd.torch.optimizer.buckets import ChangeBucket
from adasum_hvd.torch.optimizer.delta import DeltaReducer


class OffloadDeltaReducer(DeltaReducer):
    """`DeltaReducer` whose weights are masters; parameters that are their own change nothing."""

    keeps_masters = True

    def weights_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter's master."""
        return self.optimizer.master(parameter)

    def _make_bucket(self, *args: Any) -> ChangeBucket:
        bucket = super()._make_bucket(*args)
        for index, parameter in enumerate(self.members[-1]):
            weights, view = bucket.params[index], bucket.views[index]
            # With float16 on the wire the bucket is too coarse to be a master; where the op
            # forms the change, the bucket is the start.
            if (
                weights is not parameter
                and weights.dtype == view.dtype
                and not bucket.flat_is_start
            ):
                self.optimizer.adopt_master(parameter, view)
                bucket.params[index] = view
        return bucket

    def own_tensors(self) -> list[torch.Tensor]:
        """As the base's, without buckets that hold masters only."""
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
        # A master follows what others have changed since, and may be another one.
        self.buckets[index].params = [
            self.optimizer.master(p) for p in self.members[index]
        ]
        return super()._begin_bucket(index)

    def _publish(self) -> None:
        self.optimizer.publish(p for members in self.members for p in members)

    def _restore(self) -> None:
        super()._restore()
        self._publish()

    def step(self, *closure: Any) -> Any:
        """As the base's. Parameters change when the reduction is done, masters before it."""
        if self.reduction.reducing and self._local_step + 1 >= self.options.local_steps:
            self.optimizer.hold_back()
        return super().step(*closure)

    def _apply(self) -> None:
        super()._apply()
        self._publish()
