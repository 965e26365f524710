"""torch's `AdamOffload` against the float64 definition, in every dtype and layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from adasum_hvd.adam_offload import AdamOffload
from tests.unit.offload_parts import (
    TOLERANCE,
    Reference,
    equal,
    offload,
    parameters,
    set_gradients,
)

STEPS = 100
# torch's kernel rounds the factor 1 - lr * weight_decay to float32, alike in all steps.
DECAY_TOLERANCE = TOLERANCE + STEPS * 2**-25


SETTINGS = {
    "plain": {},
    "nesterov": {"use_nesterov": True},
    "weight-decay": {"weight_decay": 0.1},
    "loss-scale": {"loss_scale": 1024},
    "eps": {"eps": 1e-3, "beta1": 0.5, "beta2": 0.9},
    "torch-eps": {"torch_eps": True, "eps": 1e-3},
    "decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "decoupled-nesterov": {
        "decoupled_weight_decay": True,
        "weight_decay": 0.1,
        "use_nesterov": True,
    },
    "decoupled-scaled": {
        "decoupled_weight_decay": True,
        "weight_decay": 0.1,
        "loss_scale": 128.0,
    },
    "everything": {"use_nesterov": True, "weight_decay": 0.1, "loss_scale": 128.0},
}


RUNS = [
    *((name, torch.float32) for name in SETTINGS),
    *((name, torch.bfloat16) for name in ("plain", "nesterov", "decoupled")),
    *((name, torch.float16) for name in ("plain", "nesterov")),
    ("plain", torch.float64),
]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_trajectory_is_the_float64_reference(name, dtype):
    settings = SETTINGS[name]
    params = parameters(dtype=dtype)
    reference = Reference(params, **settings)
    optimizer = offload(params, 0.01, **settings)
    for step in range(STEPS):
        set_gradients(params, step, settings.get("loss_scale", 1))
        before = [p.grad.clone() for p in params]
        reference.step()
        optimizer.step()
        assert equal(before, [p.grad for p in params])  # gradients stay the caller's
    masters = [optimizer.master(p) for p in params]
    is_double = dtype == torch.float64
    assert {m.dtype for m in masters} == {dtype if is_double else torch.float32}
    tolerance = DECAY_TOLERANCE if "decoupled_weight_decay" in settings else TOLERANCE
    reference.check(masters, 1e-13 if is_double else tolerance)
    assert equal(params, [m.to(dtype) for m in masters])


def test_eps_is_not_where_torch_has_it():
    ours, of_torch = parameters(shapes=[(7,)]), parameters(shapes=[(7,)])
    for p in (*ours, *of_torch):
        p.grad = torch.full((7,), 1e-8)
    offload(ours).step()
    torch.optim.Adam(of_torch).step()
    moved_ours = (ours[0] - parameters(shapes=[(7,)])[0]).abs().max()
    moved_of_torch = (of_torch[0] - parameters(shapes=[(7,)])[0]).abs().max()
    assert moved_ours < 0.1 * moved_of_torch


@pytest.mark.parametrize(
    "lr",
    [
        [0.01 * 0.97**i for i in range(STEPS)],
        torch.tensor([0.01 * 0.97**i for i in range(STEPS)], dtype=torch.float64),
        (0.01 * 0.97**i for i in range(STEPS)),
        lambda step: 0.01 * 0.97**step,
        lambda step: torch.tensor([0.01 * 0.97**step], dtype=torch.float64),
    ],
    ids=["list", "tensor", "generator", "function", "one element"],
)
def test_schedules(lr):
    params = parameters(shapes=[(33,)])
    reference, optimizer = Reference(params), offload(params, lr)
    for step in range(STEPS):
        set_gradients(params, step)
        reference.step(lr=0.01 * 0.97**step)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.97**step)
    reference.check(params)
    if not callable(optimizer.param_groups[0]["schedule"]):
        before = params[0].detach().clone()
        with pytest.raises(IndexError, match="vector of 100"):
            optimizer.step()
        assert torch.equal(before, params[0])


@pytest.mark.parametrize("lr", [[0.1] * 9, lambda step: 0.1], ids=["list", "function"])
def test_torchs_distributed_checkpoint_loads_into_a_new_optimizer(lr):
    def new():
        model = torch.nn.Linear(3, 2)
        return model, AdamOffload(
            model.parameters(), lr, weight_decay=0.5, verbose=False
        )

    model, optimizer = new()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    other, resumed = new()
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed.param_groups[0]["step"] == 3


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("lr", [[0.0, 0.2, 0.1], lambda step: 0.1 / (1 + step), 0.1])
def test_reading_the_state_before_training_changes_nothing(lr, nesterov):
    """torch makes the state by a step that is not one of the training."""
    weights = []
    for read in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = offload(
            model.parameters(), lr, weight_decay=0.5, use_nesterov=nesterov
        )
        if read:
            get_optimizer_state_dict(model, optimizer)
            assert {float(s["step"]) for s in optimizer.state.values()} == {0.0}
            assert optimizer.param_groups[0]["step"] == 0
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        weights.append(list(model.parameters()))
    assert equal(*weights)


@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_of_the_step(decoupled):
    """A function, for all groups or for one; as MindSpore's, counted from 0."""
    a, b, c = params = parameters(shapes=[(33,)] * 3)
    references = [Reference([p], decoupled_weight_decay=decoupled) for p in params]
    groups = [
        {"params": [a]},
        {"params": [b], "weight_decay": lambda step: torch.tensor(0.5 / (1 + step))},
        {"params": [c], "weight_decay": 0.25},
    ]
    decay = lambda step: 0.1 * step
    settings = {"weight_decay": decay, "decoupled_weight_decay": decoupled}
    optimizer = offload(groups, 0.01, **settings)
    for step in range(STEPS):
        if step == STEPS // 2:  # functions are the program's, and not of its state
            saved = optimizer.state_dict()
            optimizer = offload(groups, 0.01, **settings)
            optimizer.load_state_dict(saved)
        set_gradients(params, step)
        decays = 0.1 * step, 0.5 / (1 + step), 0.25
        for reference, of_step in zip(references, decays, strict=True):
            reference.step(weight_decay=of_step)
        optimizer.step()
        found = [group["weight_decay"] for group in optimizer.param_groups]
        assert found == pytest.approx(decays)
    for reference in references:
        reference.check(reference.params, DECAY_TOLERANCE)


@pytest.mark.parametrize("wrong", [-1.0, "much"])
def test_wrong_weight_decay_of_a_step_changes_nothing(wrong):
    params = parameters(shapes=[(3,)])
    optimizer = offload(params, weight_decay=lambda step: wrong if step else 0.1)
    set_gradients(params, 0)
    optimizer.step()
    before = params[0].detach().clone()
    with pytest.raises((TypeError, ValueError), match="AdamOffload: weight_decay: exp"):
        optimizer.step()
    assert torch.equal(before, params[0])


def test_any_layout():
    numbers = torch.randn(3, 6, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    layouts = [
        numbers[0].transpose(0, 1),
        numbers[1].contiguous(memory_format=torch.channels_last),
        numbers[2][:, ::2],
    ]
    params = [nn.Parameter(layout) for layout in layouts]
    assert not any(p.is_contiguous() for p in params)
    strides = [p.stride() for p in params]
    reference, optimizer = Reference(params), offload(params, 0.01)
    for step in range(20):
        set_gradients(params, step)
        alternating = torch.tensor((-1.0) ** step / (1 + step))
        params[0].grad = alternating.expand(params[0].shape)  # one number in memory
        reference.step()
        optimizer.step()
    reference.check(params)
    assert strides == [p.stride() for p in params]
