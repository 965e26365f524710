"""The mesh of replicas: checks of a model and its arguments on all ranks, and equal starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.distributed.checks import DTYPES, Call, agree, call_of
from adasum_hvd.distributed.communicator import (
    Communicator,
    check_groups,
    group_of,
    hosts_of,
)
from adasum_hvd.distributed.forward_check import is_replicated
from adasum_hvd.distributed.replicas import Copies
from adasum_hvd.distributed.rules import Rule
from adasum_hvd.distributed.sharding import (
    is_dtensor,
    is_fsdp_module,
    is_reduced,
    layout_of,
    local_of,
    reshard,
    shard_groups,
)
from adasum_hvd.distributed.units import gradient_dtype, grouped

_WRAPPED = {  # by class of a module
    "DistributedDataParallel": (
        "is DistributedDataParallel, which averages gradients; pass the module inside it, or use "
        "adasum_hook"
    ),
    "FullyShardedDataParallel": (
        "is FSDP1 (FullyShardedDataParallel), which flattens parameters; use fully_shard"
    ),
}


# Gloo's reduce-scatter took an average for a sum, silently: pytorch issue 162338.
GLOO_SUMS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)


class _Place(NamedTuple):
    ranks: tuple[int, ...]  # that hold the same shards
    hosts: tuple[int, ...]  # of these
    others: tuple[int, ...]  # that hold other shards of this rank's parameters


def connect(
    what: str,
    model: torch.nn.Module,
    mesh: Any,
    arguments: Callable[[Communicator], tuple[Rule, dict[str, object]]],
) -> tuple[Communicator, Rule, Copies]:
    """Check the model and the arguments, and broadcast the first replica's weights and buffers.

    `arguments` returns, for the replicas, the rule, and what else must be the same on all of them.

    Returns:
        The replicas, for one thread of the function `what`; the rule; and what a replica repeats.

    Raises:
        TypeError, ValueError: on every rank of the job: the mesh or the model, or by `arguments`.

    Collective: all ranks of the job; blocks.
    """
    problem = _mesh_problem(mesh)
    if not isinstance(model, torch.nn.Module):
        problem = f"model: expected a torch.nn.Module, but got {type(model).__name__}"
    call = Call(problem=ValueError(problem) if problem else None)
    agree(what, call, Communicator())
    reshard(model)
    communicator = Communicator(mesh, apart=True)
    places = _places(model, communicator)
    copies = Copies(what, model)
    different = copies.mismatches()
    rule = Rule("adasum")
    try:
        rule, settings = arguments(communicator)
        call = call_of([], rule.described | settings | _described(model))
        found = next(problems(model, communicator.ranks, dist.get_rank()), "")
        if found := found or _order_problem(places, communicator):
            raise ValueError(
                f"expected a model whose replicas AdaSum can reduce, but {found}"
            )
        if different:
            raise ValueError(different[0])
    except (TypeError, ValueError) as error:  # on the other ranks, too
        call = Call(problem=error)
    agree(what, call, communicator, [Communicator()])
    # The hosts decide on AdaSum's tree, which all shards of a tensor must share.
    first = min(_replica_of(places, communicator.ranks[0]))
    communicator.hosts = places[first].hosts
    check_groups(communicator, rule)
    _broadcast(model, communicator)
    return communicator, rule, copies


def _places(model: torch.nn.Module, communicator: Communicator) -> list[_Place]:
    """Return every rank's place, by rank. Collective: all ranks of the job."""
    groups = {group for p in model.parameters() for group in shard_groups(p)}
    others = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    place = _Place(
        tuple(communicator.ranks), hosts_of(communicator), tuple(sorted(others))
    )
    return Communicator().all_gather_object(place)


def _replica_of(places: Sequence[_Place], rank: int) -> set[int]:
    """Return the ranks that hold the shards of a rank's replica, itself included."""
    found, new = {rank}, {rank}
    while new:
        new = {other for one in new for other in places[one].others} - found
        found |= new
    return found


def _order_problem(places: Sequence[_Place], communicator: Communicator) -> str:
    """Return why shards of a tensor would be joined in different orders."""
    # torch sorts the ranks of a group, and rows of Gram matrices are in that order.
    for rank in sorted(_replica_of(places, dist.get_rank())):
        number = places[rank].ranks.index(rank)
        if number != communicator.rank:
            return (
                "the mesh numbers the replicas in another order for other shards: this rank is in "
                f"replica {communicator.rank} and rank {rank}, with another shard of it, in "
                f"{number}; make a mesh whose ranks rise along the replicas, such as "
                "init_device_mesh's"
            )
    return ""


