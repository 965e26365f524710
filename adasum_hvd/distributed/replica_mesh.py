"""The mesh of replicas: checks of a model and its arguments on all ranks, and equal starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from adasum_hvd.common.marks import is_marked_local
from adasum_hvd.distributed.checks import Call, agree, agree_in_job, call_of
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.rules import Rule
from adasum_hvd.distributed.sharded_types import is_fsdp_module
from adasum_hvd.distributed.sharding import local_of, problems
from adasum_hvd.distributed.topology import hosts_of

Arguments = Callable[[], tuple[Rule, dict[str, object]]]


def connect(
    what: str, model: torch.nn.Module, mesh: Any, arguments: Arguments
) -> tuple[Communicator, Rule]:
    """Check the model and the arguments, and broadcast the first replica's weights and buffers.

    Args:
        what: the function, for messages.
        model: sharded or not.
        mesh: the one-dimensional mesh of the replicas, or their process group.
        arguments: returns the rule, and what else must be the same on all replicas; may raise
            ValueError.

    Returns:
        The replicas, for one thread of this function's caller, and the rule.

    Raises:
        ValueError: on every rank of the job: a mesh of several dimensions or without this rank,
            a model in which AdaSum has no meaning, or the replicas differ.

    Collective: all ranks of the job; blocks.
    """
    problem = _mesh_problem(mesh)
    agree(what, Call((), (), problem), Communicator())
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()  # else a forward pass may have left whole parameters in the model
    communicator = Communicator(_group_of(mesh), apart=True)
    hosts_of(communicator)
    rule = Rule("adasum")
    try:
        rule, settings = arguments()
        call = call_of([], rule.described | settings | _described(model))
        found = next(problems(model, communicator.ranks, dist.get_rank()), "")
        if found:
            raise ValueError(
                f"expected a model whose replicas AdaSum can reduce, but {found}"
            )
    except ValueError as error:  # on the other ranks, too
        call = Call((), (), str(error))
    agree_in_job(what, call, communicator)
    _broadcast(model, communicator)
    return communicator, rule


def _group_of(mesh: Any) -> Any:
    return mesh.get_group() if hasattr(mesh, "get_group") else mesh


def _mesh_problem(mesh: Any) -> str:
    """Return why a mesh cannot be the replicas'."""
    dimensions = getattr(mesh, "ndim", 1)
    if dimensions != 1:
        return (
            "mesh: expected one dimension, the replicas, but got "
            f'{dimensions} dimensions; pass mesh["replica"]'
        )
    if dist.get_rank(_group_of(mesh)) < 0:
        return (
            "mesh: expected replicas that this rank is one of, but got a group without it; pass "
            "each rank the group of ranks that hold the same shards"
        )
    return ""


def _described(model: torch.nn.Module) -> dict[str, object]:
    """Return what must be the same on all replicas."""
    return {
        name: (
            tuple(parameter.shape),
            tuple(local_of(parameter).shape),
            str(parameter.dtype),
            str(getattr(parameter, "placements", "")),
            parameter.requires_grad,
        )
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def _broadcast(model: torch.nn.Module, communicator: Communicator) -> None:
    """Copy the first replica's tensors to the others, as bytes: buffers may have any dtype."""
    for tensor in (*model.parameters(), *model.buffers()):
        local = local_of(tensor)
        if is_marked_local(tensor) or not local.numel():
            continue
        own = local[tuple(slice(None if stride else 1) for stride in local.stride())]
        data = torch.empty(own.shape, dtype=own.dtype, device=own.device).copy_(own)
        bits = data.view(-1).view(torch.uint8)
        dist.broadcast(bits, communicator.ranks[0], group=communicator.group)
        own.copy_(data)
