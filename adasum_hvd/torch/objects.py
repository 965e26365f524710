"""Allgather and broadcast of Python objects, on any process set."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
from horovod.torch import mpi_ops

from adasum_hvd.base.options import ProcessSet


class Failure:
    """An error of one rank, sent to the other ranks in place of the object that they expect."""

    def __init__(self, error: BaseException | str):
        is_text = isinstance(error, str)
        self.text = error if is_text else f"{type(error).__name__}: {error}"


class _Unpicklable(Failure):
    """Sent in place of an object that cannot be pickled."""


def ranks_of(process_set: ProcessSet) -> Sequence[int]:
    """Return the ranks of a process set, numbered in the job."""
    return process_set.ranks or range(mpi_ops.size())


def here() -> str:
    """Return this rank and the number of ranks, for messages."""
    return f"(rank {mpi_ops.rank()} of {mpi_ops.size()})"


def check_root(caller: str, root_rank: int, process_set: ProcessSet) -> None:
    """Raise ValueError unless `root_rank` is in `process_set`."""
    ranks = list(ranks_of(process_set))
    if isinstance(root_rank, bool) or root_rank not in ranks:
        raise ValueError(
            f"{caller}: expected a root_rank in {ranks}, but got {root_rank!r} {here()}; pass a "
            "rank of the process set"
        )


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    """Return the pickled `obj` and None, or a pickled `_Unpicklable` and the error."""
    try:
        return cloudpickle.dumps(obj), None
    except Exception as error:  # a class's own __reduce__ may raise any
        return pickle.dumps(_Unpicklable(error)), error


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _pickling_error(caller: str, rank: int, failure: Failure) -> pickle.PicklingError:
    return pickle.PicklingError(
        f"{caller}: expected a picklable object, but got {failure.text} on rank {rank} (seen by "
        f"rank {mpi_ops.rank()} of {mpi_ops.size()})"
    )


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = mpi_ops.global_process_set,
) -> list[Any]:
    """Return every rank's `obj`, in rank order; unlike Horovod's, on any process set.

    Args:
        obj: any picklable object, functions too.
        name: base name of the two tensors that are sent.
        process_set: the ranks to gather from.

    Raises:
        pickle.PicklingError: a rank's `obj` cannot be pickled; on all ranks.

    Collective: every rank of `process_set`; blocks.
    """
    pickled, error = _pickled(obj)
    data = _tensor_of(pickled)
    base = name or "adasum.allgather_object"
    lengths = mpi_ops.allgather(
        torch.tensor([data.numel()]), name=f"{base}.length", process_set=process_set
    )
    gathered = mpi_ops.allgather(data, name=f"{base}.data", process_set=process_set)
    objects = [
        pickle.loads(part.numpy().tobytes())
        for part in gathered.split(lengths.tolist())
    ]
    for rank, received in zip(ranks_of(process_set), objects, strict=True):
        if isinstance(received, _Unpicklable):
            raise _pickling_error("allgather_object", rank, received) from error
    return objects


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = mpi_ops.global_process_set,
) -> Any:
    """Return the root's `obj`; unlike Horovod's, types may differ between ranks.

    Args:
        obj: any picklable object, functions too; ignored on other ranks than the root.
        root_rank: the rank, in the job, whose object counts.
        name: base name of the two tensors that are sent.
        process_set: the ranks of the broadcast.

    Raises:
        ValueError: `root_rank` is not in `process_set`; on all its ranks.
        pickle.PicklingError: the root's `obj` cannot be pickled; on all ranks.

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
        raise _pickling_error("broadcast_object", root_rank, received) from error
    return received
