"""Counter of gradients during backward, which finds complete buckets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from adasum_hvd.base.frames import is_inside

# A gradient after backward, its version, and its address if it is in a bucket.
Seen = tuple[torch.Tensor, int, int | None]


class GradientReadyCounter:
    """Hooks on all parameters, which copy large gradients into buckets and report complete ones."""

    def __init__(
        self,
        buckets: Sequence[Any],
        passes: int,
        name_of: Callable[[torch.Tensor], str],
        on_complete: Callable[[Any], None],
    ):
        self._buckets, self._name_of = buckets, name_of
        self._on_complete = weakref.WeakMethod(on_complete)  # its object has this one
        self._sizes = [len(bucket.params) for bucket in buckets]
        self._places = [
            (parameter, index, place)
            for index, bucket in enumerate(buckets)
            for place, parameter in enumerate(bucket.params)
        ]
        self.expect(passes)
        self._missing = list(self._sizes)
        self._seen: list[Seen | None] = [None] * len(self._places)
        self.touched = False  # backward has made a gradient since the last reset
        hooks = ExitStack()
        for slot, (parameter, *at) in enumerate(self._places):
            hook = self._hook(slot, *at)
            hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        self.close = weakref.finalize(self, hooks.close)

    def _hook(
        self, slot: int, index: int, place: int
    ) -> Callable[[torch.Tensor], None]:
        # Weak: a parameter owns its hooks, and a hook must not keep the parameter alive.
        counting = weakref.ref(self)
        at_once = self._buckets[index].copies_eagerly(place)

        def on_gradient(parameter: torch.Tensor) -> None:
            counter = counting()
            if counter is None:
                return
            counter.touched = True
            left = counter._left[slot] = counter._left[slot] - 1
            in_bucket = at_once and left == 0 and counter._buckets[index].copy_in(place)
            gradient = parameter.grad
            if gradient is not None:
                address = gradient.data_ptr() if in_bucket else None
                counter._seen[slot] = gradient, gradient._version, address
            if left == 0:
                counter._complete(index)
            elif left < 0:
                counter._refuse(parameter)

        return on_gradient

    def _complete(self, index: int) -> None:
        """Count a parameter of a bucket as complete."""
        self._missing[index] -= 1
        if self._missing[index] == 0:
            on_complete: Any = self._on_complete()
            if on_complete is not None:
                on_complete(self._buckets[index])

    def _refuse(self, parameter: torch.Tensor) -> None:
        name = self._name_of(parameter)
        if is_inside("backward", "torch.utils.checkpoint"):
            raise RuntimeError(
                f"gradient of {name}: expected at most {self._passes} backward passes before "
                "step(), but reentrant checkpoints that use this layer more than once run one "
                "each; pass use_reentrant=False to torch.utils.checkpoint"
            )
        raise RuntimeError(
            f"gradient of {name}: expected at most {self._passes} backward passes before step(), "
            "but got one more; raise backward_passes_per_step, or call step() or zero_grad() of "
            "this optimizer (the model's does not notify it). An earlier DistributedOptimizer of "
            "the same parameters counts, too: delete it"
        )

    def expect(self, passes: int) -> None:
        """Set how many passes complete a gradient; none has begun."""
        self._passes, self._left = passes, [passes] * len(self._places)

    def passes_of(self, parameter: torch.Tensor) -> int:
        """Return how many passes have reached a parameter since the last reset."""
        pairs = zip(self._places, self._left, strict=True)
        return next((self._passes - n for (p, *_), n in pairs if p is parameter), 0)

    def reset(self) -> None:
        """Reset the counts."""
        if not self.touched:
            return  # saves thousands of writes in every step
        self._left[:] = [self._passes] * len(self._left)
        self._missing[:] = self._sizes
        self.touched = False
        self._seen[:] = [None] * len(self._seen)

    def changed(self, in_buckets: bool = False) -> torch.Tensor | None:
        """Return a parameter whose gradient was changed after backward, or None.

        With `in_buckets` only gradients count that were bucket views and were not dropped.
        """
        pairs = zip(self._places, self._seen, strict=True)
        for (parameter, index, place), seen in pairs:
            if seen is None:
                continue
            gradient, version, address = seen
            if in_buckets and (address is None or parameter.grad is None):
                continue
            moved = address is not None and gradient.data_ptr() != address
            if parameter.grad is not gradient or moved:
                return parameter
            if gradient._version != version and (
                self._buckets[index].holds(place, gradient)
                or not self._is_shared(gradient)
            ):
                return parameter
        return None

    def _is_shared(self, gradient: torch.Tensor) -> bool:
        """Return whether the last write to memory that gradients share was backward's."""
        if gradient.layout is not torch.strided:
            return False
        memory = gradient.untyped_storage().data_ptr()
        return any(
            version == gradient._version
            and other.layout is torch.strided
            and other.untyped_storage().data_ptr() == memory
            for other, version, _ in filter(None, self._seen)
        )
