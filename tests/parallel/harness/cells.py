"""Refusals of the wrap cells of all frameworks, in the order of MindSpore's checks."""

from __future__ import annotations

from typing import Any

import pytest

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
