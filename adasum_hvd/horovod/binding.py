"""The native op's C interface: its presence, settings, counters, memory and monitor records.

Every framework's Horovod library holds a copy of the op. The functions here take that
library, as `ctypes.CDLL` (`HorovodBasics.MPI_LIB_CTYPES`).
"""

from __future__ import annotations

import ctypes
import itertools
import json
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from adasum_hvd.monitor.statistics import TensorRecord

_BUILD_COMMAND = "adasum-hvd build"
_SEGMENTS = "adasum.segments="  # the same as in op/fused_tensors.cc
# What the functions of op/exports.cc return, without "horovod_adasum_"; the others nothing.
_RESULTS = {
    **dict.fromkeys(("version", "settings", "settings_error", "path"), ctypes.c_char_p),
    **dict.fromkeys(("record_weights", "weights_checksum"), ctypes.c_uint64),
    "on_devices": ctypes.c_bool,
    "observed": ctypes.c_int64,
    "allocate": ctypes.c_void_p,
}


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    function = getattr(library, f"horovod_adasum_{name}")
    function.restype = _RESULTS.get(name)
    return function(*arguments)


class Counters(NamedTuple):
    """The op's counters in this process since it was loaded.

    The times cover tensors in host memory; Horovod's timeline has those on devices.

    Attributes:
        calls: reductions; a reduction of several fused tensors counts once.
        tensors: parameters, each with its own coefficients.
        delta_tensors: parameters reduced by the delta variant.
        bytes: reduced.
        explicit_tensors: tensors with an ill-conditioned node that this rank formed explicitly;
            on devices, of finished reductions only.
        reduce_scatter_nanoseconds: time of the reduce-scatter and the Gram matrices.
        coefficients_nanoseconds: time of the Gram matrices' allreduce and of the coefficients.
        allgather_nanoseconds: time to combine slices and allgather them.
    """

    calls: int
    tensors: int
    delta_tensors: int
    bytes: int
    explicit_tensors: int
    reduce_scatter_nanoseconds: int
    coefficients_nanoseconds: int
    allgather_nanoseconds: int


def has_op(library: ctypes.CDLL) -> bool:
    """Return whether this Horovod library contains the AdaSum op."""
    return hasattr(library, "horovod_adasum_version")


def require_library(library: ctypes.CDLL) -> None:
    """Raise RuntimeError if Horovod was built without the op, or by an earlier version."""
    if not has_op(library):
        raise RuntimeError(
            "AdaSum: expected a Horovod built with the AdaSum op, but got "
            f"{library._name} without it; run `{_BUILD_COMMAND}`"
        )
    if not hasattr(library, "horovod_adasum_record_weights"):  # the newest function
        raise RuntimeError(
            "AdaSum: expected a Horovod built by this version of adasum_hvd, but got "
            f"{library._name} of an earlier one; run `{_BUILD_COMMAND}`"
        )


def require_op(library: ctypes.CDLL) -> None:
    """As :func:`require_library`; raise ValueError if an `ADASUM_HVD_*` variable is invalid."""
    require_library(library)
    if error := settings_error(library):
        raise ValueError(f"AdaSum: {error}")


def version(library: ctypes.CDLL) -> str:
    """Return the version of the op in this library."""
    return _call(library, "version").decode()


def settings(library: ctypes.CDLL) -> dict[str, object]:
    """Return the settings that the op read at the last `init`; before it, the environment's."""
    return json.loads(_call(library, "settings"))


def settings_error(library: ctypes.CDLL) -> str:
    """Return the error about an invalid `ADASUM_HVD_*` variable, or "" if all are valid."""
    return _call(library, "settings_error").decode(errors="backslashreplace")


def transport_description(library: ctypes.CDLL, process_set_id: int = 0) -> str:
    """Return the transport of a process set, and the reason if it is not shared memory.

    Empty before the first AdaSum there; the part about devices comes with a tensor on one.
    """
    return _call(library, "path", process_set_id).decode()


def reduces_on_devices(library: ctypes.CDLL) -> bool:
    """Return whether CUDA tensors are reduced on their device, over NCCL."""
    return _call(library, "on_devices")


