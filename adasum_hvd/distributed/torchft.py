"""AdaSum across the replicas of torchft, which die and rejoin while the others train on.

References:
    https://github.com/pytorch/torchft; docs/elastic.md, "torchft".
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllToAllOptions

from adasum_hvd.base.logging import logger
from adasum_hvd.base.marks import is_marked_local
from adasum_hvd.distributed.all_reduce import AdasumWork, reduce_list
from adasum_hvd.distributed.checks import agree, call_of
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.lanes import done
from adasum_hvd.distributed.rules import Coefficients, rule_of
from adasum_hvd.distributed.sharding import is_dtensor, is_reduced

__all__ = ["ManagedAdasum", "diloco", "local_sgd"]


class _Quorum(Communicator):
    """The replicas of a quorum; each is a host of its own.

    torch.distributed does not know torchft's process groups, so that messages are collectives.
    """

    may_use_core, apart = False, True  # a quorum is made for each reduction
    _is_whole = False  # for torch.distributed's collectives

    def __init__(self, process_group: Any):
        self._group = lambda: process_group
        self.size, self.rank = process_group.size(), 0
        self.ranks, self.job_size = list(range(self.size)), self.size
        self.hosts = tuple(self.ranks)
        # torchft's wrappers report rank 0 on all replicas.
        mine = torch.tensor(secrets.randbits(62), device=self.control_device)
        self.rank = self.all_gather(mine).tolist().index(mine.item())

    @property
    def control_device(self) -> torch.device:
        """The device on which small tables that the program reads are gathered."""
        if "gloo" in self.group.getBackendName():
            return torch.device("cpu")
        return torch.accelerator.current_accelerator() or torch.device("cpu")

    def _exchange(
        self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
    ) -> None:
        """Send `out[r]` to rank r and receive `into[r]` from it, the own one too."""
        sizes = [[part.numel() for part in parts] for parts in (into, out)]
        sent = torch.cat([part.reshape(-1) for part in out])
        received = sent.new_empty(sum(sizes[0]))
        work = self.group.alltoall_base(received, sent, *sizes, AllToAllOptions())
        work.wait()
        for part, one in zip(into, received.split(sizes[0]), strict=True):
            part.copy_(one.view(part.shape))


class ManagedAdasum:
    """Reduces tensors by AdaSum across the replicas of a torchft `Manager`.

    As in `Manager.allreduce`, a failure is reported to the manager, whose `should_commit` then
    discards the step on all replicas. Tensors are undefined after it.

    Args:
        manager: torchft's.
        process_group: the one that the manager was given.
        rule, group_op, group_size: as of `adasum_all_reduce`; each replica counts as a host.

    Raises:
        ValueError: `rule`, `group_op` or `group_size` is not as described.
    """

    def __init__(
        self,
        manager: Any,
        process_group: Any,
        *,
        rule: str | Coefficients = "adasum",
        group_op: str | None = None,
        group_size: int | None = None,
    ):
        self.manager, self._process_group = manager, process_group
        self._rule = rule_of(rule, group_op, group_size, has_passes=False)

    def reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reduce tensors, as of `adasum_all_reduce`, in place.

        Raises:
            ValueError: tensors or arguments differ between replicas, or cannot be reduced; on
                every replica.
            NotImplementedError: a tensor is a DTensor, of a sharded model.

        Collective: all replicas of the quorum, after `start_quorum`; blocks.
        """
        self._run(tensors)

    def reduce_gradients(self, model: torch.nn.Module) -> None:
        """Reduce the gradients of a model, between backward and the optimizer's step.

        A parameter that no replica used keeps `grad=None`. Those marked with `mark_worker_local`
        are left out. Raises, Collective: as `reduce`.
        """
        parameters = [*filter(is_reduced, model.parameters())]
        present = torch.tensor([p.grad is not None for p in parameters]).bool()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        used = self._run(gradients, present)
        for parameter, is_used in zip(parameters, used, strict=False):
            parameter.grad = parameter.grad if is_used else None

    @torch.no_grad()
    def _run(
        self, tensors: Sequence[torch.Tensor], present: torch.Tensor | None = None
    ) -> list[bool]:
        """Reduce tensors in the present quorum; return which of them any replica has."""
        if any(is_dtensor(tensor) for tensor in tensors):
            raise NotImplementedError(
                "ManagedAdasum: expected whole tensors, but got a DTensor, whose shards may not "
                "all see the failure of a replica; use one rank for each replica, or "
                "adasum_replicate without torchft"
            )
        manager = self.manager
        used: list[bool] = []
        if manager.errored():
            return used
        manager.wait_quorum()
        if not manager.is_participating():
            torch._foreach_zero_(list(tensors))
        try:
            quorum = _Quorum(self._process_group)
            agree("ManagedAdasum", call_of(tensors, self._rule.described), quorum)
            if present is not None:
                mine = present & manager.is_participating()
                rows = quorum.all_gather(mine.to(quorum.control_device))
                used = rows.any(0).tolist()
            reduce_list(tensors, quorum, self._rule)
        except (RuntimeError, TimeoutError) as error:  # a replica or its network failed
            logger.warning(
                "torchft: a reduction failed, so the step is discarded: %s", error
            )
            manager.report_error(error)
        return used


