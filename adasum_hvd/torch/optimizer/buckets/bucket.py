"""Many parameters as one Horovod tensor, each still with AdaSum coefficients of its own.

A bucket concatenates its parameters in a flat tensor of the wire dtype. Horovod then negotiates
one name instead of hundreds. The op gets the segments from the name and reduces each separately:
bucketing never changes a result.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from adasum_hvd.common import binding, ops
from adasum_hvd.common.options import ProcessSet
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch import wire

# `fill` copies smaller gradients together: one call per gradient would cost more than its copy.
LARGE_BYTES = 64 << 10
NamedParameter = tuple[str, torch.nn.Parameter]


class Bucket:
    """Parameters of one wire dtype on one device, and their flat tensor.

    Attributes:
        names: of the parameters.
        entry: name of the flat tensor in Horovod.

    Args:
        label: makes the bucket's name in Horovod unique.
        named: the parameters; the same names and shapes in the same order on all ranks.
        wire_dtype: dtype of the flat tensor.
        op: the reduction.
        factors: prescale and postscale factor.
        process_set: the ranks that reduce.
        with_flags: append one scalar per parameter, which is not zero if any rank had a tensor to
            reduce.
        keeps_sparse: gradients stay sparse where a rank has a sparse one, on all ranks; needs flags
            and no AdaSum. False makes them dense.
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
        keeps_sparse: bool = False,
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
        self._repeats = _repeats(op, factors)
        self._addresses = [view.data_ptr() for view in self.views]
        self._factors, self.process_set = factors, process_set
        # A flag for sparse gradients, above the sum of all ranks' flags for dense ones. Infinity
        # has a meaning of its own.
        ranks = process_set.size()
        fits = 2 * ranks * ranks < torch.finfo(wire_dtype).max
        self._sparse_flag = 2.0 * ranks if keeps_sparse and fits else 1.0
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

    def allows_view(self, index: int) -> bool:
        """Return whether a parameter's part of the bucket may be its `.grad`, as DDP's views.

        False if dtype or layout differ, or if a second reduction would change the result:
        after a dropped reduction the rank's own gradient must still be there.
        """
        parameter, view = self.params[index], self.views[index]
        return (
            self._repeats
            and parameter.dtype == view.dtype
            and parameter.device == view.device
            and parameter.is_contiguous()
        )

    def holds(self, index: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is a parameter's part of the bucket.

        The address decides, because pruning and conversions of the model set `.data`.
        """
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
        """Copy in one tensor per parameter, densely; None becomes zeros and clears the flag."""
        self.flags.fill_(1)
        views, tensors = [], []
        for index, source in enumerate(sources):
            if source is None:
                self.views[index].zero_()
                if self.flags.numel():
                    self.flags[index] = 0
            elif not self.holds(index, source):
                if source.is_sparse and self.flags.numel():
                    self.flags[index] = self._sparse_flag
                views.append(self.views[index])
                tensors.append(source.to_dense() if source.is_sparse else source)
        if tensors:
            torch._foreach_copy_(views, tensors)

    def announce_change(self) -> None:
        """Notify all ranks, by this reduction, that this rank's parameters change."""
        self.flags.fill_(math.inf)

    @property
    def announces_change(self) -> bool:
        """Whether a rank has announced a change. False on devices: reading would stall them."""
        return self.flags.is_cpu and not bool(self.flags.isfinite().all())

    def copies_eagerly(self, index: int) -> bool:
        """Return whether a parameter's gradients are large enough for `copy_in`."""
        return self._repeats and self.views[index].nbytes >= LARGE_BYTES

    def copy_in(self, index: int) -> bool:
        """Copy a gradient into the bucket and make `.grad` its view there.

        Backward can then reuse the gradient's memory.

        Returns:
            Whether `.grad` is a bucket view now.
        """
        gradient = self.params[index].grad
        if gradient is None or self.holds(index, gradient):
            return gradient is not None
        if (
            gradient.layout is not torch.strided
            or gradient.requires_grad
            or not self.allows_view(index)
        ):
            return False
        self.views[index].copy_(gradient)
        self.set_gradient_view(index)
        return True

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
        wire.synchronize(handle)

    @property
    def is_under_way(self) -> bool:
        """Whether the bucket is in flight, or holds a gradient that waits for the others."""
        return self.in_flight or any(
            parameter.grad is not None and self.holds(index, parameter.grad)
            for index, parameter in enumerate(self.params)
        )

    def write_back(self, only_views: bool = False) -> None:
        """Set gradients to the reduced values: to bucket views, without a copy, if allowed.

        Args:
            only_views: skip parameters without a gradient, and gradients that cannot be views.
        """
        gradients, views, written = [], [], []
        for index, (parameter, view) in enumerate(
            zip(self.params, self.views, strict=True)
        ):
            gradient = parameter.grad
            if only_views and (gradient is None or not self.allows_view(index)):
                continue
            is_sparse = gradient is not None and gradient.is_sparse
            if gradient is None and self.flags[index] == 0:
                continue  # no rank has one
            if (is_sparse or gradient is None) and self._is_sparse_somewhere(index):
                rows = gradient.sparse_dim() if gradient is not None else 1
                parameter.grad = view.to(parameter.dtype).to_sparse(rows)
            elif self.allows_view(index):
                if gradient is None or not self.holds(index, gradient):
                    self.set_gradient_view(index)
                written.append(parameter.grad)
            elif gradient is None or is_sparse:
                parameter.grad = view.to(parameter.dtype, copy=True)
            else:
                gradients.append(gradient)
                views.append(view)
        if gradients:
            torch._foreach_copy_(gradients, views)
        if written:
            # AdamOffload keeps its early copy of a gradient whose version stays.
            show_writes(written)

    def _is_sparse_somewhere(self, index: int) -> bool:
        """Return whether a rank had a sparse gradient, and all ranks are to have one."""
        if self._sparse_flag == 1.0:
            return False
        ranks = self.process_set.size() if self._op is ops.Sum else 1
        dense = ranks * math.prod(self._factors)
        return bool(self.flags[index].abs() > 1.5 * abs(dense))

    def drop(self) -> None:
        """Forget a reduction that was interrupted by Horovod's end."""
        self._handle = None

    def close(self) -> None:
        """Wait for a reduction in flight, and unregister the weights in the op."""
        if self.in_flight:
            self.finish()
        if ops.is_adasum(self._op):
            binding.forget_weights(wire.LIBRARY, self.entry)


def _repeats(op: ops.ReduceOp, factors: tuple[float, float]) -> bool:
    """Return whether reducing a result again leaves it unchanged."""
    return (
        ops.is_adasum(op)
        and factors == (1.0, 1.0)
        and torch_ops.settings()["group_op"] == "adasum"
    )


def show_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Count a write in each tensor's version, for one that torch cannot see: the op's."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except (TypeError, RuntimeError):  # torch before 2.5 takes one at a time
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)
