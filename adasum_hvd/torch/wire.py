"""The interface to Horovod's background thread for AdaSum of torch tensors.

This file starts reductions by Horovod's torch library itself, because Horovod's own Python refuses
AdaSum on process sets and if the number of ranks is not a power of two. It relies on
`mpi_ops._handle_map` and on the names of the library's functions in Horovod 0.28.1
(tests/unit/test_horovod_internals.py).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd.base import agreement, ops
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.distributed.checks import is_plain
from adasum_hvd.horovod import binding

LIBRARY = mpi_ops._basics.MPI_LIB_CTYPES
NOTHING = -1  # the handle of an empty group

# By handle, the (copy sent, output that it is copied to) pairs.
_copies: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
# Horovod numbers unnamed tensors by a count of all calls, which differs between ranks as soon as
# a process set excludes one; these counts are per process set.
_unnamed: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_generation = 0  # how often Horovod has started
_agreed = 0  # the generation in which all ranks have compared their settings


def forget() -> None:
    """Reset this module's state after Horovod's `init`."""
    global _generation
    _generation += 1
    _copies.clear()
    _unnamed.clear()
    op_is_on.cache_clear()


def generation() -> int:
    """Return how often Horovod has started; agreements between ranks hold until the next start."""
    return _generation


def note_agreement() -> None:
    """Note that all ranks have started and have the same settings."""
    global _agreed
    _agreed = _generation


def ranks_meet() -> bool:
    """Return whether all ranks run the same code now, so that collectives are allowed.

    In an elastic job new ranks still start, and survivors go on, until the first synchronization.
    """
    return not agreement.is_elastic() or _agreed == _generation


@functools.cache
def op_is_on() -> bool:
    """Return whether the op reduces AdaSum, and not Horovod's own with `ADASUM_HVD_OP=off`."""
    return binding.settings(LIBRARY)["op"] == "on"


def _as_bits(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors are bfloat16 and are sent as two bytes per element."""
    return tensors[0].dtype == torch.bfloat16 and (
        all(tensor.dtype == torch.bfloat16 for tensor in tensors) and op_is_on()
    )


def _name_in_op(name: str, op: ops.ReduceOp, as_bits: bool) -> str:
    """Return the name with the op's prefixes for bfloat16 and weight changes."""
    if as_bits:
        name = ops.BFLOAT16_PREFIX + name
    return ops.DELTA_PREFIX + name if op is ops.AdasumDelta else name


def entry(name: str, op: ops.ReduceOp, dtype: torch.dtype) -> str:
    """Return the full name in Horovod of a tensor that :func:`enqueue` sends as `name`."""
    as_bits = dtype == torch.bfloat16 and ops.is_adasum(op) and op_is_on()
    return f"allreduce.{_name_in_op(name, op, as_bits)}"


def nameless(process_set: ProcessSet) -> str:
    """Return a name for an unnamed tensor, equal on all ranks of the process set."""
    count = _unnamed.setdefault(process_set, itertools.count())
    return f"adasum.noname.{process_set.process_set_id}.{next(count)}"


def _needs_no_copy(tensor: torch.Tensor) -> bool:
    return tensor.dtype != torch.bfloat16 and is_plain(tensor)


def _with_copies(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], as_bits: bool
) -> Any:
    """Return the tensors to send and to receive, and (copy, output) pairs."""
    sent, received, copies = [], [], []
    for tensor, output in zip(tensors, outputs, strict=True):
        if as_bits and is_plain(tensor) and is_plain(output):
            tensor, output = tensor.view(torch.float16), output.view(torch.float16)
        elif as_bits or not (_needs_no_copy(tensor) and _needs_no_copy(output)):
            widens = tensor.dtype == torch.bfloat16 and not as_bits
            copy = tensor.detach().to(
                torch.float32 if widens else tensor.dtype,
                copy=True,
                memory_format=torch.contiguous_format,
            )
            copies.append((copy, output))
            tensor = output = copy.view(torch.float16) if as_bits else copy
        sent.append(tensor)
        received.append(output)
    return sent, received, copies


@functools.cache
def _function_for(dtype: torch.dtype, device_type: str, grouped: bool) -> Any:
    """Return the library's function for such tensors; ValueError if there is none."""
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
    """Enqueue tensors for AdaSum in Horovod's background thread, and return the handle.

    bfloat16 is sent as float16 of the same bits, marked by the name. Tensors that are not
    contiguous are sent as contiguous copies. So is bfloat16 in a group with other dtypes or with
    `ADASUM_HVD_OP=off`, as float32. `synchronize` copies the results to the outputs.
    """
    if not tensors:
        return NOTHING
    if name is None:
        name = nameless(process_set)
    as_bits = _as_bits(tensors)
    name = _name_in_op(name, op, as_bits)
    sent, received, copies = tensors, outputs, []
    both = tensors if outputs is tensors else (*tensors, *outputs)
    if not all(map(_needs_no_copy, both)):
        sent, received, copies = _with_copies(tensors, outputs, as_bits)
    first = sent[0]
    device = "cpu" if first.is_cpu else first.device.type  # `is_cpu` is much faster
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
    if copies:
        _copies[handle] = copies
    return handle


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an asynchronous operation and return its output, as Horovod's does.

    Args:
        handle: the return value of an asynchronous function.

    Raises:
        ValueError: the op refused the tensors (dtype, segments); on every rank.
        HorovodInternalError: the operation failed, or the ranks' tensors do not match.
    """
    if callable(handle):
        return handle()
    if handle == NOTHING:
        return ()
    copies = _copies.pop(handle, ())
    try:
        result = mpi_ops.synchronize(handle)
    finally:
        # Horovod keeps the entry if it raises ValueError.
        mpi_ops._handle_map.pop(handle, None)
    for copy, output in copies:
        write_back(output.detach(), copy)
    return result


def zeros(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a flat tensor, in shared memory if possible, which the op reduces without a copy."""
    memory = None
    if device.type == "cpu" and elements:
        memory = binding.shared_memory(LIBRARY, elements * dtype.itemsize)
    if memory is None:
        return torch.zeros(elements, dtype=dtype, device=device)
    return torch.frombuffer(memory, dtype=dtype)


def write_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor that may be expanded, writing each memory location once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(values)


def poll(handle: int) -> bool:
    """Return whether an asynchronous operation has ended, as Horovod's does."""
    return handle == NOTHING or mpi_ops.poll(handle)
