"""The wrap cells on few ranks: what is refused, what relaxed=True lifts."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

import adasum_hvd.torch as hvd
from adasum_hvd import mindspore_checkpoint
from adasum_hvd.parallel import ParallelContext
from tests.parallel.harness.cells import AUTO, check_refusals, check_step
from tests.unit import test_mindspore_checkpoint as checkpoints

CELLS = {"grad": hvd.AdaSumByGradWrapCell, "delta": hvd.AdaSumByDeltaWeightWrapCell}


def start() -> None:
    warnings.filterwarnings("ignore", message="AdaSum: in parallel mode")


@pytest.mark.parametrize("variant", ["grad", "delta"])
def case_order_of_checks(variant: str) -> None:
    """The parallel checks come before the optimizer's type."""
    check_refusals(CELLS[variant], hvd.size(), r"torch\.optim\.Optimizer")


def case_found_modes_become_the_context() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stage = PipelineStage(module, 0, 2, torch.device("cpu"))
    model = stage if hvd.rank() == hvd.size() - 1 else module
    with pytest.raises(RuntimeError, match="pipeline_stages=2"):
        hvd.AdaSumByGradWrapCell(optimizer, relaxed=True, model=model)
    dist.destroy_process_group()


def relaxed(cell, layer: nn.Module, **options):
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    return cell(optimizer, relaxed=True, **options)


