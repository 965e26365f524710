"""Detection of the parallel modes on all ranks; see `adasum_hvd/parallel`."""

from __future__ import annotations

from typing import Any

from horovod.torch.mpi_ops import global_process_set, size
from horovod.torch.mpi_ops import rank as mpi_rank

from adasum_hvd.base.options import ProcessSet
from adasum_hvd.parallel import ParallelModeFinding
from adasum_hvd.parallel.torch_modes import detect
from adasum_hvd.torch import marks
from adasum_hvd.torch.objects import allgather_object, ranks_of
from adasum_hvd.torch.wire import ranks_meet


def find_modes(
    optimizer: Any, model: Any = None, process_set: ProcessSet = global_process_set
) -> list[list[ParallelModeFinding]]:
    """Return the parallel modes in use on every rank, indexed by the rank's number in the job.

    Args:
        optimizer: any optimizer; its parameters are checked, except for worker-local ones.
        model: see :func:`adasum_hvd.parallel.torch_modes.detect`.
        process_set: the ranks to check. A rank outside of it, or alone in it, reduces nothing
            and gets an empty list.

    Collective: every rank of `process_set`; blocks.
    """
    if not process_set.included() or process_set.size() == 1:
        return []
    parameters = [
        parameter
        for group in getattr(optimizer, "param_groups", ())
        for parameter in group["params"]
        if not marks.is_worker_local(parameter)
    ]
    modes = detect(parameters, optimizer, model)
    if not ranks_meet():
        return [modes if rank == mpi_rank() else [] for rank in range(size())]
    gathered = allgather_object(modes, "adasum.parallel_modes", process_set)
    by_rank = dict(zip(ranks_of(process_set), gathered, strict=True))
    return [by_rank.get(rank, []) for rank in range(size())]
