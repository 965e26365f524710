"""Buckets, fusion groups, options and parameter lists, without a framework."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adasum_hvd.base import agreement, ops, options
from adasum_hvd.base.partition import partition
from adasum_hvd.mindspore.grad_reducer import fusion_groups

SIZES = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50)), max_size=20)


@given(SIZES, st.integers(1, 100))
def test_partition_keeps_all_and_respects_kind_and_size(items, limit):
    named = list(enumerate(items))
    lists = partition(named, lambda item: item, limit)
    assert sorted(entry for members in lists for entry in members) == named
    for members in lists:
        assert len({kind for _, (kind, _) in members}) == 1
        assert len(members) == 1 or sum(size for _, (_, size) in members) <= limit
        assert [index for index, _ in members] == sorted(
            (index for index, _ in members), reverse=True
        )


def test_partition_by_groups():
    items = [["a", 10], ["a", 10], ["b", 10], ["a", 10]]
    named = list(enumerate(items))
    lists = partition(named, tuple, 1, [[items[0], items[3]]])
    assert [[index for index, _ in members] for members in lists] == [[3, 0], [2], [1]]
    lists = partition(named, tuple, 1, 2)
    assert [[index for index, _ in members] for members in lists] == [[1, 0], [3], [2]]


def test_fusion_groups_of_the_seed():
    plain = [SimpleNamespace() for _ in range(5)]
    assert fusion_groups(plain, 3, [1]) == [3] * 5
    assert fusion_groups(plain, 1, [1, 2]) == [1024, 1024, 1025, 1026, 1026]
    own = [SimpleNamespace(comm_fusion=n) for n in (1, 2, 1)]
    assert fusion_groups(own, 1, [0]) == [1, 2, 1]
    with pytest.warns(UserWarning, match="expected indices below 5"):
        fusion_groups(plain, 1, [7])


def test_lists_of_parameters():
    mine = [("kernel", (2, 3), "float32"), ("bias", (3,), "float32")]
    renamed = [("kernel_1", (2, 3), "float32"), ("bias", (3,), "float32")]
    agreement.compare_parameters("x", [mine, mine], 0)
    agreement.compare_parameters("x", [mine, renamed], 0, names=False)
    for other in (renamed, mine[:1], []):
        with pytest.raises(ValueError, match="x: expected the same parameters in the"):
            agreement.compare_parameters("x", [mine, other], 1)
    with pytest.raises(ValueError, match="got 2 and 1 parameters"):
        agreement.compare_parameters("x", [mine, mine[:1]], 1, names=False)
    # The first place where any list differs, by the ranks in the job.
    with pytest.raises(
        ValueError, match=r"of \[2, 3, 5\], but got \('kernel'.* on rank 2 and .*ank 5"
    ):
        agreement.compare_parameters("x", [mine, mine[:1], renamed], 3, ranks=[2, 3, 5])


def test_values_that_ranks_compare():
    nested = {"rates": [np.float32(0.5), math.nan], "function": print}
    expected = {"rates": (0.5, "nan"), "function": "builtin_function_or_method"}
    assert agreement.plain(nested) == expected


def test_optimizer_options():
    assert options.optimizer_op("adasum") is ops.AdasumDelta
    assert options.optimizer_op(0) is ops.Average
    parameter = object()
    for wrong, message in (
        ({"op": ops.Sum, "local_steps": 2}, "local_steps: expected op=AdasumDelta"),
        ({"op": ops.Min}, "op: expected average, sum, max or an AdaSum variant"),
        ({"op": ops.AdasumDelta, "backward_passes_per_step": True}, "an integer >= 1"),
        ({"op": ops.AdasumDelta, "clip_delta_norm": 0}, "a number > 0"),
        ({"op": ops.Sum, "gradient_predivide_factor": 2.0}, "expected op=Average"),
        ({"op": ops.AdasumDelta, "start_copy": "disk"}, 'expected "device" or "host"'),
        ({"op": ops.Sum, "groups": [[parameter], [parameter]]}, "but got one twice"),
    ):
        given_options = options.Options(process_set=None, compression="none", **wrong)
        with pytest.raises(ValueError, match=message):
            options.check(given_options, ["none"])
    given_options = options.Options(ops.Sum, process_set=None, compression="zip")
    with pytest.raises(NotImplementedError, match=r"expected Compression\.none"):
        options.check(given_options, ["none"])
