"""Hugging Face's Trainer: a callback that makes its DDP model reduce by AdaSum."""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Any

from transformers import Trainer, TrainerCallback

from adasum_hvd.distributed import AdasumState, register_adasum_hook
from adasum_hvd.distributed.replicas import outside_of

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
        """Register the hook, and warn of parameters that neither it nor DDP reduces."""
        trainer = _trainer()
        self.state = register_adasum_hook(trainer.model_wrapped, **self._arguments)
        outside = [
            parameter
            for parameter in outside_of(trainer.model_wrapped, trainer.optimizer)
            if parameter.requires_grad and not parameter._post_accumulate_grad_hooks
        ]
        if self.state is not None and outside:
            warnings.warn(
                "AdasumCallback: expected an optimizer of the model's parameters, but got "
                f"{len(outside)} others, such as a loss's, which each rank trains alone; reduce "
                'them as docs/where_to_use.md, "Parameters outside of DDP\'s model"',
                stacklevel=2,
            )


def _trainer() -> Trainer:
    """Return the Trainer that calls: transformers passes a callback only the unwrapped model."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if isinstance(found := frame.f_locals.get("self"), Trainer):
            return found
    raise RuntimeError(
        "AdasumCallback: expected to be called by a Trainer of transformers, but got another "
        "caller; pass it in Trainer(callbacks=[...]), and leave the call to the Trainer"
    )
