"""The arguments of `DistributedOptimizer` that all frameworks share, and their checks."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adasum_hvd.base import ops

# Must be equal on all ranks; a saved Keras optimizer stores them.
SHARED = (
    "backward_passes_per_step",
    "local_steps",
    "gradient_predivide_factor",
    "average_aggregated_gradients",
    "clip_delta_norm",
    "bucket_bytes",
)


class ProcessSet(Protocol):
    """Horovod's process set, after `init`: the ranks of a collective."""

    process_set_id: int
    ranks: list[int]  # numbered in the job

    def size(self) -> int:
        """Return the number of its ranks."""

    def rank(self) -> int:
        """Return this process's rank in the set."""

    def included(self) -> bool:
        """Return whether this process is in the set."""


@dataclass(frozen=True)
class Options:
    """The arguments of `DistributedOptimizer`, documented there, that each step uses.

    `op` is never `Adasum`: :func:`optimizer_op` replaces it by `AdasumDelta`. A framework without
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
        """Whether weight changes are reduced instead of gradients."""
        return self.op is ops.AdasumDelta

    @property
    def shared(self) -> dict[str, object]:
        """The arguments that must be equal on all ranks, for `agreement.compare_settings`."""
        about = {"op": self.op.name, "compression": self.compression.__name__}
        groups = self.groups
        if isinstance(groups, Sequence):
            groups = [[tuple(item.shape) for item in group] for group in groups]
        values = {name: getattr(self, name) for name in SHARED}
        return {**about, "groups": groups, **values}

    @property
    def factors(self) -> tuple[float, float]:
        """The prescale and the postscale factor of the reduction."""
        return 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor


def optimizer_op(op: ops.ReduceOp | int | str) -> ops.ReduceOp:
    """Return `op` for an optimizer: `Adasum` becomes the delta variant, as in Horovod."""
    reduction = ops.parse(op)
    return ops.AdasumDelta if reduction is ops.Adasum else reduction


def groups_of(caller: str, num_groups: int, groups: Any) -> Any:
    """Return `groups` as lists, or the deprecated `num_groups` if that alone was given."""
    if not num_groups:
        if groups is None or isinstance(groups, int):
            return groups
        return [list(group) for group in groups]
    warnings.warn(
        f"{caller}: num_groups is deprecated; pass groups={num_groups}",
        DeprecationWarning,
        stacklevel=3,
    )
    return num_groups if groups is None else groups


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected an integer >= 1, but got {value!r}")


def check(options: Options, compressions: Sequence[Any]) -> None:
    """Check the arguments, alone and in combination.

    Raises ValueError, or NotImplementedError for a compression that is not one of `compressions`.
    """
    only_delta = {
        "local_steps": options.local_steps != 1,
        "clip_delta_norm": options.clip_delta_norm is not None,
    }
    for name, given in only_delta.items():
        if given and not options.is_delta:
            raise ValueError(
                f"{name}: expected op=AdasumDelta, but got op={options.op.name}"
            )
    if options.average_aggregated_gradients and ops.is_adasum(options.op):
        raise ValueError(
            "average_aggregated_gradients: expected op=Average or op=Sum, but got "
            f"op={options.op.name}"
        )
    if options.op in (ops.Min, ops.Product):
        raise ValueError(
            f"op: expected average, sum, max or an AdaSum variant, but got {options.op.name}"
        )
    if options.gradient_predivide_factor != 1.0 and options.op is not ops.Average:
        raise ValueError(
            f"gradient_predivide_factor: expected op=Average, but got op={options.op.name}"
        )
    factor = options.gradient_predivide_factor
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(
            f"gradient_predivide_factor: expected a finite number > 0, but got {factor!r}"
        )
    for name in ("backward_passes_per_step", "local_steps", "bucket_bytes"):
        check_count(name, getattr(options, name))
    if options.clip_delta_norm is not None and not options.clip_delta_norm > 0:
        raise ValueError(
            f"clip_delta_norm: expected a number > 0, but got {options.clip_delta_norm!r}"
        )
    if options.start_copy not in ("device", "host"):
        raise ValueError(
            f'start_copy: expected "device" or "host", but got {options.start_copy!r}'
        )
    if options.compression not in compressions:
        names = ("none", "fp16", "bf16")[: len(compressions)]
        expected = " or ".join(f"Compression.{name}" for name in names)
        raise NotImplementedError(
            f"compression: expected {expected}, but got {options.compression!r}"
        )
    if isinstance(options.groups, int):
        if isinstance(options.groups, bool) or options.groups < 0:
            raise ValueError(
                "groups: expected an integer >= 0 or lists of parameters, but got "
                f"{options.groups!r}"
            )
    elif options.groups is not None:
        listed = [id(parameter) for group in options.groups for parameter in group]
        if len(set(listed)) != len(listed):
            raise ValueError("groups: expected each parameter once, but got one twice")


def turned_off(setting: str) -> str:
    """Return "SETTING=value" if the environment turns a part off: by any text but "on" or "1"."""
    value = os.environ.get(setting) or "on"
    return "" if value in ("on", "1") else f"{setting}={value}"


def warn_of_one_group(
    group_op: str, group_size: int, rank: int, ranks: int, on_host: int
) -> None:
    """Warn on the first rank if all ranks are in one group, which AdaSum does not join.

    A `group_size` of 0 means that a host is a group, with `on_host` of all `ranks`.
    """
    size = group_size or on_host
    if group_op != "adasum" and 1 < ranks <= size and rank == 0:
        warnings.warn(
            f"AdaSum: expected at least 2 groups, but got one group of all {ranks} ranks "
            f"(group_size={size}), which is reduced by {group_op}, so AdaSum has nothing to "
            'combine; start more ranks, set a smaller group_size, or set group_op="adasum"',
            stacklevel=4,
        )
