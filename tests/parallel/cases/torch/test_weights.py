"""Weights that others change, or hold twice, under the delta variant."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import adasum_hvd.torch as hvd
from adasum_hvd.torch.optimizer import checks
from tests.parallel.harness import optimizers
from tests.parallel.harness.models import (
    batch_of,
    loss_of,
    model_of,
    weights,
)
from tests.parallel.harness.torch_training import (
    VARIANTS,
    backward,
    distributed,
    train,
)


class Masters(torch.optim.SGD):
    """float32 weights of bfloat16 parameters, kept in the state as many optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    master = self.state[p].setdefault("master", p.detach().float())
                    master -= group["lr"] * p.grad.float()
                    p.copy_(master)


class ScheduleFree(torch.optim.SGD):
    """The first step of schedule-free SGD: `z` next to the weights."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    z -= group["lr"] * p.grad
                    p.copy_(z)


class OnHost(torch.optim.SGD):
    """Weights of its own outside of the state, each with an optimizer, as torchao's offload."""

    @torch.no_grad()
    def step(self, closure=None):
        if not hasattr(self, "inner"):
            self.inner = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.inner:
                    mine = nn.Parameter(p.detach().clone())
                    self.inner[p] = torch.optim.SGD([mine], group["lr"])
                (mine,) = self.inner[p].param_groups[0]["params"]
                mine.grad = p.grad.clone()
                self.inner[p].step()
                p.copy_(mine)


def case_optimizers_with_weights_of_their_own() -> None:
    kinds = [(Masters, torch.bfloat16, "'master'"), (ScheduleFree, torch.float32, "'z'"),
             (OnHost, torch.float32, "inner"),
             (torch.optim.ASGD, torch.float32, "'ax'")]  # fmt: skip
    for kind, dtype, where in kinds:
        model = model_of().to(dtype)
        model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=dtype)))
        before = weights(model)
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), 0.1), model.named_parameters(), op="adasum-delta"
        )
        images, labels = batch_of(hvd.rank(), 0)
        functional.cross_entropy(model(images.to(dtype)).float(), labels).backward()
        with pytest.raises(RuntimeError, match=f"a second time .*{where}"):
            optimizer.step()
        assert torch.equal(weights(model), before)
        if kind is not torch.optim.ASGD:  # fine where gradients are reduced
            optimizer = distributed(model_of(), "average")


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize(
    "name", ["DroppingMaster", "OneMaster", "ScheduleFree", "Averaging", "FTRL"]
)
def case_copies_are_an_error_in_the_first_window(name: str, local_steps: int) -> None:
    model = model_of()
    optimizer = getattr(optimizers, name)(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        optimizer, op="adasum-delta", local_steps=local_steps
    )
    before = weights(model)
    with pytest.raises(RuntimeError, match=rf"{name} that keeps them a second time"):
        train(model, optimizer, *range(local_steps))
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("local_steps", [1, 2])
@pytest.mark.parametrize("first_rate", [0.1, 0.0])
@pytest.mark.parametrize("name", ["Record", "Slow", "Velocity", "QuantizedState"])
def case_states_that_are_no_copies(
    name: str, first_rate: float, local_steps: int
) -> None:
    model = model_of()
    optimizer = getattr(optimizers, name)(model.parameters(), first_rate)
    optimizer = hvd.DistributedOptimizer(
        optimizer, op="adasum-delta", local_steps=local_steps
    )
    train(model, optimizer, *range(4))
    hvd.check_replicas(model)


def case_a_copy_after_a_warm_up() -> None:
    model = model_of()
    optimizer = optimizers.Master(model.parameters(), 0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, op="adasum-delta")
    train(model, optimizer, 0)
    with pytest.raises(RuntimeError, match="keeps them a second time"):
        train(model, optimizer, 1)


def case_a_copy_on_one_rank_is_everyones_error() -> None:
    model = model_of()
    kind = ScheduleFree if hvd.rank() == 1 else torch.optim.SGD
    optimizer = hvd.DistributedOptimizer(
        kind(model.parameters(), 0.1), op="adasum-delta"
    )
    backward(model)
    with pytest.raises(RuntimeError, match="keeps them a second time"):
        optimizer.step()


class Fails(torch.optim.SGD):
    """Raises half way, as one that runs out of memory."""

    fails = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * p.grad)
                if self.fails:
                    raise MemoryError("out of memory")


@pytest.mark.parametrize("failing", [0, 1])
def case_a_local_step_that_raises(failing: int) -> None:
    """On one rank, caught: its weights are those that the step began with."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        Fails(model.parameters(), 0.1), op="adasum-delta"
    )
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        if step == failing and hvd.rank() == 1:
            optimizer.fails, before = True, weights(model)
            with pytest.raises(MemoryError):
                optimizer.step()
            assert torch.equal(weights(model), before)
            optimizer.fails = False
        optimizer.step()
    hvd.check_replicas(model)


def case_weights_changed_through_data() -> None:
    """torch does not count it; the delta variant sees it all the same."""
    model, expected_model = model_of(), model_of()
    pair = [(m, distributed(m, "adasum-delta")) for m in (model, expected_model)]
    for step in range(3):
        for net, optimizer in pair:
            train(net, optimizer, step)
            for p in net.parameters():
                if net is model:
                    p.data.mul_(p.data.abs() > 0.05)
                else:
                    with torch.no_grad():
                        p.copy_(p * (p.abs() > 0.05))
    assert torch.equal(weights(model), weights(expected_model))
    hvd.check_replicas(model)
    frozen = nn.Parameter(torch.linspace(-1, 1, 1000))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([frozen], 0.1), op="adasum-delta"
    )
    for step in range(2):
        (0 * frozen).sum().backward()
        if step:
            frozen.data[3:5] = torch.tensor([0.0, 1e-3])
        optimizer.step()
    assert frozen[3] == 0 and frozen[4] == 1e-3


def perturbed_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, puts_back_copy: bool
) -> None:
    """Compute gradients at perturbed weights, as SAM does between two steps."""
    parameters = list(model.parameters())
    original = [p.detach().clone() for p in parameters]
    perturbation = [0.05 * p.grad / p.grad.norm() for p in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, perturbation)
    optimizer.zero_grad()
    backward(model, 1000 + step)
    with torch.no_grad():
        if puts_back_copy:
            torch._foreach_copy_(parameters, original)
        else:  # leaves rounding errors, which differ by rank
            torch._foreach_sub_(parameters, perturbation)


class Detour(torch.optim.SGD):
    """SAM as a closure takes it: both passes inside one `step()`."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        parameters = [p for g in self.param_groups for p in g["params"]]
        away = [0.05 * p.grad / p.grad.norm() for p in parameters]
        torch._foreach_add_(parameters, away)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, away)
        return super().step()


