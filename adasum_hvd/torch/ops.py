"""AdaSum as a Horovod reduction of PyTorch tensors.

The only file that calls Horovod's torch library directly: Horovod's own Python refuses
AdaSum on sizes that are no power of two and on process sets, which our op handles. It relies
on `mpi_ops._handle_map` and on the names of the library's functions, as they are in Horovod
0.28.1 (tests/unit/test_horovod_internals.py).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression

from adasum_hvd import agreement, ops, topology
from adasum_hvd import binding as _binding
from adasum_hvd.torch.objects import allgather_object

LIBRARY = mpi_ops._basics.MPI_LIB_CTYPES
_ADASUM = int(ops.Adasum)

# Handles whose tensors travel as a copy, and where that copy goes when it is back.
_carried: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
# Horovod names nameless tensors by a count of all calls, which runs apart as soon as a process set
# leaves a rank out; these counts are per process set.
_nameless: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_DTYPES = frozenset(
    (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
)
# The op itself refuses integers, for all frameworks.
_ADASUM_DTYPES = _DTYPES | {torch.bfloat16}
_NOTHING = -1  # the handle of an empty group


def init(
    *args: Any,
    group_op: str | None = None,
    group_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Start Horovod, as `horovod.torch.init`, and check that AdaSum can run.

    Args:
        *args: as `horovod.torch.init`.
        group_op: see :func:`adasum_hvd.topology.configure`.
        group_size: see :func:`adasum_hvd.topology.configure`.
        **kwargs: as `horovod.torch.init`.

    Raises:
        RuntimeError: the installed Horovod lacks the op; the message holds the command.
        ValueError: a setting is invalid, or the ranks' settings differ; then on every rank.
        NotImplementedError: the job is elastic.

    Collective: every rank calls it; blocks until all have.
    """
    agreement.refuse_elastic("init()")
    topology.configure(group_op, group_size)
    _binding.require_op(LIBRARY)
    mpi_ops.init(*args, **kwargs)
    topology.warn_of_one_group(
        settings(), mpi_ops.rank(), mpi_ops.size(), mpi_ops.local_size()
    )
    _carried.clear()
    _nameless.clear()
    _op_is_on.cache_clear()
    theirs = allgather_object(agreement.comparable(settings()), "adasum.settings")
    agreement.compare_settings(theirs, mpi_ops.rank())
    if mpi_ops.size() > 1 and settings()["op"] == "on":
        # Connects the ranks now, when an error is easy to understand, not in the first step.
        allreduce(torch.zeros(1), name="adasum.connect", op=ops.Adasum)


def settings() -> dict[str, object]:
    """Return the settings that the op reads at `init`: kernels, groups, chunk sizes."""
    return _binding.settings(LIBRARY)


def counters() -> _binding.Counters:
    """Return how many calls, tensors and bytes the op has reduced in this process."""
    return _binding.counters(LIBRARY)


def _reduction(op: Any, average: bool | None) -> ops.ReduceOp:
    if type(op) is ops.ReduceOp and average is None:
        return op
    if isinstance(op, str):
        op = ops.parse(op)
    return ops.parse(mpi_ops.handle_average_backwards_compatibility(op, average))


@functools.cache
def _op_is_on() -> bool:
    return settings()["op"] == "on"


