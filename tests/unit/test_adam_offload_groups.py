"""Param groups, names, order and wrong arguments of torch's `AdamOffload`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.unit.offload_parts import (
    Reference,
    offload,
    parameters,
    set_gradients,
)


def test_groups_have_their_own_rates_and_decay():
    a, b, c = parameters(shapes=[(5,), (5,), (5,)])
    optimizer = offload(
        [
            {"params": [a], "lr": 0.1},
            {"params": b, "weight_decay": 1, "grad_centralization": True},
            {"params": [c], "lr": [0.2, 0.3]},
        ],
        0.01,
        weight_decay=0.5,
    )
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.01, 0.2]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 1.0, 0.5]
    references = [
        (Reference([a]), {"lr": 0.1, "weight_decay": 0.5}),
        (Reference([b]), {"lr": 0.01, "weight_decay": 1.0}),
        (Reference([c]), {"lr": 0.2, "weight_decay": 0.5}),
    ]
    set_gradients([a, b, c], 0)
    for reference, settings in references:
        reference.step(**settings)
    optimizer.step()
    for (reference, _), param in zip(references, (a, b, c), strict=True):
        reference.check([param])


@pytest.mark.parametrize("how", ["named_parameters", "pairs", "grouped", "unnamed"])
def test_beta_and_gamma_are_not_decayed_without_groups(how):
    kernel, gamma, beta, bias = params = parameters(shapes=[(5,)] * 4)
    names = ("net.kernel", "norm.gamma", "norm.beta", "net.bias")
    named = names = [*zip(names, params, strict=True)]
    if how == "pairs":
        params, names = named, None
    elif how == "grouped":
        params = [{"params": params}]
    elif how == "unnamed":
        names = None
    before = [p.detach().clone() for p in (kernel, gamma, beta, bias)]
    optimizer = offload(params, weight_decay=0.1, named_parameters=names)
    after = (kernel, gamma, beta, bias)
    for p in after:
        p.grad = torch.zeros(5)
    optimizer.step()
    moved = [not torch.equal(p, q) for p, q in zip(after, before, strict=True)]
    decayed = how in ("grouped", "unnamed")
    assert moved == [True, decayed, decayed, True]


def test_a_groups_rate_wins_over_the_default_schedule():
    a, b = parameters(shapes=[(5,), (5,)])
    optimizer = offload([{"params": [a], "lr": 0.1}, {"params": [b]}], [0.2, 0.3])
    for rate in (0.2, 0.3):
        set_gradients([a, b], 0)
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, rate]


def test_order_params_give_the_order_of_updates():
    a, b, c = parameters(shapes=[(1,), (2,), (3,)])
    groups = [{"params": [a, b], "lr": 0.1}, {"params": [c]}]
    assert [id(p) for p in offload(groups).update_order()] == [id(c), id(b), id(a)]
    optimizer = offload([*groups, {"order_params": [b, c, a]}])
    assert [id(p) for p in optimizer.update_order()] == [id(a), id(c), id(b)]
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 1]
    d = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [d]})
    assert [id(p) for p in optimizer.update_order()] == [id(d), id(a), id(c), id(b)]
    for p in (a, b, c, d):
        p.grad = torch.ones_like(p)
    optimizer.step()  # makes a parameter's state when it comes to it
    assert [id(p) for p in optimizer.state] == [id(d), id(a), id(c), id(b)]


def test_learning_rate_is_another_name_of_lr():
    (p,) = parameters(shapes=[(2,)])
    assert offload([p], learning_rate=0.1).param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="lr"):
        offload([p], learning_rate=-0.1)


P = nn.Parameter(torch.ones(3))
Q = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("params", "kwargs", "error", "message"),
    [
        ([P], {"beta1": 1}, TypeError, "beta1: expected a float"),
        ([P], {"beta2": "x"}, TypeError, "beta2: expected a float"),
        ([P], {"eps": 1}, TypeError, "eps: expected a float"),
        ([P], {"use_locking": 1}, TypeError, "use_locking: expected a bool"),
        ([P], {"use_nesterov": None}, TypeError, "use_nesterov: expected a bool"),
        ([P], {"weight_decay": "0"}, TypeError, "weight_decay: expected an int"),
        ([P], {"loss_scale": "1"}, TypeError, "loss_scale: expected a float"),
        ([P], {"lr": None}, TypeError, "lr: expected an int, a float"),
        ([P], {"lr": "fast"}, TypeError, "lr: expected an int, a float"),
        ([P], {"lr": True}, TypeError, "lr: expected an int, a float"),
        ([P], {"lr": {0: 0.1}}, TypeError, "a sequence or a schedule"),
        ([P], {"lr": {0.1, 0.2}}, TypeError, "a sequence or a schedule"),
        ([P], {"lr": ["a"]}, TypeError, "lr: expected numbers"),
        (3, {}, TypeError, "expected an ordered iterable"),
        (P, {}, TypeError, "expected an ordered iterable"),
        ({P, Q}, {}, TypeError, "expected an ordered iterable"),
        ([P, {"params": [Q]}], {}, TypeError, "parameters only, or dicts only"),
        ([P, 1], {}, TypeError, "parameters only, or dicts only"),
        ([{"params": [P, "q"]}], {}, TypeError, "parameters only"),
        ([{"params": 1}], {}, TypeError, "expected an ordered iterable"),
        ([{"params": [P]}, {"order_params": 1}], {}, TypeError, "order_params"),
        ([{"params": [P]}, {"order_params": ["p"]}], {}, TypeError, "order_params"),
        ([nn.Parameter(torch.ones(1, dtype=torch.cfloat))], {}, TypeError, "real"),
        ([P], {"beta1": 0.0}, ValueError, r"beta1: expected a float in \(0, 1\)"),
        ([P], {"beta2": 1.0}, ValueError, r"beta2: expected a float in \(0, 1\)"),
        ([P], {"beta1": float("nan")}, ValueError, "beta1"),
        ([P], {"eps": 0.0}, ValueError, "eps: expected a finite number > 0"),
        ([P], {"loss_scale": 0}, ValueError, "loss_scale: expected a finite"),
        ([P], {"weight_decay": -1}, ValueError, "weight_decay: expected a finite"),
        ([P], {"lr": -0.1}, ValueError, "lr: expected a finite number >= 0"),
        ([P], {"lr": [0.1, -0.1]}, ValueError, "lr: expected a finite number >= 0"),
        ([P], {"lr": torch.ones(2, 2)}, ValueError, "at most 1 dimension"),
        ([P], {"lr": []}, ValueError, "lr: expected at least one"),
        ([P], {"num_threads": 0}, ValueError, "num_threads"),
        (None, {}, ValueError, "empty parameter list"),
        ([], {}, ValueError, "empty parameter list"),
        (iter(()), {}, ValueError, "empty parameter list"),
        ([{"params": []}], {}, ValueError, "empty parameter list"),
        ([{"params": [P], "order_params": [P]}], {}, ValueError, "order_params"),
        ([{"params": [P, Q]}, {"order_params": [P]}], {}, ValueError, "order_params"),
        ([{"params": [P]}, {"order_params": [Q]}], {}, ValueError, "order_params"),
        ([{"params": [P, Q]}, {"order_params": [P, P]}], {}, ValueError, "order_para"),
        ([{"params": [P], "lr": [1.0]}, {"params": [Q], "lr": [1.0, 2.0]}], {},
         ValueError, "vectors of one length"),
        ([{"params": [P], "betas": (0.9, 1.0)}], {}, ValueError, "beta2"),
        ([P], {"betas": (0.9, 1.0)}, ValueError, "beta2"),
        ([P], {"betas": 0.9}, TypeError, r"betas: expected two floats in \(0, 1\), but got 0.9"),
        ([{"params": [P], "betas": (0.9,)}], {}, TypeError, "betas: expected two floats"),
        ([{"params": [P], "amsgrad": True}], {}, ValueError, "amsgrad"),
        ([P, Q], {"named_parameters": [("p", P)]}, ValueError, "none for 1 of 2"),
        ([P], {"named_parameters": [P]}, ValueError, "tuples"),
        ([P, Q], {"named_parameters": [("p", P), ("p", Q)]}, RuntimeError, "'p'"),
        ([{"params": [P], "learning_rate": 1.0}], {}, KeyError, "learning_rate"),
        ([{"lr": 1.0}], {}, KeyError, "no params"),
        ([{"params": [P]}, {"params": [P]}], {}, RuntimeError, "got twice"),
        ([{"params": [("w", P)]}, {"params": [("w", Q)]}], {}, RuntimeError, "'w'"),
        ([P, P], {}, RuntimeError, "got twice"),
    ],
)  # fmt: skip
def test_refuses(params, kwargs, error, message):
    with pytest.raises(error, match=message):
        offload(params, **kwargs)


def test_sharded_parameters_are_refused():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(
            NotImplementedError, match=r"got a DTensor.*CPUOffloadPolicy"
        ):
            offload(model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_conversions():
    optimizer = offload([P], 1, weight_decay=1, loss_scale=2)
    group = optimizer.param_groups[0]
    assert [type(group[k]) for k in ("lr", "weight_decay", "loss_scale")] == [float] * 3
    assert offload([P], torch.tensor(0.5)).param_groups[0]["lr"] == 0.5


def test_what_is_no_group_or_parameter_is_refused():
    (a,) = parameters(shapes=[(5,)])
    with pytest.raises(TypeError, match="param_group: expected a dict, but got list"):
        offload([a]).add_param_group([a])
    elsewhere = torch.nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(NotImplementedError, match="a CUDA device, but got meta"):
        offload([elsewhere])
