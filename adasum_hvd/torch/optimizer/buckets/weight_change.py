"""Buckets of weights whose change is reduced, formed in the op if possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from adasum_hvd.base import ops
from adasum_hvd.base.options import Options
from adasum_hvd.distributed.reduced import show_writes
from adasum_hvd.horovod import binding
from adasum_hvd.torch import wire
from adasum_hvd.torch.optimizer.buckets.bucket import Bucket
from adasum_hvd.torch.optimizer.checks import as_integers

# The op reads and writes the weights of these buckets by address. They must not be freed,
# even if the model and the optimizer are.
_in_flight: set[ChangeInOpBucket] = set()


class ChangeBucket(Bucket):
    """Weights whose change since `snapshot` is in `flat`; formed and applied by torch."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._make_start(self._options.start_copy == "host")
        self.own_tensors.add(self.start_weights)
        self._agreed = False  # all ranks have the same start
        # Whether weights are rounded from a wider start at the end of a window.
        self._start_differs = self.start_weights.dtype != self.params[0].dtype

    def _make_start(self, on_host: bool) -> None:
        self.start_weights = torch.empty(
            self.flat.shape,
            dtype=torch.promote_types(self.params[0].dtype, self.flat.dtype),
            device="cpu" if on_host else self.flat.device,
        )
        pieces = self.start_weights.split([view.numel() for view in self.views])
        self._start_views = list(map(torch.Tensor.view_as, pieces, self.views))

    def snapshot(self) -> None:
        """Record the current weights."""
        torch._foreach_copy_(self._start_views, self.params)

    def changes(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each weight at `snapshot` and now, until `start`."""
        return zip(self._start_views, self.params, strict=True)

    def begin_window(self) -> bool:
        """Record the start; return whether it differs from the weights that the ranks agreed on."""
        if self._agreed and all(map(_equal, self._weights(), self._start_views)):
            return False
        self.snapshot()
        return True

    def _weights(self) -> Sequence[torch.Tensor]:
        """Return the weights, of the start's dtype and on its device."""
        if self._start_differs or self.start_weights.device != self.flat.device:
            return [parameter.to(self.start_weights) for parameter in self.params]
        return self.params

    def start(self) -> None:
        """Begin to reduce the change since `snapshot`. Collective; does not block."""
        start = self.start_weights
        if start.dtype == self.flat.dtype and start.device == self.flat.device:
            torch._foreach_copy_(self.views, self.params)
            self.flat.sub_(start)
        else:
            for view, (old, param) in zip(self.views, self.changes(), strict=True):
                view.copy_(param.to(start.dtype) - old.to(param.device))
        super().start()

    def largest(self) -> torch.Tensor:
        """Return the largest magnitude in the reduced change; not finite if an element is not."""
        return _largest([self.flat])

    def apply(self) -> None:
        """Set the weights, after `finish`, to start + reduced change: equal on all ranks."""
        self.start_weights.add_(self.flat.to(self.start_weights.device))
        self.restore()

    def restore(self) -> None:
        """Set the weights to the start, which is equal on all ranks."""
        torch._foreach_copy_(self.params, self._start_views)
        if self._start_differs:
            self.snapshot()
        self._agreed = True


class ChangeInOpBucket(ChangeBucket):
    """Weights whose change is formed and applied in the op, which reads and writes them in place.

    `flat` holds the weights at `snapshot`. The op subtracts it while sending and adds it while
    receiving, which saves one tensor and four passes. `finish` leaves new weights in the
    parameters. On the CPU the op returns their checksum, which the next window compares.
    """

    _is_shared = False  # only this rank reads `flat`
    _registered: list[tuple[int, int, torch.dtype, bool]] | None = None
    _checksum: int | None = None  # of the weights that the last window left

    def _make_start(self, on_host: bool) -> None:
        self.start_weights, self._start_views = self.flat, self.views

    def begin_window(self) -> bool:
        """As the base's, in one pass after a reduction on the CPU."""
        expected, self._checksum = self._checksum, None
        if expected is None:
            return super().begin_window()
        self._register()  # `flat` is not the agreed start now, so nothing is compared with it
        dtype = str(self.flat.dtype).removeprefix("torch.")
        threads = torch.get_num_threads()
        found = binding.record_weights(wire.LIBRARY, self.entry, dtype, threads)
        return found != expected

    def start(self) -> None:
        """As the base's; the parameters' memory must stay where it is until `finish`."""
        self._register()
        Bucket.start(self)
        _in_flight.add(self)

    def _register(self) -> None:
        """Give the op the addresses of the weights, if they have moved; none may be converted."""
        places = [
            (param.data_ptr(), param.numel(), param.dtype, param.is_contiguous())
            for param in self.params
        ]
        if places == self._registered:
            return
        self._check_converted()
        addresses, sizes, *_ = map(list, zip(*places, strict=True))
        start = self.flat.data_ptr()
        binding.register_weights(wire.LIBRARY, self.entry, start, sizes, addresses)
        self._registered = places

    def _check_converted(self) -> None:
        flat = self.flat
        for param, view in zip(self.params, self.views, strict=True):
            found = (param.dtype, param.device, param.is_contiguous(), param.shape)
            if found != (flat.dtype, flat.device, True, view.shape):
                raise RuntimeError(
                    "delta variant: expected weights that stay contiguous, of shape "
                    f"{tuple(view.shape)}, {flat.dtype} and on {flat.device} until the reduction, "
                    f"but got one of shape {tuple(param.shape)}, {param.dtype}, on "
                    f"{param.device}, strides {param.stride()}; convert the model between "
                    "reductions, and make another optimizer for other shapes"
                )

    def finish(self) -> None:
        """As the base's; autograd then knows that the parameters have changed."""
        try:
            super().finish()
        finally:
            _in_flight.discard(self)
        show_writes(self.params)

    def drop(self) -> None:
        """As the base's; the op writes to the weights no more."""
        super().drop()
        _in_flight.discard(self)

    def largest(self) -> torch.Tensor:
        """As the base's, but of the new weights, because no tensor holds the change."""
        return _largest(self.params)

    def apply(self) -> None:
        """Note what the weights are, which `finish` has set."""
        if self.flat.device.type == "cpu":
            self._checksum = binding.weights_checksum(wire.LIBRARY, self.entry)
        else:
            self.snapshot()
        self._agreed = True


def op_takes(
    weights: Sequence[torch.Tensor], wire_dtype: torch.dtype, options: Options
) -> bool:
    """Return whether the op can read and write these weights itself: docs/torch.md, start copy."""
    devices = {"cpu"}
    if binding.reduces_on_devices(wire.LIBRARY):
        devices.add("cuda")
    return (
        ops.is_adasum(options.op)
        and options.clip_delta_norm is None
        and wire.op_is_on()
        and all(
            weight.device.type in devices
            and weight.dtype == wire_dtype
            and weight.is_contiguous()
            for weight in weights
        )
    )


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare the bits of weights: NaN equals itself."""
    return torch.equal(as_integers(found.detach()), as_integers(expected))


def _largest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm(filled, torch.inf)).max()
