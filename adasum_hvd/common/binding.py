"""What Python asks the native op: is it there, which settings, what did it do.

Every framework's Horovod library holds a copy of the op; a function here takes that
library, as `ctypes.CDLL` (`HorovodBasics.MPI_LIB_CTYPES`).
"""

from __future__ import annotations

import ctypes
import itertools
import json
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_BUILD_COMMAND = "adasum-hvd build"
_SEGMENTS = "adasum.segments="  # in native/op/fused_tensors.cc, too


class Counters(NamedTuple):
    """What the op has done in this process since it was loaded.

    Attributes:
        calls: reductions; one of several fused tensors counts once.
        tensors: parameters, each with coefficients of its own.
        delta_tensors: those of the delta variant among them.
        bytes: reduced.
        explicit_tensors: those with a node that had to be formed explicitly, on this rank; on
            devices of reductions that have ended.
        exchange_nanoseconds: spent sending, receiving and summing the Gram matrices, of
            tensors in host memory (those on devices: Horovod's timeline), as the next two.
        solve_nanoseconds: spent on the sums that ranks share, and on coefficients.
        gather_nanoseconds: spent combining slices and sending them round.
    """

    calls: int
    tensors: int
    delta_tensors: int
    bytes: int
    explicit_tensors: int
    exchange_nanoseconds: int
    solve_nanoseconds: int
    gather_nanoseconds: int


def has_op(library: ctypes.CDLL) -> bool:
    """Return whether this Horovod library contains the AdaSum op."""
    return hasattr(library, "horovod_adasum_version")


def require_op(library: ctypes.CDLL) -> None:
    """Check that the library has the op and the environment holds valid settings.

    Raises:
        RuntimeError: the installed Horovod was built without the op.
        ValueError: an `ADASUM_HVD_*` variable holds no valid value.
    """
    if not has_op(library):
        raise RuntimeError(
            "AdaSum: required a Horovod built with the AdaSum op, got "
            f"{library._name} without it; run `{_BUILD_COMMAND}`"
        )
    if error := settings_error(library):
        raise ValueError(f"AdaSum: {error}")


def _text(library: ctypes.CDLL, function: str) -> str:
    call = getattr(library, function)
    call.restype = ctypes.c_char_p
    return call().decode()


def version(library: ctypes.CDLL) -> str:
    """Return the version of the op in this library."""
    return _text(library, "horovod_adasum_version")


def settings(library: ctypes.CDLL) -> dict[str, object]:
    """Return the settings that the environment asks for, as the op reads them at `init`."""
    return json.loads(_text(library, "horovod_adasum_settings"))


def settings_error(library: ctypes.CDLL) -> str:
    """Return which `ADASUM_HVD_*` variable holds no valid value, or "" when all do."""
    return _text(library, "horovod_adasum_settings_error")


def transport_description(library: ctypes.CDLL, process_set_id: int = 0) -> str:
    """Return how the ranks of a process set reach each other, and why not by shared memory.

    Empty before the first AdaSum in that process set; what is said of devices comes with the
    first tensor there.
    """
    call = library.horovod_adasum_path
    call.restype = ctypes.c_char_p
    return call(process_set_id).decode()


def reduces_on_devices(library: ctypes.CDLL) -> bool:
    """Return whether CUDA tensors are reduced where they are, over NCCL."""
    call = library.horovod_adasum_on_devices
    call.restype = ctypes.c_bool
    return call()


def counters(library: ctypes.CDLL) -> Counters:
    """Return how much the op has reduced in this process."""
    values = (ctypes.c_int64 * len(Counters._fields))()
    library.horovod_adasum_counters(values)
    return Counters(*values)


