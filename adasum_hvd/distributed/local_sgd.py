"""`LocalSGD`: the delta variant for sharded models, and with several local steps.

References:
    Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767; Douillard et al.,
    "DiLoCo", arXiv 2311.08105, for the outer optimizer; arXiv 2006.02924, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from adasum_hvd.base.options import check_count
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.delta import Windows, check_alone, check_optimizer
from adasum_hvd.distributed.forward_check import check_ended
from adasum_hvd.distributed.replica_mesh import connect
from adasum_hvd.distributed.rules import Coefficients, rule_of
from adasum_hvd.distributed.sharding import (
    is_fsdp_module,
    is_reduced,
    like,
    local_of,
    reshard,
)
from adasum_hvd.distributed.units import Selection, gradient_dtype, units_of


class LocalSGD(Windows):
    r"""Reduce a model's changes over replicas by AdaSum after every `every` optimizer steps.

    With `w_0` the weights at the start of a window and `w_r` those of replica r at its end, all
    replicas go on from `w_0 + AdaSum(w_1 - w_0, w_2 - w_0, ...)`. An outer optimizer takes a step
    from `w_0` instead, with the negative of that AdaSum as the gradient.

    Parameters and buffers are broadcast from the first replica now. Buffers stay local afterwards,
    and gradients must: the first reduction warns if all replicas have the same changes.

    Args:
        optimizer: a plain one, over the model's parameters; its state stays local. Every replica
            takes every step, so that a `GradScaler` does not fit.
        model: sharded by `fully_shard`, `parallelize_module`, both or neither, and already
            distributed as it trains. Parameters that are frozen now, or marked with
            `mark_worker_local`, are not reduced.
        mesh: the one-dimensional mesh of the replicas, `mesh["replica"]`, or their process group:
            the ranks that hold the same shards.
        every: optimizer steps in a window.
        outer_optimizer: over the model's parameters, such as
            `SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)`.
        rule: as of `adasum_all_reduce`, or "adascale": the mean, and the object has its `gain`,
            which multiplies nothing but the rate of an outer optimizer with `AdaScaleLR`.
        group_op, group_size: as of `adasum_all_reduce`.

    Raises:
        TypeError: on every rank of the job: an optimizer is not torch's.
        ValueError: on every rank of the job: as `adasum_replicate`; `every` is not an integer of
            at least 1; an optimizer's parameters do not fit the model's; its changes are reduced
            over these replicas already; or `every` or the outer optimizer's hyperparameters differ
            between replicas.

    Collective: all ranks of the job, with their own mesh of replicas; blocks. The last step of a
    window is collective from then on. A copy of the shards is kept during a window.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        mesh: Any,
        every: int,
        outer_optimizer: torch.optim.Optimizer | None = None,
        *,
        rule: str | Coefficients = "adasum",
        group_op: str | None = None,
        group_size: int | None = None,
    ):
        communicator, self.rule, self._copies = connect(
            "LocalSGD",
            model,
            mesh,
            lambda replicas: (
                rule_of(rule, group_op, group_size),
                _settings(optimizer, model, every, outer_optimizer, replicas),
            ),
        )
        super().__init__("LocalSGD", optimizer, communicator, every)
        self._model, self._outer = model, outer_optimizer
        self._sharded = [*filter(is_fsdp_module, model.modules())]
        self._units, self._selection = units_of(model), Selection("LocalSGD", model)
        self._windows = 0  # that have ended
        self._saved: set[str] = set()  # what was saved since the last step
        hook = optimizer.register_state_dict_pre_hook
        self._handles.append(hook(lambda _: self._saved.add("optimizer")))

    @property
    def local_step(self) -> int:
        """The optimizer steps in the present window."""
        return self._local_step

    def _begin_step(self) -> None:
        check_ended("LocalSGD", self._sharded)
        self._check_parameters()
        saved, self._saved = self._saved, set()
        if self._local_step and saved == {"optimizer"}:
            raise RuntimeError(
                "LocalSGD: expected a checkpoint with the state_dict() of LocalSGD, but the "
                f"optimizer's was saved without it {self._local_step} steps into a window, whose "
                f"start would be lost (rank {dist.get_rank()}); save both before the next step, "
                "or call synchronize() on all replicas before you save"
            )
        super()._begin_step()

    def _check_parameters(self) -> None:
        """Raise RuntimeError if the optimizer trains other parameters than the reduced ones."""
        self._selection.check()
        for number, group in enumerate(self._optimizer.param_groups):
            others = [p for p in group["params"] if p not in self._selection]
            if new := sum(map(is_reduced, others)):
                raise RuntimeError(
                    f"LocalSGD: expected the parameters that the model had at the call, but got "
                    f"{new} others in group {number} of the optimizer, which are not reduced "
                    f"(rank {dist.get_rank()}); remove() and create LocalSGD again after "
                    "parameters were added or replaced"
                )

    def synchronize(self) -> None:
        """Reduce the changes of a window that is not complete, and begin another one.

        For the end of a training, and before an evaluation; between windows it does nothing.

        Raises:
            ValueError: on all replicas: they have taken different numbers of steps.
            RuntimeError: a replica did not respond within the group's timeout. Or, on all
                replicas: their weights were not the same at the start of the window; or the
                optimizer keeps a copy of the weights, which no reduction reaches.

        Collective: all replicas; blocks on a CPU. After an error, and after a first step that
        raised, the weights are those of the window's start.
        """
        reshard(self._model)
        super().synchronize()

    def _apply(self, changes: Sequence[torch.Tensor]) -> None:
        if self._outer is None:
            super()._apply(changes)
        else:
            self._restore()
            with self._without_gradients():
                for (_, parameter), change in zip(self._named(), changes, strict=True):
                    if parameter.requires_grad:
                        gradient = change.neg_().to(gradient_dtype(parameter))
                        parameter.grad = like(parameter, gradient)
                    else:  # frozen since: the outer momentum must not move it
                        local_of(parameter).add_(change)
                self._outer.step()
        self._windows += 1
        self._copies.check()

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for unit in self._units:
            yield from zip(unit.names, unit.parameters, strict=True)

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Put all gradients away for a while: an outer step uses no other ones than its own."""
        outer = () if self._outer is None else self._outer.param_groups
        several = chain(self._model.parameters(), *(each["params"] for each in outer))
        parameters = list(dict.fromkeys(several))
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this replica, for `torch.distributed.checkpoint`.

        It has the weights of the window's start by name, sharded ones as DTensors.
        """
        reshard(self._model)
        self._saved.add("window")
        starts = self._starts or [*map(torch.clone, self._locals())]
        pairs = zip(self._named(), starts, strict=True)
        state: dict[str, Any] = {
            "local_step": self._local_step,
            "windows": self._windows,
            "starts": {name: like(p, start) for (name, p), start in pairs},
        }
        if self._outer is not None:
            from torch.distributed.checkpoint import state_dict as states

            had_state = bool(self._outer.state)
            # Perhaps that of an earlier LocalSGD.
            state["windows"] = self._windows or int(had_state)
            # Else torch would leave out the state of a first step.
            with self._without_gradients():
                outer = states.get_optimizer_state_dict(self._model, self._outer)
            if not had_state:
                self._outer.state.clear()
            state["outer_optimizer"] = dict(outer)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called, in mid-window, too; load the model's state as well.

        Args:
            state: of the same replica, or of any replica if it was saved between windows.

        Raises:
            ValueError: the state is that of another model, or of another outer optimizer.
        """
        places = self.state_dict()
        for part in ("starts", "outer_optimizer"):
            expected, got = (sorted(one.get(part, ())) for one in (places, state))
            if expected != got:
                raise ValueError(
                    f"LocalSGD: {part}: expected a state of {expected}, but got {got}; load it "
                    "with the model and the outer optimizer that it was saved with"
                )
        self._local_step, self._windows = state["local_step"], state["windows"]
        starts = (local_of(state["starts"][name]).clone() for name, _ in self._named())
        self._starts = [*starts] if self._local_step else []
        self._saved = {"window"}
        if self._outer is not None:
            from torch.distributed.checkpoint import state_dict as states

            with self._without_gradients():
                # A parameter that is trained since the last outer step has no state.
                states.set_optimizer_state_dict(
                    self._model,
                    self._outer,
                    state["outer_optimizer"],
                    options=states.StateDictOptions(strict=False),
                )
            if self._windows == 0:  # torch has made the state of a first step
                self._outer.state.clear()


def _settings(
    optimizer: Any,
    model: torch.nn.Module,
    every: int,
    outer: Any,
    replicas: Communicator,
) -> dict[str, object]:
    """Return what must be the same on all replicas; TypeError, ValueError as `LocalSGD`."""
    optimizers = {"optimizer": optimizer}
    if outer is not None:
        optimizers["outer_optimizer"] = outer
    for name, one in optimizers.items():
        check_optimizer(name, one)
    check_alone("optimizer", optimizer, replicas.ranks)
    check_count("every", every)
    known = {id(parameter) for parameter in model.parameters()}
    if strange := len(_trained(optimizer) - known):
        raise ValueError(
            f"optimizer: expected parameters of the model only, but got {strange} others, which "
            "would not be reduced; pass the module that has all of them"
        )
    needed = {id(p) for p in model.parameters() if is_reduced(p)}
    for name, one in optimizers.items():
        if missing := len(needed - _trained(one)):
            raise ValueError(
                f"{name}: expected all parameters of the model that are trained, but {missing} "
                "are missing; pass it model.parameters(), or freeze parameters"
            )
    if outer is None:
        return {"every": every}
    groups = [
        sorted((key, repr(value)) for key, value in group.items() if key != "params")
        for group in outer.param_groups
    ]
    return {"every": every, "outer_optimizer": (type(outer).__name__, groups)}


def _trained(optimizer: Any) -> set[int]:
    groups = optimizer.param_groups
    return {id(p) for one in groups for p in one["params"] if p.requires_grad}
