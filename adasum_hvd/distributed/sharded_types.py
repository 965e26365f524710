"""Torch's classes of sharded models, without importing them.

Importing DTensor takes a fifth as long as torch itself. A class that was never imported cannot
have instances. Older releases have the classes under other names.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "is_fsdp_module", "layout_of", "shard_groups", "shard_problem"]

_DTENSOR = "torch.distributed.tensor", "torch.distributed._tensor"  # 2.4
_FSDP = "torch.distributed.fsdp", "torch.distributed._composable.fsdp"  # 2.4 and 2.5


def _is(value: Any, places: tuple[str, ...], name: str) -> bool:
    kinds = [getattr(sys.modules.get(place), name, None) for place in places]
    return isinstance(value, tuple(filter(None, kinds)))


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Return whether a tensor is sharded or replicated over a mesh."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):  # most of them, at once
        return False
    return _is(value, _DTENSOR, "DTensor")


def is_fsdp_module(value: Any) -> TypeGuard[FSDPModule]:
    """Return whether a module is one that `fully_shard` was called on."""
    return _is(value, _FSDP, "FSDPModule")


def layout_of(tensor: Any) -> Any:
    """Return the owner of a tensor's `device_mesh` and `placements`; None for a whole tensor.

    That is a DTensor itself. Its local part, which torch makes for DDP, keeps its DTensor's.
    """
    return tensor if is_dtensor(tensor) else getattr(tensor, "_st_info", None)


def shard_groups(parameter: Any) -> tuple[Any, ...]:
    """Return the process groups of the mesh dimensions along which a parameter is sharded.

    The dot product of whole tensors is the sum of the shards' dot products over these groups. A
    dimension along which the parameter is replicated is not among them.
    """
    if (layout := layout_of(parameter)) is None:
        return ()
    mesh = layout.device_mesh
    return tuple(
        mesh.get_group(dimension)
        for dimension, placement in enumerate(layout.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    )


def shard_problem(tensor: Any) -> str:
    """Return why AdaSum of a tensor's local part is not that of the tensor, or ""."""
    if not is_dtensor(tensor) and not shard_groups(tensor):
        return ""
    return (
        "expected whole tensors, but got a DTensor or its local part (tensor parallelism); use "
        "adasum_replicate or LocalSGD without DistributedDataParallel, which add up the dot "
        "products of its shards"
    )
