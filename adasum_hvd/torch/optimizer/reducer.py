"""The part that both reducers share: parameters, buckets and checks for the job's current ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from adasum_hvd.base import agreement
from adasum_hvd.base.options import Options, ProcessSet, check_count
from adasum_hvd.distributed.reduced import Reduced, noted, writes_to
from adasum_hvd.parallel.torch_modes import reduced_by_ddp
from adasum_hvd.torch import marks, wire
from adasum_hvd.torch.optimizer import checks
from adasum_hvd.torch.optimizer.buckets import NamedParameter
from adasum_hvd.torch.optimizer.parameters import Names, ReducedParameters


class Reducer:
    """The base of both reducers: the reductions of a distributed optimizer, held weakly."""

    alone: bool  # this rank is the only one, or outside the process set
    reducing: bool  # gradients or changes pass through buckets
    flat_buckets: Sequence[Any] = ()  # those with a flat tensor
    buckets: Sequence[Any] = ()  # all
    consistency: checks.ConsistencyCheck | None  # None for a single rank
    skip_synchronize = False  # `step()` uses the gradients as they are
    in_step = False  # a closure may run; its `zero_grad()` drops no gradient
    dropped_after = 0  # local steps of a window whose start a checkpoint has dropped
    scaler_agreed = False  # our GradScaler steps: all ranks have agreed on overflow
    # A reduced change was not finite: read and cleared by the scaler.
    change_overflowed = False
    # The last step's gradients, if it is of several passes.
    _spent: Mapping[int, Reduced] = {}

    def __init__(
        self, optimizer: Any, names: Names, options: Options, allows_ddp: bool
    ):
        self._optimizer = weakref.ref(optimizer)
        self.options = options
        self.parameters = ReducedParameters(optimizer, names, options)
        self._look_for_ddp = not allows_ddp  # to have reduced the gradients before
        self._connect()

    @property
    def optimizer(self) -> Any:
        """The distributed optimizer."""
        return self._optimizer()

    # ---- the job's current ranks ----

    def _connect(self) -> None:
        """Set up for the job's current ranks. Collective."""
        process_set = self.options.process_set
        included = process_set.included()
        self.alone = not included or process_set.size() == 1
        # A single rank needs buckets only for options other than the reduction.
        clips = self.options.clip_delta_norm is not None
        self.reducing = included and (not self.alone or clips)
        self._missed_step = checks.MissedStepCheck()
        self.consistency = None
        self.rebuild()
        # The count of Horovod's starts at the connection.
        self._met = wire.generation() if wire.ranks_meet() else 0
        if self.reducing and not self.alone:
            name = f"adasum.rounds.{self.parameters.instance}"
            self.consistency = checks.ConsistencyCheck(name, process_set)

    def restart(self) -> None:
        """Restart with the job's current ranks. Collective."""
        for bucket in self.buckets:
            bucket.drop()
        self._connect()

    def rebuild(self) -> None:
        """Compare the parameters with the other ranks, and make the buckets. Collective; blocks."""
        for bucket in self.flat_buckets:
            bucket.close()
        self.buckets = self.flat_buckets = ()
        self._in_buckets: dict[int, tuple[Any, ...]] = {}  # kinds of parameters, by id
        self._fingerprint = self.parameters.fingerprint()
        if not self.reducing:
            return
        named = self.parameters.named()
        if wire.ranks_meet():
            self.parameters.compare(named)
        self._in_buckets = self.parameters.kinds()
        lists = self.parameters.partition(self._flat(named), self.weights_of)
        self.buckets = self.flat_buckets = [self._make_bucket(*each) for each in lists]

    def _flat(self, named: Sequence[NamedParameter]) -> Sequence[NamedParameter]:
        """Return the parameters for flat buckets."""
        return named

    def weights_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that holds the parameter's weights; steps change it in place."""
        return parameter

    def _make_bucket(
        self, label: str, members: Sequence[NamedParameter], process_set: ProcessSet
    ) -> Any:
        raise NotImplementedError

    @property
    def common_buckets(self) -> list[Any]:
        """The flat buckets that all ranks of the optimizer's process set reduce."""
        process_set = self.options.process_set
        return [b for b in self.flat_buckets if b.process_set is process_set]

    def _follow_parameters(self) -> None:
        """Rebuild the buckets when parameters were (un)frozen, replaced or converted since."""
        self._check_ranks()
        if not self.reducing:
            return
        self._check_ddp()
        fingerprint = self.parameters.fingerprint()
        if fingerprint != self._fingerprint:
            if self.parameters.kinds() == self._in_buckets:
                self._fingerprint = fingerprint
            else:
                self._rebuild_for_changes()
        if not self._in_buckets:
            raise RuntimeError(
                "DistributedOptimizer: expected parameters to reduce over "
                f"{self.options.process_set.size()} ranks, but got none that requires a "
                "gradient and is not marked worker-local; the replicas would diverge"
            )

    def _rebuild_for_changes(self) -> None:
        self.parameters.name_new()
        self.parameters.changes = True
        try:
            if self.consistency is not None and wire.ranks_meet():
                self._announce_change(self.consistency)
            self.rebuild()
        finally:
            self.parameters.changes = False

    def _announce_change(self, check: checks.ConsistencyCheck) -> None:
        """Notify ranks whose parameters are unchanged: they rebuild, too, which raises on all."""
        raise NotImplementedError

    # ---- checks ----

    def _check_ranks(self) -> None:
        """Raise RuntimeError if the ranks have changed since they were connected."""
        if self._met != wire.generation() and agreement.is_elastic():
            raise RuntimeError(
                "DistributedOptimizer: expected an optimizer that is connected to the ranks of the "
                "job, but got one from before they changed; in an elastic job pass it to TorchState"
            )

    def _check_ddp(self) -> None:
        """Raise RuntimeError if DDP has reduced the gradients before."""
        if self.alone or not self._look_for_ddp:
            return
        self._look_for_ddp = False  # once, because it searches all objects
        if reduced_by_ddp(self.parameters.reduced()):
            raise RuntimeError(
                "DistributedOptimizer: expected gradients of this rank alone, but "
                "DistributedDataParallel has reduced them already; register keep_local_hook on the "
                "DDP model, run it inside no_sync(), or use adasum_hook and a plain optimizer (see "
                "adasum_hvd.distributed); allow_modes=['ddp'] lets it pass"
            )

    def check_may_change(self) -> None:
        """Raise RuntimeError unless parameters may be added now."""

    def _drop_frozen_gradients(self) -> None:
        """Drop gradients that frozen parameters have kept: they differ between ranks."""
        for p in self.parameters if self.reducing else ():
            if not (p.requires_grad or p.grad is None or marks.is_worker_local(p)):
                p.grad = None

    def _shared_settings(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks; see :class:`ConsistencyCheck`."""
        base = self.optimizer._base
        found = checks.hyperparameters(self.parameters.common_groups())
        return {"optimizer": f"{base.__module__}.{base.__qualname__}", **found}

    # ---- the step ----

    def step(self, *closure: Any) -> Any:
        """Take the optimizer's step and reduce. Collective; blocks."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until every `.grad` holds the reduced gradient, if gradients are reduced."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """See the wrapper's."""
        check_count("backward_passes_per_step", passes)
        self.options = replace(self.options, backward_passes_per_step=passes)

    def before_zero_grad(self) -> None:
        """Wait for gradients that are being reduced, and drop them."""

    def note_zero_grad(self) -> None:
        """Check a `zero_grad()` of the user's script."""
        if self.reducing and not self.alone and not self.in_step:
            self._missed_step.note(self.parameters)

    def _note_step(self) -> None:
        if self.consistency is not None:
            self.consistency.note_step()
        self._missed_step.forget()
        if self.options.backward_passes_per_step > 1:
            self._spent = {
                id(p): noted(p.grad) for p in self.parameters if p.grad is not None
            }

    def is_spent(self, parameter: torch.Tensor) -> bool:
        """Return whether its gradient is the last step's, without passes after it."""
        last = self._spent.get(id(parameter))
        return last is not None and writes_to(parameter.grad, last) == 0

    def _abandon(self) -> None:
        """Wait for buckets in flight, so that no reduction writes after an error."""
        for bucket in self.buckets:
            if bucket.in_flight:
                with suppress(Exception):
                    bucket.finish()

    # ---- state ----

    def window(self) -> Any:
        """Return an unfinished window of local steps, or None."""

    def load_window(self, window: Any) -> None:
        """Continue a window of local steps; None begins a new one."""
