"""Shards of parameters: torch's classes, the groups that hold shards, and a rank's own part.

torch's classes are found without importing them: importing DTensor takes a fifth as long as torch
itself. A class that was never imported cannot have instances.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from adasum_hvd.base.marks import is_marked_local

_DTENSOR = "torch.distributed.tensor", "torch.distributed._tensor"  # 2.4
_FSDP = "torch.distributed.fsdp", "torch.distributed._composable.fsdp"  # 2.4 and 2.5


def _is(value: Any, places: tuple[str, ...], name: str) -> bool:
    kinds = [getattr(sys.modules.get(place), name, None) for place in places]
    return isinstance(value, tuple(filter(None, kinds)))


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is sharded or replicated over a mesh."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):  # most of them, at once
        return False
    return _is(value, _DTENSOR, "DTensor")


def is_fsdp_module(value: Any) -> bool:
    """Return whether a module is one that `fully_shard` was called on."""
    return _is(value, _FSDP, "FSDPModule")


def is_reduced(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is trained, and not marked with `mark_worker_local`."""
    return parameter.requires_grad and not is_marked_local(parameter)


def layout_of(tensor: Any) -> Any:
    """Return the owner of a tensor's `device_mesh` and `placements`; None for a whole tensor."""
    # A local part, which torch makes for DDP, keeps its DTensor's.
    return tensor if is_dtensor(tensor) else getattr(tensor, "_st_info", None)


def shard_groups(parameter: Any) -> tuple[Any, ...]:
    """Return the process groups of the mesh dimensions along which a parameter is sharded."""
    if (layout := layout_of(parameter)) is None:
        return ()
    mesh = layout.device_mesh
    return tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(layout.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    )


def numbers_by_group(parameters: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the numbers of the parameters that are sharded over each process group."""
    found: dict[Any, list[int]] = {}
    for number, parameter in enumerate(parameters):
        for group in shard_groups(parameter):
            found.setdefault(group, []).append(number)
    return found


def shard_problem(tensor: Any) -> str:
    """Return why AdaSum of a tensor's local part is not that of the tensor, or ""."""
    if getattr(tensor, "_fsdp_flattened", False):
        return (
            "expected whole tensors, but got flat ones of FSDP1 (FullyShardedDataParallel); use "
            "fully_shard, and adasum_replicate or LocalSGD"
        )
    if not is_dtensor(tensor) and not shard_groups(tensor):
        return ""
    return (
        "expected whole tensors, but got a DTensor or its local part (tensor parallelism); use "
        "adasum_replicate or LocalSGD without DistributedDataParallel, which add up the dot "
        "products of its shards"
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
    """Return a gradient laid out as its parameter; collective if sums are still pending."""
    if is_dtensor(gradient) and gradient.placements != parameter.placements:
        return gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def reshard(model: torch.nn.Module) -> None:
    """Free whole parameters of FSDP, which a forward pass may use after shards were changed."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()


def repeated(model: torch.nn.Module) -> dict[Any, list[tuple[str, torch.Tensor]]]:
    """Return by process group the parameters that all its ranks hold alike, inside a replica.

    These are whole parameters next to tensor-parallel ones, replicated DTensors, and DTensors of
    FSDP on a slice of the mesh of other parameters.
    """
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not (is_marked_local(parameter) or parameter.is_meta)
    ]
    layouts = [layout_of(parameter) for _, parameter in named]
    meshes = {one.device_mesh: None for one in layouts if one is not None}
    # By ranks, because equal meshes may have groups of their own.
    groups = {ranks: group for mesh in meshes for ranks, group in _groups(mesh)}
    found: dict[Any, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in named:
        own = layout_of(parameter)
        sharded = [_ranks(group) for group in shard_groups(parameter)]
        wider = [m for m in meshes if own is None or _contains(m, own.device_mesh)]
        for ranks in {ranks: None for mesh in wider for ranks, _ in _groups(mesh)}:
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
