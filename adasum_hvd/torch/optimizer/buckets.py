"""Many parameters as one Horovod tensor, each still with AdaSum coefficients of its own.

A bucket lays its parameters end to end in a flat tensor of the wire dtype. Horovod then
negotiates one name instead of hundreds, and the op, told where the segments are, reduces
each as if it had come alone: bucketing never changes a result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from adasum_hvd import binding, ops
from adasum_hvd.options import ProcessSet
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch import wire

LARGE_BYTES = (
    1 << 16
)  # copied in less time than a call of its own takes are smaller ones
NamedParameter = tuple[str, torch.nn.Parameter]


class Bucket:
    """Parameters of one wire dtype on one device, and the flat tensor that carries them.

    Attributes:
        names: the parameters'.
        entry: what Horovod calls the flat tensor.
        gradients: the parameters' parts of it that may be their `.grad`, as DDP's bucket views;
            None for one of another dtype or layout than the parameter, and where a round that is
            dropped (the parameters changed before `step`) must find the rank's own again.

    Args:
        label: what is carried; makes the bucket's name in Horovod unique.
        named: the parameters; the same names and shapes in the same order on all ranks.
        wire_dtype: dtype of the flat tensor.
        op: the reduction.
        factors: prescale and postscale factor.
        process_set: the ranks that reduce.
        with_flags: carry, behind the parameters, one scalar for each that says whether any
            rank had something to reduce.
    """

    def __init__(
        self,
        label: str,
        named: Sequence[NamedParameter],
        wire_dtype: torch.dtype,
        op: ops.ReduceOp,
        factors: tuple[float, float],
        process_set: ProcessSet,
        with_flags: bool = False,
    ):
        self.params = [parameter for _, parameter in named]
        self.names = [name for name, _ in named]
        sizes = [parameter.numel() for parameter in self.params]
        flags = len(sizes) if with_flags else 0
        self._op = op
        self.flat = self._make_flat(
            sum(sizes) + flags, wire_dtype, self.params[0].device
        )
        *pieces, self.flags = self.flat.split([*sizes, flags])
        self.views = [
            piece.view(parameter.shape)
            for piece, parameter in zip(pieces, self.params, strict=True)
        ]
        self.gradients = (
            self._gradients() if _repeats(op, factors) else [None] * len(sizes)
        )
        self._factors, self.process_set = factors, process_set
        self._handle: int | None = None
        shape_hash = hashlib.sha256(
            repr([(name, tuple(p.shape)) for name, p in named]).encode()
        )
        self._name = f"{label}/{shape_hash.hexdigest()[:12]}"
        if ops.is_adasum(op):
            self._name = binding.segmented(self._name, [*sizes, *[1] * flags])
        self.entry = wire.entry(self._name, op, wire_dtype)

    def _make_flat(
        self, elements: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if ops.is_adasum(self._op):
            return wire.zeros(elements, dtype, device)
        return torch.zeros(elements, dtype=dtype, device=device)

    def _gradients(self) -> list[torch.Tensor | None]:
        # Version counters of their own: what `fill` copies beside a gradient must not look like a
        # change of it.
        return [
            view.data
            if parameter.dtype == view.dtype and parameter.is_contiguous()
            else None
            for view, parameter in zip(self.views, self.params, strict=True)
        ]

    @property
    def in_flight(self) -> bool:
        """Whether the bucket was started and not yet finished."""
        return self._handle is not None

    def fill(self, sources: Sequence[torch.Tensor | None]) -> None:
        """Copy one tensor per parameter in, densely; None counts as zeros and clears its flag."""
        self.flags.fill_(1)
        views, tensors = [], []
        for index, source in enumerate(sources):
            if source is None:
                self.views[index].zero_()
                if self.flags.numel():
                    self.flags[index] = 0
            elif source is not self.gradients[index]:
                views.append(self.views[index])
                tensors.append(source.to_dense() if source.is_sparse else source)
        if tensors:
            torch._foreach_copy_(views, tensors)

    def take(self, index: int) -> None:
        """Move a large gradient in, so that backward finds its memory again for the next one.

        Small ones go together, in `fill`. `.grad` is the bucket's part from here on.
        """
        parameter = self.params[index]
        if parameter.nbytes < LARGE_BYTES:
            return
        mine, gradient = self.gradients[index], parameter.grad
        if mine is None or gradient is None or gradient is mine:
            return
        if gradient.layout is torch.strided and not gradient.requires_grad:
            mine.copy_(gradient)
            parameter.grad = mine

    def start(self) -> None:
        """Begin the reduction. Collective over the process set; does not block."""
        self._handle = torch_ops.allreduce_async_(
            self.flat,
            name=self._name,
            op=self._op,
            prescale_factor=self._factors[0],
            postscale_factor=self._factors[1],
            process_set=self.process_set,
        )

    def finish(self) -> None:
        """Wait until the views hold the reduced values."""
        handle, self._handle = self._handle, None
        assert handle is not None
        wire.synchronize_idly(handle)

    def drop(self) -> None:
        """Forget a reduction that ended with Horovod."""
        self._handle = None

    def close(self) -> None:
        """Wait for a reduction that is under way, and forget the weights in the op."""
        if self.in_flight:
            self.finish()
        if ops.is_adasum(self._op):
            binding.forget_weights(wire.LIBRARY, self.entry)


def _repeats(op: ops.ReduceOp, factors: tuple[float, float]) -> bool:
    """Return whether a result that is reduced again, by the ranks that had a part, stays."""
    return (
        ops.is_adasum(op)
        and factors == (1.0, 1.0)
        and torch_ops.settings()["group_op"] == "adasum"
    )
