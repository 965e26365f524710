"""Names of reductions, and group settings."""

from __future__ import annotations

import os

import pytest

from adasum_hvd import ops, topology


def test_parse_names_and_numbers():
    assert ops.parse("AdaSum_Delta") is ops.AdasumDelta
    assert ops.parse("average") is ops.Average
    assert ops.parse(2) is ops.Adasum
    assert ops.parse(ops.AdasumGrad) is ops.AdasumGrad
    assert {ops.parse(name) for name in ops.names()} == set(ops.ReduceOp)


@pytest.mark.parametrize("wrong", ["adasume", "", 99, -1])
def test_parse_refuses(wrong):
    with pytest.raises(ValueError, match=r"required one of average, sum, adasum.*got"):
        ops.parse(wrong)


def test_only_adasum_is_adasum():
    assert [op.name for op in ops.ReduceOp if ops.is_adasum(op)] == [
        "Adasum",
        "AdasumGrad",
        "AdasumDelta",
    ]


def test_topology_sets_the_environment(monkeypatch):
    for name in ("ADASUM_HVD_GROUP_OP", "ADASUM_HVD_GROUP_SIZE"):
        monkeypatch.setenv(name, "before")
    topology.configure()
    assert os.environ["ADASUM_HVD_GROUP_OP"] == "before"
    topology.configure("average", 8)
    assert os.environ["ADASUM_HVD_GROUP_OP"] == "average"
    assert os.environ["ADASUM_HVD_GROUP_SIZE"] == "8"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mean",), "group_op: required one of"),
        ((None, 0), "group_size: required an integer >= 1, got 0"),
        ((None, True), "group_size: required an integer >= 1, got True"),
        ((None, 2.0), "group_size: required an integer >= 1, got 2.0"),
    ],
)
def test_topology_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        topology.configure(*arguments)
