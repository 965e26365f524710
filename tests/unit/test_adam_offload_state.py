"""Resume, copies, exchange with torch's Adam, and bytes of torch's `AdamOffload`."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn

from adasum_hvd.adam_offload import AdamOffload
from tests.unit.offload_parts import (
    equal,
    offload,
    parameters,
    set_gradients,
    train,
)

FILES = Path(__file__).with_name("adam_offload")  # written by earlier releases
DECOUPLED = {"decoupled_weight_decay": True, "torch_eps": True}
SHAPES = [(7,), (33, 5), (300_000,)]

# ---- resume and exchange ----


def test_a_state_without_schedules_leaves_those_of_the_program():
    (param,) = params = parameters(shapes=[(3,)])
    scheduled = offload(params, lambda step: step + 1.0, weight_decay=lambda step: 0.5)
    scheduled.load_state_dict(offload(parameters(shapes=[(3,)]), 0.1).state_dict())
    for lr in (1.0, 2.0):
        param.grad = torch.ones(3)
        scheduled.step()
        (group,) = scheduled.param_groups
        assert (group["lr"], group["weight_decay"]) == (lr, 0.5)


def test_state_has_the_layout_of_its_parameter():
    """torch's fused kernel reads the moments of a channels-last weight in its order of memory."""
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = offload(list(convolution.parameters()), 0.1)
    convolution(torch.ones(1, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()["state"][0]
    for key in ("exp_avg", "exp_avg_sq"):
        assert saved[key].stride() == convolution.weight.stride()
        assert torch.equal(saved[key], optimizer.state[convolution.weight][key])


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
    assert optimizer._use_locking
    train(holder.optimizer, holder.params, 3, 6)
    assert not equal(params, holder.params)
    train(optimizer, params, 3, 6)
    assert equal(params, holder.params)


def test_state_exchanges_with_torch_both_ways():
    params, of_torch = (
        parameters(shapes=[(7,), (5, 3)]),
        parameters(shapes=[(7,), (5, 3)]),
    )
    ours = offload(params, 0.01, torch_eps=True, weight_decay=0.1)
    adams = torch.optim.Adam(of_torch, 0.01, weight_decay=0.1, fused=True)
    for first, (source, target) in enumerate([(ours, adams), (adams, ours)] * 2):
        pair = (params, of_torch) if source is ours else (of_torch, params)
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
    assert {float(state["step"]) for state in ours.state.values()} == {12.0}
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
    with pytest.raises(ValueError, match="amsgrad: expected False"):
        ours.load_state_dict(torch.optim.Adam(params, amsgrad=True).state_dict())
    wrong = parameters(shapes=[(7,), (6,)])
    other = offload(wrong)
    train(other, wrong, 0, 1)
    with pytest.raises(
        ValueError, match=r"exp_avg of parameter 1: expected shape \(5,\)"
    ):
        ours.load_state_dict(other.state_dict())


@pytest.mark.parametrize("how", ["state dict", "pickle"])
@pytest.mark.parametrize("release", ["0.3.0", "2026-11-27"])
def test_files_of_earlier_releases(release, how):
    """0.3.0 had one count of steps for all parameters, and another module."""
    if release == "0.3.0":  # whose file has both
        pytest.importorskip("horovod", reason="its module imported Horovod")
    saved = torch.load(FILES / f"{release}.pt", weights_only=False)
    lr = [0.1 / (1 + i) for i in range(6)]
    settings = {"use_nesterov": True, "weight_decay": 0.1, "loss_scale": 2.0}
    runs = []
    for first in (0, 3):
        generator = torch.Generator().manual_seed(0)
        matrix = nn.Parameter(torch.randn(3, 2, generator=generator))
        vector = nn.Parameter(torch.randn(5, generator=generator).bfloat16())
        params = [matrix, vector]
        optimizer = offload(params, lr, **settings)
        if first and how == "pickle":
            params, optimizer = saved["pair"]
        elif first:
            optimizer.load_state_dict(saved["state"])
            with torch.no_grad():
                for p, q in zip(params, saved["pair"][0], strict=True):
                    p.copy_(q)
        for step in range(first, 6):
            for p in params:
                p.grad = torch.full_like(p, 0.5 - step)
            optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {6.0}
        runs.append([optimizer.master(p) for p in params])
    for unbroken, resumed in zip(*runs, strict=True):
        assert torch.allclose(unbroken, resumed, rtol=1e-6, atol=0)


def test_a_copy_from_before_the_first_step():
    params = parameters()
    optimizer = offload(params, 0.01)
    copied_params, copied = copy.deepcopy((params, optimizer))
    train(optimizer, params, 0, 2)
    train(copied, copied_params, 0, 2)
    assert equal(params, copied_params)


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


# ---- AdamW ----


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
        torch.optim.AdamW(groups_of(ours), 0.01, weight_decay=0.1).param_groups,
        loss_scale=loss_scale,
        torch_eps=True,
        num_threads=torch.get_num_threads(),  # the kernel rounds by a thread's share
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


# ---- bytes ----


def test_plan(caplog):
    params = parameters(shapes=[(1000,)]) + parameters(
        dtype=torch.bfloat16, shapes=[(10,)]
    )
    frozen = nn.Parameter(torch.ones(5), requires_grad=False)
    optimizer = AdamOffload([*params, frozen])
    (printed,) = (record.getMessage() for record in caplog.records)
    plan = optimizer.plan()
    assert printed.startswith(str(plan).split(" of ")[0])
    assert "device 0.0 MiB kept between steps" in printed
    assert (plan.params, plan.moments, plan.masters) == (1010, 8080, 40)
    assert (plan.pinned, plan.kept_on_device) == (0, 0)
    train(optimizer, params, 0, 1)
    counts = 4 * len(params)
    kept = sum(t.nbytes for s in optimizer.state.values() for t in s.values()) - counts
    assert kept == plan.moments + plan.masters
    scratch = optimizer._host._scratch.values()
    assert 0 < sum(t.nbytes for t in scratch) <= plan.scratch


def test_plan_warns_when_memory_is_short():
    (p,) = parameters(shapes=[(4,)])
    plan = offload([p]).plan()
    assert "WARNING" not in str(plan)
    short = type(plan)(**{**vars(plan), "available": 1})
    assert "WARNING: 1 ranks on this host need" in str(short)
