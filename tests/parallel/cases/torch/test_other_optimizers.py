"""Optimizers that are not a plain `torch.optim`: wrappers, state in groups, second derivatives."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict

import pytest
import torch
from horovod.torch import functions
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import adasum_hvd.torch as hvd
from adasum_hvd.torch.optimizer import checks
from tests.parallel.harness.models import loss_of, model_of, sgd, weights
from tests.parallel.harness.torch_training import (
    VARIANTS,
    check_same_everywhere,
    distributed,
    train,
)


class SharedGroups(torch.optim.Optimizer):
    """A wrapper as packages write them: groups and state are the inner optimizer's."""

    def __init__(self, params):
        self.inner = sgd(params)
        self.defaults = self.inner.defaults
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()
        self.mode = "train"

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def __getstate__(self):
        return {key: vars(self)[key] for key in ("inner", "defaults", "mode")}

    def add_param_group(self, group):
        self.inner.add_param_group(group)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "mode": self.mode}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.mode = state["mode"]

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"

    def step(self, closure=None):
        return self.inner.step(closure)


class InnerList(SharedGroups):
    """The same, with an attribute that is the inner optimizer's list, as SAM's."""

    param_groups = state = None

    def __init__(self, params):
        super().__init__(params)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def __getstate__(self):
        kept = {"param_groups": self.param_groups, "state": self.state}
        return super().__getstate__() | kept

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def use_everything(model: nn.Module, make, wrap) -> tuple[list, torch.Tensor]:
    """Use all of an optimizer's methods; return what they gave, and the weights."""
    layers = list(model.children())
    parameters = [*layers[0].parameters(), *layers[2].parameters()]
    plain = make(parameters)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer, seen = wrap(plain), []

    def step() -> None:
        loss_of(model, 0, len(seen)).backward()
        optimizer.step()
        schedule.step()

    hooks = [
        optimizer.register_step_pre_hook(
            lambda _, args, kwargs: seen.append(("pre", len(args), kwargs))
        ),
        optimizer.register_step_post_hook(
            lambda _, args, kwargs: seen.append(("post", len(args), kwargs))
        ),
    ]
    step()
    optimizer.add_param_group({"params": layers[4].parameters(), "lr": 0.02})
    step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.zero_grad(set_to_none=False)
    seen.append([p.grad.any().item() for p in model.parameters()])
    step()
    optimizer.zero_grad()
    seen.append([p.grad for p in model.parameters()])
    for name in ("eval", "train"):
        if hasattr(plain, name):
            getattr(optimizer, name)()
            seen.append(optimizer.mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a copy is a plain optimizer
        for other in (
            copy.copy(optimizer),
            copy.deepcopy(optimizer),
            pickle.loads(pickle.dumps(optimizer)),
        ):
            assert type(other) is type(plain)
            seen.append([len(other.param_groups), len(other.state), other.defaults])
    for hook in hooks:
        hook.remove()
    # Also after a load, all names are of one list.
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    groups = [plain, optimizer, getattr(optimizer, "inner", optimizer)]
    seen.append([len(one.param_groups) for one in groups])
    seen.append([group["lr"] for group in plain.param_groups])
    step()
    return [*seen, optimizer.defaults, len(optimizer.state)], weights(model)


@pytest.mark.parametrize("op", VARIANTS)
@pytest.mark.parametrize("name", ["sgd", "SharedGroups", "InnerList"])
def case_everything_that_torch_has(name: str, op: str) -> None:
    """With the same data on all ranks, every method does what the plain optimizer's does."""
    make = globals()[name]
    expected = use_everything(model_of(), make, lambda optimizer: optimizer)
    actual = use_everything(
        model_of(), make, lambda plain: hvd.DistributedOptimizer(plain, op=op)
    )
    assert actual[0] == expected[0]
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=1e-6)


