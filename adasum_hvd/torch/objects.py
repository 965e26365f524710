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


def _gathered(
    caller: str, obj: Any, name: str | None, process_set: ProcessSet
) -> list[Any]:
    """Return every rank's `obj`; PicklingError on all ranks if one cannot be pickled."""
    error = None
    try:
        pickled = cloudpickle.dumps(obj)
    except Exception as raised:  # a class's own __reduce__ may raise any
        pickled, error = pickle.dumps(_Unpicklable(raised)), raised
    data = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    length, base = torch.tensor([data.numel()]), name or f"adasum.{caller}"
    lengths = mpi_ops.allgather(length, f"{base}.length", process_set)
    gathered = mpi_ops.allgather(data, f"{base}.data", process_set)
    parts = gathered.split(lengths.tolist())
    objects = [pickle.loads(part.numpy().tobytes()) for part in parts]
    for rank, received in zip(ranks_of(process_set), objects, strict=True):
        if isinstance(received, _Unpicklable):
            raise pickle.PicklingError(
                f"{caller}: expected a picklable object, but got {received.text} on rank {rank} "
                f"(seen by rank {mpi_ops.rank()} of {mpi_ops.size()})"
            ) from error
    return objects


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
    return _gathered("allgather_object", obj, name, process_set)


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
    caller = "broadcast_object"
    check_root(caller, root_rank, process_set)
    is_root = mpi_ops.rank() == root_rank
    # All others send a few bytes.
    gathered = _gathered(caller, obj if is_root else None, name, process_set)
    return obj if is_root else gathered[ranks_of(process_set).index(root_rank)]
