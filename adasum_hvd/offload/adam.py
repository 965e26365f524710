"""`AdamOffload`'s arguments and its formula, `reference_step`, without a framework.

References:
    docs/adam_offload.md; docs/mindspore.md; arXiv 1412.6980, the efficient form before section
    2.1; arXiv 1711.05101 (AdamW).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np

Schedule = Callable[[int], Any] | tuple[float, ...]
UNDECAYED = ("beta", "gamma")  # ungrouped parameters with these in their names

_POSITIVE = (lambda x: 0.0 < x < math.inf), "a finite number > 0"
_NOT_NEGATIVE = (lambda x: 0.0 <= x < math.inf), "a finite number >= 0"
_BETA = (float, "a float", lambda x: 0.0 < x < 1.0, "a float in (0, 1)")
_FLAGS = (
    *("use_locking", "use_nesterov", "torch_eps", "decoupled_weight_decay"),
    "verbose",
)
# By argument, its type and range, and their words in errors.
_RULES: dict[str, tuple[Any, str, Callable[[Any], bool], str]] = {
    "beta1": _BETA,
    "beta2": _BETA,
    "eps": (float, "a float", *_POSITIVE),
    "loss_scale": (int | float, "a float", *_POSITIVE),
    "weight_decay": (
        *(int | float, "an int, a float or a function of the step"),
        *_NOT_NEGATIVE,
    ),
    "lr": (int | float, "numbers", *_NOT_NEGATIVE),
    **{name: (bool, "a bool", lambda _: True, "") for name in _FLAGS},
}
# Arguments of other Adams: the value that asks for this algorithm, and what else to use.
_KEEPS_AMSGRAD = "use Adam(amsgrad=True) of torch.optim or keras.optimizers"
FOREIGN = {
    "amsgrad": (False, _KEEPS_AMSGRAD),
    "use_amsgrad": (False, _KEEPS_AMSGRAD),
    "use_lazy": (False, "use torch.optim.SparseAdam, which steps the given rows only"),
    "use_offload": (
        True,
        "use Adam of torch.optim or keras.optimizers, which keeps its state on the device",
    ),
    "maximize": (False, "negate the loss"),
    "differentiable": (False, "use torch.optim.Adam"),
}


def check(name: str, value: Any) -> Any:
    """Return the value of the argument `name`: a bool unchanged, a number as a float.

    Raises TypeError for a wrong type (a bool is not a number), ValueError for a wrong range.
    """
    kind, words, holds, range_words = _RULES[name]
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        given = f"{value!r} ({type(value).__name__})"
        raise TypeError(f"AdamOffload: {name}: expected {words}, but got {given}")
    if not holds(value):
        raise ValueError(
            f"AdamOffload: {name}: expected {range_words}, but got {value!r}"
        )
    return value if kind is bool else float(value)


def drop_foreign(arguments: dict[str, Any]) -> None:
    """Drop other Adams' arguments that ask for what AdamOffload does anyway, in place.

    Raises ValueError if one asks for another algorithm.
    """
    for name in FOREIGN.keys() & arguments.keys():
        value, (expected, remedy) = arguments.pop(name), FOREIGN[name]
        if bool(value) is not expected:
            raise ValueError(
                f"AdamOffload: {name}: expected {expected}, but got {value!r}; {remedy}"
            )


def _plain(value: Any) -> Any:
    """Return a tensor or array of any framework as a number or lists."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double()
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value


def _number(value: Any) -> Any:
    """Return an array of one element as a number; others as they are."""
    value = _plain(value)
    while isinstance(value, list) and len(value) == 1:
        (value,) = value
    return value


def parse(name: str, value: Any) -> float | Schedule:
    """Return "lr" or "weight_decay" as a float, a tuple of floats, or a function of the step.

    "lr" may also be a 0-d array; or a 1-d array or finite iterable, with a rate per step.
    """
    if callable(value):
        return value
    value = _plain(value) if name == "lr" else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name != "lr" or is_number:
        return check(name, value)
    unordered = isinstance(value, str | bytes | Mapping | Set)
    if unordered or not isinstance(value, Iterable):
        raise TypeError(
            "AdamOffload: lr: expected an int, a float, a tensor, a sequence or a schedule "
            f"(called with the step), but got {value!r} ({type(value).__name__})"
        )
    rates = [rate if isinstance(rate, list) else _number(rate) for rate in value]
    if any(isinstance(rate, list) for rate in rates):
        raise ValueError(
            f"AdamOffload: lr: expected a tensor of at most 1 dimension, but got {rates!r}"
        )
    if not rates:
        raise ValueError("AdamOffload: lr: expected at least one value, but got none")
    return tuple(check("lr", rate) for rate in rates)


def value_at(name: str, schedule: Schedule, step: int) -> float:
    """Return "lr" or "weight_decay" of a step, counted from 0."""
    if callable(schedule):
        return check(name, _number(schedule(step)))
    if step >= len(schedule):
        raise IndexError(
            f"AdamOffload: lr: expected a rate for step {step} (counted from 0), but got a vector "
            f"of {len(schedule)}; give as many rates as there are steps"
        )
    return schedule[step]


def is_decayed(name: str) -> bool:
    """Return whether weight decay applies to an ungrouped parameter of this name.

    Example:
        >>> is_decayed("layer1.bias"), is_decayed("norm.gamma")
        (True, False)
    """
    return not any(part in name for part in UNDECAYED)


def reference_step(
    w: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    t: int,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    use_nesterov: bool = False,
    weight_decay: float = 0.0,
    loss_scale: float = 1.0,
    torch_eps: bool = False,
    decoupled_weight_decay: bool = False,
) -> None:
    """Take step t, counted from 1, in place, in float64: the reference for the tests.

    w are weights of any shape, g gradients of the scaled loss, m and v the moments, zero before
    step 1. The other arguments are `AdamOffload`'s, with the values of this step.
    """
    if decoupled_weight_decay:
        w *= 1 - lr * weight_decay
        weight_decay = 0.0
    g = (g + loss_scale * weight_decay * w) / loss_scale
    m[...] = beta1 * m + (1 - beta1) * g
    v[...] = beta2 * v + (1 - beta2) * g * g
    numerator = beta1 * m + (1 - beta1) * g if use_nesterov else m
    first, second = 1.0 - beta1**t, math.sqrt(1.0 - beta2**t)
    eps = eps * second if torch_eps else eps
    w -= lr * second / first * numerator / (np.sqrt(v) + eps)
