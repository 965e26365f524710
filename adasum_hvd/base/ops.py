"""The reduction ops by number and by name, for every framework.

`Adasum` has Horovod's own number, so Horovod's functions accept it. The two variants differ in
`DistributedOptimizer` only; in `allreduce` both are plain AdaSum.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

__all__ = [
    "Adasum",
    "AdasumDelta",
    "AdasumGrad",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "SparseAdasumError",
    "Sum",
    "is_adasum",
    "names",
    "parse",
]


class SparseAdasumError(NotImplementedError, ValueError):
    """AdaSum of sparse tensors; NotImplementedError as in Horovod, and a ValueError."""


class ReduceOp(enum.IntEnum):
    """A reduction; the first six have Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5
    AdasumGrad = 16
    AdasumDelta = 17


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product
AdasumGrad, AdasumDelta = ReduceOp.AdasumGrad, ReduceOp.AdasumDelta

# The op counts and traces a tensor with this prefix as a weight change.
DELTA_PREFIX = "adasum.delta/"
# A float16 tensor with this prefix holds bfloat16 bits; Horovod has no type for them.
BFLOAT16_PREFIX = "adasum.bfloat16/"

_ADASUM = frozenset({Adasum, AdasumGrad, AdasumDelta})
# How a group of ranks is reduced before AdaSum: `groups.configure`.
GROUP_OPS = ("adasum", "average", "sum")
_BY_NAME = {
    "average": Average,
    "sum": Sum,
    "adasum": Adasum,
    "adasum-grad": AdasumGrad,
    "adasum-delta": AdasumDelta,
    "min": Min,
    "max": Max,
    "product": Product,
}


def names() -> list[str]:
    """Return the names that :func:`parse` accepts, for the choices of a command line."""
    return list(_BY_NAME)


def parse(op: ReduceOp | int | str) -> ReduceOp:
    """Return `op` as a :class:`ReduceOp`.

    Args:
        op: a :class:`ReduceOp`, Horovod's number of one, or a name such as "adasum-delta"
            (case does not matter, "_" equals "-").

    Raises:
        ValueError: `op` is unknown.

    Example:
        >>> parse("adasum-delta") is AdasumDelta
        True
        >>> parse(2) is Adasum
        True
    """
    try:
        if isinstance(op, str):
            return _BY_NAME[op.lower().replace("_", "-")]
        return ReduceOp(op)
    except (KeyError, ValueError):
        known = ", ".join(_BY_NAME)
        raise ValueError(
            f"reduction op: expected one of {known}, but got {op!r}"
        ) from None


def requested(
    op: Any, average: bool | None, with_average: Callable[[Any, Any], Any]
) -> ReduceOp:
    """Return the op of an allreduce; Horovod's `with_average` adds the older argument `average`."""
    if type(op) is ReduceOp and average is None:
        return op
    return parse(with_average(parse(op) if isinstance(op, str) else op, average))


def is_adasum(op: ReduceOp) -> bool:
    """Return whether `op` is AdaSum in any variant."""
    return op in _ADASUM
