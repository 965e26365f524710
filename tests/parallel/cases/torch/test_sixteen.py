"""Cases for 16 ranks: the strict wrap cells, and the tutorial in its groups of eight."""

from __future__ import annotations

import numpy as np
import pytest
import resnet50_imagenet
import torch
from torch import nn

import adasum_hvd.torch as hvd
from adasum_hvd import boost, reference
from adasum_hvd.parallel import ParallelContext
from tests.parallel.harness.cells import check_step

CELLS = {"grad": hvd.AdaSumByGradWrapCell, "delta": hvd.AdaSumByDeltaWeightWrapCell}


def init() -> None:
    hvd.init(group_op="average", group_size=8)


def layer_and_gradients() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    torch.manual_seed(1 + hvd.rank())
    return layer, [torch.randn_like(p) for p in layer.parameters()]


@pytest.mark.parametrize("variant", ["grad", "delta"])
@pytest.mark.filterwarnings("ignore")
def case_strict_cells(variant: str) -> None:
    layer, gradients = layer_and_gradients()
    with pytest.warns(UserWarning, match=r"data_parallel.*adasum_hvd\.boost"):
        cell = CELLS[variant](torch.optim.SGD(layer.parameters(), 0.5))
    check_step(hvd, cell, gradients, group_op="average", group_size=8)
    hvd.check_replicas(layer)


def case_cell_over_seed_groups() -> None:
    """With the group's process set Adam sees the group's mean, as in MindSpore."""
    sets = [hvd.add_process_set(range(8)), hvd.add_process_set(range(8, 16))]
    mine = sets[hvd.rank() // 8]
    layer, gradients = layer_and_gradients()
    before = [p.detach().clone() for p in layer.parameters()]
    context = ParallelContext("auto_parallel", hvd.size())
    cell = hvd.AdaSumByDeltaWeightWrapCell(
        torch.optim.Adam(layer.parameters(), 0.1), context=context, gradient_group=mine
    )
    cell(gradients)
    for old, parameter, gradient in zip(
        before, layer.parameters(), gradients, strict=True
    ):
        everyone = np.stack(hvd.allgather_object(gradient.numpy()))
        # Adam's first step is -lr times the sign of the group's mean.
        deltas = [0.1 * np.sign(everyone[k : k + 8].mean(0)) for k in (0, 8)]
        expected = old.numpy() - reference.adasum(deltas)
        np.testing.assert_allclose(parameter.detach(), expected, rtol=0, atol=1e-5)
    for group_op in ("average", "sum"):  # which the op does not sum once more
        layer, gradients = layer_and_gradients()
        mean = group_op == "average"
        context = ParallelContext("auto_parallel", hvd.size(), gradients_mean=mean)
        cell = hvd.AdaSumByGradWrapCell(
            torch.optim.SGD(layer.parameters(), 1.0),
            context=context,
            gradient_group=mine,
        )
        check_step(hvd, cell, gradients, 1.0, 1e-5, group_op=group_op, group_size=8)
    for process_set in sets:
        hvd.remove_process_set(process_set)


def case_tutorial() -> float:
    """ResNet-50 on digits, two groups of eight: the loss falls, replicas stay equal."""
    arguments = resnet50_imagenet.parse(["--data", "digits", "--epochs", "3"])
    switch = boost.switch(
        arguments.boost_level, arguments.boost_config, gradients_mean=True
    )
    assert switch.init_arguments() == {"group_op": "average", "group_size": 8}
    training = resnet50_imagenet.Training(arguments, switch)
    losses = []
    training.log.epoch = lambda *values: losses.append(values[4][1])
    training.resume()
    training.run()
    assert training.step == 33 == 3 * training.steps_per_epoch
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.6 * losses[0]
    return losses[2]
