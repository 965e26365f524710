"""The strict wrap cells on the 16 ranks that they ask for, with groups of 8 that are summed."""

from __future__ import annotations

import pytest
import torch

import adasum_hvd.torch as hvd
from adasum_hvd.parallel import ParallelContext
from tests.parallel.cases.torch.test_sixteen import CELLS, layer_and_gradients
from tests.parallel.harness.cells import check_step


def init() -> None:
    hvd.init(group_op="sum", group_size=8)


@pytest.mark.parametrize("variant", ["grad", "delta"])
def case_strict_cells_of_summed_groups(variant: str) -> None:
    context = ParallelContext("auto_parallel", hvd.size(), gradients_mean=False)
    layer, gradients = layer_and_gradients()
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    cell = CELLS[variant](optimizer, context=context)
    check_step(hvd, cell, gradients, tolerance=8e-6, group_op="sum", group_size=8)
