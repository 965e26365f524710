"""Misuse that would make replicas diverge or lose gradients: followed, or refused."""

from __future__ import annotations

import inspect
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import adasum_hvd.torch as hvd
from tests.parallel.harness.models import (
    loss_of,
    model_of,
)
from tests.parallel.harness.torch_training import (
    VARIANTS,
    distributed,
)


def backward(model: nn.Module, step: int = 0, **options) -> None:
    loss_of(model, hvd.rank(), step).backward(**options)


@pytest.mark.parametrize("op", VARIANTS)
def case_complex_parameters(op: str) -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3) * 1j)]
    with pytest.raises(ValueError, match=r"parameter group0\.param1: expected a real"):
        hvd.DistributedOptimizer(torch.optim.SGD(weights, 0.1), op=op)


@pytest.mark.parametrize("op", VARIANTS)
def case_scheduler_from_before(op: str) -> None:
    """It shares the param groups, also after a state has been loaded, and nothing warns."""
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
    hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            schedule.step()
    rates = hvd.allgather_object(optimizer.param_groups[0]["lr"])
    assert rates == [pytest.approx(0.0125)] * hvd.size()
    hvd.check_replicas(model)


@pytest.mark.parametrize("op", VARIANTS)
def case_a_step_of_the_wrapped_optimizer(op: str) -> None:
    """It would reduce nothing: with the delta variant nothing else notices."""
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
    before = [parameter.clone() for parameter in model.parameters()]
    backward(model)
    with pytest.raises(
        RuntimeError, match="SGD: expected steps of the optimizer that D"
    ):
        plain.step()
    for one, other in zip(model.parameters(), before, strict=True):
        assert torch.equal(one, other)
    optimizer.step()
    hvd.check_replicas(model)


class Bound(torch.optim.SGD):
    """Keeps a method of its own, which is bound to the object that is wrapped."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, 0.1)
        self._plain_step = super().step

    def step(self, closure: Any = None) -> Any:
        return self._plain_step(closure)


@pytest.mark.parametrize("op", VARIANTS)
def case_a_step_that_is_bound_to_the_wrapped_optimizer(op: str) -> None:
    model = model_of()
    plain = Bound(model.parameters())
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
    backward(model)
    optimizer.step()
    hvd.check_replicas(model)


def case_an_optimizer_that_could_not_be_wrapped_steps_alone() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    model = torch.nn.Linear(2, 2 + hvd.rank())
    plain = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError):
        hvd.DistributedOptimizer(plain, model.named_parameters(), op=VARIANTS[0])
    before = model.weight.clone()
    model(torch.ones(1, 2)).sum().backward()
    plain.step()
    assert not torch.equal(model.weight, before)


def case_gradients_changed_after_their_reduction() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    def replace(model: nn.Module) -> None:
        model[0].weight.grad = torch.zeros_like(model[0].weight)

    def drop(model: nn.Module) -> None:
        model[0].weight.grad = None

    for change in (clip, replace, drop):
        model = model_of()
        optimizer = distributed(model, "adasum-grad")
        backward(model)
        change(model)
        with pytest.raises(RuntimeError, match="got one changed between backward and"):
            optimizer.step()


@pytest.mark.parametrize("when", ["between", "after", "zeroed"])
@pytest.mark.parametrize("op", VARIANTS)
def case_leftover_gradients_of_frozen_parameters(op: str, when: str) -> None:
    model = model_of()
    optimizer = distributed(model, op)
    for step in range(3):
        if step == 1 and when != "between":
            if when == "zeroed":
                optimizer.zero_grad(set_to_none=False)
            model[0].requires_grad_(False)
        if step != 1 or when == "between":
            optimizer.zero_grad()
        backward(model, step)
        if step == 1 and when == "between":
            model[0].requires_grad_(False)
        optimizer.step()
    hvd.check_replicas(model)


def case_frozen_between_backward_and_synchronize() -> None:
    """The gradient that it has kept counts in no norm: every rank has another one."""
    for options in ({}, {"compression": hvd.Compression.fp16}):
        for op in ("average", "adasum-grad"):
            model = model_of()
            optimizer = distributed(model, op, **options)
            for step in range(3):
                optimizer.zero_grad()
                backward(model, step)
                if step == 1:
                    model[0].requires_grad_(False)
                optimizer.synchronize()
                assert (model[0].weight.grad is None) == (step > 0)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
                assert len(set(hvd.allgather_object(norm))) == 1
                with optimizer.skip_synchronize():
                    optimizer.step()
            hvd.check_replicas(model)


def case_rows_changed_after_backward() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    table = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, op="average")
    for _ in range(2):  # densely, and as rows
        table(torch.tensor([hvd.rank()])).sum().backward()
        table.weight.grad.mul_(0.5)
        with pytest.raises(RuntimeError, match="got one changed between backward and"):
            optimizer.step()
        table.weight.grad = None
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank()])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def case_unfreezing_inside_a_window() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = distributed(model, "adasum-delta", local_steps=2)
    backward(model)
    optimizer.step()
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="a change 1 local steps into a window"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="a change 1 local steps into a window"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("op", VARIANTS)
def case_wrapped_twice(op: str) -> None:
    optimizer = distributed(model_of(), "average")
    with pytest.raises(ValueError, match="that is distributed already"):
        hvd.DistributedOptimizer(optimizer, op=op)


@pytest.mark.parametrize("op", VARIANTS)
def case_gradient_of_a_gradient(op: str) -> None:
    model = model_of()
    optimizer = distributed(model, op)
    backward(model, create_graph=True)
    optimizer.step()
    hvd.check_replicas(model)


def case_groups_that_differ() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    model = model_of()
    lists = [[[model[0].weight]], [[model[0].bias]]]
    for mine in (1 + hvd.rank(), lists[hvd.rank() > 0]):
        with pytest.raises(ValueError, match="same arguments of DistributedOptimizer"):
            distributed(model, "adasum-grad", groups=mine)


def case_every_is_checked() -> None:
    with pytest.raises(ValueError, match="every: expected an integer >= 1, but got 0"):
        hvd.check_replicas(model_of(), every=0)


class OldStyle(torch.optim.SGD):
    """As Apex's and older third-party optimizers."""

    def zero_grad(self) -> None:
        super().zero_grad()


