"""Gradient scalers, whose decisions must be the same on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import adasum_hvd.torch as hvd
from tests.parallel.harness.models import (
    loss_of,
    model_of,
    sgd,
)
from tests.parallel.harness.torch_training import (
    Simulation,
    check_equal,
    check_same_everywhere,
    distributed,
)
from tests.parallel.harness.torch_training import start as start


def scaled_training(
    model, optimizer, scaler, overflow_on: int | None, steps: int = 4
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if step == 1 and hvd.rank() == overflow_on:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta", "average"])
def case_grad_scaler(op: str) -> None:
    """One rank overflows: all skip, all shrink the scale, and training goes on as one."""
    model = model_of()
    optimizer = distributed(model, op)
    scaler = hvd.GradScaler("cpu", init_scale=2.0**10)
    scaled_training(model, optimizer, scaler, overflow_on=hvd.size() - 1)
    check_same_everywhere(model)
    assert all(p.isfinite().all() for p in model.parameters())
    assert set(hvd.allgather_object(scaler.get_scale())) == {2.0**9}
    simulation = Simulation(sgd, op, hvd.size(), model_of())
    for step in (0, 2, 3):
        simulation.zero_grad()
        simulation.backward(step)
        simulation.step()
    check_equal(model, simulation.models[0], 1e-5)


@pytest.mark.parametrize("op", ("adasum-grad", "average"))
def case_scales_that_differ(op: str) -> None:
    """As where one rank alone has loaded a checkpoint: gradients of two scales add up to none."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    model = model_of()
    optimizer = distributed(model, op)
    scaler = hvd.GradScaler("cpu", init_scale=2.0 ** (10 + hvd.rank()))
    with pytest.raises(
        RuntimeError, match=r"same hyperparameters.*GradScaler's scale=\d+"
    ):
        scaled_training(model, optimizer, scaler, overflow_on=None, steps=1)


def case_elastic_scaler() -> None:
    """A state gives its scaler to all, and a step that a rank's death has ended is forgotten."""
    survivor = hvd.size() - 1
    model = model_of()
    optimizer = distributed(model, "adasum-grad")
    scaler = hvd.GradScaler("cpu", init_scale=2.0 ** (5 + hvd.rank()))
    state = hvd.elastic.TorchState(model, optimizer, scaler=scaler, step=0)
    state._commits = int(hvd.rank() == survivor)
    state.sync()
    assert state.scaler is scaler
    assert scaler.get_scale() == 2.0 ** (5 + survivor)
    scaled_training(model, optimizer, scaler, overflow_on=0)
    assert scaler.get_scale() == 2.0 ** (4 + survivor)
    state.restore()
    assert scaler.get_scale() == 2.0 ** (5 + survivor)
    scaled_training(model, optimizer, scaler, overflow_on=None)
    check_same_everywhere(model)
    disabled = hvd.GradScaler("cpu", enabled=False)
    state = hvd.elastic.TorchState(model, optimizer, scaler=disabled)
    state.sync()
    state.restore()


def case_change_that_overflows() -> None:
    """Finite gradients whose change overflows on the wire: dropped, and the scale shrinks."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    for options in ({}, {"clip_delta_norm": 1e9}):
        weight = nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], 1e5),
            op="adasum-delta", compression=hvd.Compression.fp16, **options,
        )  # fmt: skip
        scaler = hvd.GradScaler("cpu", init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight.detach(), torch.ones(3))
        assert scaler.get_scale() == 2.0
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.5
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        assert torch.equal(weight.detach(), torch.full((3,), 0.5))
    weight = nn.Parameter(torch.full((3,), 3e38))  # the op adds where the weights are
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], 1e38), op="adasum-delta"
    )
    scaler = hvd.GradScaler("cpu", init_scale=1.0)
    scaler.scale(-2 * weight.sum() if hvd.rank() else 0 * weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.full((3,), 3e38))
    assert scaler.get_scale() == 0.5


def case_scaler_without_gradients_and_of_a_plain_optimizer() -> None:
    weight, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.empty(0).double())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight, empty], 0.5), op="adasum-delta"
    )
    scaler = hvd.GradScaler("cpu", init_scale=4.0)
    loss = scaler.scale(weight.sum())
    if hvd.rank() == hvd.size() - 1:
        loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.full((3,), 0.5))
    plain = torch.optim.SGD([weight], 0.5)
    weight.grad = None
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(plain)
    scaler.step(plain)
    assert torch.equal(weight.detach(), torch.zeros(3))


def case_torch_grad_scaler() -> None:
    """torch's scaler: right after an own synchronize(), an error that names ours otherwise."""
    for op in ("adasum-grad", "adasum-delta"):
        model = model_of()
        optimizer = distributed(model, op)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(loss_of(model, hvd.rank(), 0)).backward()
        if hvd.size() == 1:
            scaler.step(optimizer)
            continue
        with pytest.raises(RuntimeError, match=r"use adasum_hvd\.torch\.GradScaler"):
            scaler.step(optimizer)
    model = model_of()
    optimizer = distributed(model, "adasum-grad")
    simulation = Simulation(sgd, "adasum-grad", hvd.size(), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        simulation.zero_grad()
        scaler.scale(loss_of(model, hvd.rank(), step)).backward()
        simulation.backward(step)
        optimizer.synchronize()
        if step != 1:
            scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        simulation.step()
    check_same_everywhere(model)
    check_equal(model, simulation.models[0], 1e-5)
