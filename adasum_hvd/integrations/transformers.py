"""Hugging Face's Trainer: a callback that makes its DDP model reduce by AdaSum."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from transformers import Trainer, TrainerCallback

from adasum_hvd.distributed import AdasumState, register_adasum_hook

__all__ = ["AdasumCallback"]


class AdasumCallback(TrainerCallback):
    """Registers the hook when a training begins; once, because the Trainer keeps its DDP model.

    Args:
        arguments: of :class:`adasum_hvd.distributed.AdasumState`.

    Attributes:
        state: of the last training; None before the first one, and in a job of one process.

    Raises:
        TypeError: when a training begins, on every rank: the Trainer has not wrapped its model in
            DDP, because `evaluate()` came before the first `train()`, or because of FSDP.
        RuntimeError: no Trainer calls it.

    Collective: the beginning of a training, on every rank; blocks.
    """

    def __init__(self, **arguments: Any):
        self.state: AdasumState | None = None
        self._arguments = arguments

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Register the hook."""
        self.state = register_adasum_hook(_trainer().model_wrapped, **self._arguments)


def _trainer() -> Trainer:
    """Return the Trainer that calls: transformers passes a callback only the unwrapped model."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
    raise RuntimeError(
        "AdasumCallback: expected to be called by a Trainer of transformers, but got another "
        "caller; pass it in Trainer(callbacks=[...]), and leave the call to the Trainer"
    )
