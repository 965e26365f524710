"""Ray Train: its `prepare_model` with AdaSum."""

from __future__ import annotations

from typing import Any

import ray.train.torch
import torch

from adasum_hvd.distributed import register_adasum_hook

__all__ = ["prepare_model"]


def prepare_model(
    model: torch.nn.Module, adasum: dict[str, Any] | None = None, **arguments: Any
) -> torch.nn.Module:
    """Return `ray.train.torch.prepare_model`'s DDP model, which reduces by AdaSum.

    Args:
        model: of this worker.
        adasum: arguments of :class:`adasum_hvd.distributed.AdasumState`.
        arguments: of Ray's `prepare_model`.

    Raises:
        TypeError: several workers with `parallel_strategy` other than "ddp"; on every worker.

    Collective: every worker; blocks.
    """
    prepared = ray.train.torch.prepare_model(model, **arguments)
    register_adasum_hook(prepared, **(adasum or {}))
    return prepared
