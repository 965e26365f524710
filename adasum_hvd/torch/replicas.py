"""`check_replicas`, which compares the ranks' models, and `banner`, which describes the job."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd.advice import learning_rate
from adasum_hvd.advice.banner import banner as banner_of
from adasum_hvd.base.options import ProcessSet
from adasum_hvd.base.replicas import Digests, compare, is_due
from adasum_hvd.base.replicas import ReplicaMismatch as ReplicaMismatch
from adasum_hvd.distributed.replicas import digest, named_tensors
from adasum_hvd.horovod import binding
from adasum_hvd.torch import marks
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.objects import allgather_object
from adasum_hvd.torch.wire import LIBRARY

Ranks = tuple[int, ...]


def _digests(
    model: torch.nn.Module, optimizer: Any, everyone: Ranks
) -> dict[Ranks, Digests]:
    """Return the tensors' names and digests, by the set of ranks that share them."""
    digests: dict[Ranks, Digests] = {everyone: []}
    # The delta variant's optimizer state is local by design.
    reduced = optimizer if getattr(optimizer, "_reduces_gradients", True) else None
    for name, tensor, marked in named_tensors(model, reduced):
        if not marks.is_worker_local(marked):
            process_set = marks.holders(marked)
            ranks = tuple(process_set.ranks) if process_set else everyone
            digests.setdefault(ranks, []).append((name, digest(tensor)))
    return digests


def check_replicas(
    model: torch.nn.Module,
    optimizer: Any = None,
    every: int = 1,
    process_set: ProcessSet = mpi_ops.global_process_set,
) -> bool:
    """Compare parameters, buffers and optimizer state over the ranks, bit for bit.

    Average the statistics of batch normalization before, or mark them with `mark_worker_local`.

    Args:
        model: its parameters and buffers are compared. Worker-local ones are left out, and those
            marked with `mark_replicated_over` are compared over the ranks that hold them.
        optimizer: its state and its parameters outside of the model are compared, too; of the
            delta variant neither, because its state is local.
        every: compare on every k-th call for this model; return whether this call did.
        process_set: the ranks to compare.

    Raises:
        ValueError: `every` is not an integer of at least 1.
        ReplicaMismatch: on every rank; names the first tensor that differs and the ranks.

    Collective: every rank of `process_set`; blocks when it compares.
    """
    if not is_due(model, every):
        return False
    everyone: Ranks = tuple(process_set.ranks)
    mine = _digests(model, optimizer, everyone)
    gathered = allgather_object(mine, "adasum.check_replicas", process_set)
    by_rank = dict(zip(everyone, gathered, strict=True))
    for ranks in sorted({ranks for digests in gathered for ranks in digests}):
        digests = [by_rank.get(rank, {}).get(ranks, []) for rank in ranks]
        compare(ranks, digests, mpi_ops.rank())
    return True


def banner(optimizer: Any) -> str:
    """Return one line: variant, ranks, backend, transport, groups, learning rate, wire, memory."""
    options = optimizer._adasum.options
    flats = [bucket.flat for bucket in optimizer._adasum.flat_buckets]
    path = binding.transport_description(LIBRARY, options.process_set.process_set_id)
    if any(flat.is_cuda for flat in flats) and "devices" not in path:
        on_devices = binding.reduces_on_devices(LIBRARY)
        path += "; devices: " + ("NCCL" if on_devices else "through the host")
    return banner_of(
        options,
        torch_ops.settings(),
        "MPI" if mpi_ops.mpi_enabled() else "Gloo",
        path,
        sorted({str(flat.dtype).removeprefix("torch.") for flat in flats}),
        optimizer.extra_bytes(),
        learning_rate.find_study(optimizer),
    )
