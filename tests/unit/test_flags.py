"""The codes of a bucket's flags: every reduction keeps them apart."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from adasum_hvd import reference
from adasum_hvd.base import ops
from adasum_hvd.torch.optimizer.buckets.flags import Flags
from adasum_hvd.torch.optimizer.checks import hyperparameters

DENSE, SPARSE = torch.ones(2), torch.ones(2).to_sparse()


def adasum(codes: np.ndarray) -> float:
    return float(reference.adasum([np.array([code]) for code in codes])[0])


def summed_in_pairs(codes: np.ndarray) -> float:
    return adasum(np.array([sum(codes[i : i + 2]) for i in range(0, len(codes), 2)]))


REDUCTIONS = [
    (ops.Average, np.mean),
    (ops.Sum, np.sum),
    (ops.Max, np.max),
    (ops.AdasumGrad, adasum),
    (ops.AdasumGrad, summed_in_pairs),
    (ops.AdasumGrad, np.sum),  # all ranks in one group that adds
]


def code(gradient: torch.Tensor | None, op: ops.ReduceOp, ranks: int) -> float:
    numbers = torch.zeros(1)
    flags = Flags(numbers, op, ranks)
    flags.set_dense()
    flags.set_from(0, gradient)
    return numbers.item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 13])
@pytest.mark.parametrize("op, reduction", REDUCTIONS)
def test_every_reduction_keeps_the_codes_apart(op, reduction, ranks: int) -> None:
    found = list(itertools.combinations_with_replacement((None, DENSE, SPARSE), ranks))
    if ranks > 4:  # the extremes, and one of a kind among the others
        found = [
            [a] * place + [b] + [a] * (ranks - place - 1)
            for a, b in itertools.product((None, DENSE, SPARSE), repeat=2)
            for place in range(ranks)
        ]
    codes = {id(g): code(g, op, ranks) for g in (None, DENSE, SPARSE)}
    for gradients in found:
        reduced = reduction(np.array([codes[id(g)] for g in gradients]))
        flags = Flags(torch.tensor([reduced], dtype=torch.float32), op, ranks)
        assert flags.is_none(0) == all(g is None for g in gradients)
        assert flags.is_sparse(0) == any(g is SPARSE for g in gradients)
        assert not flags.announces_change


def test_a_change_is_announced_to_all() -> None:
    for op, reduction in REDUCTIONS[:3]:
        numbers = torch.zeros(1)
        Flags(numbers, op, 3).announce_change()
        reduced = reduction(np.array([numbers.item(), code(SPARSE, op, 3), 0.0]))
        assert math.isinf(reduced)


def test_codes_that_float16_cannot_hold_are_not_used() -> None:
    for ranks, tells in ((20, True), (200, False)):
        numbers = torch.zeros(1, dtype=torch.float16)
        flags = Flags(numbers, ops.AdasumGrad, ranks)
        flags.set_dense()
        flags.set_from(0, SPARSE)
        assert flags.is_sparse(0) == tells and not flags.announces_change


def test_hyperparameters_that_are_tensors_count_by_their_number() -> None:
    one, other = (
        hyperparameters([{"params": [], "eps": eps, "table": torch.ones(2)}])
        for eps in (0.5, torch.tensor(0.5))
    )
    assert one == other and "0.5" in str(one) and "tensor" in str(one)