@pytest.mark.parametrize("puts_back_copy", (True, False))
@pytest.mark.parametrize("variant", ["plain", "bf16", "window"])
def case_perturbed_weights_need_a_copy_put_back(
    puts_back_copy: bool, variant: str
) -> None:
    kwargs = {"plain": {}, "bf16": {"compression": hvd.Compression.bf16},
              "window": {"local_steps": 2}}[variant]  # fmt: skip
    model = model_of()
    optimizer = distributed(model, "adasum-delta", **kwargs)

    def run() -> None:
        for step in range(24):
            optimizer.zero_grad()
            backward(model, step)
            if step > 0:
                perturbed_gradients(model, optimizer, step, puts_back_copy)
            optimizer.step()

    if puts_back_copy:
        run()
        hvd.check_replicas(model)
    else:
        with pytest.raises(
            RuntimeError, match=r"at the start of a step.* put back a copy"
        ):
            run()


@pytest.mark.parametrize("op", VARIANTS)
def case_a_closure_that_perturbs_weights(op: str) -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(Detour(model.parameters(), 0.05), op=op)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), 0)
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    if op == "adasum-delta":  # SAM's two gradients differ by rank, its detour too
        hvd.check_replicas(model)


def case_an_edit_of_tiny_weights_is_a_new_start() -> None:
    """It is not a part of the change, although one large weight is in the same bucket."""
    weight = nn.Parameter(torch.cat([torch.full((1,), 1e3), torch.full((99,), 1e-5)]))
    trained = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], 1e-6), op="adasum-delta"
    )
    mine = torch.zeros(100)
    mine[1 + hvd.rank()] = 1.0
    (weight * mine).sum().backward()
    trained.step()
    with torch.no_grad():
        weight[1:].mul_(0.5)
    fresh_weight = nn.Parameter(weight.detach().clone())
    fresh = hvd.DistributedOptimizer(
        torch.optim.SGD([fresh_weight], 1e-6), op="adasum-delta"
    )
    for parameter, optimizer in ((weight, trained), (fresh_weight, fresh)):
        optimizer.zero_grad()
        (parameter * mine).sum().backward()
        optimizer.step()
    assert torch.equal(weight, fresh_weight)


def case_swapped_weights_on_one_rank_are_a_difference() -> None:
    """Their bits have the same sum."""
    weight = nn.Parameter(torch.arange(10.0))
    if hvd.rank() == 1:
        weight.data = weight.data.flip(0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], 0.1), op="adasum-delta"
    )
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="before the first step, but got others"):
        optimizer.step()


def case_weights_changed_between_steps() -> None:
    """Alike on all ranks: the new start. Otherwise: an error on all."""
    model = model_of()
    optimizer = distributed(model, "adasum-delta", momentum=0.0)
    train(model, optimizer, 0)
    expected_model = copy.deepcopy(model)
    expected = distributed(expected_model, "adasum-delta", momentum=0.0)
    with torch.no_grad():
        for p, q in zip(model.parameters(), expected_model.parameters(), strict=True):
            p.clamp_(-0.05, 0.05)
            q.copy_(p)
    for net, each in ((model, optimizer), (expected_model, expected)):
        train(net, each, *range(checks.EVERY))
    assert torch.equal(weights(model), weights(expected_model))
    with torch.no_grad():
        model[0].weight.mul_(1 + 0.5 * hvd.rank())
    with pytest.raises(
        RuntimeError, match=r"start of a step, but got another .*weight"
    ):
        train(model, optimizer, *range(checks.EVERY + 1))


def case_models_that_were_never_equal() -> None:
    model = model_of(seed=hvd.rank())
    optimizer = distributed(model, "adasum-delta")
    with pytest.raises(
        RuntimeError, match=r"before the first step, but got others on ranks"
    ):
        train(model, optimizer, 0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, 0, 1)
    hvd.check_replicas(model)


def case_a_diverged_model_costs_no_more() -> None:
    """NaN equals no NaN, but weights that nobody has changed are not new ones."""
    # The changes are formed by the op, and for a limit by torch.
    for poison, limit in (("nan", None), ("inf", None), ("nan", 1e9)):
        model = model_of()
        optimizer = distributed(model, "adasum-delta", clip_delta_norm=limit)
        train(model, optimizer, 0)
        if hvd.rank() == 0:
            model[0].weight.grad.fill_(float(poison))
        optimizer.step()
        assert not weights(model).isfinite().all()
        with torch.no_grad():
            assert not any(
                bucket.begin_window() for bucket in optimizer._adasum.buckets
            )
            model[0].weight[0, 0] = 1.0
            assert any(bucket.begin_window() for bucket in optimizer._adasum.buckets)
