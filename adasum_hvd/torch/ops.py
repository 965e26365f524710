"""Horovod's `init` and `allreduce` functions for PyTorch tensors, with AdaSum."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from horovod.torch import mpi_ops

from adasum_hvd.base import agreement, ops
from adasum_hvd.base.namespaces import with_signature_of
from adasum_hvd.distributed.checks import overlap
from adasum_hvd.distributed.sharding import is_dtensor
from adasum_hvd.horovod import binding
from adasum_hvd.horovod import start as horovod_start
from adasum_hvd.torch import launch, wire
from adasum_hvd.torch.allocator import keep_freed_memory
from adasum_hvd.torch.objects import allgather_object, here
from adasum_hvd.torch.wire import LIBRARY, enqueue, synchronize

_DTYPES = frozenset(
    (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
)
# Integers pass here, because the op itself refuses them for all frameworks.
_ADASUM_DTYPES = _DTYPES | {torch.bfloat16}
_with_average = mpi_ops.handle_average_backwards_compatibility
Reduction = TypeVar("Reduction", bound=Callable[..., Any])
_complete = False  # whether the last `init` has run to its end


def init(
    *args: Any,
    group_op: str | None = None,
    group_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Start Horovod, as `horovod.torch.init`, and check that AdaSum can run.

    If neither horovodrun nor MPI started the ranks, they are taken from torch's process group or
    from the variables of torchrun, Slurm, mpirun or a Kubernetes Job: docs/clusters.md.

    Args:
        *args: as `horovod.torch.init`, like **kwargs.
        group_op: with `group_size`, see :func:`adasum_hvd.horovod.groups.configure`.

    Raises:
        RuntimeError: the installed Horovod lacks the op; a launcher's variables are missing or
            contradict one another; or Horovod runs with other groups.
        ValueError: a setting is invalid, or the ranks' settings differ (on every rank).

    Collective: every rank calls it; blocks until all have. A second call has no effect.
    """
    horovod_start.configure(mpi_ops, LIBRARY, group_op, group_size)
    if not (mpi_ops.is_initialized() and _complete):
        start(*args, **kwargs)


def start(*args: Any, again: bool = False, **kwargs: Any) -> None:
    """Start Horovod as :func:`adasum_hvd.horovod.start.start`. Collective; blocks."""
    global _complete
    _complete = False
    horovod_start.start(mpi_ops, LIBRARY, launch.before_init, again, *args, **kwargs)
    keep_freed_memory()
    wire.forget()
    if wire.ranks_meet():
        agree()
    _complete = True
    path = binding.transport_description(LIBRARY)
    horovod_start.log_startup(mpi_ops, LIBRARY, path)


def agree() -> None:
    """Raise ValueError unless all ranks have the same settings, and connect them. Collective."""
    by_rank = allgather_object(agreement.comparable(settings()), "adasum.settings")
    agreement.compare_settings(by_rank, mpi_ops.rank())
    if mpi_ops.size() > 1 and wire.op_is_on():
        # Connection errors are easier to understand here than in the first step.
        allreduce(torch.zeros(1), name="adasum.connect", op=ops.Adasum)
    wire.note_agreement()


def settings() -> dict[str, object]:
    """Return the settings that the op has read at `init`: kernels, groups, chunk sizes, ..."""
    return binding.settings(LIBRARY)


def counters() -> binding.Counters:
    """Return how many calls, tensors and bytes the op has reduced in this process."""
    return binding.counters(LIBRARY)


def check_tensors(
    tensors: Sequence[torch.Tensor], name: str | None, op: ops.ReduceOp
) -> None:
    """Raise unless all `tensors` are dense and of a dtype that the reduction supports."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"allreduce {_label(name)}: expected a tensor, but got {type(tensor).__name__} "
                f"{here()}; make it one with torch.tensor"
            )
        if is_dtensor(tensor):  # whose memory Horovod would look for in vain
            raise ValueError(
                f"allreduce {_label(name)}: expected a plain tensor, but got a DTensor {here()}; "
                "reduce its to_local(), or with AdaSum call adasum_hvd.distributed.adasum_replicate"
            )
        adasum = ops.is_adasum(op)
        if tensor.layout is torch.strided:
            if tensor.dtype in (_ADASUM_DTYPES if adasum else _DTYPES):
                continue
            raise ValueError(
                f"allreduce {_label(name)}: {op.name} expected a dtype that Horovod reduces, but "
                f"got {tensor.dtype} {here()}; cast it before the reduction"
            )
        error = ops.SparseAdasumError if adasum else ValueError
        gather = "" if adasum else ", or use hvd.sparse_allreduce_async"
        raise error(
            f"allreduce {_label(name)}: {op.name} expected a dense tensor, but got one of layout "
            f"{tensor.layout} {here()}; reduce its to_dense(){gather}"
        )


def _label(name: str | None) -> str:
    return "of an unnamed tensor" if name is None else f"of {name}"


def _outputs_for(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


class _Allreduce(torch.autograd.Function):
    """AdaSum of `tensors`; its gradient is the AdaSum of the gradients, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.options = options
        return synchronize(enqueue(tensors, _outputs_for(tensors), *options))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, *rest, grouped = ctx.options
        name = None if name is None else f"{name}.gradient"
        reduced = _Allreduce.apply((name, *rest, grouped), *gradients)
        return (None, *reduced) if grouped else (None, reduced)