class _AdasumManager:
    """A Manager whose `allreduce` is AdaSum, for torchft's own classes."""

    def __init__(self, adasum: ManagedAdasum):
        self._adasum = adasum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adasum.manager, name)

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False
    ) -> AdasumWork:
        """Reduce a tensor; blocks."""
        self._adasum.reduce([tensor])
        return AdasumWork(done(tensor))


def diloco(
    adasum: ManagedAdasum,
    model_fragments: list[torch.nn.Module],
    inner_optimizer: torch.optim.Optimizer,
    outer_optimizer: Any,
    sync_every: int,
    **options: Any,
) -> Any:
    """Return torchft's `DiLoCo`, whose fragments' changes are reduced by AdaSum.

    Args:
        adasum: of a manager with `use_async_quorum=False`.
        model_fragments, inner_optimizer, sync_every: as of `torchft.local_sgd.DiLoCo`.
        outer_optimizer: one, or one for each fragment.
        options: of `DiLoCo`, without `use_bucketization` and `should_quantize`.

    Raises:
        ValueError: buckets or quantization, which hide where a parameter begins or change it; or
            a parameter is marked with `mark_worker_local`.
        ImportError: torchft is not installed.
    """
    from torchft.local_sgd import DiLoCo

    if os.environ.get("TORCHFT_USE_BUCKETIZATION") == "True":
        options["use_bucketization"] = True
    for name in ("use_bucketization", "should_quantize"):
        if options.get(name):
            raise ValueError(
                f"diloco: expected a reduction of each parameter by itself, but got {name}; "
                "leave it out"
            )
    for number, fragment in enumerate(model_fragments):
        for parameter, tensor in fragment.named_parameters():
            if is_marked_local(tensor):
                raise ValueError(
                    "diloco: expected parameters that all replicas share, but got one marked with "
                    f"mark_worker_local: {parameter} of fragment {number}; leave it out of the "
                    "fragments"
                )
    several = model_fragments, inner_optimizer, outer_optimizer, sync_every
    return DiLoCo(_AdasumManager(adasum), *several, **options)


def local_sgd(
    adasum: ManagedAdasum,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sync_every: int,
) -> Any:
    """Return a context manager as torchft's `LocalSGD`, which reduces changes by AdaSum.

    It is `diloco` with an outer optimizer that adds the reduced change. Args, Raises: as `diloco`.
    """
    outer = torch.optim.SGD(model.parameters(), 1.0)
    return diloco(adasum, [model], optimizer, outer, sync_every)
