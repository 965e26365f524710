"""Elastic training: the job continues with the ranks that remain or join.

Names and calls are Horovod's; :mod:`adasum_hvd.elastic.state` lists the differences. With the
delta variant the optimizer state is local, and survivors keep their own.

References:
    Horovod 0.28.1's elastic API; docs/elastic.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from horovod.torch import mpi_ops
from horovod.torch.elastic import ElasticSampler as ElasticSampler
from horovod.torch.elastic import TorchState as HorovodState
from horovod.torch.elastic import state as horovod_state

from adasum_hvd.elastic.state import SharedState, running
from adasum_hvd.torch import marks, ops
from adasum_hvd.torch.broadcasting import (
    broadcast_optimizer_state,
    broadcast_parameters,
)
from adasum_hvd.torch.objects import allgather_object, broadcast_object
from adasum_hvd.torch.optimizer.wrapper import DistributedWrapper

__all__ = [
    "ElasticSampler",
    "TorchState",
    "run",
]

Result = TypeVar("Result")


class _Model(horovod_state.ModelStateHandler):
    """A module: all ranks get the root's values, except for marked parameters and buffers."""

    def sync_from(self, root: int, survived: bool) -> None:
        module = self.value
        own = {
            name
            for name, tensor in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            )
            if marks.is_marked(tensor)
        }
        state = module.state_dict()
        shared = {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name not in own
        }
        broadcast_parameters(shared, root)
        rest = {name: v for name, v in state.items() if name not in shared}
        root_rest = broadcast_object(rest, root, "adasum.elastic.model")
        if root_rest and not survived:
            module.load_state_dict({**state, **root_rest})


class _Optimizer(horovod_state.OptimizerStateHandler):
    """An optimizer: restarts with the job's current ranks, and gets the root's state."""

    def sync_from(self, root: int, survived: bool) -> None:
        distributed = isinstance(self.value, DistributedWrapper)
        if distributed:
            self.value.restart()
        own = distributed and not self.value._reduces_gradients
        broadcast_optimizer_state(self.value, root, keep=own and survived)
        if own:
            window = broadcast_object(
                self.value._adasum.window(), root, "adasum.elastic.window"
            )
            self.value._adasum.load_window(window)


class _Sampler(horovod_state.SamplerStateHandler):
    """A sampler: all ranks get the root's progress."""

    def sync_from(self, root: int, survived: bool) -> None:
        state = broadcast_object(
            self.value.state_dict(), root, "adasum.elastic.sampler"
        )
        self.value.load_state_dict(state)


class _Scaler(horovod_state.StateHandler):
    """A gradient scaler: all ranks get the root's scale."""

    def __init__(self, scaler: torch.amp.GradScaler):
        super().__init__(scaler)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # Empty if the scaler is disabled; torch refuses to load an empty state.
        if self._saved:
            self.value.load_state_dict(self._saved)

    def sync_from(self, root: int, survived: bool) -> None:
        state = broadcast_object(self.value.state_dict(), root, "adasum.elastic.scaler")
        if state and self.value.is_enabled():
            self.value.load_state_dict(state)


_HANDLERS: dict[type, Callable[[Any], Any]] = {
    horovod_state.ModelStateHandler: _Model,
    horovod_state.OptimizerStateHandler: _Optimizer,
    horovod_state.SamplerStateHandler: _Sampler,
}


class TorchState(SharedState, HorovodState):
    """The training state that is committed, restored and copied to new ranks, as Horovod's.

    Args:
        model: a module.
        optimizer: an optimizer. Every distributed optimizer of the job must be in a state.
        **kwargs: more modules, optimizers, samplers and gradient scalers, and picklable objects;
            each becomes an attribute of the state.
    """

    _agree = staticmethod(ops.agree)
    _gather = staticmethod(allgather_object)
    _broadcast = staticmethod(broadcast_object)

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ):
        scalers = {
            name: value
            for name, value in kwargs.items()
            if isinstance(value, torch.amp.GradScaler)
        }
        rest = {name: value for name, value in kwargs.items() if name not in scalers}
        super().__init__(model, optimizer, **rest)
        for name, handler in self._handlers.items():
            self._handlers[name] = _HANDLERS.get(type(handler), _foreign)(handler.value)
        for name, scaler in scalers.items():
            setattr(self, name, scaler)
            self._handlers[name] = _Scaler(scaler)

    def _sync_trained(self, root: int) -> None:
        for handler in self._handlers.values():
            handler.sync_from(root, self._survived)


def _foreign(value: Any) -> Any:
    raise NotImplementedError(
        "TorchState: expected modules, optimizers, samplers, scalers and objects, but got a "
        f"{type(value)} with a handler of its own in Horovod's registry; "
        "keep its state_dict() in the state"
    )


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Return `func` as a function that continues when ranks die, leave or join, as Horovod's.

    After a failure the last commit is restored; if hosts only come or leave, nothing is lost.
    Then Horovod restarts, all ranks synchronize the state, and `func` is called again.

    Args:
        func: its first argument is the state, such as :class:`TorchState`.

    Example:
        >>> @hvd.elastic.run                                             # doctest: +SKIP
        ... def train(state):
        ...     while state.batch < batches:
        ...         ...                                # backward, optimizer.step()
        ...         state.batch += 1
        ...         state.commit()
    """
    return running(func, _restart, lambda error: False)


def _restart() -> None:
    mpi_ops.shutdown()
    ops.start(again=True)
