"""Many parameters as one Horovod tensor, each still with AdaSum coefficients of its own.

A bucket concatenates its parameters in a flat tensor of the wire dtype. Horovod then negotiates
one name instead of hundreds. The op gets the segments from the name and reduces each separately:
bucketing never changes a result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from adasum_hvd.base import ops
from adasum_hvd.base.options import Options, ProcessSet
from adasum_hvd.distributed.reduced import show_writes
from adasum_hvd.horovod import binding
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch import wire
from adasum_hvd.torch.optimizer.buckets.flags import Flags

# `fill` copies smaller gradients together: one call per gradient would cost more than its copy.
LARGE_BYTES = 64 << 10
NamedParameter = tuple[str, torch.nn.Parameter]


class Bucket:
    """Parameters of one wire dtype on one device, and their flat tensor, `entry` in Horovod.

    Names, shapes and order are the same on all ranks. The label makes Horovod's name unique. Flags
    are one more scalar per parameter, which tells what the ranks had to reduce.
    """

    _is_shared = True  # the host's other ranks read `flat`

    def __init__(
        self,
        label: str,
        named: Sequence[NamedParameter],
        wire_dtype: torch.dtype,
        options: Options,
        process_set: ProcessSet,
        with_flags: bool = False,
    ):
        op = options.op
        self.names, self.params = map(list, zip(*named, strict=True))
        sizes = [parameter.numel() for parameter in self.params]
        flags = len(sizes) if with_flags else 0
        self._options, self.process_set = options, process_set
        make = wire.zeros if self._is_shared and ops.is_adasum(op) else torch.zeros
        elements, device = sum(sizes) + flags, self.params[0].device
        self.flat = make(elements, dtype=wire_dtype, device=device)
        self.own_tensors = {self.flat}  # those that the optimizer alone would not need
        *pieces, numbers = self.flat.split([*sizes, flags])
        self.flags = Flags(numbers, op, process_set.size())
        self.views = [
            piece.view(parameter.shape)
            for piece, parameter in zip(pieces, self.params, strict=True)
        ]
        # Reducing a result again leaves it unchanged.
        self._is_idempotent = (
            ops.is_adasum(op)
            and options.factors == (1.0, 1.0)
            and torch_ops.settings()["group_op"] == "adasum"
        )
        self._addresses = [view.data_ptr() for view in self.views]
        self._handle: int | None = None
        shapes = repr([(name, tuple(p.shape)) for name, p in named])
        self._name = f"{label}/{hashlib.sha256(shapes.encode()).hexdigest()[:12]}"
        if ops.is_adasum(op):
            self._name = binding.segmented(self._name, [*sizes, *[1] * flags])
        self.entry = wire.entry(self._name, op, wire_dtype)

    def allows_view(self, index: int) -> bool:
        """Return whether a bucket view may be `.grad`, as DDP's: another reduction keeps it."""
        parameter, view = self.params[index], self.views[index]
        return (
            self._is_idempotent
            and parameter.dtype == view.dtype
            and parameter.device == view.device
            and parameter.is_contiguous()
        )

    def holds(self, index: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is a part of the bucket, by its address: `.data` may be set."""
        return (
            gradient.layout is torch.strided
            and gradient.data_ptr() == self._addresses[index]
            and gradient.dtype == self.flat.dtype
            and gradient.is_contiguous()
        )

    def set_gradient_view(self, index: int) -> None:
        """Make a parameter's part of the bucket its `.grad`."""
        # `.data` has its own version counter: a write to another view is no change of this one.
        self.params[index].grad = self.views[index].data

    @property
    def in_flight(self) -> bool:
        """Whether the bucket was started and not yet finished."""
        return self._handle is not None

    def fill(self, sources: Sequence[torch.Tensor | None]) -> None:
        """Copy in one tensor per parameter, densely; None becomes zeros."""
        self.flags.set_dense()
        views, tensors = [], []
        for index, source in enumerate(sources):
            if source is None or source.is_sparse:
                self.flags.set_from(index, source)
            if source is None:
                self.views[index].zero_()
            elif not self.holds(index, source):
                views.append(self.views[index])
                tensors.append(source.to_dense() if source.is_sparse else source)
        if tensors:
            torch._foreach_copy_(views, tensors)

    def copies_eagerly(self, index: int) -> bool:
        """Return whether a parameter's gradients are large enough for `copy_in`."""
        return self._is_idempotent and self.views[index].nbytes >= LARGE_BYTES

    def copy_in(self, index: int) -> bool:
        """Copy in a gradient, if allowed; return whether `.grad` is a bucket view now."""
        gradient = self.params[index].grad
        if gradient is None or self.holds(index, gradient):
            return gradient is not None
        is_plain = gradient.layout is torch.strided and not gradient.requires_grad
        allowed = is_plain and self.allows_view(index)
        if allowed:
            self.views[index].copy_(gradient)
            self.set_gradient_view(index)
        return allowed

    def start(self) -> None:
        """Begin the reduction. Collective over the process set; does not block."""
        before, after = self._options.factors
        self._handle = torch_ops.allreduce_async_(
            self.flat,
            name=self._name,
            op=self._options.op,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self.process_set,
        )

    def finish(self) -> None:
        """Wait until the views hold the reduced values."""
        handle, self._handle = self._handle, None
        assert handle is not None
        wire.synchronize(handle)

    def write_back(self, only_views: bool = False) -> None:
        """Set gradients to the reduced values, `only_views`: those that may be bucket views."""
        gradients, views, written = [], [], []
        pairs = zip(self.params, self.views, strict=True)
        any_sparse = not only_views and self.flags.tells_of_sparse
        for index, (parameter, view) in enumerate(pairs):
            gradient = parameter.grad
            if only_views and (gradient is None or not self.allows_view(index)):
                continue
            if gradient is None and self.flags.is_none(index):
                continue
            is_sparse = gradient is not None and gradient.is_sparse
            has_graph = gradient is not None and gradient.requires_grad
            unlike = gradient is None or any_sparse  # perhaps another rank's is sparse
            if is_sparse or (unlike and self.flags.is_sparse(index)):
                rows = gradient.sparse_dim() if is_sparse else 1
                parameter.grad = view.to(parameter.dtype).to_sparse(rows)
            elif self.allows_view(index):
                if gradient is None or not self.holds(index, gradient):
                    self.set_gradient_view(index)
                written.append(parameter.grad)
            elif gradient is None or has_graph:
                parameter.grad = view.to(parameter.dtype, copy=True)
            else:
                gradients.append(gradient)
                views.append(view)
            if has_graph and parameter.grad is not None:
                with torch.enable_grad():
                    parameter.grad = _WithoutGraph.apply(
                        parameter, parameter.grad, self.names[index]
                    )
        if gradients:
            torch._foreach_copy_(gradients, views)
        show_writes(written)

    def drop(self) -> None:
        """Forget a reduction that was interrupted by Horovod's end."""
        self._handle = None

    def close(self) -> None:
        """Unregister the weights in the op; no reduction is in flight."""
        if ops.is_adasum(self._options.op):
            binding.forget_weights(wire.LIBRARY, self.entry)


class _WithoutGraph(torch.autograd.Function):
    """A reduced gradient of `backward(create_graph=True)`, which cannot be differentiated.

    Its graph would reach through every rank's loss. It requires a gradient, as the local one did,
    because some optimizers skip other gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, reduced: torch.Tensor, name: str
    ) -> torch.Tensor:
        ctx.name = name
        return reduced.data

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"gradient of {ctx.name}: expected an optimizer that does not differentiate the "
            "reduced gradient, which has no graph, but got one that does, such as AdaHessian; "
            "pass op=AdasumDelta, whose local steps have this rank's own gradients"
        )
