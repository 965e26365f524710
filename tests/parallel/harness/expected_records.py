"""The records that a monitor must write, from all ranks' tensors and the reference."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np

from adasum_hvd import reference

Vectors = Sequence[np.ndarray]


def levels_of(path: str, ranks: int) -> list[int]:
    """Return the levels' sizes in `binding.transport_description`."""
    found = re.search(r"levels of (\d+(?: x \d+)*) ranks", path)
    return [int(size) for size in found[1].split(" x ")] if found else [ranks]


def walk(vectors: Vectors, merges) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of a tree, and the coefficients of its leaves."""
    unit = np.eye(len(vectors))
    nodes = [(np.asarray(v, np.float64), unit[k]) for k, v in enumerate(vectors)]
    for left, right, _ in merges:
        (a, of_a), (b, of_b) = nodes[left], nodes[right]
        dot = float(a @ b)
        c, d = (reference.coefficient(dot, float(v @ v)) for v in (a, b))
        nodes.append((c * a + d * b, c * of_a + d * of_b))
    return nodes[-1]


def expected_statistics(
    vectors: Vectors, hosts: Sequence, sizes: Sequence[int]
) -> dict[str, float]:
    """Return a tensor's statistics in the job that the environment describes.

    Args:
        vectors: of all ranks, flat.
        hosts: of the ranks.
        sizes: of :func:`levels_of`.
    """
    op = os.environ.get("ADASUM_HVD_GROUP_OP", "adasum")
    group_size = int(os.environ.get("ADASUM_HVD_GROUP_SIZE", "0"))
    groups = reference.groups_of(hosts, group_size)
    if op != "adasum":  # what AdaSum joins is what groups have averaged
        vectors = [np.mean([vectors[r] for r in group], 0) for group in groups]
        assert op == "average"
        sizes = [len(vectors)]
        trees = [[(vectors, reference.tree([0] * len(vectors)))]]
    elif len(sizes) == 1:
        trees = [[(vectors, reference.tree(hosts, op, group_size))]]
    else:
        current = [vectors[rank] for group in groups for rank in group]
        trees = []
        for size in sizes:
            merges = reference.tree([0] * size)
            cuts = range(0, len(current), size)
            trees.append([(current[cut : cut + size], merges) for cut in cuts])
            current = [walk(*group)[0] for group in trees[-1]]
    cosines, energy, gain = [], 1.0, 1.0
    coefficients = np.ones(1)
    for level in reversed(trees):
        walked = [walk(*group) for group in level]
        for joined, _ in level:
            for a, b in itertools.combinations(joined, 2):
                cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        inputs = math.fsum(float(v @ v) for joined, _ in level for v in joined)
        results = math.fsum(float(v @ v) for v, _ in walked)
        means = [np.mean(joined, 0) for joined, _ in level]
        energy *= results / inputs
        gain *= math.sqrt(results / math.fsum(float(m @ m) for m in means))
        own = np.array([c for _, c in walked])
        coefficients = (coefficients[:, None] * own).ravel()
    return {
        "cosine": float(np.mean(cosines)),
        "orthogonality": energy,
        "gain": gain,
        "lowest": float(coefficients.min()),
        "highest": float(coefficients.max()),
    }


def check(
    tensors: Mapping[str, Mapping[str, float]],
    vectors: Mapping[str, Vectors],
    hosts: Sequence,
    path: str,
    tolerance: float = 1e-4,
) -> None:
    """Compare a record's tensors with what they must be, by name and in order."""
    assert list(tensors) == list(vectors)
    for name, of_ranks in vectors.items():
        wide = [np.asarray(v, np.float64).ravel() for v in of_ranks]
        expected = expected_statistics(wide, hosts, levels_of(path, len(wide)))
        for what, value in expected.items():
            got = tensors[name][what]
            assert abs(got - value) <= tolerance * max(1.0, abs(value)), (
                name,
                what,
                got,
                value,
            )