def _reduce(tensors: list[torch.Tensor], *options: Any, compression: Any) -> Any:
    """Return the reduced tensors, or the reduced tensor if not grouped. Differentiable."""
    if not tensors:
        return []
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = _Allreduce.apply(options, *compressed)
    if not options[-1]:  # grouped
        return compression.decompress(reduced, *contexts)
    return list(map(compression.decompress, reduced, contexts))


def _reduction_like(horovod_function: Reduction, doc: str) -> Reduction:
    """Return a function of Horovod's for AdaSum, too: grouped, async or in place by its name."""
    signature, called = inspect.signature(horovod_function), horovod_function.__name__
    first = next(iter(signature.parameters))
    grouped = called.startswith("grouped_")
    waits, in_place = "_async" not in called, called.endswith("_")

    @with_signature_of(horovod_function)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        tensors = list(given[first]) if grouped else [given[first]]
        op = ops.requested(given["op"], given.pop("average"), _with_average)
        name, process_set = given["name"], agreement.registered(given["process_set"])
        check_tensors(tensors, name, op)
        if tensors and not ops.is_adasum(op):
            inputs = tensors if grouped else tensors[0]
            given["name"] = name or wire.nameless(process_set)
            return horovod_function(**given | {first: inputs, "op": int(op)})
        factors = given["prescale_factor"], given["postscale_factor"]
        options = name, op, *factors, process_set, grouped
        if waits and not in_place:
            return _reduce(tensors, *options, compression=given["compression"])
        if in_place and overlap(tensors):
            raise ValueError(
                f"allreduce {_label(name)}: expected tensors that share no elements, but got the "
                f"same memory in two of them {here()}; pass each tensor once"
            )
        outputs = tensors if in_place else _outputs_for(tensors)
        handle = enqueue(tensors, outputs, *options)
        if not waits:
            return handle
        reduced = synchronize(handle)
        return list(reduced) if grouped else reduced

    reduce.__doc__, reduce.__module__ = inspect.cleandoc(doc), __name__
    reduce.__name__ = reduce.__qualname__ = called
    return reduce  # type: ignore[return-value]


allreduce_async = _reduction_like(
    mpi_ops.allreduce_async,
    """Start to reduce `tensor` over the ranks of `process_set`; `tensor` is not modified.

    Args:
        tensor: float16, bfloat16, float32 or float64, any shape.
        average: deprecated, as Horovod's.
        name: the tensor's name, the same on all ranks; counted up when None.
        op: a reduction or its name; AdaSum works for any number of ranks. Default Average.
        prescale_factor: multiplies the input.
        postscale_factor: multiplies the result. AdaSum applies both factors once, in float64.
        process_set: the ranks to reduce over.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: `op` is unknown, or Horovod does not support the tensor's layout or dtype;
            for integer dtypes raised by `synchronize`, on every rank.
        HorovodInternalError: shapes or dtypes differ between ranks; raised by `synchronize`, on
            every rank.

    Collective: every rank of `process_set`; does not block.
    """,
)
allreduce_async_ = _reduction_like(
    mpi_ops.allreduce_async_,
    """Start to reduce `tensor` in place; arguments and errors as :func:`allreduce_async`.""",
)
grouped_allreduce_async = _reduction_like(
    mpi_ops.grouped_allreduce_async,
    """Start to reduce several tensors of one dtype together, each with its own coefficients.

    Arguments and errors as :func:`allreduce_async`; `synchronize` returns a tuple.
    """,
)
grouped_allreduce_async_ = _reduction_like(
    mpi_ops.grouped_allreduce_async_,
    """Start to reduce several tensors in place; see :func:`grouped_allreduce_async`.""",
)
allreduce = _reduction_like(
    mpi_ops.allreduce,
    """Return `tensor` reduced over the ranks; differentiable.

    Arguments and errors as :func:`allreduce_async`, and `compression` as Horovod's.

    Collective: every rank of `process_set`; blocks.
    """,
)
allreduce_ = _reduction_like(
    mpi_ops.allreduce_,
    """Reduce `tensor` in place and return it; arguments as :func:`allreduce_async_`.""",
)
grouped_allreduce = _reduction_like(
    mpi_ops.grouped_allreduce,
    """Return the tensors reduced over the ranks; differentiable; see :func:`allreduce`.""",
)
grouped_allreduce_ = _reduction_like(
    mpi_ops.grouped_allreduce_,
    """Reduce several tensors in place; arguments as :func:`grouped_allreduce_async_`.""",
)
