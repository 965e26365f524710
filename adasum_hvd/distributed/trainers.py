"""`register_adasum_hook`: the hook for programs whose DDP model a trainer makes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from adasum_hvd.distributed.ddp import AdasumState, adasum_hook

__all__ = ["register_adasum_hook"]

_registered: weakref.WeakKeyDictionary[Any, tuple[AdasumState, dict[str, Any]]]
_registered = weakref.WeakKeyDictionary()  # by DDP model


def register_adasum_hook(
    model: torch.nn.Module, **arguments: Any
) -> AdasumState | None:
    """Register :func:`adasum_hook` on a model that a trainer has wrapped, once.

    A trainer may keep its DDP model for a second training, and leaves the model alone in a job of
    one process. Both are right here, where `register_comm_hook` raises.

    Args:
        model: the trainer's, of `DistributedDataParallel`; also compiled.
        arguments: of :class:`AdasumState`.

    Returns:
        The model's state, the same for later calls. None in a job of one process whose model is
        not wrapped.

    Raises:
        TypeError: the model is not wrapped, in a job of several processes.
        ValueError: the model has the hook with other arguments; or as :class:`AdasumState`.

    Collective: every rank of the model's process group; blocks on the first call.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, DistributedDataParallel):
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise TypeError(
                "register_adasum_hook: expected a model of DistributedDataParallel, but got "
                f"{type(model).__name__} (rank {dist.get_rank()} of {dist.get_world_size()}); "
                "call it after the trainer has wrapped the model, and use adasum_replicate for "
                "a sharded one"
            )
        return None
    if model not in _registered:
        state = AdasumState(**arguments)
        model.register_comm_hook(state, adasum_hook)
        _registered[model] = state, arguments
    state, known = _registered[model]
    if known != arguments:
        raise ValueError(
            f"register_adasum_hook: expected the arguments of the first call, {known}, but got "
            f"{arguments} (rank {dist.get_rank()} of {dist.get_world_size()}); a DDP model keeps "
            "its hook"
        )
    return state
