"""The torch DistributedOptimizer against one process that plays all ranks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import adasum_hvd.torch as hvd
from tests.parallel.harness import process_sets
from tests.parallel.harness.models import (
    batch_of,
    loss_of,
    model_of,
    sgd,
)
from tests.parallel.harness.torch_training import (
    OPTIMIZERS,
    REDUCTIONS,
    STEPS,
    Simulation,
    check_equal,
    check_same_everywhere,
    closure_of,
    distributed,
    reduce_tensors,
)
from tests.parallel.harness.torch_training import start as start


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw-fused", "lamb"])
def case_every_variant_and_optimizer(name: str, op: str) -> None:
    make_optimizer = OPTIMIZERS[name]
    model = model_of()
    simulation = Simulation(make_optimizer, op, hvd.size(), model)
    optimizer = make_optimizer(model.parameters())
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
    assert isinstance(wrapped, type(optimizer))
    for step in range(STEPS):
        wrapped.zero_grad()
        simulation.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, hvd.rank(), step).backward()
        simulation.backward(step)
        assert all(  # the reduction under way leaves the weights alone
            torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
        )
        wrapped.step()
        simulation.step()
    check_same_everywhere(model)
    # Adam's first steps are sign-like: rounding in tiny gradients is amplified.
    check_equal(
        model,
        simulation.models[0],
        2e-6 if name in ("sgd", "momentum") else 5e-5,
    )


@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta"])
def case_parameters_hold_weights_between_backward_and_step(op: str) -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=op
    )
    before = copy.deepcopy(model.state_dict())
    loss_of(model, hvd.rank(), 0).backward()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    optimizer.step()
    assert not any(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def case_differing_models_are_refused_on_all_ranks() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    model = nn.Linear(3, 4 + hvd.rank())
    with pytest.raises(
        ValueError, match=r"expected the same parameters.*weight.*\(4, 3\).*\(5, 3\)"
    ):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            model.named_parameters(),
            op=hvd.Adasum,
        )
    model = nn.Linear(3, 4, bias=hvd.rank() == 0)
    with pytest.raises(ValueError, match="2 and 1 parameters"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum
        )


def case_wrong_arguments_of_the_optimizer() -> None:
    model = model_of()
    make = lambda **kwargs: hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), **kwargs
    )
    with pytest.raises(
        ValueError, match="expected unique names, but got twice: \\['a'\\]"
    ):
        make(named_parameters=[("a", p) for p in model.parameters()], op="adasum")
    with pytest.raises(ValueError, match=r"got none for group0\.param1"):
        make(named_parameters=list(model.named_parameters())[:1], op="adasum")
    with pytest.raises(ValueError, match=r"\(name, parameter\) tuples"):
        make(named_parameters=model.parameters(), op="adasum")
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        make(gradient_predivide_factor=2.0, op="adasum")
    with pytest.raises(
        ValueError, match="backward_passes_per_step: expected an integer >= 1"
    ):
        make(backward_passes_per_step=0, op="adasum")
    for groups in (-1, True):
        with pytest.raises(ValueError, match="groups: expected an integer >= 0 or"):
            make(groups=groups, op="adasum")
    for factor in (0.0, float("nan"), -1.0):
        with pytest.raises(ValueError, match="expected a finite number > 0, but got"):
            make(gradient_predivide_factor=factor, op="average")
    with pytest.raises(NotImplementedError, match=r"expected Compression\.none"):
        make(compression=object(), op="adasum")
    with pytest.raises(
        NotImplementedError, match=r"none or Compression\.fp16, but got"
    ):
        make(compression=hvd.Compression.bf16, op="average")


@pytest.mark.parametrize("op", ["average", "adasum-grad", "adasum-delta"])
def case_clipping(op: str) -> None:
    """Gradient variant: the reduced gradient is clipped; delta variant: the local one."""
    model = model_of()
    optimizer, simulation = (
        distributed(model, op),
        Simulation(sgd, op, hvd.size(), model),
    )
    untouched = copy.deepcopy(model)
    free = Simulation(sgd, op, hvd.size(), untouched)
    for step in range(STEPS):
        optimizer.zero_grad()
        simulation.zero_grad()
        free.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        simulation.backward(step)
        free.backward(step)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
        simulation.step(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05))
        free.step()
    check_same_everywhere(model)
    check_equal(model, simulation.models[0])
    with pytest.raises(AssertionError):
        check_equal(model, free.models[0])


def case_clip_delta_norm() -> None:
    model = model_of()
    optimizer = distributed(model, "adasum-delta", clip_delta_norm=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    change = torch.cat(
        [(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
    )
    assert abs(change.norm().item() - 1e-3) < 1e-5
    check_same_everywhere(model)


@pytest.mark.parametrize("op", ["average", "adasum-grad", "adasum-delta"])
def case_accumulation(op: str) -> None:
    """backward_passes_per_step: gradients add up, then one step and one reduction."""
    model = model_of()
    optimizer = distributed(model, op, backward_passes_per_step=3)
    simulation = Simulation(sgd, op, hvd.size(), model)
    for step in range(3):
        optimizer.zero_grad()
        simulation.zero_grad()
        for part in range(3):
            loss_of(model, hvd.rank(), 10 * step + part).backward()
            simulation.backward(10 * step + part)
        optimizer.step()
        simulation.step()
    check_same_everywhere(model)
    check_equal(model, simulation.models[0])


def case_more_backward_passes_than_declared() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    model = model_of()
    optimizer = distributed(model, "adasum-grad")
    loss_of(model, hvd.rank(), 0).backward()
    with pytest.raises(RuntimeError, match="expected at most 1 backward passes"):
        loss_of(model, hvd.rank(), 1).backward()
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), 2).backward()
    optimizer.step()
    check_same_everywhere(model)


def case_local_steps() -> None:
    model = model_of()
    optimizer = distributed(model, "adasum-delta", local_steps=3)
    replicas = [copy.deepcopy(model) for _ in range(hvd.size())]
    locals_ = [sgd(r.parameters()) for r in replicas]
    for window in range(2):
        start = [p.detach().clone() for p in replicas[0].parameters()]
        for step in range(3 * window, 3 * window + 3):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            for rank, (replica, local) in enumerate(
                zip(replicas, locals_, strict=True)
            ):
                local.zero_grad()
                loss_of(replica, rank, step).backward()
                local.step()
        with torch.no_grad():
            for old, *tensors in zip(
                start, *(r.parameters() for r in replicas), strict=True
            ):
                new = old + reduce_tensors([t - old for t in tensors], "adasum")
                for tensor in tensors:
                    tensor.copy_(new)
        check_same_everywhere(model)
        check_equal(model, replicas[0])


@pytest.mark.parametrize(
    ("op", "local_steps"),
    [("adasum-grad", 1), ("adasum-delta", 1), ("adasum-delta", 3)],
)
def case_exact_resume(op: str, local_steps: int) -> None:
    """Saved and loaded at any step, in the middle of a window too: the same bits."""
    kwargs = {} if local_steps == 1 else {"local_steps": local_steps}
    straight = model_of()
    optimizer = distributed(straight, op, **kwargs)
    saved = None
    for step in range(6):
        if step == 2:
            saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        loss_of(straight, hvd.rank(), step).backward()
        optimizer.step()
    resumed = model_of(1)
    again = distributed(resumed, op, **kwargs)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for step in range(2, 6):
        again.zero_grad()
        loss_of(resumed, hvd.rank(), step).backward()
        again.step()
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    plain = torch.optim.SGD(model_of().parameters(), 0.05, momentum=0.9)
    plain.load_state_dict(optimizer.state_dict())


def case_broadcast_optimizer_state() -> None:
    """One rank comes back from a checkpoint, the others start afresh: no step is taken."""
    model = model_of()
    optimizer = distributed(model, "adasum-grad", lr=0.01 * (1 + hvd.rank()))
    if hvd.rank() == 0:
        for p in model.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 3.0)
    before = copy.deepcopy(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    assert optimizer.param_groups[0]["lr"] == 0.01
    for p in model.parameters():
        assert torch.equal(
            optimizer.state[p]["momentum_buffer"], torch.full_like(p, 3.0)
        )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="expected a root_rank in"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=99)


@pytest.mark.parametrize("op", ("adasum-grad", "adasum-delta"))
def case_copies(op: str) -> None:
    """On one rank alone too: a copy is a plain optimizer, and says so."""
    import pickle

    model = model_of()
    optimizer = distributed(model, op)
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    if hvd.rank() == 0:
        for copied in (
            lambda pair: copy.deepcopy(pair),
            lambda pair: pickle.loads(pickle.dumps(pair)),
        ):
            with pytest.warns(UserWarning, match="SGD: the copy .* is a plain"):
                other_model, other = copied((model, optimizer))
            assert type(other) is torch.optim.SGD
            before = [p.detach().clone() for p in other_model.parameters()]
            for p, q in zip(before, model.parameters(), strict=True):
                assert torch.equal(p, q)
            other.zero_grad()
            loss_of(other_model, 0, 1).backward()
            other.step()
            for p, q in zip(before, other_model.parameters(), strict=True):
                assert not torch.equal(p, q)
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), 1).backward()
    optimizer.step()
    check_same_everywhere(model)


@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta"])
def case_schedulers_groups_and_add_param_group(op: str) -> None:
    model, extra = model_of(), nn.Linear(3, 3)
    hvd.broadcast_parameters(extra.state_dict(), root_rank=0)
    layers = list(model.children())
    groups = [
        {"params": layers[0].parameters(), "lr": 0.1},
        {"params": [*layers[2].parameters(), *layers[4].parameters()]},
    ]
    optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, op=op)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.2})
    rates = []
    for step in range(3):
        optimizer.zero_grad()
        images, labels = batch_of(hvd.rank(), step)
        functional.cross_entropy(extra(model(images)), labels).backward()
        optimizer.step()
        before.step()
        after.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1 * 0.45**k for k in (1, 2, 3)])
    check_same_everywhere(model)
    check_same_everywhere(extra)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta"])
def case_zero_grad(op: str, to_none: bool) -> None:
    model = model_of()
    optimizer, simulation = (
        distributed(model, op),
        Simulation(sgd, op, hvd.size(), model),
    )
    for step in range(3):
        loss_of(model, hvd.rank(), 100 + step).backward()  # dropped
        optimizer.zero_grad(set_to_none=to_none)
        simulation.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        simulation.backward(step)
        optimizer.step()
        simulation.step()
        optimizer.zero_grad(to_none)
    if to_none:
        loss_of(model, hvd.rank(), 0).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        optimizer.step()  # without gradients
    check_same_everywhere(model)
    check_equal(model, simulation.models[0])


def case_closures() -> None:
    for op in ("adasum-grad", "adasum-delta"):
        model = model_of()
        optimizer, simulation = (
            distributed(model, op),
            Simulation(sgd, op, hvd.size(), model),
        )
        for step in range(3):
            loss = optimizer.step(closure_of(model, optimizer, step))
            assert loss.item() > 0
            simulation.zero_grad()
            simulation.backward(step)
            simulation.step()
        check_same_everywhere(model)
        check_equal(model, simulation.models[0])
    model = model_of()
    lbfgs = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    optimizer = hvd.DistributedOptimizer(
        lbfgs, model.named_parameters(), op="adasum-grad"
    )

    optimizer.step(closure_of(model, optimizer, 0))
    check_same_everywhere(model)


def case_optimizer_of_a_process_set() -> None:
    if hvd.size() < 3:
        pytest.skip("needs 3 ranks")
    pair = process_sets.of(0, 2)
    model = model_of()
    optimizer = distributed(model, "adasum-delta", process_set=pair)
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    weights = hvd.allgather_object(model[0].weight.detach().numpy())
    assert np.array_equal(weights[0], weights[2])
    assert not np.array_equal(weights[0], weights[1])
    # Loading a state counts the steps of a rank outside of the set anew.
    optimizer = distributed(model, "adasum-delta", process_set=pair, local_steps=2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
