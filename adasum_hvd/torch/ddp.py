"""DDP's hooks: `keep_local_hook`, and old names of those in :mod:`adasum_hvd.distributed`.

`AdasumState` and `adasum_hook` are the ones of `adasum_hvd.distributed`, which needs no Horovod.
The old ones differed in two arguments: `process_set=` is `process_group=` now, and
`compression=` takes `adasum_hvd.distributed.Compression.fp16` or `bf16`.

No `from __future__ import annotations` here, because DDP checks the hooks' annotations.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from adasum_hvd import distributed
from adasum_hvd.distributed.lanes import done

__all__ = ["keep_local_hook"]


def __getattr__(name: str) -> Any:
    if name not in ("AdasumState", "adasum_hook"):
        raise AttributeError(name)
    warnings.warn(
        f"adasum_hvd.torch.ddp.{name} is that of adasum_hvd.distributed now, and goes with the "
        "next release; import it from there",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(distributed, name)


def keep_local_hook(
    state: None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Leave gradients as they are on each rank, for `DistributedOptimizer(op=AdasumDelta)`."""
    return done(bucket.buffer())


keep_local_hook.keeps_local = True  # type: ignore[attr-defined]  # parallel/torch_modes.py