class OwnStep(torch.optim.SGD):
    """An optimizer as a user would write it: `step()` is not decorated."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        assert torch.is_grad_enabled()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.1)
        return loss


@pytest.mark.parametrize("op", VARIANTS)
def case_a_step_with_gradients_enabled(op: str) -> None:
    model = model_of()
    optimizer = OwnStep(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, op=op)
    train(model, optimizer, 0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), 1)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    check_same_everywhere(model)


class Curvature(torch.optim.SGD):
    """SGD over the diagonal of the Hessian, as AdaHessian and SophiaH estimate it."""

    def step(self, closure=None):
        parameters = [p for p in self.param_groups[0]["params"] if p.grad.requires_grad]
        assert parameters
        gradients = [p.grad for p in parameters]
        ones = [torch.ones_like(p) for p in parameters]
        curvatures = torch.autograd.grad(gradients, parameters, ones)
        with torch.no_grad():
            for p, curvature in zip(parameters, curvatures, strict=True):
                p.sub_(p.grad / (1 + curvature.abs()), alpha=0.1)


@pytest.mark.parametrize("wire", ["none", "fp16"])
@pytest.mark.parametrize("op", VARIANTS)
def case_an_optimizer_that_differentiates_gradients(op: str, wire: str) -> None:
    """Of its own gradients, or refused: a rank's own curvature is not that of all ranks."""
    model = model_of()
    optimizer = Curvature(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, op=op, compression=getattr(hvd.Compression, wire)
    )
    before = weights(model)
    loss_of(model, hvd.rank(), 0).backward(create_graph=True)
    if hvd.size() > 1 and op != "adasum-delta":
        with pytest.raises(NotImplementedError, match="pass op=AdasumDelta"):
            optimizer.step()
        assert torch.equal(weights(model), before)
    else:
        optimizer.step()
        assert not torch.equal(weights(model), before)
    for set_to_none in (False, True):
        optimizer.zero_grad(set_to_none)  # ends the references to the graph
    check_same_everywhere(model)


class Adaptive(torch.optim.SGD):
    """SGD that keeps a rate in its group, as Prodigy and D-Adaptation do."""

    def __init__(self, params, lr=0.01, rate=1.0, **settings):
        super().__init__(params, lr, **settings)
        self.defaults["rate"] = rate
        for group in self.param_groups:
            group["rate"], group["count"] = rate, 0

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                norm = max(float(p.grad.norm()) for p in group["params"])
                # It stays, once it is large enough.
                group["rate"] = max(group["rate"], norm + hvd.rank())
                group["count"] += 1
        return super().step(closure)


def case_state_in_the_groups() -> None:
    """A value that the optimizer's own step has changed is not a hyperparameter."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    model = model_of()

    def distributed_of(**settings):
        return hvd.DistributedOptimizer(
            Adaptive(model.parameters(), **settings), op="adasum-delta"
        )

    optimizer = distributed_of(momentum=0.9)
    train(model, optimizer, *range(checks.EVERY + 1))
    rates = hvd.allgather_object(optimizer.param_groups[0]["rate"])
    assert len(set(rates)) == hvd.size()
    saved = optimizer.state_dict()
    optimizer.zero_grad()
    hvd.join()
    train(model, optimizer, 0)
    resumed = distributed_of(momentum=0.9)
    resumed.load_state_dict(saved)
    train(model, resumed, 0)
    assert hvd.allgather_object(resumed.param_groups[0]["rate"]) == rates
    for settings in ({"rate": 2.0 + hvd.rank()}, {"weight_decay": 0.1 * hvd.rank()}):
        (name,) = settings
        with pytest.raises(RuntimeError, match=f"same hyperparameters.* got {name}="):
            train(model, distributed_of(**settings), 0)
    check_same_everywhere(model)


def read(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    get_optimizer_state_dict(model, optimizer)


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    fresh = sgd(model.parameters())
    state = get_optimizer_state_dict(model, fresh)
    set_optimizer_state_dict(model, optimizer, state)


def broadcast(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    functions.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer.zero_grad()


READERS = {"read": read, "load": load, "broadcast": broadcast}


@pytest.mark.parametrize("reader", ["read", "load", "broadcast"])
@pytest.mark.parametrize("op", VARIANTS)
def case_reading_the_state_is_no_step(op: str, reader: str) -> None:
    """Before training, by all ranks: the windows and the weights are as if nobody had read."""
    steps = {"local_steps": 3} if op == "adasum-delta" else {}
    trained = []
    for reads in (False, True):
        model = model_of()
        optimizer = distributed(model, op, **steps)
        if reads:
            READERS[reader](model, optimizer)
        for step in range(6):
            train(model, optimizer, step)
            both = hvd.allgather_object(weights(model))
            equal = all(torch.equal(both[0], other) for other in both)
            assert equal == (not steps or hvd.size() == 1 or step % 3 == 2)
        trained.append(weights(model))
    assert torch.equal(*trained)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("op", VARIANTS)
def case_a_state_that_one_rank_has_read(op: str, momentum: float) -> None:
    """It waits for no other rank; gradients are not reduced into states that differ."""
    model = model_of()
    optimizer = distributed(model, op, momentum=momentum)
    if hvd.rank() == 0:
        read(model, optimizer)
    if op != "adasum-delta" and momentum and hvd.size() > 1:
        with pytest.raises(RuntimeError, match=r"has state=.*broadcast_optimizer_sta"):
            train(model, optimizer, 0)
        optimizer.zero_grad()
        hvd.broadcast_optimizer_state(optimizer)
    train(model, optimizer, *range(checks.EVERY + 1))
    check_same_everywhere(model)
