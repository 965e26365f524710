"""Lightning: strategies whose model reduces by AdaSum, for the Trainer and for Fabric."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh

from adasum_hvd.distributed import adasum_replicate, register_adasum_hook

__all__ = ["AdasumDDPStrategy", "AdasumFSDP2Strategy", "AdasumFabricStrategy"]

_NAMES = "compression", "rule", "group_op", "group_size", "overlap"


class _Adasum:
    """The arguments of AdaSum, taken out of those of a strategy."""

    state: Any = None

    def __init__(self, *arguments: Any, **named: Any):
        self._adasum = {name: named.pop(name) for name in _NAMES if name in named}
        super().__init__(*arguments, **named)


class AdasumDDPStrategy(_Adasum, DDPStrategy):
    """The Trainer's `DDPStrategy` with AdaSum, on any device; Lightning ignores hooks on a CPU.

    It takes the arguments of Lightning's `DDPStrategy`, and `compression`, `rule`, `group_op` and
    `group_size` of :class:`adasum_hvd.distributed.AdasumState`. `state` is that of the last `fit`.
    """

    def configure_ddp(self) -> None:
        """Wrap the model and register the hook."""
        super().configure_ddp()
        self.state = register_adasum_hook(self.model, **self._adasum)


class AdasumFabricStrategy(_Adasum, FabricDDPStrategy):
    """Fabric's `DDPStrategy` with AdaSum; as :class:`AdasumDDPStrategy`."""

    def setup_module(self, module: torch.nn.Module) -> Any:
        """Wrap a model in DDP and register the hook."""
        model = super().setup_module(module)
        self.state = register_adasum_hook(model, **self._adasum)
        return model


class AdasumFSDP2Strategy(_Adasum, ModelParallelStrategy):
    """The Trainer's `ModelParallelStrategy`, with AdaSum across replicas of the sharded model.

    `device_mesh` has one dimension more, "replica": `configure_model` shards by
    `self.device_mesh["data_parallel"]` as before. `state` is the handle of the last `fit`.

    Args:
        replicas: of the model; they divide `data_parallel_size`.
        named: of `ModelParallelStrategy` and :func:`adasum_hvd.distributed.adasum_replicate`.
    """

    def __init__(self, *, replicas: int, **named: Any):
        super().__init__(**named)
        self._replicas = replicas

    def setup_environment(self) -> None:
        """Make the mesh; a ValueError if the replicas do not divide the ranks."""
        super().setup_environment()
        ranks, tensor = self.device_mesh.shape
        if self._replicas < 1 or ranks % self._replicas:
            raise ValueError(
                f"replicas: expected a divisor of {ranks}, but got {self._replicas}; pass one"
            )
        shape = self._replicas, ranks // self._replicas, tensor
        names = "replica", *self.device_mesh.mesh_dim_names
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._device_mesh = self.lightning_module._device_mesh = mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks that share examples are those of a tensor-parallel group."""
        replicas, shards, tensor = self.device_mesh.shape
        return {"num_replicas": replicas * shards, "rank": self.global_rank // tensor}

    def setup(self, trainer: Any) -> None:
        """Let the model's gradients be reduced, when it is sharded and on its device."""
        super().setup(trainer)
        mesh = self.device_mesh["replica"]
        self.state = adasum_replicate(self.model, mesh, **self._adasum)

    def block_backward_sync(self) -> Any:
        """Return a context in which gradients accumulate, for `accumulate_grad_batches`."""
        return self.state.no_sync()

    def teardown(self) -> None:
        """Leave the model to another Trainer."""
        if self.state is not None:
            self.state.remove()
        super().teardown()