class KeepsZeros(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("op", VARIANTS)
def case_zero_grad_passes_on_what_the_caller_gave(op: str) -> None:
    for kind, is_none in (
        (torch.optim.SGD, True),
        (OldStyle, True),
        (KeepsZeros, False),
    ):
        model = model_of()
        plain = kind(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(plain, op=op)
        backward(model)
        optimizer.zero_grad()
        assert (model[0].weight.grad is None) == is_none
        assert inspect.signature(optimizer.zero_grad) == inspect.signature(
            plain.zero_grad
        )
        backward(model)
        if kind is not OldStyle:
            optimizer.zero_grad(set_to_none=True)
            assert model[0].weight.grad is None


@pytest.mark.parametrize("op", VARIANTS)
def case_methods_set_on_the_instance(op: str) -> None:
    """A scheduler's wrapper is no reason to warn; one over a patched method is."""

    def patched(optimizer, closure=None):
        return type(optimizer).step(optimizer, closure)

    for scheduled in (False, True):
        model = model_of()
        plain = torch.optim.SGD(model.parameters(), 0.1)
        plain.step = types.MethodType(patched, plain)
        if scheduled:
            torch.optim.lr_scheduler.StepLR(plain, 1)
        with pytest.warns(UserWarning, match=r"expected step\(\) of SGD, but got"):
            optimizer = hvd.DistributedOptimizer(plain, op=op)
        backward(model)
        optimizer.step()
        hvd.check_replicas(model)


@pytest.mark.parametrize("use_reentrant", (True, False))
def case_reentrant_checkpoints_of_a_layer_used_twice(use_reentrant: bool) -> None:
    layer = nn.Linear(4, 4)
    optimizer = distributed(layer, "adasum-grad")
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    if use_reentrant:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            x.sum().backward()
    else:
        x.sum().backward()
        optimizer.step()
    optimizer.zero_grad()