def _as_bits(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether these are bfloat16 and travel as such, in two bytes, by their name."""
    return tensors[0].dtype == torch.bfloat16 and (
        all(tensor.dtype == torch.bfloat16 for tensor in tensors) and _op_is_on()
    )


def name_in_op(name: str, op: ops.ReduceOp, as_bits: bool) -> str:
    """Return the name that tells the op what a tensor is."""
    if as_bits:
        name = ops.BFLOAT16_PREFIX + name
    return ops.DELTA_PREFIX + name if op is ops.AdasumDelta else name


def _travels_as_is(tensor: torch.Tensor) -> bool:
    return tensor.dtype != torch.bfloat16 and tensor.is_contiguous()


def _carry(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], as_bits: bool
) -> Any:
    """Return what to send, what to receive, and (copy, where its result belongs) pairs."""
    sent, received, carried = [], [], []
    for tensor, output in zip(tensors, outputs, strict=True):
        if as_bits and tensor.is_contiguous() and output.is_contiguous():
            tensor, output = tensor.view(torch.float16), output.view(torch.float16)
        elif as_bits:
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            carried.append((copy, output))
            tensor = output = copy.view(torch.float16)
        elif not (_travels_as_is(tensor) and _travels_as_is(output)):
            dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
            copy = tensor.detach().to(
                dtype, copy=True, memory_format=torch.contiguous_format
            )
            carried.append((copy, output))
            tensor = output = copy
        sent.append(tensor)
        received.append(output)
    return sent, received, carried


@functools.cache
def _function_for(dtype: torch.dtype, device_type: str, grouped: bool) -> Any:
    """Return the library's function for such tensors; ValueError when it has none."""
    factory = (
        mpi_ops._grouped_allreduce_function_factory
        if grouped
        else mpi_ops._allreduce_function_factory
    )
    probe = torch.empty(0, dtype=dtype, device=device_type)
    return getattr(mpi_ops.mpi_lib, mpi_ops._check_function(factory, probe))


def _enqueue(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: ops.ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    grouped: bool,
) -> int:
    """Hand tensors to Horovod's background thread for AdaSum and return the handle.

    bfloat16 travels as float16 of the same bits under a name that says so. What the op
    cannot take as it is (other layouts; bfloat16 beside other dtypes in a group, or with
    `ADASUM_HVD_OP=off`) travels as a contiguous copy, of float32 for bfloat16;
    `synchronize` copies the result to where it belongs.
    """
    if name is None:
        name = nameless(process_set)
    as_bits = _as_bits(tensors)
    name = name_in_op(name, op, as_bits)
    sent, received, carried = tensors, outputs, []
    in_place = outputs is tensors
    if not all(map(_travels_as_is, tensors if in_place else (*tensors, *outputs))):
        sent, received, carried = _carry(tensors, outputs, as_bits)
    first = sent[0]
    device = "cpu" if first.is_cpu else first.device.type  # the latter takes its time
    function = _function_for(first.dtype, device, grouped)
    arguments = (sent, received) if grouped else (first, received[0])
    try:
        handle = function(
            *arguments,
            1,  # divisor
            name.encode(),
            _ADASUM,
            prescale_factor,
            postscale_factor,
            process_set.process_set_id,
        )
    except RuntimeError as error:
        raise mpi_ops.HorovodInternalError(error) from error
    results = tuple(outputs) if grouped else outputs[0]
    mpi_ops._handle_map[handle] = ((sent, received), results)
    if carried:
        _carried[handle] = carried
    return handle


def check_tensors(
    tensors: Sequence[torch.Tensor], name: str | None, op: ops.ReduceOp
) -> None:
    """Check that there is nothing but dense tensors of the right dtypes to reduce.

    Raises:
        TypeError: something is no tensor.
        SparseAdasumError: a sparse tensor, and the reduction is AdaSum.
        ValueError: a sparse tensor, or one of a dtype that Horovod has no type for.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"allreduce {_label(name)}: required a tensor, got {type(tensor).__name__} "
                f"(rank {mpi_ops.rank()} of {mpi_ops.size()}); make it one with torch.tensor"
            )
        adasum = ops.is_adasum(op)
        if tensor.layout is torch.strided:
            if tensor.dtype in (_ADASUM_DTYPES if adasum else _DTYPES):
                continue
            raise ValueError(
                f"allreduce {_label(name)}: {op.name} required a dtype that Horovod adds up, "
                f"got {tensor.dtype} (rank {mpi_ops.rank()} of {mpi_ops.size()}); cast it "
                "before the reduction"
            )
        error = ops.SparseAdasumError if adasum else ValueError
        gather = "" if adasum else ", or use hvd.sparse_allreduce_async"
        raise error(
            f"allreduce {_label(name)}: {op.name} required a dense tensor, got one of layout "
            f"{tensor.layout} (rank {mpi_ops.rank()} of {mpi_ops.size()}); reduce its "
            f"to_dense(){gather}"
        )


def _label(name: str | None) -> str:
    return "of a nameless tensor" if name is None else f"of {name}"


def nameless(process_set: Any) -> str:
    """Return a name for what has none, the same on all ranks of the process set."""
    count = _nameless.setdefault(process_set, itertools.count())
    return f"adasum.noname.{process_set.process_set_id}.{next(count)}"


def _outputs_for(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _dispatch(
    horovods: Any,
    tensors: Sequence[torch.Tensor],
    average: bool | None,
    name: str | None,
    op: Any,
    factors: tuple[float, float, Any],
    grouped: bool,
    in_place: bool,
) -> int:
    """Start an AdaSum ourselves, and every other reduction with Horovod's own function."""
    reduction = _reduction(op, average)
    check_tensors(tensors, name, reduction)
    if not tensors:
        return _NOTHING
    if not ops.is_adasum(reduction):
        what = tensors if grouped else tensors[0]
        return horovods(what, None, name, int(reduction), *factors)
    outputs = tensors if in_place else _outputs_for(tensors)
    return _enqueue(tensors, outputs, name, reduction, *factors, grouped)


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an asynchronous operation and return its output, as Horovod's does.

    Args:
        handle: what any of the asynchronous functions has returned.

    Raises:
        ValueError: the op refused the tensors (dtype, segments); on every rank.
        HorovodInternalError: the operation failed, or the ranks' tensors do not match.
    """
    if callable(handle):
        return handle()
    if handle == _NOTHING:
        return ()
    carried = _carried.pop(handle, ())
    try:
        result = mpi_ops.synchronize(handle)
    finally:
        # Horovod forgets to where it raises ValueError.
        mpi_ops._handle_map.pop(handle, None)
    for copy, output in carried:
        write_back(output.detach(), copy)
    return result


def write_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor that may be expanded: each place in memory once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(values)


def poll(handle: int) -> bool:
    """Return whether an asynchronous operation has ended, as Horovod's does."""
    return handle == _NOTHING or mpi_ops.poll(handle)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = mpi_ops.global_process_set,
) -> int:
    """Start reducing `tensor` over the ranks of `process_set`; `tensor` stays as it is.

    Args:
        tensor: float16, bfloat16, float32 or float64, any shape.
        average: deprecated, as Horovod's.
        name: the tensor's name, the same on all ranks; counted up when None.
        op: a reduction or its name; AdaSum works for any number of ranks. Default Average.
        prescale_factor: multiplies the input.
        postscale_factor: multiplies the result. AdaSum applies both factors once, in float64.
        process_set: the ranks that take part.

    Returns:
        A handle for `synchronize` and `poll`.

    Raises:
        TypeError: `tensor` is none.
        ValueError: unknown `op`, a sparse tensor, or a tensor type that Horovod does not know;
            from `synchronize`, on every rank, for an integer dtype.
        HorovodInternalError: from `synchronize`, on every rank, for tensors that differ.

    Collective: every rank of `process_set`; does not block.
    """
    factors = (prescale_factor, postscale_factor, process_set)
    return _dispatch(
        mpi_ops.allreduce_async,
        [tensor],
        average,
        name,
        op,
        factors,
        grouped=False,
        in_place=False,
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = mpi_ops.global_process_set,
) -> int:
    """Start reducing `tensor` in place; arguments and errors as :func:`allreduce_async`."""
    factors = (prescale_factor, postscale_factor, process_set)
    return _dispatch(
        mpi_ops.allreduce_async_,
        [tensor],
        average,
        name,
        op,
        factors,
        grouped=False,
        in_place=True,
    )


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = mpi_ops.global_process_set,
) -> int:
    """Start reducing several tensors of one dtype together, each with its own coefficients.

    Arguments and errors as :func:`allreduce_async`; `synchronize` returns a tuple.
    """
    factors = (prescale_factor, postscale_factor, process_set)
    return _dispatch(
        mpi_ops.grouped_allreduce_async,
        list(tensors),
        average,
        name,
        op,
        factors,
        grouped=True,
        in_place=False,
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = mpi_ops.global_process_set,
) -> int:
    """Start reducing several tensors in place; see :func:`grouped_allreduce_async`."""
    factors = (prescale_factor, postscale_factor, process_set)
    return _dispatch(
        mpi_ops.grouped_allreduce_async_,
        list(tensors),
        average,
        name,
        op,
        factors,
        grouped=True,
        in_place=True,
    )


