"""`AdamOffload`'s arguments and formula, without a framework.

    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    l = lr sqrt(1 - beta2^t) / (1 - beta1^t)
    w = w - l n / (sqrt(v) + eps),   n = m,  or  beta1 m + (1 - beta1) g  with Nesterov

eps is outside the bias correction; torch has it inside. The gradient is
`g = (gradient + loss_scale weight_decay w) / loss_scale`, and t counts steps from 1.
Decoupled weight decay leaves g alone: the step begins with `w = (1 - lr weight_decay) w`.

References:
    docs/mindspore.md; arXiv 1412.6980, the efficient form before section 2.1; arXiv 1711.05101
    (AdamW).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

Schedule = Callable[[int], Any] | tuple[float, ...]
UNDECAYED = ("beta", "gamma")  # ungrouped parameters with these in their names

_NUMBER = int | float


class _Rule(NamedTuple):
    """The type and range of an argument, and their text in errors."""

    type: Any
    type_words: str
    holds: Callable[[Any], bool]
    range_words: str


_POSITIVE = (lambda x: 0.0 < x < math.inf), "a finite number > 0"
_NOT_NEGATIVE = (lambda x: 0.0 <= x < math.inf), "a finite number >= 0"
_BETA = _Rule(float, "a float", lambda x: 0.0 < x < 1.0, "a float in (0, 1)")
_BOOL = _Rule(bool, "a bool", lambda _: True, "a bool")
_RULES = {
    "beta1": _BETA,
    "beta2": _BETA,
    "eps": _Rule(float, "a float", *_POSITIVE),
    "loss_scale": _Rule(_NUMBER, "a float", *_POSITIVE),
    "weight_decay": _Rule(
        _NUMBER, "an int, a float or a function of the step", *_NOT_NEGATIVE
    ),
    "lr": _Rule(_NUMBER, "numbers", *_NOT_NEGATIVE),
    "use_locking": _BOOL,
    "use_nesterov": _BOOL,
    "torch_eps": _BOOL,
    "decoupled_weight_decay": _BOOL,
    "verbose": _BOOL,
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


def _got(value: Any) -> str:
    return f"but got {value!r} ({type(value).__name__})"


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool)


def check(name: str, value: Any) -> Any:
    """Return the value of the argument `name`: a bool unchanged, a number as a float.

    Raises:
        TypeError: it has a wrong type; a bool is not a number.
        ValueError: it is out of range or not finite.
    """
    rule = _RULES[name]
    if not isinstance(value, rule.type) or (
        isinstance(value, bool) and rule is not _BOOL
    ):
        raise TypeError(
            f"AdamOffload: {name}: expected {rule.type_words}, {_got(value)}"
        )
    if not rule.holds(value):
        raise ValueError(
            f"AdamOffload: {name}: expected {rule.range_words}, but got {value!r}"
        )
    return value if rule is _BOOL else float(value)


def drop_foreign(arguments: dict[str, Any]) -> None:
    """Drop other Adams' arguments that ask for what AdamOffload does anyway, in place.

    Raises:
        ValueError: one asks for another algorithm; the message names what to use.

    Example:
        >>> arguments = {"use_offload": True, "clipnorm": 1.0}
        >>> drop_foreign(arguments)
        >>> arguments
        {'clipnorm': 1.0}
    """
    for name in FOREIGN.keys() & arguments.keys():
        value, (expected, remedy) = arguments.pop(name), FOREIGN[name]
        if bool(value) is not expected:
            raise ValueError(
                f"AdamOffload: {name}: expected {expected}, but got {value!r}; {remedy}"
            )


def check_value(name: str, value: Any) -> float:
    """Return a number of one step ("lr" or "weight_decay"), or a 0-d array, as a float.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative or not finite.
    """
    return check(name, value.item() if hasattr(value, "item") else value)


def parse(name: str, value: Any) -> float | Schedule:
    """Return the meaning of "lr" or "weight_decay": a float, or a schedule of the steps.

    Raises:
        TypeError: `value` is of no accepted type; see :func:`parse_lr`.
        ValueError: it is out of range.
    """
    if name == "lr":
        return parse_lr(value)
    return value if callable(value) else check(name, value)


def parse_lr(value: Any) -> float | Schedule:
    """Return the meaning of a learning rate argument.

    Args:
        value: a number; a 0-d array (the same for all steps); a 1-d array or a finite
            iterable (the i-th step, counted from 0, takes the i-th value); or a schedule,
            called with the step counted from 0.

    Returns:
        A float, a tuple of floats, or the callable.

    Raises:
        TypeError: `value` is none of these.
        ValueError: a rate is negative, or the array has more than one dimension or no value.
    """
    if _is_number(value):
        return check("lr", value)
    if hasattr(value, "__array__") and not callable(value):
        array = np.asarray(value, dtype=np.float64)
        if array.ndim > 1:
            raise ValueError(
                "AdamOffload: lr: expected a tensor of at most 1 dimension, but got shape "
                f"{array.shape}"
            )
        if array.ndim == 0:
            return check_value("lr", array)
        value = array
    if callable(value):
        return value
    is_single = isinstance(value, bool | str | bytes)
    if is_single or isinstance(value, Mapping | Set) or not isinstance(value, Iterable):
        raise TypeError(
            "AdamOffload: lr: expected an int, a float, a tensor, a sequence or a schedule "
            f"(called with the step), {_got(value)}"
        )
    rates = tuple(check_value("lr", rate) for rate in value)
    if not rates:
        raise ValueError("AdamOffload: lr: expected at least one value, but got none")
    return rates


def value_at(name: str, schedule: Schedule, step: int) -> float:
    """Return "lr" or "weight_decay" of a step, counted from 0.

    Raises:
        IndexError: a vector of rates has no value for this step.
        TypeError: a schedule did not return a number.
        ValueError: a schedule returned a negative number.
    """
    if callable(schedule):
        return check_value(name, schedule(step))
    if step >= len(schedule):
        raise IndexError(
            f"AdamOffload: lr: expected a rate for step {step} (counted from 0), but got a vector "
            f"of {len(schedule)}; give as many rates as there are steps"
        )
    return schedule[step]


def check_same_length(schedules: Sequence[Any]) -> None:
    """Check that the groups' vectors of rates have one length.

    Raises:
        ValueError: the lengths differ.
    """
    lengths = {len(s) for s in schedules if isinstance(s, tuple)}
    if len(lengths) > 1:
        raise ValueError(
            "AdamOffload: lr: expected vectors of one length in all groups, but got lengths "
            f"{sorted(lengths)}"
        )


def is_decayed(name: str) -> bool:
    """Return whether weight decay applies to an ungrouped parameter of this name.

    Example:
        >>> is_decayed("layer1.bias"), is_decayed("norm.gamma")
        (True, False)
    """
    return not any(part in name for part in UNDECAYED)


def corrections(beta1: float, beta2: float, t: int) -> tuple[float, float]:
    """Return `1 - beta1^t` and `sqrt(1 - beta2^t)`, for t counted from 1."""
    return 1.0 - beta1**t, math.sqrt(1.0 - beta2**t)


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
    """Take step t in place, in float64: the reference for the frameworks' tests.

    Args:
        w: weights, float64, any shape.
        g: gradients of the scaled loss, as `w`.
        m: first moment, as `w`, zero before step 1.
        v: second moment, as `m`.
        t: the step, counted from 1.
        lr: learning rate of this step.
        beta1: decay rate of `m`.
        beta2: decay rate of `v`.
        eps: added to `sqrt(v)`.
        use_nesterov: Nesterov's numerator.
        weight_decay: L2 penalty, or the factor of the decoupled decay.
        loss_scale: factor of the loss.
        torch_eps: add eps to the bias-corrected `sqrt(v)`, as torch does.
        decoupled_weight_decay: shrink `w` before the step and leave `g` alone, as AdamW does.

    Example:
        >>> w, m, v = np.ones(1), np.zeros(1), np.zeros(1)
        >>> reference_step(w, np.ones(1), m, v, 1, lr=0.1)
        >>> round(float(w[0]), 6)
        0.9
    """
    if decoupled_weight_decay:
        w *= 1 - lr * weight_decay
        weight_decay = 0.0
    g = (g + loss_scale * weight_decay * w) / loss_scale
    m[...] = beta1 * m + (1 - beta1) * g
    v[...] = beta2 * v + (1 - beta2) * g * g
    numerator = beta1 * m + (1 - beta1) * g if use_nesterov else m
    first, second = corrections(beta1, beta2, t)
    eps = eps * second if torch_eps else eps
    w -= lr * second / first * numerator / (np.sqrt(v) + eps)
