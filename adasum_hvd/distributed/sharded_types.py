"""torch's classes of sharded models, which older releases have under other names."""

from __future__ import annotations

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor
try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import FSDPModule

__all__ = ["DTensor", "FSDPModule"]
