"""`DistributedOptimizer`: AdaSum, Average or Sum around any torch optimizer (docs/torch.md).

The user holds `wrapper.py`, an instance of the optimizer's own class. It asks one of two reducers:
`gradient.py` reduces gradients, then every rank takes the same step; `delta.py` lets every rank
take its own step and reduces the weight changes (arXiv 2006.02924, section 3).
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import global_process_set, rank, size

from adasum_hvd import parallel
from adasum_hvd.base import agreement, ops
from adasum_hvd.base.dynamic_subclass import as_dynamic_subclass
from adasum_hvd.base.frames import is_making_state
from adasum_hvd.base.namespaces import with_signature_of
from adasum_hvd.base.options import Options, ProcessSet, check, groups_of, optimizer_op
from adasum_hvd.offload.optimizer import AdamOffload
from adasum_hvd.parallel.torch_modes import detect
from adasum_hvd.torch import marks
from adasum_hvd.torch.compression import Compression, compressions
from adasum_hvd.torch.objects import allgather_object, here, ranks_of
from adasum_hvd.torch.optimizer.buckets import NamedParameter
from adasum_hvd.torch.optimizer.delta import DeltaReducer
from adasum_hvd.torch.optimizer.gradient import GradientReducer
from adasum_hvd.torch.optimizer.offload_delta import OffloadDeltaReducer
from adasum_hvd.torch.optimizer.parameters import Names, names_by_place
from adasum_hvd.torch.optimizer.reducer import Reducer
from adasum_hvd.torch.optimizer.wrapper import DistributedWrapper
from adasum_hvd.torch.wire import ranks_meet


def find_modes(
    optimizer: Any, model: Any = None, process_set: ProcessSet = global_process_set
) -> list[list[parallel.ParallelModeFinding]]:
    """Return the modes in use, by rank of the job; [] if this rank is alone. Collective; blocks."""
    if not process_set.included() or process_set.size() == 1:
        return []
    groups = getattr(optimizer, "param_groups", ())
    parameters = (parameter for group in groups for parameter in group["params"])
    reduced = [each for each in parameters if not marks.is_worker_local(each)]
    mine = detect(reduced, optimizer, model)
    by_rank = {rank(): mine}
    if ranks_meet():
        gathered = allgather_object(mine, "adasum.parallel_modes", process_set)
        by_rank = dict(zip(ranks_of(process_set), gathered, strict=True))
    return [by_rank.get(each, []) for each in range(size())]


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "DistributedOptimizer: expected a torch.optim.Optimizer, but got "
            f"{type(optimizer).__name__}; create one from the model's parameters, or pass the one "
            "that this object wraps"
        )
    for parameter, place in names_by_place(optimizer.param_groups).items():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameter {place}: expected one with a shape, but got one of a lazy layer; run "
                "one forward pass first, on every rank"
            )


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[NamedParameter] | None
) -> Names:
    """Return the name of every parameter of the optimizer."""
    by_place = names_by_place(optimizer.param_groups)
    if named_parameters is None:
        return by_place
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ValueError(
            "named_parameters: expected (name, parameter) tuples, as "
            "model.named_parameters() gives them"
        )
    counts = Counter(name for name, _ in named)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise ValueError(
            f"named_parameters: expected unique names, but got twice: {duplicates}"
        )
    names = {parameter: name for name, parameter in named}
    unnamed = [place for parameter, place in by_place.items() if parameter not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters: expected a name for every parameter of the optimizer, but got none "
            f"for {', '.join(unnamed)}"
        )
    return names


def _drop_patched_methods(distributed: Any) -> None:
    """Remove methods that were set on the instance: they would act on the old object."""
    original = distributed._base
    for name, method in list(vars(distributed).items()):
        if name.startswith("_") or not callable(getattr(original, name, None)):
            continue
        del distributed.__dict__[name]
        # A scheduler wraps step() to count calls; DistributedWrapper notifies it.
        by_scheduler = hasattr(method, "_wrapped_by_lr_sched")
        if not (by_scheduler and method.__wrapped__ is getattr(original, name)):
            warnings.warn(
                f"DistributedOptimizer: expected {name}() of {original.__name__}, but got one that "
                f"was set on the instance and is not called from here on; set {name} on the "
                "distributed optimizer, or override it in a subclass",
                stacklevel=4,
            )


# Optimizers that were passed to DistributedOptimizer, and what it returned last.
_passed: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def _refuse_step(stepping: Any, *_: Any) -> None:
    """Raise RuntimeError for a step of the wrapped object's own, which would reduce nothing."""
    if (returned := _passed.get(stepping)) is None or is_making_state():
        return
    distributed = returned()
    if distributed is None or not distributed._adasum.in_step:
        raise RuntimeError(
            f"{type(stepping).__name__}: expected steps of the optimizer that DistributedOptimizer "
            "returned, but got one of the optimizer that was passed to it, which reduces nothing "
            f"{here()}; use the returned one, or a copy of this one alone"
        )


