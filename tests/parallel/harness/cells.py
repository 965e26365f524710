"""Steps of the wrap cells of all frameworks, and refusals in the order of MindSpore's checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from adasum_hvd import reference
from adasum_hvd.parallel import ParallelContext

AUTO = "auto_parallel"


def check_refusals(cell_class: Any, ranks: int, plain: str) -> None:
    """Check a cell's refusals in a job without groups.

    Args:
        cell_class: of a framework.
        ranks: in the job.
        plain: how messages name the framework's optimizers, as a pattern.
    """
    found = "stand_alone" if ranks == 1 else f"power of two, but got {ranks}"
    for context, match in (
        (None, found),
        (ParallelContext("stand_alone", 12), "stand_alone"),
        (ParallelContext(AUTO, 12, 2, True), "optimizer sharding"),
        (ParallelContext(AUTO, 12, 2), "pipeline_stages=2"),
        (ParallelContext(AUTO, 12), "at least 16 devices.*got 12; .*relaxed=True"),
        (ParallelContext(AUTO, 24), "a power of two.*got 24"),
        (ParallelContext(AUTO, 16), "expected group_op='average' and group_size=8"),
        (
            ParallelContext(AUTO, 16, gradients_mean=False),
            "expected group_op='sum' and group_size=8",
        ),
    ):
        with pytest.raises(RuntimeError, match=match):
            cell_class("no optimizer", context=context)
    with pytest.raises(TypeError, match=f"expected a {plain}, but got str"):
        cell_class("no optimizer", relaxed=True, context=ParallelContext(AUTO, 12))


def check_step(
    hvd: Any,
    cell: Any,
    gradients: list[Any],
    rate: float = 0.5,
    tolerance: float = 1e-6,
    **groups: Any,
) -> None:
    """Check a step of plain SGD against the reference.

    Args:
        hvd: the framework's module.
        cell: a wrap cell.
        gradients: this rank's.
        rate: the learning rate.
        tolerance: absolute.
        **groups: of `reference.adasum`.
    """
    before = [_array(parameter) for parameter in cell.parameters]
    given = [_array(gradient) for gradient in gradients]
    result = cell(gradients)
    if isinstance(cell, hvd.AdaSumByDeltaWeightWrapCell):
        assert all(a is b for a, b in zip(result, cell.parameters, strict=True))
    found = zip(before, cell.parameters, gradients, given, strict=True)
    for old, parameter, gradient, copy in found:
        assert np.array_equal(_array(gradient), copy)  # it is not touched
        change = reference.adasum(hvd.allgather_object(copy), **groups)
        expected = old - rate * change
        np.testing.assert_allclose(_array(parameter), expected, rtol=0, atol=tolerance)


def _array(tensor: Any) -> Any:
    """Return a copy of any framework's tensor."""
    detached = tensor.detach() if hasattr(tensor, "detach") else tensor
    return np.array(detached)