def shared_memory(
    library: ctypes.CDLL, size: int
) -> ctypes.Array[ctypes.c_char] | None:
    """Return memory of zeros that the other ranks of this host can map.

    Tensors that lie there are reduced where they are; all others are copied there and back.

    Args:
        library: the framework's Horovod library.
        size: bytes.

    Returns:
        A buffer of `size` bytes, given back when nobody holds it any more; None where the
        system gives none.
    """
    allocate = library.horovod_adasum_allocate
    allocate.restype, allocate.argtypes = ctypes.c_void_p, (ctypes.c_int64,)
    address = allocate(size)
    if not address:
        return None
    memory = (ctypes.c_char * size).from_address(address)
    free = weakref.finalize(
        memory, library.horovod_adasum_free, ctypes.c_void_p(address)
    )
    free.atexit = False  # the op may be at work until the process ends
    return memory


class Observation(NamedTuple):
    """What a reduction has found of a tensor's segments.

    Attributes:
        number: of the observed reductions of this tensor, from 1.
        sizes: of every level in which AdaSum joins anything, outwards: how many vectors a group
            joins there. Empty on one rank.
        rows: float64 of (segments * width,): `monitor.statistics` says what they hold. A rank
            has what it has solved, and zeros of all else: the sum over the ranks is complete.
    """

    number: int
    sizes: tuple[int, ...]
    rows: NDArray[np.float64]


def observe(library: ctypes.CDLL, entry: str) -> None:
    """Ask for what the next reduction of tensor `entry` finds.

    Args:
        library: the framework's Horovod library.
        entry: the tensor's full name in Horovod ("allreduce." included).
    """
    library.horovod_adasum_observe(entry.encode())


def observation(library: ctypes.CDLL, entry: str) -> Observation | None:
    """Return what the latest observed reduction of a tensor has found.

    None where there was none. On a device waits for the reduction, once.

    Args:
        library: the framework's Horovod library.
        entry: as of :func:`observe`.
    """
    sizes, rows = ctypes.POINTER(ctypes.c_int)(), ctypes.POINTER(ctypes.c_double)()
    levels, doubles = ctypes.c_int64(), ctypes.c_int64()
    call = library.horovod_adasum_observed
    call.restype = ctypes.c_int64
    where = (sizes, levels, rows, doubles)
    number = call(entry.encode(), *(ctypes.byref(place) for place in where))
    if not number:
        return None
    count = doubles.value
    copied = np.ctypeslib.as_array(rows, (count,)).copy() if count else np.zeros(0)
    return Observation(number, tuple(sizes[: levels.value]), copied)


def segmented(name: str, elements: Sequence[int]) -> str:
    """Return a tensor's name that tells the op that it is many tensors laid end to end.

    Each segment then gets its own AdaSum coefficients, as if it had been reduced alone,
    for the price of negotiating one tensor. All ranks agree on a name, so that none can cut
    the tensor otherwise: neither one that has joined, nor one that never made such a tensor.

    Args:
        name: what the tensor is called besides.
        elements: the segments' element counts; their sum is the tensor's.

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
    """Tell the op that tensor `entry` holds weights, and where newer ones are.

    The op then reduces the change of each segment, leaves `entry` as it is and sets each
    newer weight to the older one plus the AdaSum of the changes.

    Args:
        library: the framework's Horovod library.
        entry: the tensor's full name in Horovod ("allreduce." included).
        start: address of the tensor; one of that name elsewhere in memory (of a rank that
            has joined) is an ordinary tensor.
        elements: the segments' element counts, as in its name (:func:`segmented`).
        weights: the newer weights' addresses, by segment, contiguous and of the tensor's
            dtype; they must stay where they are until the reduction is done.
    """
    array = (ctypes.c_int64 * len(elements))(*elements)
    addresses = (ctypes.c_void_p * len(elements))(*weights)
    library.horovod_adasum_register_weights(
        entry.encode(), array, len(elements), ctypes.c_void_p(start), addresses
    )


def forget_weights(library: ctypes.CDLL, entry: str) -> None:
    """Undo :func:`register_weights`."""
    library.horovod_adasum_register_weights(entry.encode(), None, 0, None, None)
