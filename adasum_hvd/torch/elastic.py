"""Elastic training: the job continues with the ranks that remain or join.

Names and calls are Horovod's; docs/elastic.md lists the differences. With the delta variant the
optimizer state is local, and survivors keep their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from horovod.torch import mpi_ops
from horovod.torch.elastic import ElasticSampler as HorovodSampler
from horovod.torch.elastic import TorchState as HorovodState
from horovod.torch.elastic import state as horovod_state

from adasum_hvd.horovod.elastic.state import SharedState, running
from adasum_hvd.torch import broadcasting, marks, ops
from adasum_hvd.torch.objects import allgather_object, broadcast_object
from adasum_hvd.torch.optimizer.wrapper import DistributedWrapper

__all__ = ["ElasticSampler", "TorchState", "run"]

Result = TypeVar("Result")
Gradients = Sequence[tuple[torch.Tensor, torch.Tensor]]  # a parameter and its gradient


class ElasticSampler(HorovodSampler):
    """A sampler whose state counts the samples that all ranks have processed, as Horovod's.

    Every rank gets the same number of indices of the rest of the epoch, repeated as often as
    needed, and none after its end. Arguments are Horovod's.
    """

    def __iter__(self) -> Iterator[int]:
        """Return this rank's indices."""
        endless = itertools.cycle(self.remaining_indices)
        own = itertools.islice(endless, self.rank, self.total_size, self.num_replicas)
        self.indices = list(own)
        return iter(self.indices)


def _sync_module(module: torch.nn.Module, root: int, survived: bool) -> None:
    """Copy the root's values, except for marked parameters and buffers."""
    named = itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    own = {name for name, tensor in named if marks.is_marked(tensor)}
    state = module.state_dict()
    shared = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name not in own
    }
    broadcasting.broadcast_parameters(shared, root)
    rest = {name: v for name, v in state.items() if name not in shared}
    root_rest = broadcast_object(rest, root, "adasum.elastic.model")
    if root_rest and not survived:
        module.load_state_dict({**state, **root_rest})


def _sync_optimizer(optimizer: Any, root: int, survived: bool) -> None:
    """Restart an optimizer with the job's current ranks, and copy the root's state."""
    distributed = isinstance(optimizer, DistributedWrapper)
    if distributed:
        optimizer.restart()
    own = distributed and not optimizer._reduces_gradients
    broadcasting.broadcast_optimizer_state(optimizer, root, keep=own and survived)
    if own:
        reducer, name = optimizer._adasum, "adasum.elastic.window"
        reducer.load_window(broadcast_object(reducer.window(), root, name))


_SYNC: dict[type, Callable[[Any, int, bool], None]] = {
    horovod_state.ModelStateHandler: _sync_module,
    horovod_state.OptimizerStateHandler: _sync_optimizer,
}


class TorchState(SharedState, HorovodState):
    """The training state that is committed, restored and copied to new ranks, as Horovod's.

    Args:
        model: a module.
        optimizer: an optimizer. Every distributed optimizer of the job must be in a state.
        **kwargs: more modules and optimizers; objects with `state_dict()` and
            `load_state_dict()`, such as samplers and gradient scalers; and objects that pickle.
            Each becomes an attribute of the state.

    Raises:
        TypeError: an object has no `state_dict()`, and cannot be pickled or refers to a model or
            optimizer.
        NotImplementedError: Horovod's registry has a handler of its own for an object.
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
        super().__init__(model, optimizer, **kwargs)
        for name, handler in list(self._handlers.items()):
            if isinstance(handler, horovod_state.SamplerStateHandler):
                self._saved_state[name] = self._handlers.pop(name).value
            elif type(handler) not in _SYNC:
                raise NotImplementedError(
                    "TorchState: expected modules, optimizers and objects, but got a "
                    f"{type(handler.value)} with a handler of its own in Horovod's registry; "
                    "keep its state_dict() in the state"
                )
        self._commit()

    def _commit(self) -> None:
        super()._commit()
        # Of earlier passes of a step. With one pass, a step needs none from before it.
        self._gradients = [
            (p, p.grad.detach().clone())
            for handler in self._handlers.values()
            if isinstance(handler.value, DistributedWrapper)
            and handler.value._adasum.options.backward_passes_per_step > 1
            for p in _parameters(handler.value)
            if not (p.grad is None or handler.value._adasum.is_spent(p))
        ]

    def restore(self) -> None:
        """Restore the last commit, also inside lists, dictionaries and arrays."""
        super().restore()
        for handler in self._handlers.values():
            handler.save()  # because optimizers change the tensors that they have loaded
        self._load_gradients(self._gradients)

    def _load_gradients(self, gradients: Gradients) -> None:
        """Set these gradients, and drop all others."""
        for handler in self._handlers.values():
            for parameter in _parameters(handler.value):
                parameter.grad = None
        for parameter, gradient in gradients:
            parameter.grad = gradient.clone()

    def _sync_trained(self, root: int, newest: bool) -> None:
        for handler in self._handlers.values():
            _SYNC[type(handler)](handler.value, root, self._survived)
        # Others are of a step that is taken, or their reduction may be interrupted.
        self._load_gradients(self._gradients if newest else ())

    def _trained(self) -> Callable[[Any], bool]:
        own = {
            id(part)
            for handler in self._handlers.values()
            for part in (handler.value, *_parts(handler.value))
        }
        return lambda obj: id(obj) in own or isinstance(obj, DistributedWrapper)


def _parameters(trained: torch.nn.Module | torch.optim.Optimizer) -> Iterator[Any]:
    if isinstance(trained, torch.nn.Module):
        return trained.parameters()
    return (p for group in trained.param_groups for p in group["params"])


def _parts(trained: torch.nn.Module | torch.optim.Optimizer) -> Iterator[Any]:
    if isinstance(trained, torch.nn.Module):
        yield from (*trained.modules(), *trained.buffers())
    yield from _parameters(trained)


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Return `func` as a function that continues when ranks die, leave or join, as Horovod's.

    After a failure the last commit is restored; if hosts only come or leave, nothing is lost.
    Then Horovod restarts, all ranks synchronize the state, and `func` is called again.

    Args:
        func: its first argument is the state, such as :class:`TorchState`.
    """
    return running(func, mpi_ops.shutdown, ops.start)
