"""`check_replicas`, which compares the ranks' models, and `banner`, which describes the hook."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from adasum_hvd.advice.banner import distributed_banner
from adasum_hvd.advice.learning_rate import find_study
from adasum_hvd.common.marks import is_marked_local
from adasum_hvd.common.replicas import compare, is_due
from adasum_hvd.distributed import native
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.ddp import AdasumState
from adasum_hvd.distributed.sharding import local_of
from adasum_hvd.distributed.topology import hosts_of


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bits, of a DTensor those of its local part."""
    local = local_of(tensor.detach())
    data = torch.empty(local.numel(), dtype=local.dtype, device="cpu")
    data.copy_(local.reshape(-1))
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()


def named_tensors(
    model: torch.nn.Module, optimizer: Any
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name, tensor, parameter or buffer whose marks apply to it).

    Args:
        model: its parameters and buffers.
        optimizer: its state's tensors too, if it is not None.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor, tensor
    if optimizer is None:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                name = names.get(id(parameter), "unnamed")
                yield f"{name}.{key}", value, parameter


def check_replicas(
    model: torch.nn.Module, optimizer: Any = None, every: int = 1, group: Any = None
) -> bool:
    """Compare parameters, buffers and optimizer state over the ranks, bit for bit.

    Each rank has its own statistics of batch normalization between two forward passes of DDP:
    mark these buffers with `mark_worker_local`.

    Args:
        model: its parameters and buffers, without those marked with `mark_worker_local`. Of a
            sharded one this rank's shards: pass the group of ranks that hold the same ones.
        optimizer: its state's tensors too. Leave it out if each rank steps by itself.
        every: compare on every k-th call for this model only, and return at once otherwise.
        group: the process group; by default the default one.

    Returns:
        True if a comparison was made, False if this call was left out.

    Raises:
        ValueError: `every` is not an integer of at least 1.
        ReplicaMismatch: on every rank; names the first tensor that differs and the ranks.

    Collective: every rank of the group; blocks when it compares.
    """
    if not is_due(model, every):
        return False
    communicator = Communicator(group)
    mine = [
        (name, digest(tensor))
        for name, tensor, marked in named_tensors(model, optimizer)
        if not is_marked_local(marked)
    ]
    ranks = communicator.ranks
    compare(ranks, communicator.all_gather_object(mine), ranks[communicator.rank])
    return True


def banner(state: AdasumState, optimizer: Any = None) -> str:
    """Return one line that says what is in force: rule, ranks, backend, groups, wire.

    Args:
        state: the hook's.
        optimizer: of this model, or its class; adds the learning rate to start from, if a study
            has it. None: the line has no rate.

    Example:
        >>> if dist.get_rank() == 0:                  # doctest: +SKIP
        ...     print(banner(state, optimizer))
    """
    communicator = state.communicator
    wire = state.compression
    return distributed_banner(
        state.rule.described,
        communicator.size,
        len(set(hosts_of(communicator))),
        communicator.backends,
        "the gradients' dtype" if wire is None else str(wire).removeprefix("torch."),
        native.described(communicator, state.rule),
        None if optimizer is None else find_study(optimizer),
    )
