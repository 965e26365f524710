"""The learning-rate helper."""

from __future__ import annotations

import doctest

import pytest

from adasum_hvd import learning_rate, ops
from adasum_hvd.learning_rate import adasum_lr


@pytest.mark.parametrize(
    ("op", "kwargs", "factor"),
    [
        ("adasum-delta", {"size": 64}, 1.0),
        ("adasum-grad", {"size": 64}, 1.0),
        ("adasum", {"size": 64, "group_op": "average", "group_size": 8}, 8.0),
        ("average", {"size": 64}, 64.0),
        ("sum", {"size": 64}, 1.0),
        ("adasum", {"size": 64, "group_op": "sum", "group_size": 8}, 1.0),
    ],
)
def test_factor(op, kwargs, factor):
    rate = adasum_lr(0.1, op, **kwargs)
    assert rate.factor == factor
    assert rate.lr == pytest.approx(0.1 * factor)
    assert len(rate.reason) > 20


@pytest.mark.parametrize(
    "wrong", [(0.0,), (-1.0,), (0.1, "adasum", 0), (float("nan"),)]
)
def test_refuses(wrong):
    with pytest.raises(ValueError, match="adasum_lr: required base_lr > 0"):
        adasum_lr(*wrong)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"group_op": "avg"}, r"group_op: required one of .*'average'.* got 'avg'"),
        ({"op": "max"}, "op: required average, sum or an AdaSum variant, got Max"),
        ({"op": "min"}, "op: required average, sum or an AdaSum variant, got Min"),
        ({"op": "product"}, "op: required average, sum .* got Product"),
    ],
    ids=str,
)
def test_refuses_what_has_no_rule(kwargs, message):
    with pytest.raises(ValueError, match=f"adasum_lr: {message}"):
        adasum_lr(0.1, size=16, **kwargs)


def test_reasons_are_of_the_groups_given():
    alone = adasum_lr(0.1, "adasum", size=16, group_op="average")
    assert alone.factor == 1.0
    assert "groups of one rank" in alone.reason and "give group_size" in alone.reason
    eight = adasum_lr(0.1, "adasum", size=16, group_op="average", group_size=8)
    assert "scale by the ranks in a group" in eight.reason
    summed = adasum_lr(0.1, "adasum", size=16, group_op="sum", group_size=8)
    assert "groups are summed before AdaSum" in summed.reason


@pytest.mark.parametrize("module", [learning_rate, ops])
def test_examples_run(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0
