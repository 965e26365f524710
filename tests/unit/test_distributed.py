"""The parts of the torch.distributed engine, in one process."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adasum_hvd import reference
from adasum_hvd.distributed.blocks import Slice, _products
from adasum_hvd.distributed.coefficients import (
    tree_of,
    walk,
)
from adasum_hvd.distributed.exchange import sums_by_tensor
from adasum_hvd.distributed.lanes import ThreadLane
from adasum_hvd.distributed.reduction import plan, power_of_two_scale
from adasum_hvd.distributed.replicas import digest
from adasum_hvd.distributed.slices import (
    BLOCK_ELEMENTS,
    PADDED_ELEMENTS,
    Layout,
    chunks_of,
)
from tests.parallel.harness.processes import until

SIZES = st.lists(st.integers(0, 5 * BLOCK_ELEMENTS), max_size=6).map(tuple)


@given(SIZES, st.integers(1, 9), st.integers(1, 4))
def test_every_element_is_in_one_slice_and_one_block(sizes, ranks, blocks) -> None:
    layout = Layout(sizes, ranks)
    assert layout.bounds[0] == 0 and layout.bounds[-1] == sum(sizes)
    assert list(layout.bounds) == sorted(layout.bounds)
    starts = [0, *itertools.accumulate(sizes)]
    seen: list[tuple[int, int]] = []  # tensor, element
    for rank in range(ranks):
        runs = layout.runs[rank]
        in_chunks: list[int] = []
        for chunk in chunks_of(runs, blocks):
            assert len(chunk.tensors) <= blocks
            assert sum(chunk.sizes) == len(chunk.tensors) * PADDED_ELEMENTS
            assert chunk.sizes[::2] == chunk.counts
            in_chunks += range(sum(run.elements for run in runs))[chunk.range]
        assert in_chunks == list(range(sum(run.elements for run in runs)))
        for run in runs:
            first = layout.bounds[rank] + run.start - starts[run.tensor]
            assert first % BLOCK_ELEMENTS == 0
            assert run.whole == (run.elements == sizes[run.tensor])
            seen += [(run.tensor, first + k) for k in range(run.elements)]
        assert len(layout.split.intersection(layout.held[rank])) <= 2
    assert seen == [(t, k) for t, size in enumerate(sizes) for k in range(size)]


@given(st.lists(st.floats(-1e20, 1e20), min_size=1, max_size=200), st.randoms())
def test_sums_do_not_depend_on_the_order(values, random) -> None:
    def total(terms: list[float], cut: int) -> float:
        rows = torch.tensor(terms, dtype=torch.float64)[:, None]
        parts = []
        for some in (rows[:cut], rows[cut:]):
            owners = torch.zeros(len(some), dtype=torch.int64)
            parts += sums_by_tensor(some, owners, 1)
        both = torch.cat(parts)
        return sums_by_tensor(both, torch.zeros(4, dtype=torch.int64), 1).sum(1)

    shuffled = random.sample(values, len(values))
    cut = random.randrange(len(values) + 1)
    one, other = total(values, 0), total(shuffled, cut)
    largest = max(map(abs, values))
    # An error of the parts, which shows if terms cancel, and one of the rounded result.
    bound = largest * len(values) ** 3 * 2.0**-98 + abs(one) * 2.0**-52
    assert abs(one - other) <= (bound if abs(one) < largest / 2 else 0)


def test_sums_of_what_is_not_finite() -> None:
    rows = torch.tensor([[1.0], [float("inf")], [2.0], [float("nan")]]).double()
    found = sums_by_tensor(rows, torch.tensor([0, 1, 0, 2]), 4).sum(1).flatten()
    assert found[0] == 3 and found[3] == 0 and found[1:3].isnan().all()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 13, 16, 33])
def test_identical_vectors_have_identical_products(ranks: int) -> None:
    """Whichever place of the Gram matrix they have, and whatever else is in the buffer."""
    vector = torch.randn(5000, dtype=torch.float64)
    layout = Layout((300, 5000, 7), 1)
    rows = [
        torch.cat([torch.randn(300).double(), vector, torch.ones(7).double()])
        for _ in range(ranks)
    ]
    part = Slice(rows, layout.runs[0])
    products = part.gram(None)[part.owners == 1]
    assert torch.equal(products, products[:, :1].expand_as(products))
    alone = Slice([vector] * ranks, Layout((5000,), 1).runs[0]).gram(None)
    assert torch.equal(alone, products)


@pytest.mark.parametrize("sizes", [(1, 1024, 32, 0, 2000, 7), (1024, 7), (3,) * 700])
def test_a_tensor_has_the_same_bits_in_a_buffer_as_alone(sizes) -> None:
    rows = [torch.randn(sum(sizes), dtype=torch.float16) for _ in range(3)]
    rows[1][0] = float("nan")
    tree = tree_of((0, 0, 0), "adasum", 0)
    factors = torch.rand(len(sizes), 3, dtype=torch.float64)

    def reduced(rows, sizes, factors):
        part, result = Slice(rows, Layout(sizes, 1).runs[0]), torch.empty_like(rows[0])
        part._space[: len(rows)] = torch.nan  # as uninitialized memory may be
        part.combine(tree, factors, None, result)
        return part.gram(factors).nan_to_num(-1), part.owners, result.nan_to_num(-1)

    grams, owners, together = reduced(rows, sizes, factors)
    parts = zip(*(row.split(sizes) for row in rows), together.split(sizes), strict=True)
    for number, (*own, expected) in enumerate(parts):
        if sizes[number]:
            gram, _, alone = reduced(own, sizes[number : number + 1], factors[[number]])
            assert torch.equal(alone, expected)
            assert torch.equal(gram, grams[owners == number])


HOSTS = st.lists(st.integers(0, 3), min_size=1, max_size=9)
GROUPS = st.sampled_from(["adasum", "average", "sum"])


@settings(deadline=None)
@given(HOSTS, GROUPS, st.integers(0, 4), st.integers(0, 1000))
def test_coefficients_are_those_of_the_reference(hosts, group_op, group_size, seed):
    vectors = np.random.default_rng(seed).standard_normal((len(hosts), 40))
    gram = torch.from_numpy(vectors @ vectors.T)[None]
    tree = tree_of(tuple(hosts), group_op, group_size)
    found = walk(gram, tree)[0].numpy() @ vectors
    correct = reference.adasum(vectors, hosts, group_op, group_size)
    np.testing.assert_allclose(found, correct, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), GROUPS, st.integers(0, 4))
def test_levels_cut_the_tree_at_whole_subtrees(hosts, group_op, group_size) -> None:
    order, radices = plan(tuple(hosts), group_size)
    assert sorted(order) == list(range(len(hosts)))
    assert np.prod(radices) == len(hosts)
    if len(radices) == 1:
        return
    vectors = np.random.default_rng(len(hosts)).standard_normal((len(hosts), 40))
    current, op = [vectors[rank] for rank in order], group_op
    for radix in radices:
        groups = [current[k : k + radix] for k in range(0, len(current), radix)]
        current = [reference.adasum(group, None, op) for group in groups]
        op = "adasum"
    correct = reference.adasum(vectors, hosts, group_op, group_size)
    np.testing.assert_allclose(*current, correct, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("hosts", "group_size", "radices"),
    [
        ((0, 0, 1, 1), 0, (2, 2)),
        ((0, 1, 0, 1), 0, (2, 2)),
        ((0, 1, 2, 0, 1, 2), 0, (2, 3)),
        ((0,) * 8 + (1,) * 8, 0, (8, 2)),
        ((0,) * 8 + (1,) * 8, 2, (2, 4, 2)),  # the groups of a host, then hosts
        ((0,) * 8 + (1,) * 8, 8, (8, 2)),
        ((0,) * 6 + (1,) * 6, 2, (2, 6)),  # neighbours are on two hosts
        ((0,) * 4 + (1,) * 8, 4, (4, 3)),
        ((0, 0, 0, 0), 0, (4,)),
        ((0, 0, 0, 0), 2, (4,)),  # one host
        ((0, 1, 2, 3), 0, (4,)),  # one rank on each
        ((0, 0, 1, 1), 1, (4,)),
        ((0, 0, 1), 0, (3,)),
        ((0, 1, 0, 1), 2, (4,)),  # groups over hosts
        ((0, 0, 0, 1, 1, 1), 2, (6,)),
        ((0,), 0, (1,)),
    ],
)
def test_levels_of_hosts(hosts, group_size, radices) -> None:
    assert plan(hosts, group_size)[1] == radices


def test_a_vanishing_vector_is_neutral() -> None:
    gram = torch.diag(torch.tensor([4.0, 0.0, 9.0])).double()[None]
    assert torch.equal(walk(gram, tree_of((0,) * 3, "adasum", 0))[0], torch.ones(3))


def test_nodes_that_cancel_are_reported() -> None:
    """From the second tier on, for the tensors concerned only."""
    vectors = torch.randn(2, 4, 1000, dtype=torch.float64)
    vectors[1, 1] = -vectors[1, 0] + 1e-5 * vectors[1, 1]
    tree = tree_of((0,) * 4, "adasum", 0)
    reported = []

    def form_nodes(sides, cancelled, dots):
        reported.append((len(sides), cancelled.tolist()))
        return dots

    walk(vectors @ vectors.mT, tree, form_nodes)
    assert reported == [(1, [False, True])]


def test_coefficients_of_an_odd_tree() -> None:
    """Of an average with factor 2, and of a rank with factor 3."""
    gram = torch.tensor([[[2.0, 2, -4], [2, 2, -4], [-4, -4, 1]]]).double()
    tree = tree_of((0, 0, 1), "average", 0)
    assert walk(gram, tree).tolist() == [[1.0, 1.0, 3.0]]


def test_scales_are_powers_of_two() -> None:
    largest = [1e300, 1e-300, 5e-324, 1.0, 0.75, 0.0, float("inf"), float("nan")]
    scales = power_of_two_scale(torch.tensor(largest, dtype=torch.float64))
    assert torch.equal(scales.frexp()[0], torch.full((8,), 0.5).double())
    scaled = (scales * torch.tensor(largest, dtype=torch.float64))[[0, 1, 3, 4]]
    assert (scaled >= 0.5).all() and (scaled <= 1).all()
    assert scales[5:].tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_products_of_a_block_do_not_depend_on_the_number_of_blocks(
    device, dtype
) -> None:
    """Buckets of any size have the same bits. On an H200 float64 had others for one block."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, 9, PADDED_ELEMENTS, generator=generator, dtype=dtype)
    blocks = values.to(device, torch.float64)
    alone = [_products(blocks[:, k : k + 1], blocks[:, k : k + 1]) for k in range(9)]
    for count in range(1, 10):
        together = _products(blocks[:, :count], blocks[:, :count])
        assert torch.equal(together, torch.cat(alone[:count])), count


def test_equal_bits_of_other_shapes_or_dtypes_differ() -> None:
    zeros = torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32)
    assert len({*map(digest, zeros)}) == 3
    assert digest(zeros[0]) == digest(torch.zeros(3, 2).t())


def test_a_rule_that_exits_ends_its_reduction() -> None:
    """A future takes no SystemExit: the thread ended, and `wait` did not."""
    ranks: Any = SimpleNamespace(rank=0, size=1)
    lane = ThreadLane(ranks)
    future = lane.submit(lambda _: sys.exit("enough"), [])
    until(future.done, 10)
    with pytest.raises(
        RuntimeError, match=r"got SystemExit\('enough'\) \(rank 0 of 1\)"
    ):
        future.wait()
    assert lane.submit(lambda _: "next", []).wait() == "next"
