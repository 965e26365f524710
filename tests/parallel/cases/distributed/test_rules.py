"""Rules by name on real ranks, against their formulas in NumPy; AdaScale's gain and schedule."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from adasum_hvd import reference
from adasum_hvd.distributed import (
    AdaScaleLR,
    AdasumState,
    LocalSGD,
    adasum_all_reduce,
    adasum_hook,
    adasum_replicate,
    reduce_changes,
)
from adasum_hvd.distributed.replica_mesh import GLOO_SUMS
from tests.parallel.harness import sharded
from tests.parallel.harness.models import loss_of, model_of, sgd, weights
from tests.parallel.harness.sharded import align as align
from tests.parallel.harness.sharded import everyone, mesh_of
from tests.parallel.harness.sharded import init as init
from tests.parallel.harness.sharded import rank as rank
from tests.parallel.harness.sharded import shutdown as shutdown

NAMES = ["mean_direction", "grafted", "rda"]
TOLERANCE = 1e-5


def expected_of(name: str, rows: np.ndarray) -> np.ndarray:
    """Return a rule's result of the rows."""
    mean, adasum = rows.mean(0), np.asarray(reference.adasum(list(rows)))
    norms = np.linalg.norm(rows, axis=1)
    unit = (rows / norms[:, None]).mean(0)
    lengths = {
        "mean_direction": (mean, np.linalg.norm(adasum)),
        "grafted": (adasum, np.linalg.norm(mean)),
        "rda": (unit, norms.mean()),
    }
    direction, length = lengths[name]
    return direction * length / np.linalg.norm(direction)


def gain_of(steps: list[list[np.ndarray]]) -> float:
    """Return AdaScale's gain after steps, each a list of all ranks' flat gradients."""
    moments = []
    for rows in steps:
        ranks = len(rows)
        mean = np.square(np.mean(rows, 0)).sum()
        variance = (np.square(rows).sum() - ranks * mean) / (ranks - 1)
        moments.append((max(variance, 0), max(mean - variance / ranks, 0)))
    variance, mean = np.mean(moments, 0)  # of few steps the plain mean
    return (variance + mean) / (variance / ranks + mean)


def local_gradients(model: torch.nn.Module, step: int) -> list[np.ndarray]:
    """Return this rank's gradients, which a copy of the model has computed."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss_of(plain, rank(), step).backward()
    return [p.grad.double().numpy().ravel() for p in plain.parameters()]


def close(found: torch.Tensor, expected: np.ndarray) -> None:
    error = np.abs(found.detach().double().numpy().ravel() - expected).max()
    assert error <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["all_reduce", "hook", "replicate"])
def case_rules_are_their_formulas(way: str, name: str) -> None:
    if dist.get_world_size() == 1:
        return
    model = model_of()
    own = local_gradients(model, 0)
    if way == "hook":
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(AdasumState(rule=name), adasum_hook)
        loss_of(ddp, rank(), 0).backward()
    elif way == "replicate":
        adasum_replicate(model, mesh_of(1)["replica"], rule=name)
        loss_of(model, rank(), 0).backward()
    else:
        loss_of(model, rank(), 0).backward()
        adasum_all_reduce([p.grad for p in model.parameters()], rule=name)
    for p, *rows in zip(model.parameters(), *everyone(own), strict=True):
        close(p.grad, expected_of(name, np.stack(rows)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def case_a_gain_over_all_tensors_multiplies_the_rate(dtype: str) -> None:
    """Three steps; the gradient is the mean, and all ranks have the same gain."""
    model = model_of().to(getattr(torch, dtype))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    state = AdasumState(rule="adascale")
    ddp.register_comm_hook(state, adasum_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = AdaScaleLR(optimizer, state, lambda step: 1.0 / (1 + step))
    steps, gained = [], 0.0
    for step in range(3):
        ranks = everyone(np.concatenate(local_gradients(model, step)))
        steps.append(ranks)
        before = weights(model).double().numpy()
        optimizer.zero_grad()
        loss_of(ddp, rank(), step).backward()
        optimizer.step()
        scheduler.step()
        gain = 1.0 if len(ranks) == 1 else gain_of(steps)
        assert state.gain == pytest.approx(gain, rel=1e-4)
        rate = 0.05 / (1 + int(gained))
        gained += state.gain
        change = weights(model).double().numpy() - before
        expected = -rate * gain * np.mean(ranks, 0)
        assert np.abs(change - expected).max() <= 1e-4 * np.abs(expected).max()
    for step in (3, 4):  # passes without a step count, too
        steps.append(everyone(np.concatenate(local_gradients(model, step))))
        optimizer.zero_grad()
        loss_of(ddp, rank(), step).backward()
    gain = 1.0 if len(steps[0]) == 1 else gain_of(steps)
    assert state.gain == pytest.approx(gain, rel=1e-4)
    assert len(set(everyone((state.gain, scheduler.gained)))) == 1
    assert scheduler.gained == gained


def case_a_gain_of_a_sharded_model() -> None:
    """Its norms are those of whole tensors: means over a replica's ranks."""
    if GLOO_SUMS:
        pytest.skip("FSDP2 on CPUs before torch 2.9 sums")
    plain = sharded.Model()
    for shards in sharded.shard_counts()[:-1]:
        model = copy.deepcopy(plain)
        plain.zero_grad()
        sharded.shard(model, shards)
        replicas = adasum_replicate(model, mesh_of(shards)["replica"], rule="adascale")
        for one in (plain, model):
            sharded.loss_of(one, rank()).backward()
        own = [p.grad.numpy().ravel() for p in plain.parameters() if p.grad is not None]
        ranks = everyone(np.concatenate(own).astype(np.float64))
        groups = range(0, len(ranks), shards)
        expected = gain_of([[np.mean(ranks[k : k + shards], 0) for k in groups]])
        assert replicas.gain == pytest.approx(expected, rel=1e-4)
        assert len(set(everyone(replicas.gain))) == 1


def case_a_gain_multiplies_an_outer_rate() -> None:
    model = model_of()
    start = weights(model).double().numpy()
    inner, outer = (torch.optim.SGD(model.parameters(), lr) for lr in (0.05, 1.0))
    local_sgd = LocalSGD(inner, model, mesh_of(1)["replica"], 2, outer, rule="adascale")
    scheduler = AdaScaleLR(outer, local_sgd)
    plain = copy.deepcopy(model)
    own = sgd(plain.parameters())
    own.param_groups[0]["momentum"] = 0
    for module, optimizer in ((plain, own), (model, inner)):
        for step in range(2):
            optimizer.zero_grad()
            loss_of(module, rank(), step).backward()
            optimizer.step()
    changes = everyone(weights(plain).double().numpy() - start)
    gain = 1.0 if len(changes) == 1 else gain_of([changes])
    assert local_sgd.gain == pytest.approx(gain, rel=1e-3)
    expected = gain * np.mean(changes, 0)
    found = weights(model).double().numpy() - start
    assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()
    assert scheduler.gained == local_sgd.gain


def case_a_gain_where_no_program_sees_it_is_refused() -> None:
    expected = (
        r"rule: expected one without a gain, but got 'adascale'.*; use AdasumState"
    )
    with pytest.raises(ValueError, match=expected):
        adasum_all_reduce(torch.ones(2), rule="adascale")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    remove = reduce_changes(optimizer, rule="adascale")
    parameter.grad = torch.ones(2)
    with pytest.raises(ValueError, match=expected):
        optimizer.step()
    remove()
    with pytest.raises(ValueError, match=r"expected rule='adascale', but got rule=rda"):
        AdaScaleLR(optimizer, AdasumState(rule="rda"))
