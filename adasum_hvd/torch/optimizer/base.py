"""What the gradient and the delta variant of the distributed optimizer share."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from horovod.torch.mpi_ops import rank, size

from adasum_hvd.common import agreement
from adasum_hvd.common.agreement import OPTIONS, compare_settings
from adasum_hvd.common.marks import times_marked
from adasum_hvd.common.options import Options, ProcessSet, check_count
from adasum_hvd.common.partition import partition
from adasum_hvd.parallel.torch_modes import reduced_by_ddp
from adasum_hvd.torch import marks, wire
from adasum_hvd.torch.compression import Compression
from adasum_hvd.torch.objects import allgather_object
from adasum_hvd.torch.optimizer.buckets import Bucket, NamedParameter
from adasum_hvd.torch.optimizer.dropping import Dropping
from adasum_hvd.torch.optimizer.rounds import Rounds, hyperparameters
from adasum_hvd.torch.parameter_lists import compare_parameter_lists

_instances = itertools.count()


def _is_reduced(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and not marks.is_worker_local(parameter)


def _on_all(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and not marks.is_marked(parameter)


def _kind(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return what may change while the parameter stays the same object: `model.to()`, marks."""
    holders = marks.holders(parameter)
    return (
        parameter.dtype,
        parameter.device,
        parameter.is_contiguous(),
        holders and holders.process_set_id,
    )


