"""Accelerate: one call after `prepare`."""

from __future__ import annotations

from typing import Any

import torch

from adasum_hvd.distributed import AdasumState, register_adasum_hook

__all__ = ["use_adasum"]


def use_adasum(*prepared: Any, **arguments: Any) -> list[AdasumState]:
    """Make the models that `Accelerator.prepare` has returned reduce by AdaSum, each once.

    Accelerate 1.15 drops a Python hook of its `DistributedDataParallelKwargs(comm_hook=)`
    silently, so it is registered here.

    Args:
        prepared: what `prepare` returned: models, and others, which are left alone.
        arguments: of :class:`adasum_hvd.distributed.AdasumState`.

    Returns:
        The models' states; none in a job of one process.

    Raises:
        TypeError: no model is among them; or, on every rank, one is not wrapped in DDP: it was
            not prepared, or FSDP, DeepSpeed or another plugin has it.

    Collective: every rank; blocks.
    """
    models = [one for one in prepared if isinstance(one, torch.nn.Module)]
    if not models:
        raise TypeError(
            f"use_adasum: expected a model that is prepared, but got {len(prepared)} objects "
            "without one; pass what accelerator.prepare(model, ...) has returned"
        )
    states = [register_adasum_hook(model, **arguments) for model in models]
    return [state for state in states if state is not None]
