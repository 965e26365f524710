"""The conformance table of torch tensors: every engine, dtype and size, and AdaSum's properties.

A file of cases describes its engine once and runs `every_dtype_and_size` and the functions that
CHECKS names. Nothing here imports an engine, so that it serves in an environment without Horovod.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adasum_hvd import reference

CHECKS = ("properties", "magnitudes", "not_finite", "cancelling_pairs", "layouts")
SIZES = (1, 0, 7, 4096, 300, 4097, 100_003, 8)
TOLERANCE = {
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
    torch.float32: 1e-6,
    torch.float64: 1e-9,
}


@dataclass(frozen=True)
class Engine:
    """How tensors are reduced; a name is the tensor's in calls that need one."""

    rank: int
    hosts: Sequence[Any]  # any id of each rank's host
    reduce: Callable[[torch.Tensor, str], torch.Tensor]
    reduce_in_place: Callable[[torch.Tensor, str], torch.Tensor]
    reduce_several: Callable[[list[torch.Tensor], str], list[torch.Tensor]]
    gather: Callable[[Any], list[Any]]

    @property
    def size(self) -> int:
        return len(self.hosts)


def tensor_of(
    rank: int, size: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    values = np.random.default_rng([seed, rank, size]).standard_normal(size) * scale
    return torch.from_numpy(values).to(dtype)


def reduced(inputs: Iterable[torch.Tensor], hosts: Sequence[Any]) -> np.ndarray:
    """Return the reference's AdaSum with the groups of the environment."""
    wide = [
        t.double().numpy() if t.dtype == torch.float64 else t.float().numpy()
        for t in inputs
    ]
    return reference.adasum(
        wide,
        hosts,
        os.environ.get("ADASUM_HVD_GROUP_OP", "adasum"),
        int(os.environ.get("ADASUM_HVD_GROUP_SIZE", "0")),
    )


def by_levels(
    inputs: Sequence[torch.Tensor], radices: Sequence[int], group_op: str = "adasum"
) -> torch.Tensor:
    """Return the AdaSum of tensors in the tree's order, rounded to their dtype in each level."""
    current, dtype = [tensor.double().numpy() for tensor in inputs], inputs[0].dtype
    for radix in radices:
        groups = (current[k : k + radix] for k in range(0, len(current), radix))
        found = [reference.adasum(group, None, group_op) for group in groups]
        current = [torch.from_numpy(v).to(dtype).double().numpy() for v in found]
        group_op = "adasum"
    return torch.from_numpy(*current).to(dtype)


def expected(
    engine: Engine, size: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0
) -> np.ndarray:
    """Return the reduction of every rank's `tensor_of`."""
    inputs = [tensor_of(r, size, dtype, seed, scale) for r in range(engine.size)]
    return reduced(inputs, engine.hosts)


def check_close(
    got: torch.Tensor, reference_value: np.ndarray, dtype: torch.dtype
) -> None:
    assert got.dtype == dtype
    if got.numel():
        error = np.abs(got.double().numpy() - reference_value).max()
        # Opposite scalars cancel: measure against a typical input where the result is tiny.
        largest = max(np.abs(reference_value).max(), 0.3 if got.numel() < 100 else 0.0)
        assert error <= TOLERANCE[dtype] * largest, f"error {error / largest}"


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = torch.cat([tensor.detach().cpu().reshape(-1)])
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_same_everywhere(engine: Engine, tensors: Iterable[torch.Tensor]) -> str:
    digest = digest_of(tensors)
    assert len(set(engine.gather(digest))) == 1, "ranks have different bits"
    return digest


def every_dtype_and_size(engine: Engine) -> dict[str, str]:
    digests = {}
    for dtype in TOLERANCE:
        results = []
        for size in SIZES:
            mine = tensor_of(engine.rank, size, dtype)
            before = mine.clone()
            result = engine.reduce(mine, f"single.{dtype}.{size}")
            assert torch.equal(mine, before), "the input was changed"
            check_close(result, expected(engine, size, dtype), dtype)
            in_place = engine.reduce_in_place(mine, f"in_place.{dtype}.{size}")
            assert in_place is mine
            assert torch.equal(result, mine), "in place differs from out of place"
            results.append(result)
        tensors = [tensor_of(engine.rank, size, dtype) for size in SIZES]
        grouped = engine.reduce_several(tensors, f"grouped.{dtype}")
        for alone, together in zip(results, grouped, strict=True):
            assert torch.equal(alone, together), "fused differs from unfused"
        digests[str(dtype)] = check_same_everywhere(engine, results)
    return digests


def properties(engine: Engine) -> None:
    """Identical inputs, disjoint supports, and one rank that is not zero."""
    rank, size = engine.rank, engine.size
    same = tensor_of(0, 10_000, torch.float32)
    assert torch.equal(engine.reduce(same, "identity"), same)
    wide = tensor_of(0, 10_000, torch.float64)
    assert torch.equal(engine.reduce(wide, "identity.float64"), wide)
    mine = torch.zeros(999 * size)
    mine[rank::size] = tensor_of(rank, 999, torch.float32)
    everyone = torch.zeros_like(mine)
    for other in range(size):
        everyone[other::size] = tensor_of(other, 999, torch.float32)
    assert torch.equal(engine.reduce(mine, "orthogonal"), everyone)
    giver = size - 1
    alone = tensor_of(giver, 5000, torch.float32)
    zero_or_not = alone if rank == giver else torch.zeros(5000)
    assert torch.equal(engine.reduce(zero_or_not, "zero"), alone)


def magnitudes(engine: Engine) -> None:
    for scale in (1e19, 1e-30):
        mine = tensor_of(engine.rank, 9000, torch.float32, 3, scale)
        result = engine.reduce(mine, f"magnitude.{scale}").numpy()
        correct = expected(engine, 9000, torch.float32, 3, scale)
        assert np.abs(result - correct).max() <= 1e-6 * np.abs(correct).max()
    for exponent in (300, -300):
        scale = 10.0**exponent
        mine = tensor_of(engine.rank, 9000, torch.float64, 4, scale)
        result = engine.reduce(mine, f"magnitude64.{exponent}").numpy()
        correct = expected(engine, 9000, torch.float64, 4, scale)
        assert np.abs(result - correct).max() <= 1e-9 * np.abs(correct).max()


def cancelling_pairs(engine: Engine) -> None:
    """Neighbours that are opposite but for a little noise."""
    for digits in (2, 4, 8):

        def make(rank: int, digits: int = digits) -> torch.Tensor:
            base = tensor_of(rank // 2, 60_000, torch.float64, 5)
            noise = tensor_of(rank, 60_000, torch.float64, 6) * 10.0**-digits
            return base if rank % 2 == 0 else -base + noise

        result = engine.reduce(make(engine.rank), f"cancel.{digits}").numpy()
        inputs = [make(rank).numpy() for rank in range(engine.size)]
        correct = reference.adasum(inputs, engine.hosts)
        # NumPy's own pairwise sums put an error of some 1e-15 / eps into the float64 tree.
        bound = 1e-9 + 1e-14 * 10.0**digits
        assert np.abs(result - correct).max() <= bound * np.abs(correct).max()


def not_finite(engine: Engine) -> None:
    """NaN and infinity of one rank reach all of them, and no other tensor."""
    for dtype in TOLERANCE:
        for value in (float("nan"), float("inf")):
            tensors = [
                tensor_of(engine.rank, size, dtype, 7) for size in (300, 5000, 8)
            ]
            alone = engine.reduce_several(
                [t.clone() for t in tensors], f"finite.{dtype}"
            )
            if engine.rank == engine.size - 1:
                tensors[1][1234] = value
            found = engine.reduce_several(tensors, f"infinite.{dtype}.{value}")
            assert not found[1].isfinite()[1234]
            assert torch.equal(found[0], alone[0]) and torch.equal(found[2], alone[2])


def layouts(engine: Engine) -> None:
    mine = tensor_of(engine.rank, 600, torch.float32, 11).view(20, 30).t()
    flat = engine.reduce(mine.contiguous(), "layout.flat")
    assert torch.equal(engine.reduce(mine, "layout.t"), flat)
    engine.reduce_in_place(mine, "layout.t_")
    assert torch.equal(mine, flat)
    signs = torch._neg_view(-flat)  # which are not in memory
    again = engine.reduce(flat, "layout.again")
    assert torch.equal(engine.reduce(signs, "layout.signs"), again)
