"""Lightning: strategies whose DDP model reduces by AdaSum, for the Trainer and for Fabric."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from adasum_hvd.distributed import AdasumState, register_adasum_hook

__all__ = ["AdasumDDPStrategy", "AdasumFabricStrategy"]

_NAMES = "compression", "rule", "group_op", "group_size"


class _Adasum:
    """The arguments of `AdasumState`, taken out of those of a strategy."""

    state: AdasumState | None = None

    def __init__(self, *arguments: Any, **named: Any):
        self._adasum = {name: named.pop(name) for name in _NAMES if name in named}
        super().__init__(*arguments, **named)

    def _register(self, model: torch.nn.Module) -> None:
        self.state = register_adasum_hook(model, **self._adasum)


class AdasumDDPStrategy(_Adasum, DDPStrategy):
    """The Trainer's `DDPStrategy` with AdaSum, on any device; Lightning ignores hooks on a CPU.

    Args:
        arguments: of Lightning's `DDPStrategy`.
        named: of `DDPStrategy`; and `compression`, `rule`, `group_op` and `group_size` of
            :class:`adasum_hvd.distributed.AdasumState`.

    Attributes:
        state: of the last `fit`; None before.

    Example:
        >>> trainer = Trainer(strategy=AdasumDDPStrategy(), devices=2)  # doctest: +SKIP
    """

    def configure_ddp(self) -> None:
        """Wrap the model and register the hook."""
        super().configure_ddp()
        self._register(self.model)


class AdasumFabricStrategy(_Adasum, FabricDDPStrategy):
    """Fabric's `DDPStrategy` with AdaSum; as :class:`AdasumDDPStrategy`.

    Example:
        >>> fabric = Fabric(strategy=AdasumFabricStrategy(), devices=2)  # doctest: +SKIP
    """

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap a model and register the hook."""
        model = super().setup_module(module)
        self._register(model)
        return model
