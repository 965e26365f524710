"""The parameters that a distributed optimizer reduces: names, comparison of ranks, changes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import rank

from adasum_hvd.base.agreement import OPTIONS, compare_parameters, compare_settings
from adasum_hvd.base.marks import times_marked
from adasum_hvd.base.options import Options
from adasum_hvd.base.partition import partition
from adasum_hvd.torch import marks
from adasum_hvd.torch.compression import Compression
from adasum_hvd.torch.objects import allgather_object, ranks_of
from adasum_hvd.torch.optimizer.buckets import NamedParameter

_instances = itertools.count()
Ranks = tuple[int, ...]
Names = dict[torch.Tensor, str]

_REMEDY = (
    "build the same model on every rank, and freeze and unfreeze on all ranks in the same step, "
    "because pipeline stages and shards cannot be reduced. Mark parameters that differ with "
    "mark_worker_local(), or with mark_replicated_over() the ranks that hold them"
)


def names_by_place(param_groups: Iterable[Mapping[str, Any]]) -> Names:
    """Return a name for each parameter, by its place in the groups."""
    return {
        parameter: f"group{index}.param{place}"
        for index, group in enumerate(param_groups)
        for place, parameter in enumerate(group["params"])
    }


def _kind(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return the facts that `model.to()` and marks change on the same parameter object."""
    holders = marks.holders(parameter)
    return (
        parameter.dtype,
        parameter.device,
        parameter.is_contiguous(),
        holders and holders.process_set_id,
    )