def _mesh_problem(mesh: Any) -> str:
    try:
        group = group_of(mesh)
    except ValueError:
        dimensions = getattr(mesh, "ndim", None)
        got = f"{dimensions} dimensions" if dimensions else type(mesh).__name__
        return (
            "mesh: expected one dimension, the replicas, or their process group, but got "
            f'{got}; pass mesh["replica"]'
        )
    if dist.get_rank(group) < 0:
        return (
            "mesh: expected replicas that this rank is one of, but got a group without it; pass "
            "each rank the group of ranks that hold the same shards"
        )
    return ""


def problems(model: torch.nn.Module, ranks: list[int], rank: int) -> Iterator[str]:
    """Yield why the gradients of a model cannot be reduced over these ranks, the replicas."""
    for name, module in model.named_modules():
        found = _WRAPPED.get(type(module).__name__)
        if is_replicated(module):
            found = "is under torch's replicate, which averages gradients; leave it out"
        if GLOO_SUMS and is_fsdp_module(module) and _averages_on_cpus(module):
            found = (
                f"is sharded on CPUs, where fully_shard of torch {torch.__version__} sums "
                "gradients that it should average; install torch 2.9 or newer"
            )
        if found:
            yield f"{name or 'the model'} {found}"
    is_sharded = any(
        is_fsdp_module(module) and any(map(shard_groups, module.parameters()))
        for module in model.modules()
    )
    for name, parameter in model.named_parameters():
        if is_sharded and is_reduced(parameter) and not is_dtensor(parameter):
            yield (
                f"{name} is outside fully_shard, so its gradients differ between the ranks of a "
                "replica; call fully_shard on the model, too, without ignored_params"
            )
        if hasattr(parameter, "ds_id"):
            yield f"{name} is partitioned by DeepSpeed ZeRO; use fully_shard"
        elif parameter.is_meta:
            yield f"{name} is on the meta device; call to_empty(), and initialize it first"
        elif parameter.requires_grad and parameter.dtype not in DTYPES:
            yield f"{name} has dtype {parameter.dtype}; use real parameters"
        elif not is_dtensor(parameter) and layout_of(parameter) is not None:
            yield (
                f"{name} is the local part of a DTensor, which torch makes for "
                "DistributedDataParallel; pass the module as it is before that"
            )
        elif is_dtensor(parameter):
            mesh = parameter.device_mesh
            both = sorted(set(mesh.mesh.flatten().tolist()) & set(ranks) - {rank})
            if both:  # its mesh has ranks of the replicas
                yield f"{name} {_shared(parameter, both)}"
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided and not is_marked_local(buffer):
            yield (
                f"buffer {name} is sparse, and would be broadcast; make it dense, or call "
                "mark_worker_local on it if the replicas have equal ones"
            )


def _averages_on_cpus(module: Any) -> bool:
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None or group.device.type != "cpu":
        return False
    forced = getattr(group, "force_sum_reduction_for_comms", False)
    return group.mesh_info.shard_mesh_size > 1 and not forced


def _shared(parameter: Any, both: list[int]) -> str:
    what = f"is sharded over ranks {both} of the replicas, which have to hold the same shard"
    dimensions = parameter.device_mesh.ndim
    if dimensions > 1 and any(place.is_replicate() for place in parameter.placements):
        what = (
            f"is on a mesh of {dimensions} dimensions, along one of which torch averages its "
            f"gradient before AdaSum can see it (HSDP), and which holds ranks {both} of the "
            "replicas"
        )
    return (
        f"{what}; shard over a one-dimensional mesh inside each replica, fully_shard(module, "
        'mesh=mesh["shard"]), and pass the other dimension, mesh["replica"], here'
    )


def _described(model: torch.nn.Module) -> dict[str, object]:
    """Return what must be the same on all replicas."""
    units = enumerate(grouped(model))
    unit = {name: number for number, members in units for name, _ in members}
    parameters: dict[str, object] = {
        name: (
            tuple(parameter.shape),
            tuple(local_of(parameter).shape),
            str(parameter.dtype),
            str(gradient_dtype(parameter)),
            str(getattr(parameter, "placements", "")),
            f"requires_grad={parameter.requires_grad}",
            f"worker_local={is_marked_local(parameter)}",
            f"unit {unit.get(name)}",
        )
        for name, parameter in model.named_parameters()
    }
    buffers = {
        f"buffer {name}": (tuple(local_of(buffer).shape), str(buffer.dtype))
        for name, buffer in model.named_buffers()
        if not is_marked_local(buffer)
    }
    return parameters | buffers


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
