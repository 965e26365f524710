"""Resume, copies, exchange with torch's Adam, and bytes of torch's `AdamOffload`."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from adasum_hvd.adam_offload import AdamOffload
from tests.unit.offload_parts import (
    equal,
    offload,
    parameters,
    train,
)

# ---- resume and exchange ----


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
def test_states_with_one_count_for_all_parameters(how):
    """As 0.3.0 wrote them: state dicts with equal counts, pickles with a group's only."""
    params = parameters(shapes=[(7,), (5,)])
    optimizer = offload(params, 0.01)
    train(optimizer, params, 0, 3)
    if how == "pickle":
        for state in optimizer.state.values():
            del state["step"]
        again, resumed = copy.deepcopy((params, optimizer))
    else:
        again = copy.deepcopy(params)
        resumed = offload(again, 0.01)
        saved = optimizer.state_dict()
        saved["param_groups"][0].pop("decay_schedule")
        resumed.load_state_dict(copy.deepcopy(saved))
    assert {float(state["step"]) for state in resumed.state.values()} == {3.0}
    unbroken = parameters(shapes=[(7,), (5,)])
    train(offload(unbroken, 0.01), unbroken, 0, 5)
    train(resumed, again, 3, 5)
    assert equal(again, unbroken)


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
