"""The defining properties of AdaSum, on its NumPy definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adasum_hvd import reference

ranks = st.integers(1, 9)
finite = st.floats(-1e3, 1e3, allow_nan=False, width=32)
vectors = hnp.arrays(np.float32, st.integers(1, 30), elements=finite)
pairs = st.integers(1, 30).flatmap(
    lambda n: st.tuples(*[hnp.arrays(np.float32, n, elements=finite)] * 2)
)


@given(vectors, ranks)
def test_identical_inputs_give_identity(vector, count):
    assert np.array_equal(reference.adasum([vector] * count), vector)


@given(vectors, ranks)
def test_disjoint_supports_add_up(vector, count):
    inputs = [
        np.where(np.arange(len(vector)) % count == r, vector, 0) for r in range(count)
    ]
    assert np.array_equal(reference.adasum(inputs), vector)


@given(vectors, ranks, st.data())
def test_zero_is_neutral(vector, count, data):
    giver = data.draw(st.integers(0, count - 1))
    inputs = [vector if r == giver else np.zeros_like(vector) for r in range(count)]
    assert np.array_equal(reference.adasum(inputs), vector)


@given(vectors)
def test_twice_the_other_gives_one_and_a_half(vector):
    np.testing.assert_allclose(
        reference.adasum([vector, 2 * vector]),
        1.5 * vector.astype(np.float64),
        rtol=1e-12,
    )


@given(pairs)
def test_symmetric_and_homogeneous(both):
    a, b = both
    straight = reference.adasum([a, b])
    assert np.array_equal(straight, reference.adasum([b, a]))
    scaled = reference.adasum(
        [np.ldexp(a, 20).astype(np.float64), np.ldexp(b, 20).astype(np.float64)]
    )
    plain = reference.adasum([a.astype(np.float64), b.astype(np.float64)])
    assert np.array_equal(scaled, np.ldexp(plain, 20))


@given(pairs)
def test_paper_formula(both):
    a, b = (v.astype(np.float64) for v in both)
    if a @ a and b @ b:
        expected = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
        scale = np.abs(expected).max() + np.abs(a).max() + np.abs(b).max()
        assert np.abs(reference.pair(a, b) - expected).max() <= 1e-9 * scale


def test_wide_range_float64():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 50))
    plain = reference.adasum([a, b])
    for exponent in (1000, -1000):
        scaled = reference.adasum([np.ldexp(a, exponent), np.ldexp(b, exponent)])
        assert np.array_equal(scaled, np.ldexp(plain, exponent))


@pytest.mark.parametrize(
    ("hosts", "group_op", "group_size", "merges"),
    [
        ([0], "adasum", 0, []),
        ([0, 0, 0], "adasum", 0, [(0, 1, True), (3, 2, True)]),
        (
            [0] * 5,
            "adasum",
            0,
            [(0, 1, True), (2, 3, True), (5, 6, True), (7, 4, True)],
        ),
        ([0, 1, 0, 1], "adasum", 0, [(0, 2, True), (1, 3, True), (4, 5, True)]),
        ([7, 7, 7, 3], "adasum", 0, [(0, 1, True), (4, 2, True), (5, 3, True)]),
        ([0, 0, 1, 1], "average", 0, [(0, 1, False), (2, 3, False), (4, 5, True)]),
        ([0] * 5, "sum", 2, [(0, 1, False), (2, 3, False), (5, 6, True), (7, 4, True)]),
    ],
)
def test_tree(hosts, group_op, group_size, merges):
    assert reference.tree(hosts, group_op, group_size) == merges


@pytest.mark.parametrize(
    ("shapes", "arguments"),
    [
        ([(3,), (1,)], ()),
        ([(2,)] * 3, ([0, 0],)),
        ([(2,)] * 3, (None, "mean")),
    ],
)
def test_bad_input(shapes, arguments):
    with pytest.raises(ValueError, match="one host per tensor and one shape, but got"):
        reference.adasum([np.ones(shape) for shape in shapes], *arguments)


def test_average_groups():
    inputs = np.random.default_rng(1).standard_normal((4, 20))
    means = inputs.reshape(2, 2, 20).mean(1)
    np.testing.assert_allclose(
        reference.adasum(inputs, [0, 0, 1, 1], "average"),
        reference.pair(*means),
        rtol=1e-12,
    )
