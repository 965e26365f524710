"""Steps of `LocalSGD` and `reduce_changes` that fail, or that touch other parameters."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from adasum_hvd.distributed import LocalSGD, reduce_changes
from tests.parallel.cases.distributed.test_local_sgd import sgd, train
from tests.parallel.harness.sharded import (
    Model,
    digest,
    everyone,
    loss_of,
    mesh_of,
    shard,
)
from tests.parallel.harness.sharded import align as align
from tests.parallel.harness.sharded import init as init
from tests.parallel.harness.sharded import rank as rank
from tests.parallel.harness.sharded import shutdown as shutdown


def case_an_outer_step_leaves_frozen_parameters() -> None:
    """Also one that has a gradient from before."""
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    model.bias.requires_grad_(False).fill_(0)
    outer = torch.optim.SGD(model.parameters(), 1.0)
    optimizer = torch.optim.SGD([model.weight], 0.1)
    LocalSGD(optimizer, model, mesh_of(1)["replica"], 1, outer)
    optimizer.step()
    assert not model.bias.any() and model.bias.grad.all()


def case_an_outer_momentum_leaves_parameters_that_are_frozen_later() -> None:
    """And a state loads that has no momentum of a parameter that is trained since."""
    model = nn.Linear(3, 2)
    outer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    optimizer, replicas = sgd(model), mesh_of(1)["replica"]

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model.bias.requires_grad_(False)
    first = LocalSGD(optimizer, model, replicas, 1, outer)
    step()
    first.remove()
    model.bias.requires_grad_(True)
    local_sgd = LocalSGD(optimizer, model, replicas, 1, outer)
    local_sgd.load_state_dict(local_sgd.state_dict())
    assert model.weight in outer.state and model.bias not in outer.state
    step()
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    step()
    assert torch.equal(model.bias, before) and outer.state[model.bias]


def case_an_evaluation_after_the_last_window_has_the_reduced_weights() -> None:
    """One in mid-window has left whole parameters in FSDP's root."""
    model = Model()
    shard(model, 2)
    optimizer = sgd(model)
    local_sgd = LocalSGD(optimizer, model, mesh_of(2)["replica"], 4)
    train(model, optimizer, range(2))
    with torch.no_grad():
        loss_of(model, 0)
        local_sgd.synchronize()
        losses = everyone(loss_of(model, 0))
        model.reshard()
        assert torch.equal(loss_of(model, 0), losses[dist.get_rank()])
    assert len({float(loss) for loss in losses}) == 1


def case_a_first_step_that_raises_is_undone() -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    local_sgd = LocalSGD(optimizer, model, mesh_of(1)["replica"], 2)
    before = digest(model)

    def fails(*_) -> None:
        raise KeyError("fails")

    handle = optimizer.register_step_post_hook(fails)
    local_sgd.remove()  # so that the failing hook is the first
    local_sgd = LocalSGD(optimizer, model, mesh_of(1)["replica"], 2)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(KeyError):
        optimizer.step()
    assert digest(model) != before
    local_sgd.synchronize()
    handle.remove()
    assert digest(model) == before


def case_a_step_after_one_that_raised_begins_anew() -> None:
    """If other parameters are trained by now: all of them are reduced."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.bias.requires_grad_(False)
    optimizer = sgd(model)
    reduce_changes(optimizer, rule="mean")
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    model.bias.requires_grad_(True).data.fill_(1)
    (rank() * model(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    expected = 1 - 0.05 * (dist.get_world_size() - 1) / 2
    assert torch.allclose(model.bias.data, torch.full((2,), expected))


def case_changes_are_compared_as_soon_as_there_are_any() -> None:
    """A warm-up begins at a rate of 0, and one rank alone may have a gradient."""
    warned = {}
    for name, rates, own in (("warm-up", (0.0, 0.1), False), ("one", (0.1,), True)):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        end = reduce_changes(optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for optimizer.param_groups[0]["lr"] in rates:
                optimizer.zero_grad()
                scale = float(dist.get_rank() == 0) if own else 1.0
                (scale * model(torch.ones(1, 3)).sum()).backward()
                optimizer.step()
        end()
        warned[name] = sum("the same change from all" in str(w.message) for w in caught)
    assert warned == {"warm-up": 1, "one": 0}


def case_a_step_that_cannot_be_reduced_is_undone() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reduce_changes(optimizer, rule="mean" if dist.get_rank() else "adasum")
    before = digest(model)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match="expected the same arguments on all ranks"):
        optimizer.step()
    assert digest(model) == before


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
def case_saving_is_no_step(sharded: bool) -> None:
    """torch takes a step without gradients if an optimizer has no state, as SGD never has."""
    model, shards = Model(), 2 if sharded else 1
    if sharded:
        shard(model, shards)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local_sgd = LocalSGD(optimizer, model, mesh_of(shards)["replica"], 3)
    steps = []
    for step in range(4):
        loss_of(model, dist.get_rank() + step).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = get_state_dict(model, optimizer)
        local_sgd.state_dict()
        set_state_dict(
            model, optimizer, model_state_dict=state[0], optim_state_dict=state[1]
        )
        steps.append(local_sgd.local_step)
    assert steps == [1, 2, 0, 1]


def case_saving_on_one_rank_reduces_nothing() -> None:
    """The step of torch would else wait for the other ranks."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    reduce_changes(optimizer)
    if dist.get_rank() == 0:
        get_optimizer_state_dict(model, optimizer)
    model(torch.eye(3)[dist.get_rank() % 3]).sum().backward()
    optimizer.step()
    assert len(set(everyone(digest(model)))) == 1


def case_an_outer_step_with_gradients_of_another_dtype() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    if not hasattr(model.weight, "grad_dtype"):
        pytest.skip("torch before 2.10 has no grad_dtype")
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    outer = torch.optim.SGD(model.parameters(), 1.0, foreach=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, foreach=False)
    LocalSGD(optimizer, model, mesh_of(1)["replica"], 1, outer)
    before = model.bias.detach().clone()
    model(torch.eye(3, dtype=torch.bfloat16)[dist.get_rank() % 3]).sum().backward()
    optimizer.step()
    assert len(set(everyone(digest(model)))) == 1
    assert not torch.equal(model.bias, before)