class DistributedBase(torch.optim.Optimizer):
    """Buckets, names and copies; mixed in front of the user's optimizer class."""

    _reduces_gradients: bool  # else changes of weights; wrap cells pass it on
    _base: type  # the user's class
    _wrapper_attributes: Set[str]  # those that the user's optimizer does not have
    param_groups: list[dict[str, Any]]
    # GradScaler then calls step() instead of skipping it on one rank alone, and leaves
    # `found_inf` and `grad_scale` here: see adasum_hvd/torch/amp.py.
    _step_supports_amp_scaling = True

    def _configure(
        self, plain: torch.optim.Optimizer, names: dict[int, str], options: Options
    ) -> None:
        self._wrapped = weakref.ref(plain)
        self._names = names
        self._options = options
        self._instance = next(_instances)
        self._may_see_ddp = False  # it may reduce, or has been looked for
        self._changes = False  # this rank has other parameters than its buckets
        self._any_partial = False  # some rank has parameters that not all ranks reduce
        self._in_step = False  # a closure's zero_grad() drops nothing
        self._buckets: list[Bucket] = []
        self._connect()

    def _connect(self) -> None:
        """Set up what depends on the ranks that there are. Collective where they meet."""
        options = self._options
        included = options.process_set.included()
        self._alone = not included or options.process_set.size() == 1
        # A single rank goes through the buckets only where they do more than reduce.
        self._reducing = included and (
            not self._alone or options.clip_delta_norm is not None
        )
        self._dropping = Dropping()
        self._rounds: Rounds | None = None
        self._build_buckets()
        # When it met the ranks that there are, by the count of Horovod's starts.
        self._met = wire.generation() if wire.ranks_meet() else 0
        if self._reducing and not self._alone:
            name = f"adasum.rounds.{self._instance}"
            self._rounds = Rounds(name, options.process_set)

    def restart(self) -> None:
        """Begin anew with the ranks that there are now, as an elastic job does. Collective.

        Reductions that were under way are dropped. The optimizer's own state stays.
        """
        for carrier in self._carriers:
            carrier.drop()
        self._connect()

    def _check_ranks(self) -> None:
        """Raise where the ranks are not those that this optimizer has met."""
        if self._met != wire.generation() and agreement.is_elastic():
            raise RuntimeError(
                "DistributedOptimizer: required an optimizer that has met the ranks of the job, "
                "got one from before they changed; in an elastic job pass it to TorchState"
            )

    # ---- parameters and buckets ----

    def _reduced_parameters(self) -> list[torch.Tensor]:
        return [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if _is_reduced(parameter)
        ]

    def _wire_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if self._options.compression is Compression.fp16:
            return torch.float16
        if self._options.compression is Compression.bf16:
            return torch.bfloat16
        return torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype

    def _describe(self, parameter: torch.Tensor) -> tuple[tuple[Any, ...], int]:
        dtype = self._wire_dtype(parameter)
        return (dtype, parameter.device), parameter.numel() * dtype.itemsize

    def _build_buckets(self) -> None:
        for bucket in self._buckets:
            bucket.close()
        self._buckets = []
        # All that reductions travel in.
        self._carriers: Sequence[Any] = self._buckets
        self._in_buckets: dict[int, tuple[Any, ...]] = {}  # kinds of parameters, by id
        self._places = self._current_places()
        if not self._reducing:
            return
        named = [(self._names[id(p)], p) for p in self._reduced_parameters()]
        for name, parameter in named:
            if parameter.is_complex():
                raise ValueError(
                    f"parameter {name}: required a real dtype, got {parameter.dtype}, which "
                    "Horovod does not carry; keep it as torch.view_as_real(...), or mark it with "
                    "mark_worker_local()"
                )
        if wire.ranks_meet():
            self._compare_with_other_ranks(named)
        self._in_buckets = {id(p): _kind(p) for _, p in named}
        options = self._options
        for process_set, of_set in self._by_process_set(self._bucketed(named)):
            lists = partition(
                of_set, self._describe, options.bucket_bytes, options.groups
            )
            for index, members in enumerate(lists):
                label = f"{self._instance}.{process_set.process_set_id}.{index}"
                self._buckets.append(self._make_bucket(label, members, process_set))

    def _bucketed(self, named: Sequence[NamedParameter]) -> Sequence[NamedParameter]:
        """Return those that travel in flat buckets."""
        return named

    def _by_process_set(
        self, named: Sequence[NamedParameter]
    ) -> Iterator[tuple[Any, list[NamedParameter]]]:
        """Yield the parameters that each process set reduces, in one order on all ranks."""
        by_id: dict[int, tuple[Any, list[NamedParameter]]] = {}
        for name, parameter in named:
            process_set = marks.holders(parameter) or self._options.process_set
            key = process_set.process_set_id
            by_id.setdefault(key, (process_set, []))[1].append((name, parameter))
        yield from (by_id[key] for key in sorted(by_id))

    @property
    def _common_buckets(self) -> Sequence[Any]:
        """Those that all ranks of the optimizer's process set reduce."""
        process_set = self._options.process_set
        return [b for b in self._buckets if b.process_set is process_set]

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names by parameter; Horovod's name of it, which programs read."""
        groups = self.param_groups
        return {p: self._name_of(p) for group in groups for p in group["params"]}

    def _name_of(self, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)]

    def _make_bucket(
        self, label: str, members: Sequence[NamedParameter], process_set: ProcessSet
    ) -> Bucket:
        raise NotImplementedError

    def _compare_with_other_ranks(self, named: Sequence[NamedParameter]) -> None:
        """Raise on every rank unless all holders of a parameter list it alike. Collective."""
        everyone = tuple(self._options.process_set.ranks or range(size()))
        mine: dict[tuple[int, ...], list[Any]] = {everyone: []}
        for name, parameter in named:
            process_set = marks.holders(parameter)
            ranks = tuple(process_set.ranks) if process_set else everyone
            described = (name, tuple(parameter.shape), str(parameter.dtype))
            mine.setdefault(ranks, []).append(described)
        has_local = any(
            marks.is_worker_local(parameter)
            for group in self.param_groups
            for parameter in group["params"]
        )
        gathered = allgather_object(
            (self._options.shared, mine, self._instance, has_local, self._changes),
            "adasum.parameter_lists",
            process_set=self._options.process_set,
        )
        shared, theirs, instances, local, changes = zip(*gathered, strict=True)
        compare_settings(shared, rank(), *OPTIONS, ranks=everyone)
        # A number of its own in the buckets' names keeps optimizers of one job apart.
        self._instance = max(instances)
        compare_parameter_lists(dict(zip(everyone, theirs, strict=True)), rank())
        if any(changes) and not all(changes):
            changing = [
                r for r, changed in zip(everyone, changes, strict=True) if changed
            ]
            raise ValueError(
                "DistributedOptimizer: expected parameters that are replaced or converted on all "
                f"ranks in the same step, but got others on ranks {changing} only (seen by rank "
                f"{rank()}); change them on all ranks alike"
            )
        partly = any(len(of_rank) > 1 for of_rank in theirs)
        self._any_partial = partly or any(local)
        if partly and self._options.clip_delta_norm is not None:
            raise ValueError(
                "clip_delta_norm: required all parameters on all ranks, got some marked with "
                "mark_replicated_over(); the ranks' norms, and so their replicas, would differ"
            )

    def _follow_parameters(self) -> None:
        """Rebuild the buckets when parameters were (un)frozen, replaced or converted since.

        Every rank runs the same program, so every rank comes to the same conclusion.

        Raises:
            RuntimeError: there is nothing to reduce on several ranks.
        """
        self._check_ranks()
        if not self._reducing:
            return
        self._check_ddp()
        places = self._current_places()
        if places != self._places:
            kinds = {id(p): _kind(p) for p in self._reduced_parameters()}
            if kinds == self._in_buckets:
                self._places = places
            else:
                self._name_new_parameters()
                self._changes = True
                try:
                    if self._rounds is not None and wire.ranks_meet():
                        self._announce_change(self._rounds)
                    self._build_buckets()
                finally:
                    self._changes = False
        if not self._in_buckets:
            raise RuntimeError(
                "DistributedOptimizer: required parameters to reduce over "
                f"{self._options.process_set.size()} ranks, got none that requires a "
                "gradient and is not marked worker-local; the replicas would drift apart"
            )

    def _check_ddp(self) -> None:
        """Raise in the first step if DDP has reduced the gradients before."""
        if self._may_see_ddp or self._alone:
            return
        self._may_see_ddp = True
        if reduced_by_ddp(self._reduced_parameters()):
            raise RuntimeError(
                "DistributedOptimizer: expected gradients of this rank alone, but "
                "DistributedDataParallel has reduced them already; register keep_local_hook on the "
                "DDP model, run it inside no_sync(), or use adasum_hook and a plain optimizer (see "
                "adasum_hvd.torch.ddp); allow_modes=['ddp'] lets it pass"
            )

    def _current_places(self) -> list[Any]:
        """Return what changes when a parameter is replaced, (un)frozen, converted or marked.

        Quick, for every step asks it: a conversion to another dtype or device moves a parameter.
        """
        places: list[Any] = [
            (id(p), p.requires_grad, p.data_ptr(), p.is_contiguous())
            for group in self.param_groups
            for p in group["params"]
        ]
        return [*places, times_marked()]

    def _name_new_parameters(self) -> None:
        for index, group in enumerate(self.param_groups):
            for j, parameter in enumerate(group["params"]):
                self._names.setdefault(id(parameter), f"group{index}.param{j}")

    def _drop_frozen_gradients(self) -> None:
        """Forget gradients that frozen parameters have kept: every rank has another one."""
        if self._reducing:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if (
                        not parameter.requires_grad
                        and parameter.grad is not None
                        and not marks.is_worker_local(parameter)
                    ):
                        parameter.grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. Param groups stay the same list, which schedulers made before share."""
        groups = self.param_groups
        super().load_state_dict(state_dict)
        groups[:] = self.param_groups
        self.param_groups = groups

    def extra_bytes(self) -> dict[str, int]:
        """Return the bytes this wrapper keeps beside the optimizer: "device" and "host"."""
        totals = {"device": 0, "host": 0}
        for tensor in self._own_tensors():
            key = "host" if tensor.device.type == "cpu" else "device"
            totals[key] += tensor.numel() * tensor.element_size()
        return totals

    def _own_tensors(self) -> Iterable[torch.Tensor]:
        return [bucket.flat for bucket in self._buckets]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters are reduced too. Collective."""
        if "_names" in self.__dict__:
            self._check_may_change()
        super().add_param_group(param_group)
        if "_names" in self.__dict__:
            self._name_new_parameters()
            self._build_buckets()

    def _announce_change(self, rounds: Rounds) -> None:
        """Let the other ranks know that this one changes its buckets. Collective; see the variants.

        Ranks that do not change theirs learn of it in their step, and call `_build_buckets` too,
        which raises on every rank.
        """
        raise NotImplementedError

    def _check_may_change(self) -> None:
        """Raise where parameters may not be added or (un)frozen now; see the variants."""

    # ---- the contract of Horovod's optimizer ----

    def synchronize(self) -> None:
        """Finish the reductions that backward started; see the variants."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` trust that `synchronize()` has been called, as Horovod's."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes a step takes, on all ranks alike, as Horovod's.

        Raises:
            ValueError: no integer of at least 1.
        """
        check_count("backward_passes_per_step", passes)
        self._options = replace(self._options, backward_passes_per_step=passes)

    # ---- rounds: what all ranks do together ----

    def _next_round(self) -> None:
        """Begin a round of reductions, and see whether all ranks still do the same. Collective."""
        if self._rounds is not None and self._rounds.next(
            self._settings, self._has_news
        ):
            self._hear_news()

    def _settings(self, first: bool) -> dict[str, Any]:
        """Return what must be the same on all ranks; see :class:`Rounds`."""
        groups = self.param_groups
        common = [group for group in groups if any(map(_on_all, group["params"]))]
        name = f"{self._base.__module__}.{self._base.__qualname__}"
        return {"optimizer": name, **hyperparameters(common)}

    def _has_news(self) -> bool:
        """Return whether the other ranks must hear of something on this one."""
        return False

    def _hear_news(self) -> None:
        """Look at what some rank has news of. Called on all ranks."""

    def _abandon(self) -> None:
        """Wait for whatever is in flight, so that nobody writes behind an error's back."""
        for carrier in self._carriers:
            if carrier.in_flight:
                with suppress(Exception):
                    carrier.finish()

    def _note_step(self) -> None:
        if self._rounds is not None:
            self._rounds.note_step()
        self._dropping.forget()
        plain = self._wrapped()
        if plain is not None:  # a scheduler made before the wrapping asks it
            plain._opt_called = True

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the user's class does it, with what the caller gave.

        Warns if weights change and gradients are dropped without `step()`.
        """
        if self._reducing and not self._alone and not self._in_step:
            self._dropping.note(
                p for group in self.param_groups for p in group["params"]
            )
        super().zero_grad(*args, **kwargs)

    # ---- copies ----

    def __reduce__(self) -> Any:
        """Copy and pickle as a plain optimizer of the user's class; not collective."""
        return _plain_copy, (self._base, self.__getstate__())


def _plain_copy(base: type, state: dict[str, Any]) -> Any:
    """Return a plain optimizer with the state of a distributed one."""
    warnings.warn(
        f"{base.__name__}: the copy of a DistributedOptimizer is a plain optimizer; wrap it to "
        "reduce with it",
        stacklevel=2,
    )
    plain: Any = object.__new__(base)
    plain.__setstate__(state)
    return plain


StepClosure = Callable[[], Any] | None