def _wrapped(
    optimizer: torch.optim.Optimizer, names: Names, options: Options, allows_ddp: bool
) -> Any:
    """Return a reducing instance with `optimizer`'s state. Collective; blocks."""

    # Callers such as Accelerate look at the signature before they pass `set_to_none`.
    @with_signature_of(type(optimizer).zero_grad)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        DistributedWrapper.zero_grad(self, *args, **kwargs)

    name = f"Distributed{type(optimizer).__name__}"
    distributed = as_dynamic_subclass(
        optimizer, DistributedWrapper, name, zero_grad=zero_grad
    )
    _drop_patched_methods(distributed)
    distributed._wrapped = weakref.ref(optimizer)
    kind: type[Reducer] = GradientReducer
    if options.is_delta:
        offloaded = isinstance(optimizer, AdamOffload)
        kind = OffloadDeltaReducer if offloaded else DeltaReducer
    distributed._adasum = kind(distributed, names, options, allows_ddp)
    # Some wrappers are made without `super().__init__()`, and have no hooks.
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        if optimizer not in _passed:
            optimizer.register_step_pre_hook(_refuse_step)
        _passed[optimizer] = weakref.ref(distributed)
    return distributed


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
    process_set: ProcessSet = global_process_set,
    *,
    start_copy: str = "device",
    local_steps: int = 1,
    clip_delta_norm: float | None = None,
    bucket_bytes: int = Options.bucket_bytes,
    model: Any = None,
    allow_modes: Collection[str] = (),
) -> Any:
    """Return `optimizer` as an optimizer of its own class that reduces over the ranks.

    Args:
        optimizer: any torch optimizer; its state and param groups are taken over.
        named_parameters: (name, parameter) pairs, as `model.named_parameters()`; without it
            parameters are named by their place in the param groups.
        compression: `Compression.none`; `Compression.fp16` for float16 on the wire;
            `Compression.bf16` for bfloat16, with the AdaSum ops.
        backward_passes_per_step: backward passes whose gradients add up before a step.
        op: a reduction or its name. `Adasum` and `AdasumDelta` are the delta variant, every
            other one reduces gradients.
        gradient_predivide_factor: as Horovod's, with `Average` only.
        num_groups: deprecated name of `groups`.
        groups: for Horovod's scripts, in place of `bucket_bytes`: a number of buckets, or lists
            of parameters that share one.
        sparse_as_dense: reduce sparse gradients densely, and give them back sparse (no effect in
            the delta variant, whose gradients stay local).
        process_set: the ranks that reduce; others step locally.
        start_copy: "device" or "host": where the delta variant keeps the weights from
            before the step.
        local_steps: delta variant: local optimizer steps before one reduction of the total change.
        clip_delta_norm: delta variant: largest 2-norm of the reduced change of all weights.
        bucket_bytes: approximate size of a flat bucket, in bytes.
        model: the trained module, pipeline stage or engine. It is searched for parallel modes
            that leave no trace on parameters; see docs/parallel.md.
        allow_modes: names of parallel modes to accept, as in the error.

    Returns:
        An instance of a subclass of `type(optimizer)`.

    Raises:
        TypeError: `optimizer` is not a torch optimizer.
        ValueError: bad arguments, or parameters that differ between the ranks; on all ranks.
        RuntimeError: a parallel mode that AdaSum cannot mix with, on any rank; on all ranks.
        NotImplementedError: a compression that is not one of these; a process set in an
            elastic job.

    Collective: every rank of `process_set`; blocks until the parameter lists are compared.
    """
    options = Options(
        op=optimizer_op(op),
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        local_steps=local_steps,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of("DistributedOptimizer", num_groups, groups),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        start_copy=start_copy,
        clip_delta_norm=clip_delta_norm,
        bucket_bytes=bucket_bytes,
    )
    if hasattr(optimizer, "_reduces_gradients"):
        raise ValueError(
            f"DistributedOptimizer: expected a plain optimizer, but got a "
            f"{type(optimizer).__name__} that is distributed already; wrap the one inside, once"
        )
    check(options, compressions(options.op))
    agreement.refuse_process_set(process_set, global_process_set)
    parallel.refuse(find_modes(optimizer, model, process_set), allow_modes, rank())
    _check_optimizer(optimizer)
    names = _checked_names(optimizer, named_parameters)
    return _wrapped(optimizer, names, options, "ddp" in allow_modes)
