"""The arguments of `DistributedOptimizer` that mean the same in every framework."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adasum_hvd.common import ops

# What must be the same on all ranks, and what a saved Keras optimizer keeps.
SHARED = (
    "backward_passes_per_step",
    "local_steps",
    "gradient_predivide_factor",
    "average_aggregated_gradients",
    "clip_delta_norm",
    "bucket_bytes",
)


class ProcessSet(Protocol):
    """Horovod's process set, after `init`: the ranks that take part in a collective."""

    process_set_id: int
    ranks: list[int]  # in the job

    def size(self) -> int:
        """Return the number of ranks in it."""

    def rank(self) -> int:
        """Return this process's rank in it."""

    def included(self) -> bool:
        """Return whether this process is in it."""


@dataclass(frozen=True)
class Options:
    """The arguments of `DistributedOptimizer` that outlive it; documented there.

    `op` is never `Adasum`: that is resolved to `AdasumDelta`. A framework without
    `start_copy` or `average_aggregated_gradients` leaves them at their defaults.
    """

    op: ops.ReduceOp
    process_set: ProcessSet
    compression: Any
    backward_passes_per_step: int = 1
    local_steps: int = 1
    gradient_predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    sparse_as_dense: bool = False
    average_aggregated_gradients: bool = False
    start_copy: str = "device"
    clip_delta_norm: float | None = None
    bucket_bytes: int = 16 << 20

    @property
    def is_delta(self) -> bool:
        """Whether weight changes are reduced, and not gradients."""
        return self.op is ops.AdasumDelta

    @property
    def shared(self) -> dict[str, object]:
        """What must be the same on all ranks, for `agreement.compare_settings`."""
        values = {name: getattr(self, name) for name in SHARED}
        groups = self.groups
        if isinstance(groups, Sequence):
            groups = [[tuple(item.shape) for item in group] for group in groups]
        return {
            "op": self.op.name,
            "compression": self.compression.__name__,
            "groups": groups,
            **values,
        }

    @property
    def factors(self) -> tuple[float, float]:
        """The prescale and the postscale factor of the reduction."""
        return 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor


def optimizer_op(op: ops.ReduceOp | int | str) -> ops.ReduceOp:
    """Return what `op` means for an optimizer, where `Adasum` is the delta variant."""
    reduction = ops.parse(op)
    return ops.AdasumDelta if reduction is ops.Adasum else reduction


def groups_of(what: str, num_groups: int, groups: Any) -> Any:
    """Return `groups`, with lists for what may be iterated once, or what `num_groups` says."""
    if not num_groups:
        if groups is None or isinstance(groups, int):
            return groups
        return [list(group) for group in groups]
    warnings.warn(
        f"{what}: num_groups is deprecated; pass groups={num_groups}",
        DeprecationWarning,
        stacklevel=3,
    )
    return num_groups if groups is None else groups


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: required an integer >= 1, got {value!r}")


def check(options: Options, compressions: Sequence[Any]) -> None:
    """Check arguments that make no sense, alone or together.

    Args:
        options: the arguments.
        compressions: those that the framework and the reduction have.

    Raises:
        ValueError: an argument, or a combination, that has no meaning.
        NotImplementedError: a compression that is not one of `compressions`.
    """
    only_delta = {
        "local_steps": options.local_steps != 1,
        "clip_delta_norm": options.clip_delta_norm is not None,
    }
    for name, given in only_delta.items():
        if given and not options.is_delta:
            raise ValueError(
                f"{name}: required op=AdasumDelta, got op={options.op.name}"
            )
    if options.average_aggregated_gradients and ops.is_adasum(options.op):
        raise ValueError(
            "average_aggregated_gradients: required op=Average or op=Sum, got "
            f"op={options.op.name}"
        )
    if options.op in (ops.Min, ops.Product):
        raise ValueError(
            f"op: required average, sum, max or an AdaSum variant, got {options.op.name}"
        )
    if options.gradient_predivide_factor != 1.0 and options.op is not ops.Average:
        raise ValueError(
            f"gradient_predivide_factor: required op=Average, got op={options.op.name}"
        )
    factor = options.gradient_predivide_factor
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(
            f"gradient_predivide_factor: required a finite number > 0, got {factor!r}"
        )
    for name in ("backward_passes_per_step", "local_steps", "bucket_bytes"):
        check_count(name, getattr(options, name))
    if options.clip_delta_norm is not None and not options.clip_delta_norm > 0:
        raise ValueError(
            f"clip_delta_norm: required a number > 0, got {options.clip_delta_norm!r}"
        )
    if options.start_copy not in ("device", "host"):
        raise ValueError(
            f'start_copy: required "device" or "host", got {options.start_copy!r}'
        )
    if options.compression not in compressions:
        names = ("none", "fp16", "bf16")[: len(compressions)]
        required = " or ".join(f"Compression.{name}" for name in names)
        raise NotImplementedError(
            f"compression: required {required}, got {options.compression!r}"
        )
    if isinstance(options.groups, int):
        if isinstance(options.groups, bool) or options.groups < 0:
            raise ValueError(
                f"groups: required an integer >= 0 or lists of parameters, got {options.groups!r}"
            )
    elif options.groups is not None:
        listed = [id(parameter) for group in options.groups for parameter in group]
        if len(set(listed)) != len(listed):
            raise ValueError("groups: required each parameter once, got one twice")
