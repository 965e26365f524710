"""Places of the shards of a parameter, and the set-ups in which AdaSum has no meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.distributed.checks import DTYPES
from adasum_hvd.distributed.forward_check import is_replicated
from adasum_hvd.distributed.sharded_types import (
    is_dtensor,
    is_fsdp_module,
    layout_of,
    shard_groups,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_ONE_DIMENSION = (
    "shard over a one-dimensional mesh inside each replica, fully_shard(module, "
    'mesh=mesh["shard"]), and pass the other dimension, mesh["replica"], here'
)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its memory: of a DTensor its local tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is laid out over the ranks as `tensor`, with this local part."""
    if not is_dtensor(tensor):
        return local
    return type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.size(), stride=tensor.stride(),
    )  # fmt: skip


def complete(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient laid out as its parameter; sums that are still pending are added up.

    Collective over the parameter's mesh if the placements differ.
    """
    if is_dtensor(gradient) and gradient.placements != parameter.placements:
        return gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def reshard(model: torch.nn.Module) -> None:
    """Free the whole parameters that a forward pass of FSDP may have left in a model.

    Else the next forward pass would use them, whatever was written to the shards.
    """
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()


def repeated(model: torch.nn.Module) -> dict[Any, list[tuple[str, torch.Tensor]]]:
    """Return by process group the parameters that all its ranks hold alike, inside a replica.

    These are whole parameters next to tensor-parallel ones, replicated DTensors, and DTensors of
    FSDP on a slice of the mesh of other parameters. Nothing reduces their gradients over the
    group, so that they stay alike only if its ranks compute alike.
    """
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not (is_marked_local(parameter) or parameter.is_meta)
    ]
    layouts = [layout_of(parameter) for _, parameter in named]
    meshes = dict.fromkeys(
        layout.device_mesh for layout in layouts if layout is not None
    )
    # By ranks, because equal meshes may have groups of their own.
    groups = {ranks: group for mesh in meshes for ranks, group in _groups(mesh)}
    found: dict[Any, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in named:
        own = layout_of(parameter)
        sharded = [_ranks(group) for group in shard_groups(parameter)]
        wider = [m for m in meshes if own is None or _contains(m, own.device_mesh)]
        for ranks in dict.fromkeys(
            ranks for mesh in wider for ranks, _ in _groups(mesh)
        ):
            if ranks not in sharded:
                found.setdefault(groups[ranks], []).append((name, parameter))
    return found


def _groups(mesh: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Return the ranks and the group of each dimension of a mesh that has several ranks."""
    sizes = enumerate(mesh.shape)
    groups = [mesh.get_group(dimension) for dimension, size in sizes if size > 1]
    return [(_ranks(group), group) for group in groups]


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _contains(mesh: Any, part: Any) -> bool:
    """Return whether a mesh is another one, or has all its dimensions."""
    names, own = (set(one.mesh_dim_names or ()) for one in (mesh, part))
    ranks, few = (set(one.mesh.flatten().tolist()) for one in (mesh, part))
    return mesh == part or (bool(own) and own < names and few < ranks)


def problems(model: torch.nn.Module, ranks: list[int], rank: int) -> Iterator[str]:
    """Yield why the gradients of a model cannot be reduced over replicas by AdaSum.

    Args:
        model: the model.
        ranks: the ranks of the replicas that hold the same shards, in the job.
        rank: this one.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "DistributedDataParallel":
            yield (
                f"{name or 'the model'} is DistributedDataParallel, which averages gradients; "
                "pass the module inside it, or use adasum_hook"
            )
        elif is_replicated(module):
            yield (
                f"{name or 'the model'} is under torch's replicate, which averages gradients; "
                "leave it out"
            )
        elif kind == "FullyShardedDataParallel":
            yield (
                f"{name or 'the model'} is FSDP1 (FullyShardedDataParallel), which flattens "
                "parameters; use fully_shard"
            )
    is_sharded = any(
        is_fsdp_module(module) and any(map(shard_groups, module.parameters()))
        for module in model.modules()
    )
    for name, parameter in model.named_parameters():
        is_trained = parameter.requires_grad and not is_marked_local(parameter)
        if is_sharded and is_trained and not is_dtensor(parameter):
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
            yield from _mesh_problem(name, parameter, ranks, rank)
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided and not is_marked_local(buffer):
            yield (
                f"buffer {name} is sparse, and would be broadcast; make it dense, or call "
                "mark_worker_local on it if the replicas have equal ones"
            )


def _mesh_problem(
    name: str, parameter: DTensor, ranks: list[int], rank: int
) -> Iterator[str]:
    mesh = parameter.device_mesh
    both = sorted(set(mesh.mesh.flatten().tolist()) & set(ranks) - {rank})
    if not both:
        return
    replicated = [placement.is_replicate() for placement in parameter.placements]
    if mesh.ndim > 1 and any(replicated):
        yield (
            f"{name} is on a mesh of {mesh.ndim} dimensions, along one of which torch averages "
            f"its gradient before AdaSum can see it (HSDP), and which holds ranks {both} of the "
            f"replicas; {_ONE_DIMENSION}"
        )
    else:
        yield (
            f"{name} is sharded over ranks {both} of the replicas, which have to hold the same "
            f"shard; {_ONE_DIMENSION}"
        )
