"""Rules that join the ranks' tensors, by name or as any function of Gram matrices."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch

from adasum_hvd.base.agreement import plain
from adasum_hvd.base.ops import GROUP_OPS
from adasum_hvd.distributed.adascale import AdaScale
from adasum_hvd.distributed.coefficients import grafted, mean_direction, rda

Coefficients: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
# What makes the function of a rule; AdaSum and the mean need none.
FUNCTIONS: dict[str, Callable[[], Coefficients | None]] = {
    "adasum": lambda: None,
    "mean": lambda: None,
    "adascale": AdaScale,
    "grafted": lambda: grafted,
    "mean_direction": lambda: mean_direction,
    "rda": lambda: rda,
}


@dataclass(frozen=True)
class Rule:
    """A rule and its groups; ValueError if there are none such."""

    # A name in `FUNCTIONS`, or a function from Gram matrices, float64 [tensors, N, N], to
    # coefficients, float64 [tensors, N], on the same device.
    kind: str | Coefficients
    group_op: str = "adasum"  # how ranks of a group are joined before AdaSum
    group_size: int = 0  # ranks in a group; 0 means that a host is a group
    function: Coefficients | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        kind = self.kind
        if not callable(kind) and (not isinstance(kind, str) or kind not in FUNCTIONS):
            raise ValueError(
                f"rule: expected one of {', '.join(FUNCTIONS)}, or a function of Gram matrices, "
                f"but got {kind!r}"
            )
        function = kind if callable(kind) else FUNCTIONS[kind]()
        object.__setattr__(self, "function", function)
        if self.group_op not in GROUP_OPS:
            raise ValueError(
                f"group_op: expected one of {', '.join(GROUP_OPS)}, but got {self.group_op!r}"
            )
        size = self.group_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"group_size: expected an integer >= 0, but got {size!r}")
        if self.kind != "adasum" and self.group_op != "adasum":
            raise ValueError(
                f"group_op: expected rule='adasum', but got rule={self.name} with group_op="
                f"{self.group_op!r}; leave group_op out"
            )

    @property
    def name(self) -> str:
        """The rule's name, by which ranks compare it; of a partial with its plain arguments."""
        return self.kind if isinstance(self.kind, str) else _shown(self.kind)

    @property
    def adascale(self) -> AdaScale:
        """The estimates of AdaScale; ValueError if this is another rule."""
        if not isinstance(self.function, AdaScale):
            raise ValueError(
                f"gain: expected rule='adascale', but got rule={self.name}; pass rule='adascale'"
            )
        return self.function

    def begin_pass(self) -> None:
        """Forget a pass that broke off; only AdaScale keeps anything."""
        if isinstance(self.function, AdaScale):
            self.function.begin_pass()

    def end_pass(self) -> None:
        """Note that all tensors of a pass are reduced."""
        if isinstance(self.function, AdaScale):
            self.function.end_pass()

    @property
    def described(self) -> dict[str, object]:
        """The settings that must be the same on all ranks."""
        groups = {"group_op": self.group_op, "group_size": self.group_size}
        return {"rule": self.name, **groups}


class Ruled:
    """A base of the objects that reduce pass after pass by one rule."""

    rule: Rule

    @property
    def gain(self) -> float:
        """AdaScale's gain after the last pass, from 1 to N; blocks on a device.

        Raises:
            ValueError: another rule than "adascale".
        """
        return self.rule.adascale.gain


def _shown(value: object) -> str:
    if isinstance(value, partial):
        named = [f"{key}={_shown(one)}" for key, one in sorted(value.keywords.items())]
        return f"{_shown(value.func)}({', '.join([*map(_shown, value.args), *named])})"
    if not callable(value):
        return repr(plain(value))
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{getattr(value, '__module__', '')}.{name}"


def rule_of(
    rule: str | Coefficients,
    group_op: str | None,
    group_size: int | None,
    has_passes: bool = True,
) -> Rule:
    """Return the rule, with groups from the environment where an argument is None.

    `has_passes`: the caller is a :class:`Ruled`, whose gain a program can read.

    Raises:
        ValueError: as :class:`Rule`; or "adascale" without passes.
    """
    if rule == "adascale" and not has_passes:
        raise ValueError(
            "rule: expected one without a gain, but got 'adascale'; use AdasumState, "
            "adasum_replicate or LocalSGD, which have it as .gain, or rule='mean'"
        )
    variables = os.environ if rule == "adasum" else {}
    op = variables.get("ADASUM_HVD_GROUP_OP") or "adasum"
    size = variables.get("ADASUM_HVD_GROUP_SIZE") or "0"
    if group_size is None:
        if not size.isdecimal():
            raise ValueError(
                f"ADASUM_HVD_GROUP_SIZE: expected an integer >= 0, but got {size!r}"
            )
        group_size = int(size)
    return Rule(rule, op if group_op is None else group_op, group_size)


def checked(coefficients: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return the coefficients of a user's rule in float64; ValueError if their shape is wrong."""
    shape = tuple(gram.shape[:2])
    got = getattr(coefficients, "shape", None)
    if got is None or tuple(got) != shape:
        raise ValueError(
            f"rule: expected coefficients of shape {shape} (tensors, ranks), but got "
            f"{type(coefficients).__name__ if got is None else tuple(got)}"
        )
    return coefficients.to(gram)
