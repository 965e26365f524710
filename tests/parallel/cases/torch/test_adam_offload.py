"""AdamOffload on several ranks: the delta variant reduces its host masters."""

from __future__ import annotations

import copy
import io
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional

import adasum_hvd.torch as hvd
from adasum_hvd import reference
from adasum_hvd.offload import adam
from tests.parallel.harness.models import (
    batch_of,
)
from tests.parallel.harness.torch_training import (
    check_same_everywhere,
)

STEPS = 5
HOSTS: list[str] = []
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def start() -> None:
    HOSTS[:] = ["one"] * hvd.size()


def model_of(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    # One parameter that is not its own master even in float32.
    model[0].weight = nn.Parameter(model[0].weight.detach().t().clone().t())
    return model.to(dtype)


def backward(model: nn.Module, step: int, rank: int | None = None) -> None:
    rank = hvd.rank() if rank is None else rank
    images, labels = batch_of(rank, step)
    dtype = next(model.parameters()).dtype
    functional.cross_entropy(model(images.to(dtype)).float(), labels).backward()


def wrapped(
    model: nn.Module, op: str = "adasum-delta", lr=0.01, settings=None, **kwargs
):
    optimizer = hvd.AdamOffload(
        model.parameters(), lr, verbose=False, **(settings or {})
    )
    return hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), op=op, **kwargs
    )


def train(optimizer, model: nn.Module, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def masters(optimizer) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.master(p).detach().clone() for p in params]


def check_equal(these, those, tolerance: float = 0.0) -> None:
    for a, b in zip(these, those, strict=True):
        assert (a - b).abs().max() <= tolerance, (a - b).abs().max()