def counters(library: ctypes.CDLL) -> Counters:
    """Return how much the op has reduced in this process."""
    values = (ctypes.c_int64 * len(Counters._fields))()
    _call(library, "counters", values)
    return Counters(*values)


def shared_memory(
    library: ctypes.CDLL, size: int
) -> ctypes.Array[ctypes.c_char] | None:
    """Return `size` zeroed bytes that the other ranks of this host can map, None without any.

    The op reduces tensors there in place, and copies all others in and out. They are freed with
    their last reference.
    """
    address = _call(library, "allocate", ctypes.c_int64(size))
    if not address:
        return None
    memory = (ctypes.c_char * size).from_address(address)
    free = weakref.finalize(memory, _call, library, "free", ctypes.c_void_p(address))
    free.atexit = False  # the op may use the memory until the process ends
    return memory


def request_record(library: ctypes.CDLL, entry: str) -> None:
    """Request a record of the next reduction of a tensor, by its full name ("allreduce....")."""
    _call(library, "observe", entry.encode())


def latest_record(library: ctypes.CDLL, entry: str) -> TensorRecord | None:
    """Return the latest record of a tensor, or None if there is none.

    For a tensor on a device, the first call waits for the reduction.
    """
    sizes, rows = ctypes.POINTER(ctypes.c_int)(), ctypes.POINTER(ctypes.c_double)()
    levels, doubles = ctypes.c_int64(), ctypes.c_int64()
    outputs = map(ctypes.byref, (sizes, levels, rows, doubles))
    number = _call(library, "observed", entry.encode(), *outputs)
    if not number:
        return None
    count = doubles.value
    copied = np.ctypeslib.as_array(rows, (count,)).copy() if count else np.zeros(0)
    return TensorRecord(number, tuple(sizes[: levels.value]), copied)


def segmented(name: str, elements: Sequence[int]) -> str:
    """Return a name that makes the op treat a tensor as consecutive segments of these elements.

    Each segment gets its own AdaSum coefficients, as if it were reduced alone; only one tensor is
    negotiated. Horovod compares names over the ranks, so all ranks use the same segments,
    also ranks that have joined.

    Example:
        >>> segmented("bucket", [768, 768, 64])
        'bucket/adasum.segments=768*2,64'
    """
    runs = [(count, len(list(same))) for count, same in itertools.groupby(elements)]
    parts = [f"{count}*{times}" if times > 1 else str(count) for count, times in runs]
    return f"{name}/{_SEGMENTS}{','.join(parts)}"


def register_weights(
    library: ctypes.CDLL,
    entry: str,
    start: int,
    elements: Sequence[int],
    weights: Sequence[int],
) -> None:
    """Register tensor `entry` as a start copy of weights, with the addresses of the weights.

    The op then reduces each segment's change (weight minus start copy), leaves `entry` as it is,
    and sets each weight to its start copy plus the AdaSum of the changes.

    Args:
        entry: the tensor's full name in Horovod ("allreduce." included).
        start: address of the start copy; at another one a tensor of that name is an ordinary one.
        elements: as in the name (:func:`segmented`).
        weights: addresses by segment, of contiguous memory of the tensor's dtype, which must not
            move until the reduction is done.
    """
    array = (ctypes.c_int64 * len(elements))(*elements)
    addresses = (ctypes.c_void_p * len(elements))(*weights)
    given = array, len(elements), ctypes.c_void_p(start), addresses
    _call(library, "register_weights", entry.encode(), *given)


def record_weights(library: ctypes.CDLL, entry: str, dtype: str, threads: int) -> int:
    """Copy registered weights to their start copy, by so many threads at most.

    Returns a checksum of their bits. It is :func:`weights_checksum` if no weight has changed since
    the latest reduction.
    """
    types = ("float16", "float32", "float64", "bfloat16")  # the order of kernels.h
    given = entry.encode(), types.index(dtype), threads
    return _call(library, "record_weights", *given)


def weights_checksum(library: ctypes.CDLL, entry: str) -> int:
    """Return the checksum of registered weights as the latest reduction on the host wrote them."""
    return _call(library, "weights_checksum", entry.encode())


def forget_weights(library: ctypes.CDLL, entry: str) -> None:
    """Undo :func:`register_weights`."""
    _call(library, "register_weights", entry.encode(), None, 0, None, None)