class _Allreduce(torch.autograd.Function):
    """AdaSum of `tensors`, whose gradient is the AdaSum of the gradients (as Horovod's)."""

    @staticmethod
    def forward(ctx: Any, options: tuple, *tensors: torch.Tensor) -> Any:
        ctx.options = options
        grouped, name, op, prescale_factor, postscale_factor, process_set = options
        outputs = _outputs_for(tensors)
        handle = _enqueue(
            tensors,
            outputs,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            grouped,
        )
        return synchronize(handle)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        grouped, name, *rest = ctx.options
        name = None if name is None else f"{name}.gradient"
        reduced = _Allreduce.apply((grouped, name, *rest), *gradients)
        return (None, *reduced) if grouped else (None, reduced)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = mpi_ops.global_process_set,
) -> torch.Tensor:
    """Return `tensor` reduced over the ranks; differentiable.

    Arguments and errors as :func:`allreduce_async`, and `compression` as Horovod's.

    Collective: every rank of `process_set`; blocks.
    """
    reduction = _reduction(op, average)
    check_tensors([tensor], name, reduction)
    factors = (prescale_factor, postscale_factor, process_set)
    if not ops.is_adasum(reduction):
        return mpi_ops.allreduce(
            tensor, None, name, compression, int(reduction), *factors
        )
    compressed, context = compression.compress(tensor)
    reduced = _Allreduce.apply((False, name, reduction, *factors), compressed)
    return compression.decompress(reduced, context)


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Reduce `tensor` in place and return it; arguments as :func:`allreduce_async_`."""
    return synchronize(allreduce_async_(tensor, *args, **kwargs))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = mpi_ops.global_process_set,
) -> list[torch.Tensor]:
    """Return the tensors reduced over the ranks; differentiable; see :func:`allreduce`."""
    reduction, tensors = _reduction(op, average), list(tensors)
    check_tensors(tensors, name, reduction)
    if not tensors:
        return []
    factors = (prescale_factor, postscale_factor, process_set)
    if not ops.is_adasum(reduction):
        return mpi_ops.grouped_allreduce(
            tensors, None, name, compression, int(reduction), *factors
        )
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = _Allreduce.apply((True, name, reduction, *factors), *compressed)
    return [
        compression.decompress(t, c) for t, c in zip(reduced, contexts, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """Reduce several tensors in place; arguments as :func:`grouped_allreduce_async_`."""
    return list(synchronize(grouped_allreduce_async_(tensors, *args, **kwargs)))
