"""Names of reduction ops, and group settings."""

from __future__ import annotations

import os

import pytest

from adasum_hvd.base import ops
from adasum_hvd.base.options import warn_of_one_group
from adasum_hvd.horovod import groups


def test_parse_names_and_numbers():
    assert ops.parse("AdaSum_Delta") is ops.AdasumDelta
    assert ops.parse("average") is ops.Average
    assert ops.parse(2) is ops.Adasum
    assert ops.parse(ops.AdasumGrad) is ops.AdasumGrad
    assert {ops.parse(name) for name in ops.names()} == set(ops.ReduceOp)


@pytest.mark.parametrize("wrong", ["adasume", "", 99, -1])
def test_parse_refuses(wrong):
    with pytest.raises(ValueError, match=r"expected one of average, sum, adasum.*got"):
        ops.parse(wrong)


def test_only_adasum_is_adasum():
    assert [op.name for op in ops.ReduceOp if ops.is_adasum(op)] == [
        "Adasum",
        "AdasumGrad",
        "AdasumDelta",
    ]


def test_groups_sets_the_environment(monkeypatch):
    monkeypatch.setenv("ADASUM_HVD_GROUP_OP", "before")
    monkeypatch.delenv("ADASUM_HVD_GROUP_SIZE", raising=False)
    groups.configure()
    assert os.environ["ADASUM_HVD_GROUP_OP"] == "before"
    groups.configure("average", 8)
    assert os.environ["ADASUM_HVD_GROUP_OP"] == "average"
    assert os.environ["ADASUM_HVD_GROUP_SIZE"] == "8"
    groups.configure()  # of another init: as the program has set it
    assert os.environ["ADASUM_HVD_GROUP_OP"] == "before"
    assert "ADASUM_HVD_GROUP_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mean",), "group_op: expected one of"),
        ((None, 0), "group_size: expected an integer >= 1, but got 0"),
        ((None, True), "group_size: expected an integer >= 1, but got True"),
        ((None, 2.0), "group_size: expected an integer >= 1, but got 2.0"),
    ],
)
def test_groups_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        groups.configure(*arguments)


@pytest.mark.parametrize(
    ("group_op", "group_size", "rank", "ranks", "on_host", "warns"),
    [
        ("average", 8, 0, 8, 4, True),
        ("sum", 0, 0, 4, 4, True),
        ("average", 8, 1, 8, 4, False),  # the first rank's decides
        ("average", 0, 0, 8, 4, False),
        ("average", 8, 0, 9, 4, False),
        ("adasum", 8, 0, 8, 8, False),
        ("average", 8, 0, 1, 1, False),
    ],
)
def test_one_group_leaves_nothing_to_adasum(
    group_op, group_size, rank, ranks, on_host, warns, recwarn
):
    warn_of_one_group(group_op, group_size, rank, ranks, on_host)
    assert [f"reduced by {group_op}" in str(w.message) for w in recwarn] == [
        True
    ] * warns