@pytest.mark.parametrize("variant", ["grad", "delta"])
def case_relaxed(variant: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    if hvd.size() == 1:
        with pytest.raises(RuntimeError, match="stand_alone"):
            relaxed(CELLS[variant], layer)
        return
    cell = relaxed(CELLS[variant], layer, named_parameters=layer.named_parameters())
    torch.manual_seed(hvd.rank())
    loss = layer(torch.randn(4, 3)).square().sum()
    check_step(hvd, cell, list(torch.autograd.grad(loss, cell.parameters)))
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("variant", ["grad", "delta"])
def case_is_used_as_an_optimizer(variant: str) -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    cell_class = CELLS[variant]
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    cell = relaxed(cell_class, layer)
    schedule = torch.optim.lr_scheduler.StepLR(cell.optimizer, 1)
    before = layer.weight.detach().clone()
    layer(torch.full((1, 3), 1.0 + hvd.rank())).sum().backward()
    cell.step()
    cell.zero_grad()
    schedule.step()
    assert cell.param_groups[0]["lr"] == pytest.approx(0.05)
    assert cell.state_dict()["param_groups"]
    assert not torch.equal(layer.weight, before)
    hvd.check_replicas(layer)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = cell.nonsense


@pytest.mark.parametrize("variant", ["grad", "delta"])
@pytest.mark.parametrize("in_group", [False, True])
def case_order_params(variant: str, in_group: bool) -> None:
    """Gradients come in AdamOffload's given order, not in that of its groups."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    first, second, late = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    hvd.mark_worker_local(second)  # the reducer of the group must take the right one
    optimizer = hvd.AdamOffload(
        [{"params": [second]}, {"params": [first]}, {"order_params": [first, second]}],
        learning_rate=0.1,
        verbose=False,
    )
    group = hvd.global_process_set if in_group else None
    cell = CELLS[variant](optimizer, relaxed=True, gradient_group=group)
    order = [first, second]
    assert [*map(id, cell.parameters)] == [*map(id, order)]
    sign = 1.0 if hvd.rank() == 0 else -1.0
    result = cell((torch.ones(3), torch.full((3,), sign)))
    if variant == "delta":
        assert [*map(id, result)] == [*map(id, order)]
    # Adam's first step is -lr times the sign of the gradient; the second one is local.
    torch.testing.assert_close(first.detach(), torch.full((3,), -0.1))
    torch.testing.assert_close(second.detach(), torch.full((3,), -0.1 * sign))
    groups = [{"params": [second]}, {"params": [first]}, {"order_params": order[::-1]}]
    saved = hvd.AdamOffload(groups, verbose=False).state_dict()
    cell.load_state_dict(saved)  # the order is the program's
    assert [*map(id, cell.parameters)] == [*map(id, order)]
    cell.add_param_group({"params": [late]})
    assert [*map(id, cell.parameters)] == [*map(id, [*order, late])]
    first.requires_grad_(False)
    assert [*map(id, cell.parameters)] == [id(second), id(late)]


@pytest.mark.parametrize("variant", ["grad", "delta"])
def case_checkpoint_of_mindspore(variant: str) -> None:
    """Training continues as in MindSpore, because all ranks have the same gradients."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    model, optimizer = checkpoints.training()
    cell = CELLS[variant](optimizer, relaxed=True)
    mindspore_checkpoint.load(checkpoints.FIRST, model, cell)
    checkpoints.steps(model, cell, checkpoints.STEPS)
    checkpoints.check(model, cell, checkpoints.LATER)
    plain = torch.optim.Adam(model.parameters())
    cell = CELLS[variant](plain, relaxed=True)
    mindspore_checkpoint.load(checkpoints.FIRST, model, cell)
    checkpoints.check(model, cell, checkpoints.FIRST)


def case_wrong_gradients() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    cell = relaxed(CELLS["delta"], layer)
    wrong = (
        [torch.zeros(2, 3)],
        [torch.zeros(2, 3), None],
        [torch.zeros(2), torch.zeros(2)],
    )
    for gradients in wrong:
        with pytest.raises(ValueError, match=r"WeightWrapCell: expected (one|a) grad"):
            cell(gradients)
    cell([torch.zeros(2, 3), torch.zeros(2)])


@pytest.mark.parametrize("variant", ["grad", "delta"])
def case_scalers(variant: str) -> None:
    """A scaler takes a cell for an optimizer: one rank's overflow counts for all."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    cell_class = CELLS[variant]
    weight = nn.Parameter(torch.ones(3))
    cell = cell_class(torch.optim.SGD([weight], 0.5), relaxed=True)
    scaler = hvd.GradScaler("cpu", init_scale=1024.0)
    for overflow in (True, False):
        factor = torch.inf if overflow and hvd.rank() == 1 else 1.0
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(cell)
        scaler.update()
        cell.zero_grad()
        expected = 1.0 if overflow else 0.5
        assert torch.equal(weight.detach(), torch.full((3,), expected))
        assert scaler.get_scale() == 512.0
    plain = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match=r"use adasum_hvd\.torch\.GradScaler"):
        plain.step(cell)


def case_frozen_and_worker_local_parameters() -> None:
    """Frozen parameters get no gradient; local ones keep their own, in a group as well."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    weight, frozen, local = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    hvd.mark_worker_local(local)
    gradient = torch.full((2,), 1.0 + hvd.rank())
    cell = hvd.AdaSumByGradWrapCell(
        torch.optim.SGD([weight, frozen, local], 1.0),
        relaxed=True,
        gradient_group=hvd.global_process_set,
    )
    assert [*map(id, cell.parameters)] == [id(weight), id(local)]
    cell((gradient, gradient))
    mean = (1.0 + hvd.size()) / 2
    assert torch.allclose(weight, torch.full((2,), 1.0 - mean))
    assert torch.equal(frozen, torch.ones(2))
    assert torch.equal(local, 1.0 - gradient)
    frozen.requires_grad_(True)
    cell((gradient, gradient, gradient))
    assert torch.allclose(frozen, torch.full((2,), 1.0 - mean))


def case_attributes_reach_the_optimizer() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    cell = relaxed(CELLS["grad"], nn.Linear(3, 2))
    cell.note = 7
    assert cell.optimizer.note == 7
    del cell.note
    assert not hasattr(cell.optimizer, "note")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="expected no copy or pickle"):
            copied(cell)


def case_a_group_is_not_summed_twice() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    context = ParallelContext(AUTO, 16, gradients_mean=False)
    with pytest.raises(RuntimeError, match="expected group_op='average' and group_"):
        hvd.AdaSumByGradWrapCell(
            optimizer, context=context, gradient_group=hvd.global_process_set
        )
