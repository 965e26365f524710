"""The delta variant over `AdamOffload`: deltas are those of the masters, on the host.

Where the op forms the change (`delta_buckets.op_takes`), the bucket's flat tensor holds the
start, and the op reads newer masters and writes final ones where they are. Elsewhere a master
lives in the flat tensor, beside a start: a step updates it in place, turns it into the delta,
reduces that and makes weights of it again. Only then are parameters written. The device holds
nothing for any of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from adasum_hvd.torch.adam_offload import AdamOffload
from adasum_hvd.torch.optimizer.base import StepClosure
from adasum_hvd.torch.optimizer.delta import DeltaOptimizer
from adasum_hvd.torch.optimizer.delta_buckets import ChangeBucket


class OffloadDeltaOptimizer(DeltaOptimizer, AdamOffload):
    """`DeltaOptimizer` whose weights are masters; parameters that are their own change nothing."""

    def _weights(self, parameter: torch.Tensor) -> torch.Tensor:
        return self.master(parameter)

    def _wire_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return super()._wire_dtype(self._weights(parameter))

    def _make_bucket(self, *args: Any) -> ChangeBucket:
        bucket = super()._make_bucket(*args)
        for index, parameter in enumerate(self._members[-1]):
            weights, view = bucket.params[index], bucket.views[index]
            # With float16 on the wire the bucket is too coarse to be a master; where the op
            # forms the change, the bucket is the start.
            if (
                weights is not parameter
                and weights.dtype == view.dtype
                and not bucket.flat_is_start
            ):
                self.adopt_master(parameter, view)
                bucket.params[index] = view
        return bucket

    def _own_tensors(self) -> Iterable[torch.Tensor]:
        flats = [
            bucket.flat
            for bucket in self._buckets
            if not bucket.flat_is_start
            and any(
                p is not v for p, v in zip(bucket.params, bucket.views, strict=True)
            )
        ]
        return [*flats, *(bucket.start_weights for bucket in self._buckets)]

    def _keep_start(self, index: int) -> bool:
        # A master follows what others have changed since, and may be another one.
        self._buckets[index].params = [self.master(p) for p in self._members[index]]
        return super()._keep_start(index)

    def _find_weight_copies(self) -> tuple[str, ...]:
        return ()  # the masters are the weights that are reduced

    def _restore(self) -> None:
        super()._restore()
        self.publish(p for members in self._members for p in members)

    def step(self, closure: StepClosure = None) -> Any:
        """As the base's. Parameters change when the reduction is done, masters before it."""
        if self._reducing and self._local_step + 1 >= self._options.local_steps:
            self.hold_back()
        return super().step(closure)

    def _apply(self) -> None:
        super()._apply()
        self.publish(p for members in self._members for p in members)


# torch wraps step() with its hooks once per class; AdamOffload's is wrapped already.
OffloadDeltaOptimizer.step.hooked = True  # type: ignore[attr-defined]
