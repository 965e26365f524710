"""Whether something is one of torch's classes of sharded models, without importing them.

Importing DTensor takes a fifth as long as torch itself. What nobody has imported has no instances.
Older releases have the classes under other names.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "is_fsdp_module"]

_DTENSOR = "torch.distributed.tensor", "torch.distributed._tensor"  # 2.4
_FSDP = "torch.distributed.fsdp", "torch.distributed._composable.fsdp"  # 2.4 and 2.5


def _is(value: Any, places: tuple[str, ...], name: str) -> bool:
    kinds = [getattr(sys.modules.get(place), name, None) for place in places]
    return isinstance(value, tuple(filter(None, kinds)))


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Return whether a tensor is sharded or replicated over a mesh."""
    return _is(value, _DTENSOR, "DTensor")


def is_fsdp_module(value: Any) -> TypeGuard[FSDPModule]:
    """Return whether a module is one that `fully_shard` was called on."""
    return _is(value, _FSDP, "FSDPModule")
