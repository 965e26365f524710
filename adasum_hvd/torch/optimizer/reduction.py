"""Ranks, buckets and checks between ranks, for both reducers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from adasum_hvd.common import agreement
from adasum_hvd.common.options import Options, ProcessSet
from adasum_hvd.parallel.torch_modes import reduced_by_ddp
from adasum_hvd.torch import marks, wire
from adasum_hvd.torch.optimizer.buckets import NamedParameter
from adasum_hvd.torch.optimizer.checks import ConsistencyCheck, MissedStepCheck
from adasum_hvd.torch.optimizer.checks.consistency import hyperparameters
from adasum_hvd.torch.optimizer.parameters import ReducedParameters

MakeBucket = Callable[[str, Sequence[NamedParameter], ProcessSet], Any]


class Reduction:
    """The buckets of one optimizer over the job's current ranks.

    Args:
        parameters: the optimizer's parameters.
        options: arguments of `DistributedOptimizer`.
        optimizer_name: name of the user's class, which must be equal on all ranks.

    Attributes:
        alone: this rank is the only one, or outside the process set.
        reducing: gradients or changes pass through buckets.
        buckets: the flat buckets.
        consistency: the check of the ranks, None for a single rank.
        in_step: a closure is running; its `zero_grad()` drops no gradient.
    """

    def __init__(
        self, parameters: ReducedParameters, options: Options, optimizer_name: str
    ):
        self.parameters, self._options = parameters, options
        self._optimizer_name = optimizer_name
        self.buckets: list[Any] = []
        self.allows_ddp = False
        self.in_step = False

    def connect(self, rebuild: Callable[[], None]) -> None:
        """Set up for the job's current ranks; `rebuild` calls :meth:`build`. Collective."""
        options = self._options
        included = options.process_set.included()
        self.alone = not included or options.process_set.size() == 1
        # A single rank needs buckets only for options other than the reduction.
        self.reducing = included and (
            not self.alone or options.clip_delta_norm is not None
        )
        self.missed_step = MissedStepCheck()
        self.consistency: ConsistencyCheck | None = None
        rebuild()
        # The count of Horovod's starts at the connection.
        self._met = wire.generation() if wire.ranks_meet() else 0
        if self.reducing and not self.alone:
            name = f"adasum.rounds.{self.parameters.instance}"
            self.consistency = ConsistencyCheck(name, options.process_set)

    def build(
        self,
        make_bucket: MakeBucket,
        dense: Callable[[Any], Any] = lambda named: named,
        travels_as: Callable[[Any], torch.Tensor] = lambda parameter: parameter,
    ) -> None:
        """Compare the parameters with the other ranks, and make the buckets. Collective.

        `dense` returns the named parameters for flat buckets; `travels_as` returns the tensor that
        is reduced for a parameter.

        Raises:
            ValueError: the ranks' parameters or options differ; on every rank.
        """
        for bucket in self.buckets:
            bucket.close()
        self.buckets = []
        self._in_buckets: dict[int, tuple[Any, ...]] = {}  # kinds of parameters, by id
        self._fingerprint = self.parameters.fingerprint()
        if not self.reducing:
            return
        named = self.parameters.named()
        if wire.ranks_meet():
            self.parameters.compare(named)
        self._in_buckets = self.parameters.kinds()
        of_buckets = self.parameters.partition(dense(named), travels_as)
        self.buckets = [make_bucket(*of_bucket) for of_bucket in of_buckets]

    @property
    def common_buckets(self) -> list[Any]:
        """The buckets that all ranks of the optimizer's process set reduce."""
        process_set = self._options.process_set
        return [b for b in self.buckets if b.process_set is process_set]

    def follow_parameters(
        self, announce: Callable[[ConsistencyCheck], None], rebuild: Callable[[], None]
    ) -> None:
        """Rebuild the buckets when parameters were (un)frozen, replaced or converted since.

        Args:
            announce: notifies ranks whose parameters are unchanged. They rebuild, too, which
                raises on every rank.
            rebuild: as in :meth:`connect`.

        Raises:
            RuntimeError: there is nothing to reduce on several ranks.
        """
        self._check_ranks()
        if not self.reducing:
            return
        if not (self.alone or self.allows_ddp):
            self.allows_ddp = True  # once, because it searches all objects
            self._check_ddp()
        fingerprint = self.parameters.fingerprint()
        if fingerprint != self._fingerprint:
            if self.parameters.kinds() == self._in_buckets:
                self._fingerprint = fingerprint
            else:
                self.parameters.name_new()
                self.parameters.changes = True
                try:
                    if self.consistency is not None and wire.ranks_meet():
                        announce(self.consistency)
                    rebuild()
                finally:
                    self.parameters.changes = False
        if not self._in_buckets:
            raise RuntimeError(
                "DistributedOptimizer: expected parameters to reduce over "
                f"{self._options.process_set.size()} ranks, but got none that requires a "
                "gradient and is not marked worker-local; the replicas would diverge"
            )

    def _check_ranks(self) -> None:
        """Raise RuntimeError if the ranks have changed since :meth:`connect`."""
        if self._met != wire.generation() and agreement.is_elastic():
            raise RuntimeError(
                "DistributedOptimizer: expected an optimizer that is connected to the ranks of "
                "the job, but got one from before they changed; in an elastic job pass it to "
                "TorchState"
            )

    def _check_ddp(self) -> None:
        """Raise RuntimeError if DDP has reduced the gradients before."""
        if reduced_by_ddp(self.parameters.reduced()):
            raise RuntimeError(
                "DistributedOptimizer: expected gradients of this rank alone, but "
                "DistributedDataParallel has reduced them already; register keep_local_hook on the "
                "DDP model, run it inside no_sync(), or use adasum_hook and a plain optimizer (see "
                "adasum_hvd.torch.ddp); allow_modes=['ddp'] lets it pass"
            )

    def drop_frozen_gradients(self) -> None:
        """Drop gradients that frozen parameters have kept: they differ between ranks."""
        for p in self.parameters if self.reducing else ():
            if not (p.requires_grad or p.grad is None or marks.is_worker_local(p)):
                p.grad = None

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks; see :class:`ConsistencyCheck`."""
        groups = self.parameters.common_groups()
        return {"optimizer": self._optimizer_name, **hyperparameters(groups)}

    def note_step(self) -> None:
        """Count a step."""
        if self.consistency is not None:
            self.consistency.note_step()
        self.missed_step.forget()

    def note_zero_grad(self) -> None:
        """Check a `zero_grad()` of the user's script."""
        if self.reducing and not self.alone and not self.in_step:
            self.missed_step.note(self.parameters)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the user's step, whose closure may call `zero_grad()`."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False


def abandon(buckets: Sequence[Any]) -> None:
    """Wait for buckets in flight, so that no reduction writes after an error."""
    for bucket in buckets:
        if bucket.in_flight:
            with suppress(Exception):
                bucket.finish()
