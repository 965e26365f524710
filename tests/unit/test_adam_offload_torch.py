"""torch's `AdamOffload` against the float64 definition, torch's own Adam, and bad input."""

from __future__ import annotations

import copy
import doctest
import io
import itertools
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from adasum_hvd import adam
from adasum_hvd.torch import adam_offload
from adasum_hvd.torch.adam_offload import AdamOffload
from adasum_hvd.torch.adam_offload.host import PIECE_ELEMENTS

STEPS = 100
TOLERANCE = 1e-6  # relative to the largest weight, after STEPS steps in float32
# 0-d, empty, odd, and longer than a thread's piece of scratch.
SHAPES = [(), (0,), (7,), (33, 5), (PIECE_ELEMENTS + 3,)]


def offload(params, *args, **kwargs) -> AdamOffload:
    return AdamOffload(params, *args, **{"num_threads": 1, "verbose": False, **kwargs})


def parameters(seed: int = 0, dtype=torch.float32, shapes=SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in shapes
    ]


def set_gradients(params, step: int, scale: float = 1.0) -> None:
    """Gradients of many magnitudes: only a right eps gets the small ones right."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        if not p.requires_grad:
            continue
        magnitude = 10.0 ** torch.randint(-8, 1, p.shape, generator=generator)
        gradient = torch.randn(p.shape, generator=generator) * magnitude * scale
        p.grad = gradient.to(p.dtype)


class Reference:
    """The float64 definition on copies of the parameters."""

    def __init__(self, params, **settings):
        self.params, self.settings = params, {"lr": 0.01, **settings}
        self.weights = [p.detach().double().numpy().copy() for p in params]
        self.m = [np.zeros(w.shape) for w in self.weights]
        self.v = [np.zeros(w.shape) for w in self.weights]
        self.t = 0

    def step(self, **settings):
        self.t += 1
        for p, w, m, v in zip(self.params, self.weights, self.m, self.v, strict=True):
            g = p.grad.detach().double().numpy()
            adam.reference_step(w, g, m, v, self.t, **{**self.settings, **settings})

    def check(self, tensors, tolerance=TOLERANCE):
        for tensor, expected in zip(tensors, self.weights, strict=True):
            if expected.size:
                error = np.abs(tensor.detach().double().numpy() - expected).max()
                assert error <= tolerance * np.abs(expected).max(), tuple(tensor.shape)


def equal(these, those) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


# ---- the formula ----

SETTINGS = {
    "plain": {},
    "nesterov": {"use_nesterov": True},
    "weight-decay": {"weight_decay": 0.1},
    "loss-scale": {"loss_scale": 1024},
    "eps": {"eps": 1e-3, "beta1": 0.5, "beta2": 0.9},
    "torch-eps": {"torch_eps": True, "eps": 1e-3},
    "everything": {"use_nesterov": True, "weight_decay": 0.1, "loss_scale": 128.0},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_trajectory_is_the_float64_reference(settings):
    params = parameters()
    reference = Reference(params, **settings)
    optimizer = offload(params, 0.01, **settings)
    for step in range(STEPS):
        set_gradients(params, step, settings.get("loss_scale", 1))
        before = [p.grad.clone() for p in params]
        reference.step()
        optimizer.step()
        assert equal(before, [p.grad for p in params])  # gradients stay the caller's
    reference.check(params)


def test_eps_is_not_where_torch_has_it():
    ours, theirs = parameters(shapes=[(7,)]), parameters(shapes=[(7,)])
    for p in (*ours, *theirs):
        p.grad = torch.full((7,), 1e-8)
    offload(ours).step()
    torch.optim.Adam(theirs).step()
    moved_ours = (ours[0] - parameters(shapes=[(7,)])[0]).abs().max()
    moved_theirs = (theirs[0] - parameters(shapes=[(7,)])[0]).abs().max()
    assert moved_ours < 0.1 * moved_theirs


@pytest.mark.parametrize(
    "lr",
    [
        [0.01 * 0.97**i for i in range(STEPS)],
        torch.tensor([0.01 * 0.97**i for i in range(STEPS)], dtype=torch.float64),
        (0.01 * 0.97**i for i in range(STEPS)),
        lambda step: 0.01 * 0.97**step,
    ],
    ids=["list", "tensor", "generator", "function"],
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


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_follow_a_float32_master(dtype, nesterov):
    params = parameters(dtype=dtype)
    reference = Reference(params, use_nesterov=nesterov)
    optimizer = offload(params, 0.01, use_nesterov=nesterov)
    for step in range(STEPS):
        set_gradients(params, step)
        reference.step()
        optimizer.step()
    masters = [optimizer.master(p) for p in params]
    assert {m.dtype for m in masters} == {torch.float32}
    reference.check(masters)
    assert equal(params, [m.to(dtype) for m in masters])


def test_float64_stays_float64():
    params = parameters(dtype=torch.float64)
    reference, optimizer = Reference(params), offload(params, 0.01)
    for step in range(20):
        set_gradients(params, step)
        reference.step()
        optimizer.step()
    reference.check(params, 1e-13)


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


# ---- groups, names, order ----


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
    kernel, gamma, bias = parameters(shapes=[(5,), (5,), (5,)])
    named = [("net.kernel", kernel), ("norm.gamma", gamma), ("net.bias", bias)]
    params, names = [kernel, gamma, bias], named
    if how == "pairs":
        params, names = named, None
    elif how == "grouped":
        params = [{"params": params}]
    elif how == "unnamed":
        names = None
    before = [p.detach().clone() for p in (kernel, gamma, bias)]
    optimizer = offload(params, weight_decay=0.1, named_parameters=names)
    for p in (kernel, gamma, bias):
        p.grad = torch.zeros(5)
    optimizer.step()
    after = (kernel, gamma, bias)
    moved = [not torch.equal(p, q) for p, q in zip(after, before, strict=True)]
    assert moved == [True, how in ("grouped", "unnamed"), True]


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
        ([P], {"beta1": 1}, TypeError, "beta1: required a float"),
        ([P], {"beta2": "x"}, TypeError, "beta2: required a float"),
        ([P], {"eps": 1}, TypeError, "eps: required a float"),
        ([P], {"use_locking": 1}, TypeError, "use_locking: required a bool"),
        ([P], {"use_nesterov": None}, TypeError, "use_nesterov: required a bool"),
        ([P], {"weight_decay": "0"}, TypeError, "weight_decay: required an int"),
        ([P], {"loss_scale": "1"}, TypeError, "loss_scale: required a float"),
        ([P], {"lr": None}, TypeError, "lr: required an int, a float"),
        ([P], {"lr": "fast"}, TypeError, "lr: required an int, a float"),
        ([P], {"lr": True}, TypeError, "lr: required an int, a float"),
        ([P], {"lr": ["a"]}, TypeError, "lr: required numbers"),
        (3, {}, TypeError, "required an ordered iterable"),
        (P, {}, TypeError, "required an ordered iterable"),
        ({P, Q}, {}, TypeError, "required an ordered iterable"),
        ([P, {"params": [Q]}], {}, TypeError, "parameters only, or dicts only"),
        ([P, 1], {}, TypeError, "parameters only, or dicts only"),
        ([{"params": [P, "q"]}], {}, TypeError, "parameters only"),
        ([{"params": 1}], {}, TypeError, "required an ordered iterable"),
        ([{"params": [P]}, {"order_params": 1}], {}, TypeError, "order_params"),
        ([{"params": [P]}, {"order_params": ["p"]}], {}, TypeError, "order_params"),
        ([nn.Parameter(torch.ones(1, dtype=torch.cfloat))], {}, TypeError, "real"),
        ([P], {"beta1": 0.0}, ValueError, r"beta1: required a float in \(0, 1\)"),
        ([P], {"beta2": 1.0}, ValueError, r"beta2: required a float in \(0, 1\)"),
        ([P], {"beta1": float("nan")}, ValueError, "beta1"),
        ([P], {"eps": 0.0}, ValueError, "eps: required a finite number > 0"),
        ([P], {"loss_scale": 0}, ValueError, "loss_scale: required a finite"),
        ([P], {"weight_decay": -1}, ValueError, "weight_decay: required a finite"),
        ([P], {"lr": -0.1}, ValueError, "lr: required a finite number >= 0"),
        ([P], {"lr": [0.1, -0.1]}, ValueError, "lr: required a finite number >= 0"),
        ([P], {"lr": torch.ones(2, 2)}, ValueError, "at most 1 dimension"),
        ([P], {"lr": []}, ValueError, "lr: required at least one"),
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
        ([P], {"betas": 0.9}, TypeError, r"betas: required two floats in \(0, 1\), got 0.9"),
        ([{"params": [P], "betas": (0.9,)}], {}, TypeError, "betas: required two floats"),
        ([{"params": [P], "amsgrad": True}], {}, ValueError, "amsgrad"),
        ([P, Q], {"named_parameters": [("p", P)]}, ValueError, "none for 1 of 2"),
        ([P], {"named_parameters": [P]}, ValueError, "tuples"),
        ([P], {"named_parameters": [("p", P), ("p", Q)]}, ValueError, "unique"),
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


def test_conversions():
    optimizer = offload([P], 1, weight_decay=1, loss_scale=2)
    group = optimizer.param_groups[0]
    assert [type(group[k]) for k in ("lr", "weight_decay", "loss_scale")] == [float] * 3
    assert offload([P], torch.tensor(0.5)).param_groups[0]["lr"] == 0.5


# ---- a torch optimizer like any other ----


def test_schedulers_and_groups_of_other_optimizers():
    params = parameters(shapes=[(5,), (6,)])
    optimizer = offload(torch.optim.Adam(params, 0.1).param_groups)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)
    reference = Reference(params)
    for step in range(8):
        set_gradients(params, step)
        group = optimizer.param_groups[0]
        reference.step(lr=group["lr"], beta1=group["betas"][0])
        optimizer.step()
        scheduler.step()
    reference.check(params)
    assert len({g["lr"] for g in optimizer.param_groups}) == 1


def test_frozen_parameters_new_groups_and_one_count_of_steps():
    a, b, c = parameters(shapes=[(5,), (5,), (5,)])
    b.requires_grad_(False)
    optimizer = offload([a, b], 0.01)
    before = b.detach().clone()
    for step in range(3):
        set_gradients([a, b], step)
        optimizer.step()
    assert torch.equal(b, before)
    optimizer.add_param_group({"params": [c], "lr": 0.1})
    b.requires_grad_(True)
    set_gradients([a, b, c], 3)
    reference = Reference([b], lr=0.01)
    reference.t = 3
    reference.step()
    optimizer.step()
    reference.check([b])
    steps = {float(s["step"]) for s in optimizer.state_dict()["state"].values()}
    assert steps == {4.0}
    assert {g["step"] for g in optimizer.param_groups} == {4}


def test_closure_zero_grad_and_accumulation():
    (p,) = parameters(shapes=[(9,)])
    reference, optimizer = Reference([p]), offload([p], 0.01)
    for set_to_none, step in itertools.product((True, False), range(3)):
        optimizer.zero_grad(set_to_none=set_to_none)

        def closure(step=step):
            loss = 0.0
            for _ in range(2):
                half = (p**2).sum() * (step + 1)
                half.backward()
                loss += half.item()
            return loss

        start = (p.detach() ** 2).sum().item()
        expected = 4 * p.detach() * (step + 1)
        assert optimizer.step(closure) == pytest.approx(2 * start * (step + 1))
        assert torch.allclose(p.grad, expected)
        reference.step()
        reference.check([p])
    optimizer.zero_grad()
    before = p.detach().clone()
    optimizer.step()  # without gradients nothing moves
    assert torch.equal(p, before)


def test_betas_as_torch_names_them():
    weights = []
    for settings in (
        {"betas": (0.5, 0.75)},
        {"beta1": 0.5, "beta2": 0.75},
        {"beta1": 0.25, "betas": [0.5, 0.75]},
    ):
        params = parameters()
        optimizer = offload(params, 0.01, **settings)
        assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
        set_gradients(params, 0)
        optimizer.step()
        weights.append([p.detach() for p in params])
    for others in weights[1:]:
        assert all(map(torch.equal, weights[0], others))


def test_states_of_other_algorithms_are_refused():
    params = parameters(shapes=[(3,)])
    other = torch.optim.SGD(params, 0.1, momentum=0.9)
    set_gradients(params, 0)
    other.step()
    with pytest.raises(ValueError, match=r"parameter 0: required .*'momentum_buffer'"):
        offload(params).load_state_dict(other.state_dict())


def test_grad_scaler_without_gradients():
    (p,) = params = parameters(shapes=[(3,)])
    optimizer = offload(params, 0.01)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    before = p.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(p, before)


# GradScaler.unscale_, which clipping needs, refuses float16 gradients.
@pytest.mark.parametrize(
    ("dtype", "clip"),
    [(torch.float32, False), (torch.float32, True), (torch.float16, False)],
)
def test_grad_scaler_with_clipping_and_accumulation(dtype, clip):
    (p,) = parameters(shapes=[(64,)], dtype=dtype)
    plain = nn.Parameter(p.detach().float())
    optimizer, expected = offload([p], 0.01), offload([plain], 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(6):
        target = torch.linspace(-1, 1, 64) + step
        for _ in range(2):
            scaler.scale((p.float() * target).mean()).backward()
            (plain * target).mean().backward()
        if step == 3:
            p.grad.fill_(float("inf"))
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p], 1e-2)
            torch.nn.utils.clip_grad_norm_([plain], 1e-2)
        before = p.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if step == 3:
            assert torch.equal(p, before)  # skipped, and not counted
            assert scaler.get_scale() == 512.0
        else:
            assert not torch.equal(p, before)
            expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    assert optimizer.param_groups[0]["step"] == 5
    tolerance = 2e-6 if dtype == torch.float32 else 2e-4
    assert (optimizer.master(p) - plain).abs().max() <= tolerance


def test_sparse_gradients_are_refused_before_anything_moves():
    embedding = nn.Embedding(4, 2, sparse=True)
    linear = nn.Linear(2, 2)
    optimizer = offload([*linear.parameters(), *embedding.parameters()])
    linear(embedding(torch.tensor([1]))).sum().backward()
    before = [p.detach().clone() for p in linear.parameters()]
    with pytest.raises(RuntimeError, match="required dense gradients"):
        optimizer.step()
    assert equal(before, linear.parameters())
    assert optimizer.param_groups[0]["step"] == 0


def test_use_locking_holds_the_lock_during_the_step():
    (p,) = parameters(shapes=[(4,)])
    optimizer = offload([p], use_locking=True)
    p.grad = torch.ones(4)
    before = p.detach().clone()
    with optimizer.lock:
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert torch.equal(p, before)
    thread.join(10)
    assert not torch.equal(p, before)


def test_threads_are_given_back():
    (p,) = parameters(shapes=[(4,)])
    p.grad = torch.ones(4)
    before = torch.get_num_threads()
    optimizer = offload([p], num_threads=before + 1)
    seen = []
    run = optimizer._host.run
    optimizer._host.run = lambda *a: (seen.append(torch.get_num_threads()), run(*a))
    optimizer.step()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_default_device_and_dtype_do_not_matter():
    (p,) = parameters(shapes=[(4,)], dtype=torch.bfloat16)
    p.grad = torch.ones_like(p)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = offload([p], use_nesterov=True)
        optimizer.step()
        saved = optimizer.state_dict()["state"][0]
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert {v.device.type for v in saved.values()} == {"cpu"}
    assert {v.dtype for v in saved.values()} == {torch.float32}


# ---- changes by others ----


def test_master_follows_parameters_that_others_changed():
    torch.manual_seed(0)  # where both models happen to agree, nothing has changed
    model = nn.Linear(8, 8).bfloat16()
    optimizer = offload(model.parameters(), 1e-4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    other = nn.Linear(8, 8).bfloat16()
    model.load_state_dict(other.state_dict())
    optimizer.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (optimizer.master(p) - q.float()).abs().max() < 2e-4
    model.weight.data.fill_(5.0)  # behind torch's back
    optimizer.refresh_master()
    optimizer.step()
    assert (optimizer.master(model.weight) - 5).abs().max() < 2e-4


def test_parameters_that_move_to_another_dtype():
    model = nn.Linear(4, 4)
    optimizer = offload(model.parameters(), 1e-2)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    for dtype in dtypes:
        model.to(dtype)
        before = model.weight.detach().float().clone()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        moved = (model.weight.detach().float() - before).mean().item()
        assert moved == pytest.approx(-1e-2, rel=0.3)


# ---- resume and exchange ----


def train(optimizer, params, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(params, step)
        optimizer.step()


@pytest.mark.parametrize("order", ["model-first", "optimizer-first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_resume(dtype, order):
    shapes = [(7,), (33, 5), ()]
    lr = [0.01 / (1 + i) for i in range(20)]
    params = parameters(dtype=dtype, shapes=shapes)
    optimizer = offload(params, lr, use_nesterov=True, weight_decay=0.1)
    train(optimizer, params, 0, 5)
    file = io.BytesIO()
    torch.save({"model": params, "optimizer": optimizer.state_dict()}, file)
    train(optimizer, params, 5, 10)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    again = parameters(seed=1, dtype=dtype, shapes=shapes)
    resumed = offload(again, lr, use_nesterov=True, weight_decay=0.1)

    def load_model():
        with torch.no_grad():
            for p, q in zip(again, saved["model"], strict=True):
                p.copy_(q)

    if order == "model-first":
        load_model()
    resumed.load_state_dict(saved["optimizer"])
    if order == "optimizer-first":
        load_model()
    train(resumed, again, 5, 10)
    assert equal(params, again)
    assert equal(map(optimizer.master, params), map(resumed.master, again))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_as_the_original(how, dtype):
    class Holder:
        def __init__(self):
            self.params = parameters(dtype=dtype, shapes=[(7,), (5, 3)])
            self.optimizer = offload(self.params, 0.01, use_locking=True)

    holder = Holder()
    train(holder.optimizer, holder.params, 0, 3)
    pair = (holder.params, holder.optimizer)
    if how == "deepcopy":
        params, optimizer = copy.deepcopy(pair)
    else:
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        params, optimizer = torch.load(file, weights_only=False)
    train(holder.optimizer, holder.params, 3, 6)
    assert not equal(params, holder.params)
    train(optimizer, params, 3, 6)
    assert equal(params, holder.params)


def test_state_exchanges_with_torch_both_ways():
    params, theirs = (
        parameters(shapes=[(7,), (5, 3)]),
        parameters(shapes=[(7,), (5, 3)]),
    )
    ours = offload(params, 0.01, torch_eps=True, weight_decay=0.1)
    adams = torch.optim.Adam(theirs, 0.01, weight_decay=0.1, fused=True)
    for first, (source, target) in enumerate([(ours, adams), (adams, ours)] * 2):
        pair = (params, theirs) if source is ours else (theirs, params)
        source_params, target_params = pair
        train(source, source_params, 3 * first, 3 * first + 3)
        with torch.no_grad():
            for p, q in zip(source_params, target_params, strict=True):
                q.copy_(p)
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        adams.param_groups[0]["fused"] = True  # lost in ours
    expected = parameters(shapes=[(7,), (5, 3)])
    train(
        torch.optim.Adam(expected, 0.01, weight_decay=0.1, fused=True), expected, 0, 12
    )
    assert equal(params, expected)
    # A tensor shared by all parameters would have been counted up once for each of them.
    assert {float(state["step"]) for state in adams.state.values()} == {12.0}
    assert ours.param_groups[0]["step"] == 12


def test_state_of_low_precision_loads_in_torch():
    params = parameters(dtype=torch.bfloat16, shapes=[(7,)])
    ours = offload(params, 0.01)
    train(ours, params, 0, 3)
    adams = torch.optim.Adam(params, 0.01)
    adams.load_state_dict(ours.state_dict())
    train(adams, params, 3, 4)
    ours.load_state_dict(adams.state_dict())
    state = ours.state[params[0]]
    assert {t.dtype for t in state.values()} == {torch.float32}
    assert torch.equal(ours.master(params[0]), params[0].float())


def test_loading_reports_what_cannot_be_taken_over():
    params = parameters(shapes=[(7,), (5,)])
    ours = offload(params)
    with pytest.raises(ValueError, match="amsgrad: required False"):
        ours.load_state_dict(torch.optim.Adam(params, amsgrad=True).state_dict())
    with pytest.raises(ValueError, match="decoupled_weight_decay: required False"):
        ours.load_state_dict(torch.optim.AdamW(params).state_dict())
    wrong = parameters(shapes=[(7,), (6,)])
    other = offload(wrong)
    train(other, wrong, 0, 1)
    with pytest.raises(
        ValueError, match=r"exp_avg of parameter 1: required shape \(5,\)"
    ):
        ours.load_state_dict(other.state_dict())
    adams = torch.optim.Adam(params)
    train(adams, params[:1], 0, 1)
    params[0].grad = None
    params[1].grad = torch.ones(5)
    adams.step()
    adams.step()
    with pytest.warns(UserWarning, match="one count for all here, which is set to 2"):
        ours.load_state_dict(adams.state_dict())


def test_hooks_of_the_user_see_plain_tensors():
    (p,) = parameters(shapes=[(4,)])
    optimizer, seen = offload([p]), []
    train(optimizer, [p], 0, 1)

    def look(_, state_dict):
        seen.append(
            (type(state_dict["state"][0]["exp_avg"]), "step" in state_dict["state"][0])
        )

    optimizer.register_state_dict_post_hook(look)
    optimizer.register_load_state_dict_pre_hook(look)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append((type(o.state[p]["exp_avg"]), True))
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [(torch.Tensor, True)] * 3


# ---- bytes ----


def test_plan(capsys):
    params = parameters(shapes=[(1000,)]) + parameters(
        dtype=torch.bfloat16, shapes=[(10,)]
    )
    frozen = nn.Parameter(torch.ones(5), requires_grad=False)
    optimizer = AdamOffload([*params, frozen])
    printed = capsys.readouterr().out
    plan = optimizer.plan()
    assert printed.startswith(str(plan).split(" of ")[0])
    assert "device 0.0 MiB kept between steps" in printed
    assert (plan.params, plan.moments, plan.masters) == (1010, 8080, 40)
    assert (plan.pinned, plan.kept_on_device) == (0, 0)
    train(optimizer, params, 0, 1)
    kept = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert kept == plan.moments + plan.masters
    assert optimizer._host.scratch_bytes() <= plan.scratch


def test_plan_warns_when_memory_is_short():
    (p,) = parameters(shapes=[(4,)])
    plan = offload([p]).plan()
    assert "WARNING" not in str(plan)
    short = type(plan)(**{**vars(plan), "available": 1})
    assert "WARNING: 1 ranks on this host need" in str(short)


def test_examples_run():
    for module in (adam, adam_offload):
        outcome = doctest.testmod(module)
        assert outcome.attempted > 0
        assert outcome.failed == 0


def test_no_warnings_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = parameters(shapes=[(7,)])
        optimizer = offload(params)
        before = params[0].detach().clone()
        train(optimizer, params, 0, 2)
        optimizer.load_state_dict(optimizer.state_dict())
    assert not torch.equal(params[0], before)
