"""Reductions drawn at random, against the reference: what no table of cases would think of.

Round `n` draws everything from `n`, the same on all ranks. A failure names its round; to see it
alone: ADASUM_FUZZ="n 1", the number of the first and how many.
"""

from __future__ import annotations

import os

import numpy as np
import torch

import adasum_hvd.torch as hvd
from adasum_hvd import reference
from adasum_hvd.horovod import binding
from tests.parallel.cases.torch.test_ops import HOSTS, TOLERANCE, check_same_everywhere
from tests.parallel.harness import process_sets

FIRST, ROUNDS = map(int, os.environ.get("ADASUM_FUZZ", "0 22").split())
SETS: list = []
ALIKE = ("normal", "zeros", "same", "opposed", "apart", "alone", "huge", "tiny")
FORMS = ("separate", "grouped", "in place", "strided", "bucket")


def start() -> None:
    size = hvd.size()
    SETS[:] = [hvd.global_process_set]
    if size > 1:
        SETS.append(process_sets.of(*range(0, size, 2)))


def _values(kind: str, draw: np.random.Generator, ranks: int, size: int, dtype):
    """Return one float64 array per rank that the dtype can hold."""
    normal = draw.standard_normal((ranks, size))
    limits = torch.finfo(dtype)
    if kind == "zeros":
        return normal * 0
    if kind == "same":
        return np.broadcast_to(normal[0], normal.shape)
    if kind == "opposed":
        return normal[0] * np.where(np.arange(ranks) % 2, -1.0, 1.0)[:, None]
    if kind == "apart":  # orthogonal: no two ranks have the same element
        return normal * (np.arange(size) % ranks == np.arange(ranks)[:, None])
    if kind == "alone":
        return normal * (np.arange(ranks) == draw.integers(ranks))[:, None]
    if kind == "huge":  # as much as their sum leaves room for
        return normal / np.abs(normal).max(initial=1) * (limits.max / (4 * ranks))
    if kind == "tiny":  # subnormal, most of it
        return normal * limits.tiny / 4
    return normal


def _shape(draw: np.random.Generator) -> tuple[int, ...]:
    dimensions = draw.integers(0, 4)
    most = (1, 30_000, 150, 20)[dimensions]
    return tuple(int(n) for n in draw.integers(0, most + 1, dimensions))


def _reduce(form: str, inputs: list[torch.Tensor], **options) -> list[torch.Tensor]:
    if form == "grouped":
        return hvd.grouped_allreduce(inputs, name="fuzz.group", **options)
    if form == "in place":
        return [
            hvd.allreduce_(t.clone(), name=f"fuzz.{k}", **options)
            for k, t in enumerate(inputs)
        ]
    if form == "bucket":
        flat = torch.cat([t.reshape(-1) for t in inputs])
        sizes = [t.numel() for t in inputs]
        name = binding.segmented("fuzz.bucket", sizes)
        parts = hvd.allreduce(flat, name=name, **options).split(sizes)
        return [part.view_as(t) for part, t in zip(parts, inputs, strict=True)]
    if form == "strided":
        inputs = [torch.stack([t, t], -1)[..., 0] for t in inputs]
    handles = [
        hvd.allreduce_async(t, name=f"fuzz.{k}", **options)
        for k, t in enumerate(inputs)
    ]
    return [hvd.synchronize(handle) for handle in handles]


def _check(got: torch.Tensor, inputs: list[torch.Tensor], factor: float, members):
    wide = [
        (t.double() if t.dtype == torch.float64 else t.float()).numpy() for t in inputs
    ]
    expected = factor * reference.adasum(
        wide,
        [HOSTS[rank] for rank in members],
        os.environ.get("ADASUM_HVD_GROUP_OP", "adasum"),
        int(os.environ.get("ADASUM_HVD_GROUP_SIZE", "0")),
    )
    assert got.dtype == inputs[0].dtype and got.shape == inputs[0].shape
    error = np.abs(got.double().numpy() - expected).max(initial=0.0)
    # What cancels is as exact as its parts.
    scale = max(
        np.abs(expected).max(initial=0.0),
        0.3 * factor * max(float(t.double().abs().max()) for t in inputs),
    )
    smallest = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    assert error <= TOLERANCE[got.dtype] * scale + smallest, f"error {error / scale}"


def reduce_round(number: int) -> list[torch.Tensor]:
    """Reduce what round `number` draws; return the results, none outside the process set."""
    draw = np.random.default_rng([2026, number])
    process_set = SETS[draw.integers(len(SETS))]
    members = process_set.ranks or list(range(hvd.size()))
    dtype = list(TOLERANCE)[draw.integers(len(TOLERANCE))]
    form = FORMS[draw.integers(len(FORMS))]
    op = (hvd.Adasum, hvd.AdasumGrad, hvd.AdasumDelta)[draw.integers(3)]
    factors = [float(f) for f in 2.0 ** draw.integers(-3, 1, 2)]
    description = [f"round {number}: {form}, {dtype}, {op}, {factors}, ranks {members}"]
    tensors = []  # per tensor, per rank
    for _ in range(draw.integers(1, 9)):
        shape, kind = _shape(draw), ALIKE[draw.integers(len(ALIKE))]
        size = int(np.prod(shape, dtype=int))
        values = _values(kind, draw, len(members), size, dtype)
        tensors.append(
            [torch.from_numpy(v.reshape(shape).copy()).to(dtype) for v in values]
        )
        description.append(f"{kind} {shape}")
    if not process_set.included():
        return []
    try:
        me = list(members).index(hvd.rank())
        results = _reduce(
            form,
            [of_ranks[me] for of_ranks in tensors],
            op=op,
            process_set=process_set,
            prescale_factor=factors[0],
            postscale_factor=factors[1],
        )
        for got, of_ranks in zip(results, tensors, strict=True):
            if got.numel():
                _check(got, of_ranks, factors[0] * factors[1], members)
    except Exception as error:
        raise AssertionError("; ".join(description)) from error
    return results if process_set is hvd.global_process_set else []


def case_drawn_at_random() -> None:
    results = []
    for number in range(FIRST, FIRST + ROUNDS):
        results += reduce_round(number)
    check_same_everywhere(results)


def case_not_finite() -> None:
    """A NaN or an infinity on one rank: its tensor is so everywhere, the others are untouched."""
    for dtype in TOLERANCE:
        for bad in (float("nan"), float("inf"), -float("inf")):
            tensors = [
                torch.full((n,), 1.0 + hvd.rank(), dtype=dtype) for n in (7, 5000, 300)
            ]
            alone = hvd.allreduce(tensors[0], op=hvd.Adasum, name="fuzz.finite")
            if hvd.rank() == hvd.size() - 1:
                tensors[1][4097] = bad
            found = hvd.grouped_allreduce(tensors, op=hvd.Adasum, name="fuzz.infinite")
            check_same_everywhere([t.nan_to_num() for t in found])
            assert torch.equal(found[0], alone)
            assert torch.isfinite(found[2]).all()
            # With one rank there are no coefficients to carry it to the other elements.
            hit = found[1] if hvd.size() > 1 else found[1][4097:4098]
            assert not torch.isfinite(hit).any(), (dtype, bad)
