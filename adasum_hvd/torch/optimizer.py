"""`DistributedOptimizer`: AdaSum, Average or Sum around any torch optimizer.

Two variants, one class each over a shared base:

- gradient: gradients are reduced, then every rank takes the same step;
- delta: every rank takes its own step, the weight changes are reduced, and
  `w = w_old + AdaSum(w_new - w_old)`. Optimizer state stays local, which suits stateful
  optimizers (momentum, Adam, LAMB), for AdaSum then sees what would really be applied.

References:
    arXiv 2006.02924, section 3; SEEDS rows 1A (ByGrad, ByDeltaWeight) and 1F.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import global_process_set, rank

from adasum_hvd import ops
from adasum_hvd.torch.buckets import Bucket, NamedParameter, partition
from adasum_hvd.torch.functions import allgather_object

DEFAULT_BUCKET_BYTES = 16 << 20
_LOCAL_MARK = "_adasum_worker_local"


def mark_worker_local(*parameters: torch.nn.Parameter) -> None:
    """Exclude parameters from every reduction: each rank keeps and updates its own.

    For parameters that exist on one rank only (tensor parallelism) or must differ.
    Call it before `DistributedOptimizer`.
    """
    for parameter in parameters:
        setattr(parameter, _LOCAL_MARK, True)


def _is_reduced(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and not getattr(parameter, _LOCAL_MARK, False)


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[NamedParameter] | None
) -> dict[int, str]:
    """Return the name of every parameter of the optimizer, by id."""
    in_groups = [
        (f"group{i}.param{j}", parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]
    if named_parameters is None:
        return {id(parameter): name for name, parameter in in_groups}
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ValueError(
            "named_parameters: required (name, parameter) tuples, as "
            "model.named_parameters() gives them"
        )
    counts = Counter(name for name, _ in named)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise ValueError(
            f"named_parameters: required unique names, got twice: {duplicates}"
        )
    names = {id(parameter): name for name, parameter in named}
    unnamed = [
        position for position, parameter in in_groups if id(parameter) not in names
    ]
    if unnamed:
        raise ValueError(
            f"named_parameters: required a name for every parameter of the optimizer, got none "
            f"for {', '.join(unnamed)}"
        )
    return names


class _DistributedOptimizer(torch.optim.Optimizer):
    """What both variants share; mixed in front of the user's optimizer class."""

    def _configure(
        self, names: dict[int, str], op: ops.ReduceOp, options: dict
    ) -> None:
        self._names = names
        self._op = op
        self._options = options
        self._process_set = options["process_set"]
        self._reducing = self._process_set.included() and self._process_set.size() > 1
        self._buckets: list[Bucket] = []
        self._build_buckets()

    # ---- parameters and buckets ----

    def _reduced_parameters(self) -> list[NamedParameter]:
        return [
            (self._names[id(parameter)], parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if _is_reduced(parameter)
        ]

    def _wire_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if self._options["compression"] is Compression.fp16:
            return torch.float16
        return torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype

    def _build_buckets(self) -> None:
        for bucket in self._buckets:
            bucket.close()
        self._buckets = []
        if not self._reducing:
            return
        named = self._reduced_parameters()
        self._compare_with_other_ranks(named)
        for index, members in enumerate(
            partition(
                named,
                self._wire_dtype,
                self._options["bucket_bytes"],
                self._options["groups"],
            )
        ):
            self._buckets.append(self._make_bucket(index, members))

    def _make_bucket(self, index: int, members: Sequence[NamedParameter]) -> Bucket:
        raise NotImplementedError

    def _compare_with_other_ranks(self, named: Sequence[NamedParameter]) -> None:
        mine = [(name, tuple(p.shape), str(p.dtype)) for name, p in named]
        theirs = allgather_object(mine, process_set=self._process_set)
        for other, list_of_other in enumerate(theirs):
            if list_of_other == theirs[0]:
                continue
            pairs = zip(theirs[0], list_of_other, strict=False)
            first = next((pair for pair in pairs if pair[0] != pair[1]), None)
            difference = (
                f"{first[0]} on the first rank and {first[1]} on rank {other} of the process set"
                if first
                else f"{len(theirs[0])} and {len(list_of_other)} parameters"
            )
            raise ValueError(
                "DistributedOptimizer: required the same parameters in the same order on all "
                f"ranks, got {difference} (this is rank {rank()}); build the model alike, or "
                "mark what differs with mark_worker_local()"
            )

    def add_param_group(self, param_group: dict) -> None:
        """As torch's; the new parameters are reduced too. Collective."""
        super().add_param_group(param_group)
        if "_names" in self.__dict__:
            index = len(self.param_groups) - 1
            for j, parameter in enumerate(self.param_groups[index]["params"]):
                self._names[id(parameter)] = f"group{index}.param{j}"
            self._build_buckets()

    # ---- the contract of Horovod's optimizer ----

    def synchronize(self) -> None:
        """Finish the reductions that backward started; see the variants."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` trust that `synchronize()` has been called, as Horovod's."""
        yield


class _GradientOptimizer(_DistributedOptimizer):
    """Reduces gradients while backward runs; `step()` waits for the last of them."""

    def _configure(
        self, names: dict[int, str], op: ops.ReduceOp, options: dict
    ) -> None:
        self._hooks: list[Any] = []
        self._passes_left: dict[torch.Tensor, int] = {}
        self._bucket_of: dict[torch.Tensor, int] = {}
        self._waiting: list[int] = []
        self._synchronized = False
        self._skip_synchronize = False
        super()._configure(names, op, options)

    def _make_bucket(self, index: int, members: Sequence[NamedParameter]) -> Bucket:
        factor = self._options["gradient_predivide_factor"]
        return Bucket(
            f"grad.{index}",
            members,
            self._wire_dtype(members[0][1]),
            self._op,
            (1.0 / factor, factor),
            self._process_set,
            with_flags=True,
        )

    def _build_buckets(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super()._build_buckets()
        self._bucket_of = {
            parameter: index
            for index, bucket in enumerate(self._buckets)
            for parameter in bucket.params
        }
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in self._bucket_of
        ]
        self._reset()

    def _reset(self) -> None:
        passes = self._options["backward_passes_per_step"]
        self._passes_left = dict.fromkeys(self._bucket_of, passes)
        self._waiting = [len(bucket.params) for bucket in self._buckets]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._synchronized = False
        left = self._passes_left[parameter] - 1
        if left < 0:
            raise RuntimeError(
                f"gradient of {self._names[id(parameter)]}: required at most "
                f"{self._options['backward_passes_per_step']} backward passes before step(), got "
                "one more; raise backward_passes_per_step, or call step() or zero_grad()"
            )
        self._passes_left[parameter] = left
        if left == 0:
            index = self._bucket_of[parameter]
            self._waiting[index] -= 1
            if self._waiting[index] == 0:
                self._start(self._buckets[index])

    def _start(self, bucket: Bucket) -> None:
        bucket.fill([self._dense(parameter) for parameter in bucket.params])
        bucket.start()

    def _dense(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            return gradient
        if not self._options["sparse_as_dense"]:
            raise ValueError(
                f"gradient of {self._names[id(parameter)]}: required a dense gradient, got a "
                "sparse one; pass sparse_as_dense=True, or make the layer with sparse=False"
            )
        return gradient.to_dense()

    def synchronize(self) -> None:
        """Wait until every `.grad` holds the reduced gradient.

        A gradient that is None here becomes the others' reduced gradient if any rank has one,
        and stays None if none has, so that no rank alone moves an unused parameter.

        Collective: every rank of the process set; blocks.
        """
        for bucket in self._buckets:
            if not bucket.in_flight:
                self._start(bucket)
        for bucket in self._buckets:
            bucket.finish()
            self._write_back(bucket)
        self._reset()
        self._synchronized = True

    def _write_back(self, bucket: Bucket) -> None:
        gradients, views = [], []
        for index, (parameter, view) in enumerate(
            zip(bucket.params, bucket.views, strict=True)
        ):
            gradient = parameter.grad
            if gradient is None:
                if bucket.flags[index] != 0:
                    parameter.grad = view.to(parameter.dtype, copy=True)
            elif gradient.is_sparse:
                parameter.grad = view.to(gradient.dtype).to_sparse(
                    gradient.sparse_dim()
                )
            else:
                gradients.append(gradient)
                views.append(view)
        if gradients:
            torch._foreach_copy_(gradients, views)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step()` use the gradients as they are, after an own `synchronize()`.

        Example:
            >>> opt.synchronize()                                      # doctest: +SKIP
            >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1)  # doctest: +SKIP
            >>> with opt.skip_synchronize():                           # doctest: +SKIP
            ...     opt.step()
        """
        self._skip_synchronize = True
        try:
            yield
        finally:
            self._skip_synchronize = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the optimizer's step with the reduced gradients. Collective; blocks.

        A closure is reduced after each evaluation, so L-BFGS works too.
        """
        if closure is not None:

            def reduced_closure() -> Any:
                with torch.enable_grad():
                    loss = closure()
                self.synchronize()
                return loss

            result = super().step(reduced_closure)
        else:
            if not self._synchronized and not self._skip_synchronize:
                self.synchronize()
            result = super().step()
        self._synchronized = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Gradients that are being reduced are waited for and dropped."""
        for bucket in self._buckets:
            if bucket.in_flight:
                bucket.finish()
        self._reset()
        self._synchronized = False
        super().zero_grad(set_to_none)


class _DeltaOptimizer(_DistributedOptimizer):
    """Takes the local step and reduces what it changed; parameters always hold weights."""

    def _make_bucket(self, index: int, members: Sequence[NamedParameter]) -> Bucket:
        bucket = Bucket(
            f"weights.{index}",
            members,
            self._wire_dtype(members[0][1]),
            self._op,
            (1.0, 1.0),
            self._process_set,
        )
        start = torch.empty_like(bucket.flat)
        self._starts.append(start)
        pieces = start.split([view.numel() for view in bucket.views])
        self._start_views.append(
            [
                piece.view(view.shape)
                for piece, view in zip(pieces, bucket.views, strict=True)
            ]
        )
        return bucket

    def _build_buckets(self) -> None:
        self._starts: list[torch.Tensor] = []
        self._start_views: list[list[torch.Tensor]] = []
        super()._build_buckets()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the local step, reduce the weight changes and apply them. Collective; blocks."""
        for bucket, views in zip(self._buckets, self._start_views, strict=True):
            torch._foreach_copy_(views, bucket.params)
        result = super().step(closure)
        for bucket, start in zip(self._buckets, self._starts, strict=True):
            torch._foreach_copy_(bucket.views, bucket.params)
            bucket.flat.sub_(start)
            bucket.start()
        for bucket, start, views in zip(
            self._buckets, self._starts, self._start_views, strict=True
        ):
            bucket.finish()
            start.add_(bucket.flat)
            torch._foreach_copy_(bucket.params, views)
        return result


_classes: dict[tuple[type, type], type] = {}


def _distributed_class(variant: type, base: type) -> type:
    """Return the class that is `variant` in front of the user's optimizer class."""
    key = (variant, base)
    if key not in _classes:
        _classes[key] = type(
            f"Distributed{base.__name__}", key, {"__doc__": base.__doc__}
        )
    return _classes[key]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[NamedParameter] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ops.ReduceOp | int | str = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Any:
    """Return `optimizer` as an optimizer of its own class that reduces over the ranks.

    Args:
        optimizer: any torch optimizer; its state and param groups are taken over.
        named_parameters: (name, parameter) pairs, as `model.named_parameters()`; without it
            parameters are named by their place in the param groups.
        compression: `Compression.none`, or `Compression.fp16` for float16 on the wire.
        backward_passes_per_step: backward passes whose gradients add up before a step.
        op: a reduction or its name. `Adasum` and `AdasumDelta` are the delta variant, every
            other one reduces gradients.
        gradient_predivide_factor: as Horovod's, with `Average` only.
        num_groups: deprecated name of `groups`.
        groups: a number of buckets, or lists of parameters that share one.
        sparse_as_dense: reduce sparse gradients densely.
        process_set: the ranks that reduce; others step locally.
        bucket_bytes: parameters travel in flat buckets of about this many bytes.

    Returns:
        An instance of a subclass of `type(optimizer)`.

    Raises:
        ValueError: bad arguments, or parameters that differ between the ranks; on all ranks.
        NotImplementedError: a compression that is not a cast to float16.

    Collective: every rank of `process_set`; blocks until the parameter lists are compared.

    Example:
        >>> opt = torch.optim.SGD(model.parameters(), 0.1)           # doctest: +SKIP
        >>> opt = hvd.DistributedOptimizer(                          # doctest: +SKIP
        ...     opt, model.named_parameters(), op=hvd.AdasumDelta)
    """
    reduction = ops.parse(op)
    if gradient_predivide_factor != 1.0 and reduction is not ops.Average:
        raise ValueError(
            f"gradient_predivide_factor: required op=Average, got op={reduction.name}"
        )
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step: required an integer >= 1, got {backward_passes_per_step}"
        )
    if compression not in (Compression.none, Compression.fp16):
        raise NotImplementedError(
            f"compression: required Compression.none or Compression.fp16, got {compression!r}"
        )
    if num_groups:
        warnings.warn(
            "num_groups has been replaced by groups", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    names = _checked_names(optimizer, named_parameters)
    delta = reduction in (ops.Adasum, ops.AdasumDelta)
    variant = _DeltaOptimizer if delta else _GradientOptimizer
    distributed: Any = object.__new__(_distributed_class(variant, type(optimizer)))
    distributed.__dict__.update(optimizer.__dict__)
    # A scheduler made before this call has wrapped the old object's step().
    distributed.__dict__.pop("step", None)
    distributed._configure(
        names,
        ops.AdasumDelta if delta else reduction,
        {
            "compression": compression,
            "backward_passes_per_step": backward_passes_per_step,
            "gradient_predivide_factor": gradient_predivide_factor,
            "groups": groups,
            "sparse_as_dense": sparse_as_dense,
            "process_set": process_set,
            "bucket_bytes": bucket_bytes,
        },
    )
    return distributed