class Simulation:
    """All ranks in float64 NumPy: the definition of Adam, and the reference AdaSum."""

    def __init__(self, model: nn.Module, **settings):
        size = hvd.size()
        self.models = [copy.deepcopy(model) for _ in range(size)]
        self.settings = settings
        self.weights = [p.detach().double().numpy() for p in model.parameters()]
        zeros = [np.zeros(w.shape) for w in self.weights]
        self.m, self.v = (
            [[z.copy() for z in zeros] for _ in range(size)] for _ in range(2)
        )

    def step(self, step: int) -> None:
        after = []
        for rank, model in enumerate(self.models):
            model.zero_grad()
            backward(model, step, rank)
            new = [w.copy() for w in self.weights]
            for i, p in enumerate(model.parameters()):
                m, v = self.m[rank][i], self.v[rank][i]
                g = p.grad.double().numpy()
                adam.reference_step(new[i], g, m, v, step + 1, **self.settings)
            after.append(new)
        for i, w in enumerate(self.weights):
            deltas = [(new[i] - w).astype(np.float32) for new in after]
            w += reference.adasum(deltas, HOSTS)
        with torch.no_grad():
            for model in self.models:
                for p, w in zip(model.parameters(), self.weights, strict=True):
                    p.copy_(torch.from_numpy(w))


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16", "float16"])
def case_delta_variant_reduces_the_masters(dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    decoupled = {"decoupled_weight_decay": True, "weight_decay": 1.0}
    outside = {"clip_delta_norm": 1e6}  # the change is formed outside the op
    nesterov = {"use_nesterov": True, "weight_decay": 0.1}
    for more, given in (({}, {}), ({}, outside), (nesterov, {}), (decoupled, {})):
        # With a small eps the first steps are sign-like and amplify rounding.
        settings = {"eps": 1e-2, **more}
        model = model_of(dtype)
        simulation = Simulation(model, lr=0.01, **settings)
        optimizer = wrapped(model, settings=settings, **given)
        for step in range(STEPS):
            train(optimizer, model, step, step + 1)
            simulation.step(step)
        check_equal(model.parameters(), [m.to(dtype) for m in masters(optimizer)])
        check_same_everywhere(model.float() if dtype != torch.float32 else model)
        # A gradient of the rounded model is rounded, too.
        tolerance = 2e-6 if dtype == torch.float32 else 2e-3
        check_equal(
            masters(optimizer),
            [torch.from_numpy(w).float() for w in simulation.weights],
            tolerance,
        )


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
def case_wrap_cells_around_it(dtype_name: str) -> None:
    """A cell steps as the distributed optimizer does, and with gradients that it is given."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    cells = {
        "adasum-grad": hvd.AdaSumByGradWrapCell,
        "adasum-delta": hvd.AdaSumByDeltaWeightWrapCell,
    }
    dtype = getattr(torch, dtype_name)
    for op, cell_class in cells.items():
        model, expected_model = model_of(dtype), model_of(dtype)
        expected = wrapped(expected_model, op)
        train(expected, expected_model, 0, STEPS)
        optimizer = hvd.AdamOffload(model.parameters(), 0.01, verbose=False)
        with pytest.warns(UserWarning, match="in parallel mode data_parallel"):
            cell = cell_class(optimizer, relaxed=True)
        for step in range(STEPS):
            backward(model, step)
            gradients = [p.grad.clone() for p in cell.parameters]
            result = cell(gradients)
        assert (op == "adasum-delta") == (result == tuple(model.parameters()))
        check_equal(model.parameters(), expected_model.parameters())
        check_equal(masters(cell.optimizer), masters(expected))


def case_memory_is_the_start_on_the_host_and_nothing_else() -> None:
    model = model_of(torch.bfloat16)
    elements = sum(p.numel() for p in model.parameters())
    extra = wrapped(model).extra_bytes()
    assert extra == {"device": 0, "host": 4 * elements if hvd.size() > 1 else 0}
    outside = wrapped(model_of(torch.bfloat16), clip_delta_norm=1.0)
    assert outside.extra_bytes() == {"device": 0, "host": 8 * elements}


def case_broadcast_reaches_the_masters() -> None:
    for dtype in DTYPES:
        model = model_of(dtype, seed=hvd.rank())
        optimizer = wrapped(model)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(optimizer, model, 0, 2)
        expected = model_of(dtype)
        train(wrapped(expected), expected, 0, 2)
        check_equal(model.parameters(), expected.parameters())
        # And again later, when the masters have been in use.
        with torch.no_grad():
            for p in model.parameters():
                p.add_(hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
        before = [p.detach().float().clone() for p in model.parameters()]
        train(optimizer, model, 2, 3)
        check_equal([p.float() for p in model.parameters()], before, 0.1)
    same = [p.detach().float().numpy().tobytes() for p in model.parameters()]
    assert len(set(hvd.allgather_object(same[0]))) == 1


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
def case_exact_resume_and_copies(dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    for local_steps in (1, 3):
        model = model_of(dtype)
        optimizer = wrapped(model, local_steps=local_steps)
        train(optimizer, model, 0, 4)
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        train(optimizer, model, 4, 9)
        file.seek(0)
        saved_model, saved = torch.load(file)
        again = model_of(dtype, seed=1)
        resumed = wrapped(again, local_steps=local_steps)
        again.load_state_dict(saved_model)
        resumed.load_state_dict(saved)
        train(resumed, again, 4, 9)
        check_equal(model.parameters(), again.parameters())
        check_equal(masters(optimizer), masters(resumed))
    with pytest.warns(UserWarning, match="AdamOffload: the copy of a Distributed"):
        model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    assert type(optimizer_copy) is hvd.AdamOffload
    check_equal(masters(optimizer), masters(optimizer_copy))
    again_copy = hvd.DistributedOptimizer(
        optimizer_copy, op="adasum-delta", local_steps=local_steps
    )
    train(optimizer, model, 9, 12)
    train(again_copy, model_copy, 9, 12)
    check_equal(masters(optimizer), masters(again_copy))


@pytest.mark.parametrize("op", ["adasum-grad", "average"])
def case_versions_show_reductions(op: str) -> None:
    """On a device an early copy of a gradient is kept while its version stays."""
    if hvd.size() == 1:
        pytest.skip("nothing is reduced")
    model = nn.Linear(40, 2, bias=False)
    optimizer = wrapped(model, op)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(1, 40) * (hvd.rank() + 1)).sum().backward()
        gradient = model.weight.grad
        version = gradient._version
        optimizer.synchronize()
        assert model.weight.grad is not gradient or gradient._version > version, step
        with optimizer.skip_synchronize():
            optimizer.step()


def case_counts_of_steps_are_a_ranks_own() -> None:
    """After an uneven join(), or an elastic job's restart, the delta variant goes on."""
    model = model_of(torch.float32)
    optimizer = wrapped(model)
    train(optimizer, model, 0, 1)
    for group in optimizer.param_groups:
        group["step"] += hvd.rank()
    for state in optimizer.state.values():
        state["step"] += hvd.rank()
    train(optimizer, model, 1, 3)
    hvd.check_replicas(model)


@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta"])
def case_reading_the_state_before_training(op: str) -> None:
    results = []
    for read in (False, True):
        model = model_of(torch.float32)
        optimizer = wrapped(model, op, lr=[0.01 / (1 + i) for i in range(STEPS)])
        if read:
            get_optimizer_state_dict(model, optimizer)
        train(optimizer, model, 0, STEPS)
        results.append(list(model.parameters()))
    check_equal(*results)


def case_broadcast_offloaded_state() -> None:
    model = model_of(torch.bfloat16)
    optimizer = wrapped(model)
    train(optimizer, model, 0, 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    moments = [s["exp_avg"] for s in optimizer.state.values()]
    digests = hvd.allgather_object([m.numpy().tobytes() for m in moments])
    assert all(digest == digests[0] for digest in digests)
    train(optimizer, model, 1, 3)
    check_equal(
        [p.detach().float() for p in model.parameters()],
        [m.bfloat16().float() for m in masters(optimizer)],
    )


@pytest.mark.parametrize(
    "options", ({"bucket_bytes": 64}, {"groups": 2}), ids=["bytes", "groups"]
)
def case_buckets_do_not_change_results(options: dict) -> None:
    expected_model = model_of(torch.bfloat16)
    expected = wrapped(expected_model)
    train(expected, expected_model, 0, STEPS)
    model = model_of(torch.bfloat16)
    optimizer = wrapped(model, **options)
    train(optimizer, model, 0, STEPS)
    check_equal(masters(optimizer), masters(expected))
    assert {g["step"] for g in optimizer.param_groups} == {STEPS}


def case_float16_on_the_wire_and_clipped_deltas() -> None:
    model = model_of(torch.bfloat16)
    optimizer = wrapped(model, compression=hvd.Compression.fp16, clip_delta_norm=1e-3)
    before = masters(optimizer)
    train(optimizer, model, 0, 1)
    moved = [a - b for a, b in zip(masters(optimizer), before, strict=True)]
    norm = torch.cat([m.flatten() for m in moved]).norm().item()
    assert 0.9e-3 < norm < 1.1e-3, norm
    check_same_everywhere(model.float())


def case_frozen_parameters_come_and_go() -> None:
    model = model_of(torch.bfloat16)
    optimizer = wrapped(model)
    train(optimizer, model, 0, 1)
    model[2].weight.requires_grad_(False)
    frozen = model[2].weight.detach().clone()
    train(optimizer, model, 1, 2)
    assert torch.equal(frozen, model[2].weight)
    model[2].weight.requires_grad_(True)
    train(optimizer, model, 2, 4)
    assert not torch.equal(frozen, model[2].weight)
    check_same_everywhere(model.float())


def case_a_step_that_fails_leaves_masters_and_parameters() -> None:
    model = model_of(torch.bfloat16)
    optimizer = wrapped(model)
    if hvd.size() == 1:
        pytest.skip("a single rank keeps no start")
    before = [p.detach().clone() for p in model.parameters()]
    masters = [optimizer.master(p).clone() for p in model.parameters()]
    failing = mock.patch.object(
        optimizer._adasum, "_next_round", side_effect=RuntimeError
    )
    backward(model, 0)
    with failing, pytest.raises(RuntimeError):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert all(map(torch.equal, masters, map(optimizer.master, model.parameters())))


def case_grad_scaler_skips_on_all_ranks() -> None:
    model = model_of(torch.bfloat16)
    optimizer = wrapped(model)
    scaler = hvd.GradScaler("cpu", init_scale=64.0)
    images, labels = batch_of(hvd.rank(), 0)
    for step in range(3):
        optimizer.zero_grad()
        output = model(images.bfloat16()).float()
        scaler.scale(functional.cross_entropy(output, labels)).backward()
        if step == 1 and hvd.rank() == 0:
            model[0].bias.grad[0] = float("inf")
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = any(
            not torch.equal(a, b)
            for a, b in zip(before, model.parameters(), strict=True)
        )
        assert moved == (step != 1)
    assert scaler.get_scale() == 32.0
    check_same_everywhere(model.float())


def case_new_groups_and_torch_exchange() -> None:
    model = model_of(torch.float32)
    optimizer = wrapped(model, settings={"torch_eps": True})
    train(optimizer, model, 0, 2)
    extra = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [extra]})
    optimizer.zero_grad()
    backward(model, 2)
    (extra.float() ** 2 * (1 + hvd.rank())).sum().backward()
    optimizer.step()
    assert (extra < 1).all()
    plain = torch.optim.Adam([{"params": model.parameters()}, {"params": [extra]}])
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    *others, of_extra = (
        float(plain.state[p]["step"]) for p in [*model.parameters(), extra]
    )
    assert set(others) == {3.0} and of_extra == 1.0
    optimizer.load_state_dict(plain.state_dict())
    train(optimizer, model, 3, 4)
    check_same_everywhere(model)