class ReducedParameters:
    """Names and kinds of the parameters of an optimizer, and which of them are reduced."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Names, options: Options
    ):
        self._optimizer: Any = weakref.ref(optimizer)
        self._names, self._options = names, options
        self._current: set[torch.Tensor] = set()  # at the last `name_new`
        # Number of this optimizer, equal on all ranks, for names in Horovod.
        self.instance = next(_instances)
        self.any_partial = False  # a rank has parameters that not all ranks reduce
        self.changes = False  # this rank's parameters differ from those in its buckets

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups."""
        return self._optimizer().param_groups

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.groups for parameter in group["params"])

    def reduced(self) -> list[torch.Tensor]:
        """Return the parameters that require a gradient and are not worker-local."""
        return [p for p in self if p.requires_grad and not marks.is_worker_local(p)]

    def common_groups(self) -> list[dict[str, Any]]:
        """Return the groups with a parameter that all ranks reduce."""
        return [
            group
            for group in self.groups
            if any(p.requires_grad and not marks.is_marked(p) for p in group["params"])
        ]

    def any_has_state(self) -> bool:
        """Return whether the optimizer keeps state of a parameter that all ranks reduce."""
        state = getattr(self._optimizer(), "state", ())
        return any(p in state for p in self.reduced() if not marks.is_marked(p))

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name."""
        return self._names[parameter]

    def name_new(self) -> None:
        """Name parameters that were added, by their place, and forget those that are gone."""
        current = names_by_place(self.groups)
        for gone in self._current - current.keys():
            self._names.pop(gone, None)
        self._current = set(current)
        self._names = current | self._names

    def wire_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a tensor is sent."""
        if self._options.compression is Compression.fp16:
            return torch.float16
        if self._options.compression is Compression.bf16:
            return torch.bfloat16
        return torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype

    def kinds(self) -> dict[int, tuple[Any, ...]]:
        """Return the facts on which buckets depend, by parameter's id."""
        return {id(parameter): _kind(parameter) for parameter in self.reduced()}

    def fingerprint(self) -> list[Any]:
        """Return, fast, a value that depends on replaced, frozen, converted and marked ones."""
        # A conversion changes a parameter's address.
        places = [
            (id(p), p.requires_grad, p.data_ptr(), p.is_contiguous()) for p in self
        ]
        return [*places, times_marked()]

    def named(self) -> list[NamedParameter]:
        """Return the parameters to reduce, with their names; ValueError if one is complex."""
        named: list[Any] = [(self.name_of(p), p) for p in self.reduced()]
        for name, parameter in named:
            if parameter.is_complex():
                raise ValueError(
                    f"parameter {name}: expected a real dtype, but got {parameter.dtype}, which "
                    "Horovod does not carry; keep it as torch.view_as_real(...), or mark it with "
                    "mark_worker_local()"
                )
        return named

    def compare(self, named: Sequence[NamedParameter]) -> None:
        """Raise ValueError on every rank if the ranks' options or parameters differ. Collective."""
        process_set = self._options.process_set
        everyone = tuple(ranks_of(process_set))
        mine: dict[Ranks, list[Any]] = {everyone: []}
        for name, parameter in named:
            holders = marks.holders(parameter)
            ranks = tuple(holders.ranks) if holders else everyone
            described = (name, tuple(parameter.shape), str(parameter.dtype))
            mine.setdefault(ranks, []).append(described)
        has_local = any(map(marks.is_worker_local, self))
        gathered = allgather_object(
            (self._options.shared, mine, self.instance, has_local, self.changes),
            "adasum.parameter_lists",
            process_set,
        )
        shared, by_rank, instances, local, changes = zip(*gathered, strict=True)
        compare_settings(shared, rank(), *OPTIONS, ranks=everyone)
        # The number in the buckets' names separates the optimizers of one job.
        self.instance = max(instances)
        _compare_lists(dict(zip(everyone, by_rank, strict=True)))
        if any(changes) and not all(changes):
            changing = list(itertools.compress(everyone, changes))
            raise ValueError(
                "DistributedOptimizer: expected parameters that are replaced or converted on all "
                f"ranks in the same step, but got others on ranks {changing} only (seen by rank "
                f"{rank()}); change them on all ranks alike"
            )
        partly = any(len(of_rank) > 1 for of_rank in by_rank)
        self.any_partial = partly or any(local)
        if partly and self._options.clip_delta_norm is not None:
            raise ValueError(
                "clip_delta_norm: expected all parameters on all ranks, but got some marked with "
                "mark_replicated_over(); the ranks' norms, and so their replicas, would differ"
            )

    def partition(
        self, named: Sequence[NamedParameter], travels_as: Callable[[Any], torch.Tensor]
    ) -> Iterator[tuple[str, list[NamedParameter], Any]]:
        """Yield label, members and process set of every bucket, in one order on all ranks."""
        options = self._options

        def describe(parameter: torch.Tensor) -> tuple[tuple[Any, ...], int]:
            dtype = self.wire_dtype(travels_as(parameter))
            return (dtype, parameter.device), parameter.numel() * dtype.itemsize

        by_id: dict[int, tuple[Any, list[NamedParameter]]] = {}
        for name, parameter in named:
            process_set = marks.holders(parameter) or options.process_set
            key = process_set.process_set_id
            by_id.setdefault(key, (process_set, []))[1].append((name, parameter))
        for key in sorted(by_id):
            process_set, members = by_id[key]
            lists = partition(members, describe, options.bucket_bytes, options.groups)
            for index, bucket in enumerate(lists):
                yield f"{self.instance}.{key}.{index}", bucket, process_set


def _compare_lists(by_rank: Mapping[int, Mapping[Ranks, Sequence[Any]]]) -> None:
    """Raise ValueError, on every rank, unless every set of ranks has one list of parameters."""
    for ranks in sorted({ranks for lists in by_rank.values() for ranks in lists}):
        outside = [holder for holder in ranks if holder not in by_rank]
        if outside:
            raise ValueError(
                "DistributedOptimizer: expected marked process sets inside the optimizer's own, "
                f"but got {list(ranks)} with rank {outside[0]} outside of {list(by_rank)} (seen "
                f"by rank {rank()}); pass the optimizer a process set that contains them"
            )
        lists = [by_rank[holder].get(ranks, ()) for holder in ranks]
        compare_parameters(
            "DistributedOptimizer", lists, rank(), ranks=ranks, remedy=_REMEDY
        )
