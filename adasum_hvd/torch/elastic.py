"""Elastic training: the job goes on with the ranks that are left, or have come.

Horovod's names and calls. What differs, because Horovod's loses work or waits for ever there:

- after a change all ranks synchronize, always, from the lowest rank that was in the job before;
- a rendezvous that fails (another rank has died in it) is tried again;
- what was trained when hosts come or go is kept, attributes of the state too;
- with the delta variant, whose optimizer state is a rank's own, survivors keep theirs.

References:
    Horovod 0.28.1's elastic API; docs/elastic.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from horovod.common.elastic import ObjectState, notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch import mpi_ops
from horovod.torch.elastic import ElasticSampler as ElasticSampler
from horovod.torch.elastic import TorchState as HorovodState
from horovod.torch.elastic import state as horovod_state

from adasum_hvd.torch import marks, ops
from adasum_hvd.torch.broadcasting import (
    broadcast_optimizer_state,
    broadcast_parameters,
)
from adasum_hvd.torch.objects import allgather_object, broadcast_object
from adasum_hvd.torch.optimizer.base import DistributedBase

Result = TypeVar("Result")
RENDEZVOUS_TRIES = 5  # in a row


class _Model(horovod_state.ModelStateHandler):
    """A module: all ranks get the root's, and keep what is marked as their own."""

    def sync_from(self, root: int, survived: bool) -> None:
        module = self.value
        own = {
            name
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
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
        theirs = broadcast_object(rest, root, "adasum.elastic.model")
        if theirs and not survived:
            module.load_state_dict({**state, **theirs})


class _Optimizer(horovod_state.OptimizerStateHandler):
    """An optimizer: meets the ranks that there are now, and gets the root's state."""

    def sync_from(self, root: int, survived: bool) -> None:
        distributed = isinstance(self.value, DistributedBase)
        if distributed:
            self.value.restart()
        own = distributed and not self.value._reduces_gradients
        broadcast_optimizer_state(self.value, root, keep=own and survived)
        if own:
            window = broadcast_object(
                self.value.window(), root, "adasum.elastic.window"
            )
            self.value.load_window(window)


class _Sampler(horovod_state.SamplerStateHandler):
    """A sampler, whose progress all ranks have in common."""

    def sync_from(self, root: int, survived: bool) -> None:
        state = broadcast_object(
            self.value.state_dict(), root, "adasum.elastic.sampler"
        )
        self.value.load_state_dict(state)


_HANDLERS: dict[type, Callable[[Any], Any]] = {
    horovod_state.ModelStateHandler: _Model,
    horovod_state.OptimizerStateHandler: _Optimizer,
    horovod_state.SamplerStateHandler: _Sampler,
}


class TorchState(HorovodState):
    """What is committed, restored and given to newcomers, as Horovod's.

    Args:
        model: a module.
        optimizer: an optimizer, distributed or not; a distributed one has to be in a state.
        **kwargs: more modules, optimizers and samplers, and objects that pickle; attributes of
            the state.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ):
        super().__init__(model, optimizer, **kwargs)
        self._bcast_object = functools.partial(
            broadcast_object, name="adasum.elastic.hosts"
        )
        for name, handler in self._handlers.items():
            self._handlers[name] = _HANDLERS.get(type(handler), _foreign)(handler.value)
        self._survived = False  # this rank has been in the job since a synchronization

    def sync(self) -> None:
        """Give every rank what the lowest surviving one has, and commit it.

        Collective: every rank; blocks.

        Raises:
            ValueError: models, optimizers or settings differ between ranks; on every rank.
            HorovodInternalError: a rank has died.
        """
        ops.agree()
        survived = allgather_object(self._survived, "adasum.elastic.survivors")
        root = survived.index(True) if any(survived) else 0
        for handler in self._handlers.values():
            handler.sync_from(root, self._survived)
        mine = {name: getattr(self, name) for name in self._saved_state}
        self._saved_state: dict[str, Any] = broadcast_object(
            mine, root, "adasum.elastic.objects"
        )
        self._set_attrs()
        self._survived = True
        self.save()


def _foreign(value: Any) -> Any:
    raise NotImplementedError(
        f"TorchState: required modules, optimizers, samplers and objects, got a {type(value)} with "
        "a handler of its own in Horovod's registry; keep its state_dict() in the state"
    )


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Return `func` as a function that goes on when ranks die, leave or come, as Horovod's.

    After a failure the last commit is restored; when hosts only come or leave, nothing is
    lost. Then Horovod starts again, all ranks synchronize the state, and `func` is called anew.

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

    @functools.wraps(func)
    def wrapper(state: ObjectState, *args: Any, **kwargs: Any) -> Result:
        notification_manager.init()
        notification_manager.register_listener(state)
        is_first = True
        try:
            while True:
                try:
                    if not is_first:
                        _restart()
                        state.on_reset()
                    state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    state.restore()
                except HostsUpdatedInterrupt:
                    state.save()
                is_first = False
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _restart() -> None:
    """Start Horovod again, with the ranks that there are now."""
    for attempt in range(1, RENDEZVOUS_TRIES + 1):
        mpi_ops.shutdown()
        try:
            ops.init()
            return
        except (HorovodInternalError, ValueError):
            if attempt == RENDEZVOUS_TRIES:
                raise
