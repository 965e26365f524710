"""AdamOffload on CUDA: transfers, overlap, and what is kept where."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from adasum_hvd.adam_offload import AdamOffload
from adasum_hvd.offload.cuda import Transfers, pinned
from tests.unit import offload_parts

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)

STEPS = 20
SHAPES = [(), (0,), (7,), (300, 500), (1 << 21,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def parameters(dtype=torch.float32, shapes=SHAPES, device="cuda") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(s, generator=generator).to(device, dtype))
        for s in shapes
    ]


def backward(params, step: int, passes: int = 1, scale: float = 1.0) -> None:
    """Real backward passes, so that the hooks run; gradients of many magnitudes."""
    generator = torch.Generator().manual_seed(1000 + step)
    for _ in range(passes):
        loss = 0.0
        for p in params:
            factor = torch.randn(p.shape, generator=generator)
            factor *= 10.0 ** torch.randint(-4, 1, p.shape, generator=generator)
            loss = loss + (p * factor.to(p.device, p.dtype) * scale).float().sum()
        loss.backward()


class Reference(offload_parts.Reference):
    """The float64 definition on copies of the parameters."""

    def check_masters(self, optimizer):
        masters = [optimizer.master(p) for p in self.params]
        for p, master in zip(self.params, masters, strict=True):
            assert master.device.type == "cpu"
            assert torch.equal(p.detach().cpu(), master.to(p.dtype))
        self.check(masters)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_trajectory(dtype, nesterov):
    params = parameters(dtype)
    reference = Reference(params, use_nesterov=nesterov)
    optimizer = AdamOffload(params, 0.01, use_nesterov=nesterov)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(params, step)
        reference.step()
        optimizer.step()
    reference.check_masters(optimizer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["clip", "accumulate", "replace", "both"])
def test_gradients_that_changed_after_they_were_copied(what, dtype):
    params = parameters(dtype)
    reference, optimizer = Reference(params), AdamOffload(params, 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(params, step, passes=1 if what == "clip" else 3)
        # Every second step only, so that early copies are not given up.
        if what in ("clip", "both") and step % 2:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        if what == "replace" and step % 2:
            for p in params:
                p.grad = p.grad * 0.5
        reference.step()
        optimizer.step()
    reference.check_masters(optimizer)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_scaler(dtype, unscale):
    unscale = unscale and dtype != torch.float16  # which torch's unscale_ refuses
    params = parameters(dtype, shapes=[(64,), (100, 100)])
    plain = [nn.Parameter(p.detach().float().cpu()) for p in params]
    optimizer, expected = AdamOffload(params, 0.01), AdamOffload(plain, 0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0, growth_interval=1000)
    for step in range(6):
        optimizer.zero_grad()
        loss = sum((p.float() * (i + 1 + step)).mean() for i, p in enumerate(params))
        scaler.scale(loss).backward()
        for p, q in zip(params, plain, strict=True):
            q.grad = p.grad.float().cpu() / scaler.get_scale()
        if step == 3:
            params[0].grad[0] = float("inf")
        if unscale:  # changes gradients in place and no version counter
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step != 3:
            expected.step()
    assert scaler.get_scale() == 64.0
    assert optimizer.param_groups[0]["step"] == 5
    for p, q in zip(params, plain, strict=True):
        assert (optimizer.master(p) - q).abs().max() <= 1e-6


def test_scaler_does_not_cost_the_early_copies():
    params = parameters(torch.bfloat16, shapes=[(1000,)])
    optimizer = AdamOffload(params, 0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale((params[0].float() * step).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer._transfers._stale_steps == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_kept_on_the_device(dtype):
    params = parameters(dtype, shapes=[(1000, 1000), (3,)])
    optimizer = AdamOffload(params, 0.01)
    backward(params, 0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    tensors = [t for s in optimizer.state.values() for t in s.values()]
    assert {t.device.type for t in tensors} == {"cpu"}
    plan = optimizer.plan()
    buffers = optimizer._transfers._buffers.values()
    assert plan.pinned == sum(buffer.nbytes for buffer in buffers)
    counts = 4 * len(params)
    assert plan.moments + plan.masters + counts == sum(t.nbytes for t in tensors)


def test_state_stays_on_the_host_after_loading_and_copying():
    params = parameters(torch.bfloat16, shapes=[(64,), (10, 10)])
    optimizer = AdamOffload(params, 0.01)
    for step in range(3):
        optimizer.zero_grad()
        backward(params, step)
        optimizer.step()
    saved = copy.deepcopy((params, optimizer.state_dict()))
    on_device = copy.deepcopy(optimizer.state_dict())
    for state in on_device["state"].values():
        state.update({k: v.cuda() for k, v in state.items()})
    resumed_params = [nn.Parameter(p.detach().clone()) for p in saved[0]]
    resumed = AdamOffload(resumed_params, 0.01)
    resumed.load_state_dict(on_device)
    copied_params, copied = copy.deepcopy((params, optimizer))
    for which, of in (
        (optimizer, params),
        (resumed, resumed_params),
        (copied, copied_params),
    ):
        which.zero_grad()
        backward(of, 3)
        which.step()
        tensors = [t for s in which.state.values() for t in s.values()]
        assert {t.device.type for t in tensors} == {"cpu"}
        assert {t.dtype for t in tensors} == {torch.float32}
        for p, q in zip(params, of, strict=True):
            assert torch.equal(p, q)


def test_layouts_and_parameters_on_both_devices():
    params = [
        nn.Parameter(torch.randn(6, 8, device="cuda").t()),
        nn.Parameter(torch.randn(5)),
        nn.Parameter(torch.randn(4, 4, 3, 3, device="cuda").to(memory_format=torch.channels_last)),
    ]  # fmt: skip
    reference, optimizer = Reference(params), AdamOffload(params, 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for p in params:
            (p * (-1.0) ** step / (1 + step) * torch.ones_like(p)).sum().backward()
        reference.step()
        optimizer.step()
    reference.check_masters(optimizer)


def test_step_returns_when_parameters_are_back():
    params = parameters(shapes=[(1 << 22,)] * 4)
    optimizer = AdamOffload(params, 0.01)
    for step in range(5):
        optimizer.zero_grad()
        backward(params, step)
        optimizer.step()
        for p in params:  # on a stream of its own, without waiting for anything
            with torch.cuda.stream(torch.cuda.Stream()):
                assert torch.equal(p.detach().cpu(), optimizer.master(p))


def test_a_parameter_that_others_changed_counts():
    params = parameters(torch.bfloat16, shapes=[(64,)])
    optimizer = AdamOffload(params, 1e-4)
    backward(params, 0)
    optimizer.step()
    with torch.no_grad():
        params[0].fill_(3.0)
    optimizer.step()
    assert (optimizer.master(params[0]) - 3).abs().max() < 2e-4


def test_held_back_weights_are_published():
    params = parameters(torch.bfloat16, shapes=[(64,)])
    optimizer = AdamOffload(params, 0.1)
    backward(params, 0)
    before = params[0].detach().clone()
    optimizer.hold_back()
    optimizer.step()
    assert torch.equal(params[0], before)
    optimizer.publish()
    assert torch.equal(params[0].detach().cpu(), optimizer.master(params[0]).bfloat16())


def test_pinned_memory_is_exact_and_given_back():
    like = torch.empty(5, 1001, dtype=torch.float16, device="cuda")
    buffer = pinned(like)
    assert buffer.is_pinned()
    assert buffer.untyped_storage().nbytes() == like.nbytes
    address = buffer.data_ptr()
    del buffer
    again = [pinned(like) for _ in range(100)]
    assert all(tensor.is_pinned() for tensor in again)
    assert address
    assert pinned(torch.empty(0, device="cuda")).numel() == 0


def test_early_copies_are_given_up_where_they_are_always_outdated():
    params = parameters(shapes=[(64,)])
    optimizer = AdamOffload(params, 0.01)
    for step in range(4):
        optimizer.zero_grad()
        backward(params, step)
        started = bool(optimizer._transfers._copied)
        assert started == (step < 2)
        torch.nn.utils.clip_grad_norm_(params, 1e-3)
        optimizer.step()


def test_hooks_end_with_the_optimizer():
    params = parameters(shapes=[(64,)])
    transfers = Transfers()
    transfers.watch(params[0])
    del transfers
    backward(params, 0)  # the hook finds nobody and does nothing
    assert params[0].grad is not None
