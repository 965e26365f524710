"""Objects over the ranks, on any process set."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
from horovod.torch import mpi_ops

from adasum_hvd.common.options import ProcessSet


class Failure:
    """What went wrong on one rank, sent in place of what the others wait for."""

    def __init__(self, error: BaseException | str):
        self.text = (
            error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        )


class _Unpicklable(Failure):
    """In place of an object that did not pickle."""


def ranks_of(process_set: ProcessSet) -> Sequence[int]:
    """Return the ranks of a process set, by their numbers in the job."""
    return process_set.ranks or range(mpi_ops.size())


def check_root(what: str, root_rank: int, process_set: ProcessSet) -> None:
    """Raise ValueError where no rank of `process_set` is the root."""
    ranks = list(ranks_of(process_set))
    if isinstance(root_rank, bool) or root_rank not in ranks:
        raise ValueError(
            f"{what}: expected a root_rank of {ranks}, but got {root_rank!r} (this is rank "
            f"{mpi_ops.rank()})"
        )


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    """Return `obj` in bytes, or else the error that the others must hear of."""
    try:
        return cloudpickle.dumps(obj), None
    except Exception as error:  # whatever a class's own __reduce__ may raise
        return pickle.dumps(_Unpicklable(error)), error


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _refusal(what: str, rank: int, failure: Failure) -> pickle.PicklingError:
    return pickle.PicklingError(
        f"{what}: expected an object that pickles, but got on rank {rank} {failure.text} (this "
        f"is rank {mpi_ops.rank()})"
    )


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = mpi_ops.global_process_set,
) -> list[Any]:
    """Return every rank's `obj`, in rank order; Horovod's knows the global process set only.

    Args:
        obj: anything that pickles, functions too.
        name: base name of the two tensors that travel.
        process_set: the ranks that take part.

    Raises:
        pickle.PicklingError: a rank's `obj` does not pickle; on all ranks.

    Collective: every rank of `process_set`; blocks.
    """
    pickled, error = _pickled(obj)
    data = _tensor_of(pickled)
    base = name or "adasum.allgather_object"
    lengths = mpi_ops.allgather(
        torch.tensor([data.numel()]), name=f"{base}.length", process_set=process_set
    )
    everything = mpi_ops.allgather(data, name=f"{base}.data", process_set=process_set)
    objects = [
        pickle.loads(part.numpy().tobytes())
        for part in everything.split(lengths.tolist())
    ]
    for rank, found in zip(ranks_of(process_set), objects, strict=True):
        if isinstance(found, _Unpicklable):
            raise _refusal("allgather_object", rank, found) from error
    return objects


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = mpi_ops.global_process_set,
) -> Any:
    """Return the root's `obj`.

    Horovod's names what travels after the type of `obj`, and waits for ever where the ranks
    pass objects of different types, such as None on all but the root.

    Args:
        obj: anything that pickles, functions too; without meaning on other ranks.
        root_rank: the rank, in the job, whose object counts.
        name: base name of the two tensors that travel.
        process_set: the ranks that take part.

    Raises:
        ValueError: `root_rank` is not in `process_set`; on all its ranks.
        pickle.PicklingError: the root's `obj` does not pickle; on all ranks.

    Collective: every rank of `process_set`; blocks.
    """
    check_root("broadcast_object", root_rank, process_set)
    is_root = mpi_ops.rank() == root_rank
    pickled, error = _pickled(obj) if is_root else (b"", None)
    base = name or "adasum.broadcast_object"
    length = torch.tensor([len(pickled)])
    mpi_ops.broadcast_(length, root_rank, f"{base}.length", process_set)
    data = (
        _tensor_of(pickled)
        if is_root
        else torch.empty(length.tolist(), dtype=torch.uint8)
    )
    mpi_ops.broadcast_(data, root_rank, f"{base}.data", process_set)
    received = (
        obj if is_root and error is None else pickle.loads(data.numpy().tobytes())
    )
    if isinstance(received, _Unpicklable):
        raise _refusal("broadcast_object", root_rank, received) from error
    return received
