"""Comparisons of the ranks' models, and `banner`, which describes the hook."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from adasum_hvd.advice.banner import distributed_banner
from adasum_hvd.advice.learning_rate import find_study
from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.base.replicas import ReplicaMismatch, compare, digest_of, is_due
from adasum_hvd.distributed import device_slice, native
from adasum_hvd.distributed.communicator import Communicator, hosts_of
from adasum_hvd.distributed.ddp import AdasumState
from adasum_hvd.distributed.sharding import local_of, repeated


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's dtype, shape and bits, of a DTensor those of its local part."""
    local = local_of(tensor.detach())
    data = torch.empty(local.numel(), dtype=local.dtype, device="cpu")
    data.copy_(local.reshape(-1))
    return digest_of(local.dtype, local.shape, data.view(torch.uint8).numpy())


def outside_of(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Return what the optimizer trains and the model lacks, such as a loss's parameters."""
    own = set(map(id, model.parameters()))
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [parameter for parameter in parameters if id(parameter) not in own]


def named_tensors(
    model: torch.nn.Module, optimizer: Any
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name, tensor, whose marks apply to it) of a model, and of an optimizer if any."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor, tensor
    if optimizer is None:
        return
    for parameter in outside_of(model, optimizer):
        name = f"parameter of shape {tuple(parameter.shape)} outside of the model"
        names[id(parameter)] = name
        yield name, parameter, parameter
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{names.get(id(parameter), 'unnamed')}.{key}", value, parameter


def mismatch(
    named: Iterable[tuple[str, torch.Tensor]], communicator: Communicator
) -> ReplicaMismatch | None:
    """Return an error with the first tensor that is not the same on all ranks. Collective."""
    mine = [(name, digest(tensor)) for name, tensor in named]
    digests, ranks = communicator.gather_if_different(mine), communicator.ranks
    try:
        compare(ranks, digests or [], ranks[communicator.rank])
    except ReplicaMismatch as error:
        return error
    return None


class Copies:
    """The parameters that the ranks of one replica hold alike, compared while they train."""

    def __init__(self, what: str, model: torch.nn.Module):
        self._what, self._checks = what, 0
        self._named = [(Communicator(g), named) for g, named in repeated(model).items()]

    def mismatches(self) -> list[ReplicaMismatch]:
        """Return the first difference in each group of ranks. Collective."""
        found = [mismatch(named, communicator) for communicator, named in self._named]
        return [error for error in found if error is not None]

    def check(self) -> None:
        """Warn of a difference, on call 1, 2, 4, 8 and so on: kernels may round differently.

        Collective; blocks.
        """
        self._checks += 1
        if self._checks & (self._checks - 1) == 0:
            for error in self.mismatches():
                warnings.warn(f"{self._what}: {error}", stacklevel=2)


def check_replicas(
    model: torch.nn.Module, optimizer: Any = None, every: int = 1, group: Any = None
) -> bool:
    """Compare parameters, buffers and optimizer state over the ranks, bit for bit.

    Each rank has its own statistics of batch normalization between two forward passes of DDP:
    mark these buffers with `mark_worker_local`.

    Args:
        model: its parameters and buffers, without those marked with `mark_worker_local`. Of a
            sharded one this rank's shards: pass the group of ranks that hold the same ones.
            Parameters that tensor parallelism leaves whole are compared inside a replica, too.
        optimizer: its state's tensors too, and its parameters outside of the model. Leave it out
            if each rank steps by itself.
        every: compare on every k-th call for this model only, and return at once otherwise.
        group: the process group; by default the default one.

    Returns:
        True if a comparison was made, False if this call was left out.

    Raises:
        ValueError: `every` is not an integer of at least 1.
        ReplicaMismatch: on every rank; names the first tensor that differs and the ranks.

    Collective: every rank of the group, and of a sharded model all ranks that hold it; blocks
    when it compares.
    """
    if not is_due(model, every):
        return False
    named = [
        (name, tensor)
        for name, tensor, marked in named_tensors(model, optimizer)
        if not is_marked_local(marked)
    ]
    found = mismatch(named, Communicator(group))
    for error in (found, *Copies("check_replicas", model).mismatches()):
        if error is not None:  # not sooner, because other groups' ranks may see none
            raise error
    return True


def banner(state: AdasumState, optimizer: Any = None) -> str:
    """Return one line that says what is in force: rule, ranks, backend, groups, wire.

    Args:
        state: the hook's.
        optimizer: of this model, or its class; adds the learning rate to start from, if known.
    """
    communicator, wire = state.communicator, state.compression
    path = native.described(communicator, state.rule)
    if "cuda:" in communicator.backends and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        path += f"; CUDA tensors by {device_slice.described(device)}"
    return distributed_banner(
        state.rule.described,
        communicator.size,
        len(set(hosts_of(communicator))),
        communicator.backends,
        "the gradients' dtype" if wire is None else str(wire).removeprefix("torch."),
        path,
        None if optimizer is None else find_study(optimizer),
    )
