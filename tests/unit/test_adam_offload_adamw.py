"""Decoupled weight decay of both `AdamOffload`s against AdamW of torch and Keras."""

from __future__ import annotations

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from adasum_hvd.offload.keras import AdamOffload as KerasAdamOffload
from tests.unit.offload_parts import equal, offload, parameters, set_gradients, train

DECOUPLED = {"decoupled_weight_decay": True, "torch_eps": True}
SHAPES = [(7,), (33, 5), (300_000,)]


def relative_error(actual, expected) -> float:
    return max(
        ((a.double() - e.double()).abs().max() / e.double().abs().max()).item()
        for a, e in zip(actual, expected, strict=True)
    )


def groups_of(params) -> list[dict]:
    return [
        {"params": params[:1], "lr": 0.03, "weight_decay": 0.3},
        {"params": params[1:]},
    ]


def accumulate(params, step: int, scale: float) -> None:
    """Two backward passes, as within an accumulation window."""
    for p in params:
        p.grad = None
        for micro_batch in range(2):
            generator = torch.Generator().manual_seed(2 * step + micro_batch)
            target = torch.randn(p.shape, generator=generator)
            ((p - target).square().sum() * scale).backward()


@pytest.mark.parametrize("loss_scale", [1.0, 100.0])
def test_a_run_is_that_of_torchs_adamw(loss_scale):
    """With groups, a schedule, accumulation, and states exchanged every 5 steps."""
    ours, of_torch = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    offloaded = offload(
        groups_of(ours),
        0.01,
        weight_decay=0.1,
        loss_scale=loss_scale,
        num_threads=torch.get_num_threads(),  # the kernel rounds by a thread's share
        **DECOUPLED,
    )
    adamw = torch.optim.AdamW(groups_of(of_torch), 0.01, weight_decay=0.1, fused=True)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        for optimizer in (offloaded, adamw)
    ]
    for step in range(20):
        accumulate(ours, step, loss_scale)
        accumulate(of_torch, step, 1.0)
        for optimizer, schedule in zip((offloaded, adamw), schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 5 == 4:
            states = [copy.deepcopy(o.state_dict()) for o in (offloaded, adamw)]
            offloaded.load_state_dict(states[1])
            adamw.load_state_dict(states[0])
            for group in adamw.param_groups:
                assert group["decoupled_weight_decay"]
                group["fused"] = True  # lost in ours
    if loss_scale == 1.0:
        assert equal(ours, of_torch)
    assert relative_error(ours, of_torch) < 1e-6


@pytest.mark.parametrize("capturable", [False, True])
def test_a_gradient_that_is_missing_every_second_step(capturable):
    """Each parameter counts its own steps; also in a state of torch's, whose dtype differs."""
    ours, of_torch = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    offloaded = offload(ours, 0.01, weight_decay=0.1, **DECOUPLED)
    adamw = torch.optim.AdamW(of_torch, 0.01, weight_decay=0.1, fused=True)
    for step in range(12):
        for optimizer, params in ((offloaded, ours), (adamw, of_torch)):
            set_gradients(params, step)
            if step % 2:
                params[1].grad = None
            optimizer.step()
        if step == 5:
            saved = copy.deepcopy(adamw.state_dict())
            saved["param_groups"][0]["capturable"] = capturable
            for state in saved["state"].values():
                state["step"] = state["step"].double() if capturable else state["step"]
            offloaded = offload(ours, 0.01, weight_decay=0.1, **DECOUPLED)
            offloaded.load_state_dict(saved)
    assert equal(ours, of_torch)
    for p, q in zip(ours, of_torch, strict=True):
        assert torch.equal(offloaded.state[p]["step"], adamw.state[q]["step"])


def test_masters_of_bfloat16_parameters_follow_adamw():
    params = parameters(shapes=SHAPES, dtype=torch.bfloat16)
    plain = [torch.nn.Parameter(p.detach().float()) for p in params]
    offloaded = offload(params, 0.01, weight_decay=0.5, **DECOUPLED)
    adamw = torch.optim.AdamW(plain, 0.01, weight_decay=0.5)
    for step in range(10):
        train(offloaded, params, step, step + 1)
        for p, q in zip(params, plain, strict=True):
            q.grad = p.grad.float()
        adamw.step()
    masters = [offloaded.master(p) for p in params]
    assert relative_error(masters, plain) < 1e-6


def test_param_groups_of_adamw_keep_its_decay():
    ours, of_torch = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    adamw = torch.optim.AdamW(of_torch, 0.01, weight_decay=0.5)
    offloaded = offload(
        torch.optim.AdamW(ours, 0.01, weight_decay=0.5).param_groups, torch_eps=True
    )
    for optimizer, params in ((offloaded, ours), (adamw, of_torch)):
        train(optimizer, params, 0, 5)
    assert relative_error(ours, of_torch) < 1e-6


@pytest.mark.parametrize("decoupled", [False, True])
def test_loading_the_other_kind_of_decay_is_an_error(decoupled):
    params = parameters(shapes=[(7,)])
    ours = offload(params, decoupled_weight_decay=decoupled)
    other = torch.optim.Adam(params) if decoupled else torch.optim.AdamW(params)
    match = f"expected {decoupled}, but got {not decoupled}.*_decay={not decoupled}"
    with pytest.raises(ValueError, match=match):
        ours.load_state_dict(other.state_dict())
    older = other.state_dict()
    del older["param_groups"][0]["decoupled_weight_decay"]  # as before torch 2.7
    ours.load_state_dict(older)
    assert ours.param_groups[0]["decoupled_weight_decay"] is decoupled


def test_gradients_stay_the_callers_and_names_count():
    kernel, gamma = parameters(shapes=[(5,), (5,)])
    before = [p.detach().clone() for p in (kernel, gamma)]
    optimizer = offload(
        [("kernel", kernel), ("gamma", gamma)], 0.1, weight_decay=0.5, **DECOUPLED
    )
    for p in (kernel, gamma):
        p.grad = torch.zeros(5)
    optimizer.step()
    assert torch.allclose(kernel, 0.95 * before[0])
    assert torch.equal(gamma, before[1])
    assert not kernel.grad.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keras_run_is_that_of_keras_adamw(dtype):
    start = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.95)
    options = {"gradient_accumulation_steps": 2, "weight_decay": 0.5}
    ours, expected = keras.Variable(start, dtype=dtype), keras.Variable(start)
    expected.assign(ours)  # rounded alike
    offloaded = KerasAdamOffload(schedule, decoupled_weight_decay=True, **options)
    adamw = keras.optimizers.AdamW(schedule, epsilon=1e-8, **options)
    # Keras's learning rate counts every pass, and its moments only every window.
    run = tf.function(lambda g: offloaded.apply([tf.cast(g, dtype)], [ours]))
    for step in range(20):
        gradient = tf.cast(tf.random.stateless_normal(start.shape, (step, 0)), dtype)
        run(gradient)
        adamw.apply([tf.cast(gradient, "float32")], [expected])
    actual = ours if dtype == "float32" else offloaded._masters[0]
    error = np.abs(actual.numpy() - expected.numpy()).max()
    assert error < (2e-6 if dtype == "float32" else 2e-3)
    again = KerasAdamOffload.from_config(offloaded.get_config())
    assert again.decoupled_weight_decay


@pytest.mark.parametrize("optimizer", [offload, KerasAdamOffload])
@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ({"amsgrad": True}, r"use Adam\(amsgrad=True\)"),
        ({"use_amsgrad": True}, r"use Adam\(amsgrad=True\)"),
        (
            {"use_lazy": True},
            "expected False, but got True; use torch.optim.SparseAdam",
        ),
        ({"use_offload": False}, "use Adam of torch.optim or keras.optimizers"),
        ({"use_lock": True}, "use_lock"),
    ],
    ids=str,
)
def test_arguments_of_other_adams(optimizer, argument, match):
    first = parameters(shapes=[(3,)]) if optimizer is offload else 0.1
    error = TypeError if "use_lock" in argument and optimizer is offload else ValueError
    with pytest.raises(error, match=match):
        optimizer(first, **argument)
    optimizer(first, amsgrad=False, use_lazy=False, use_offload=True)
