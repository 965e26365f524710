"""MindSpore's parallel checks: rules, order, messages; and what was found as a context."""

from __future__ import annotations

import doctest
import warnings

import pytest

from adasum_hvd.mindspore.wrap_cells import check_job
from adasum_hvd.parallel import (
    FOUND_MODES,
    ParallelContext,
    ParallelModeFinding,
    check,
    context,
    refuse,
)
from adasum_hvd.parallel.torch_modes import context_of


def warnings_of(*arguments, **options) -> list[str]:
    """Run `check` and return its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(*arguments, **options)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("mode", "devices", "options"),
    [
        ("auto_parallel", 2, {}),
        ("semi_auto_parallel", 3, {}),
        ("auto_parallel", 16, {"strict": True}),
        ("auto_parallel", 32, {"strict": True}),
        ("auto_parallel", 1024, {"strict": True}),
        ("auto_parallel", 1, {"min_devices": 1}),
    ],
)
def test_an_accepted_context_has_no_warning(mode, devices, options):
    assert warnings_of(ParallelContext(mode, devices), **options) == []


@pytest.mark.parametrize("mode", ["data_parallel", "hybrid_parallel"])
def test_recommends_boost(mode):
    with pytest.warns(UserWarning, match=rf"{mode}.*adasum_hvd\.boost"):
        check(ParallelContext(mode, 16), strict=True)


@pytest.mark.parametrize("devices", [1, 2, 8, 12, 15, 17, 24, 48])
def test_strict_number_of_devices(devices):
    match = f"at least 16 devices and a power of two, but got {devices}"
    with pytest.raises(RuntimeError, match=match):
        check(ParallelContext("auto_parallel", devices), strict=True)


def test_relaxed_number_of_devices():
    with pytest.raises(RuntimeError, match="at least 2 devices, but got 1"):
        check(ParallelContext("auto_parallel", 1))
    with pytest.raises(
        RuntimeError, match="at least 4 devices and a power of two, but got 6"
    ):
        check(ParallelContext("auto_parallel", 6), min_devices=4, power_of_two=True)


def test_order():
    """Each mistake hides the later ones, as in MindSpore."""
    wrong = {
        "enable_parallel_optimizer": True,
        "pipeline_stages": 2,
        "device_num": 12,
    }
    with pytest.raises(RuntimeError, match="stand_alone"):
        check(ParallelContext("stand_alone", **wrong), strict=True)
    with (
        pytest.raises(RuntimeError, match="optimizer sharding"),
        pytest.warns(UserWarning, match="boost"),  # comes before the sharding's error
    ):
        check(ParallelContext("data_parallel", **wrong), strict=True)
    wrong["enable_parallel_optimizer"] = False
    with pytest.raises(RuntimeError, match="pipeline_stages=2"):
        check(ParallelContext("auto_parallel", **wrong), strict=True)
    wrong["pipeline_stages"] = 1
    with pytest.raises(RuntimeError, match="got 12"):
        check(ParallelContext("auto_parallel", **wrong), strict=True)


def test_bad_contexts():
    assert (
        ParallelContext("auto_parallel", 32, pipeline_stages=2).stage_device_num == 16
    )
    with pytest.raises(
        ValueError, match=r"expected one of stand_alone.*got 'parallel'"
    ):
        ParallelContext("parallel")
    for name in ("device_num", "pipeline_stages"):
        with pytest.raises(TypeError, match=f"{name}: expected an int, but got True"):
            ParallelContext(**{name: True})
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, but got 0"):
            ParallelContext(**{name: 0})
    with pytest.raises(TypeError, match="gradients_mean: expected a bool, but got 1"):
        ParallelContext(gradients_mean=1)
    with pytest.raises(ValueError, match="at most device_num=2, but got 4"):
        ParallelContext(device_num=2, pipeline_stages=4)


def test_context_of_findings():
    found = [
        ParallelModeFinding("pipeline", "stages", 4),
        ParallelModeFinding("zero_redundancy", "it"),
    ]
    assert context_of(found, 16) == ParallelContext(
        "data_parallel", 16, 4, True, gradients_mean=True
    )
    assert context_of([], 1) == ParallelContext("stand_alone", 1, gradients_mean=True)
    assert not context_of(
        [ParallelModeFinding("ddp", "it")], 2
    ).enable_parallel_optimizer


def test_refuse():
    refuse([])
    refuse([[], []])
    pipeline = ParallelModeFinding("pipeline", "a PipelineStage of 2 stages", 2)
    everywhere = [[pipeline]] * 3
    with pytest.raises(
        RuntimeError,
        match=r'PipelineStage of 2 stages on all ranks: each rank.*allow_modes=\("pipeline",\)'
        r".*this is rank 1 of 3",
    ):
        refuse(everywhere, rank=1)
    with pytest.raises(RuntimeError, match="on ranks 0, 2:"):
        refuse([[pipeline], [], [pipeline]])
    refuse(everywhere, allow_modes=["pipeline"])
    refuse(everywhere, allow_modes=FOUND_MODES)
    ddp = [[pipeline, ParallelModeFinding("ddp", "a module of DDP")]]
    with pytest.raises(RuntimeError, match="a module of DDP"):
        refuse(ddp, allow_modes=["pipeline"])
    for bad in ("pipeline", ["pipelines"]):
        with pytest.raises(ValueError, match="allow_modes: expected names of ddp"):
            refuse([], allow_modes=bad)


def test_wrap_cells_need_the_seeds_groups():
    eights = {"group_op": "average", "group_size": 8}
    unset = ParallelContext("auto_parallel", 16)
    for how in ({}, {"relaxed": True, "reduced_in_group": True}):
        with pytest.warns(UserWarning, match="summed by MindSpore's default"):
            check_job(unset, eights, **how)
    whole = {"group_op": "adasum", "group_size": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_job(ParallelContext("auto_parallel", 16, gradients_mean=True), eights)
        check_job(ParallelContext("auto_parallel", 3), whole, relaxed=True)
    for groups, mean in (
        (whole, True),
        ({**eights, "group_size": 4}, True),
        (eights, False),
    ):
        context = ParallelContext("auto_parallel", 16, gradients_mean=mean)
        with pytest.raises(RuntimeError, match="AdaSum wrap cell: expected group_op="):
            check_job(context, groups)


def test_relaxed_cells_with_a_gradient_group_do_not_sum_twice():
    context = ParallelContext("auto_parallel", 3)
    groups = {"group_op": "sum", "group_size": 2}
    check_job(context, groups, relaxed=True)
    check_job(
        context, {**groups, "group_op": "average"}, relaxed=True, reduced_in_group=True
    )
    match = "'average' or 'adasum' with gradient_group, but got 'sum'"
    with pytest.raises(RuntimeError, match=match):
        check_job(context, groups, relaxed=True, reduced_in_group=True)


def test_examples():
    results = doctest.testmod(context, optionflags=doctest.ELLIPSIS)
    assert results.attempted >= 2
    assert results.failed == 0
