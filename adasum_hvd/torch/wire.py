"""How tensors reach Horovod's background thread for AdaSum, and come back.

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

from adasum_hvd.common import agreement, binding, ops
from adasum_hvd.common.options import ProcessSet

LIBRARY = mpi_ops._basics.MPI_LIB_CTYPES
NOTHING = -1  # the handle of an empty group

# Handles whose tensors travel as a copy, and where that copy goes when it is back.
_carried: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
# Horovod names nameless tensors by a count of all calls, which runs apart as soon as a process set
# leaves a rank out; these counts are per process set.
_nameless: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_generation = 0  # how often Horovod has started
_agreed = 0  # the generation in which all ranks have agreed on the settings


def forget() -> None:
    """Begin anew, as Horovod does at `init`."""
    global _generation
    _generation += 1
    _carried.clear()
    _nameless.clear()
    _op_is_on.cache_clear()


def generation() -> int:
    """Return how often Horovod has started: what ranks agreed on holds for one time."""
    return _generation


def note_agreement() -> None:
    """Note that all ranks are here, and work with the same settings."""
    global _agreed
    _agreed = _generation


def ranks_meet() -> bool:
    """Return whether all ranks come through here together.

    In an elastic job they do so from the first synchronization on: before that some have just
    been started and others go on where they were.
    """
    return not agreement.is_elastic() or _agreed == _generation


@functools.cache
def _op_is_on() -> bool:
    return binding.settings(LIBRARY)["op"] == "on"


def _as_bits(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether these are bfloat16 and travel as such, in two bytes, by their name."""
    return tensors[0].dtype == torch.bfloat16 and (
        all(tensor.dtype == torch.bfloat16 for tensor in tensors) and _op_is_on()
    )


def _name_in_op(name: str, op: ops.ReduceOp, as_bits: bool) -> str:
    """Return the name that tells the op what a tensor is."""
    if as_bits:
        name = ops.BFLOAT16_PREFIX + name
    return ops.DELTA_PREFIX + name if op is ops.AdasumDelta else name


def entry(name: str, op: ops.ReduceOp, dtype: torch.dtype) -> str:
    """Return what Horovod calls a tensor of this dtype that :func:`enqueue` sends as `name`."""
    as_bits = dtype == torch.bfloat16 and ops.is_adasum(op) and _op_is_on()
    return f"allreduce.{_name_in_op(name, op, as_bits)}"


def nameless(process_set: ProcessSet) -> str:
    """Return a name for what has none, the same on all ranks of the process set."""
    count = _nameless.setdefault(process_set, itertools.count())
    return f"adasum.noname.{process_set.process_set_id}.{next(count)}"


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


def enqueue(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: ops.ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    grouped: bool,
) -> int:
    """Hand tensors to Horovod's background thread for AdaSum and return the handle.

    bfloat16 travels as float16 of the same bits under a name that says so. What the op
    cannot take as it is (other layouts; bfloat16 beside other dtypes in a group, or with
    `ADASUM_HVD_OP=off`) travels as a contiguous copy, of float32 for bfloat16;
    `synchronize` copies the result to where it belongs.
    """
    if not tensors:
        return NOTHING
    if name is None:
        name = nameless(process_set)
    as_bits = _as_bits(tensors)
    name = _name_in_op(name, op, as_bits)
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
            int(ops.Adasum),
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
    if handle == NOTHING:
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


def zeros(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a flat tensor that the op reduces without copying it, where there is such memory."""
    memory = None
    if device.type == "cpu" and elements:
        memory = binding.shared_memory(LIBRARY, elements * dtype.itemsize)
    if memory is None:
        return torch.zeros(elements, dtype=dtype, device=device)
    return torch.frombuffer(memory, dtype=dtype)


def write_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor that may be expanded: each place in memory once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(values)


def poll(handle: int) -> bool:
    """Return whether an asynchronous operation has ended, as Horovod's does."""
    return handle == NOTHING or mpi_ops.poll(handle)
