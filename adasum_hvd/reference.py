"""The definition of AdaSum in NumPy float64; every test compares with this file.

References:
    Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "adasum",
    "coefficient",
    "groups_of",
    "pair",
    "tree",
]

GROUP_OPS = ("adasum", "average", "sum")  # the reductions inside a group

Vector: TypeAlias = NDArray[np.float64]
Merge: TypeAlias = tuple[
    int, int, bool
]  # left node, right node, by AdaSum (else plain addition)
_SMALLEST_NORM = np.sqrt(np.finfo(np.float64).tiny)


def coefficient(dot: float, norm: float) -> float:
    """Return `1 - dot / 2 norm`; exactly 1 when the squared norm `norm` counts as zero."""
    return 1.0 if norm < _SMALLEST_NORM else 1.0 - dot / norm * 0.5


def pair(a: Vector, b: Vector) -> Vector:
    """Return `(1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b` (the paper's equation 7)."""
    dot = float(np.sum(a * b))
    return coefficient(dot, np.sum(a * a)) * a + coefficient(dot, np.sum(b * b)) * b


def _neighbours(
    nodes: list[int], leaves: int, by_adasum: bool, merges: list[Merge]
) -> int:
    while len(nodes) > 1:
        upper = []
        for left, right in zip(nodes[::2], nodes[1::2], strict=False):
            upper.append(leaves + len(merges))
            merges.append((left, right, by_adasum))
        nodes = upper + nodes[len(nodes) - len(nodes) % 2 :]
    return nodes[0]


def groups_of(hosts: Sequence[int], group_size: int = 0) -> list[list[int]]:
    """Return the ranks of each group: hosts, or `group_size` consecutive ranks if > 0."""
    groups: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(rank // group_size if group_size else host, []).append(rank)
    return list(groups.values())


def tree(
    hosts: Sequence[int], group_op: str = "adasum", group_size: int = 0
) -> list[Merge]:
    """Return the merges, in order, of nearest neighbours in each group and then over groups.

    Args:
        hosts: any id of each rank's host.
        group_op: "adasum", "average" or "sum": the reduction inside a group.
        group_size: ranks in a group; 0 means that a host is a group.

    Returns:
        Merge k combines two nodes into node `len(hosts) + k`; nodes below `len(hosts)` are ranks.
    """
    merges: list[Merge] = []
    tops = [
        _neighbours(group, len(hosts), group_op == "adasum", merges)
        for group in groups_of(hosts, group_size)
    ]
    _neighbours(tops, len(hosts), True, merges)
    return merges


def adasum(
    tensors: Sequence[ArrayLike],
    hosts: Sequence[int] | None = None,
    group_op: str = "adasum",
    group_size: int = 0,
) -> Vector:
    """Return the AdaSum of one tensor per rank, in float64.

    Args:
        tensors: one array per rank, all of one shape.
        hosts: see :func:`tree`; by default all ranks share one.
        group_op: see :func:`tree`.
        group_size: see :func:`tree`.

    Raises:
        ValueError: an unknown `group_op`, another number of hosts than of tensors, or tensors of
            several shapes.
    """
    hosts = [0] * len(tensors) if hosts is None else hosts
    nodes = [np.asarray(tensor, np.float64) for tensor in tensors]
    shapes = {node.shape for node in nodes}
    if group_op not in GROUP_OPS or len(hosts) != len(nodes) or len(shapes) > 1:
        raise ValueError(
            f"adasum: expected a group_op of {GROUP_OPS}, one host per tensor and one shape, but "
            f"got {group_op!r}, {len(hosts)} hosts for {len(nodes)} tensors, and {sorted(shapes)}"
        )
    largest = max((np.max(np.abs(node), initial=0.0) for node in nodes), default=0.0)
    # float64 products overflow where float64 inputs do not: scale by a power of two.
    is_wide = np.asarray(tensors[0]).dtype == np.float64 and 0 < largest < np.inf
    exponent = int(np.clip(-np.frexp(largest)[1], -1021, 1021)) if is_wide else 0
    nodes = [np.ldexp(node, exponent) for node in nodes]
    if group_op == "average":
        for group in groups_of(hosts, group_size):
            for rank in group:
                nodes[rank] = nodes[rank] * (1.0 / len(group))
    for left, right, by_adasum in tree(hosts, group_op, group_size):
        a, b = nodes[left], nodes[right]
        nodes.append(pair(a, b) if by_adasum else a + b)
    return np.ldexp(nodes[-1], -exponent)
