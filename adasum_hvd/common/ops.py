"""The reductions by number and by name, for every framework.

`Adasum` has Horovod's own number, so it can be passed to Horovod's functions; the two
variants exist for `DistributedOptimizer`, and in `allreduce` mean the same plain AdaSum.
"""

from __future__ import annotations

import enum

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
    """AdaSum of sparse tensors: to Horovod not implemented, to us a wrong argument."""


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

# A tensor of this name is a weight change: the op shows and counts it as such.
DELTA_PREFIX = "adasum.delta/"
# A float16 tensor of this name holds bfloat16, which Horovod has no type for.
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
    """Return the names that :func:`parse` knows, for the choices of a command line."""
    return list(_BY_NAME)


def parse(op: ReduceOp | int | str) -> ReduceOp:
    """Return the reduction that `op` means.

    Args:
        op: a :class:`ReduceOp`, Horovod's number of one, or a name such as "adasum-delta"
            (case does not matter, "_" reads as "-").

    Returns:
        The reduction.

    Raises:
        ValueError: there is no such reduction.

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
        raise ValueError(f"reduction op: required one of {known}, got {op!r}") from None


def is_adasum(op: ReduceOp) -> bool:
    """Return whether `op` is AdaSum in any variant."""
    return op in _ADASUM
