"""torch's `AdamOffload` with schedulers, scalers, closures, locks, and changes by others."""

from __future__ import annotations

import doctest
import itertools
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from adasum_hvd.offload import adam, cores, optimizer, state
from adasum_hvd.offload.optimizer import AdamOffload
from tests.unit.offload_parts import (
    Reference,
    equal,
    offload,
    parameters,
    set_gradients,
    train,
)

pytestmark = pytest.mark.filterwarnings("error")

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


def test_frozen_parameters_and_new_groups_count_their_own_steps():
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
    references = Reference([b], lr=0.01), Reference([c], lr=0.1)
    for reference in references:
        reference.step()
    optimizer.step()
    for reference in references:
        reference.check(reference.params)
    saved = optimizer.state_dict()["state"]
    assert [float(saved[place]["step"]) for place in range(3)] == [4.0, 1.0, 1.0]
    assert {g["step"] for g in optimizer.param_groups} == {4}  # of schedules


def test_closure_zero_grad_and_accumulation():
    (p,) = parameters(shapes=[(9,)])
    reference, optimizer = Reference([p]), offload([p], 0.01)
    for set_to_none, step in itertools.product((True, False), range(3)):
        optimizer.zero_grad(set_to_none=set_to_none)

        def closure(step=step):
            halves = [(p**2).sum() * (step + 1) for _ in range(2)]
            for half in halves:
                half.backward()
            return sum(halves).item()

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


@pytest.mark.parametrize(
    "settings", [{"beta1": 0.5, "beta2": 0.75}, {"beta1": 0.25, "betas": [0.5, 0.75]}]
)
def test_betas_as_torch_names_them(settings):
    params, others = parameters(), parameters()
    optimizer = offload(params, 0.01, **settings)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    train(optimizer, params, 0, 1)
    train(offload(others, 0.01, betas=(0.5, 0.75)), others, 0, 1)
    assert equal(params, others)


def test_states_of_other_algorithms_are_refused():
    params = parameters(shapes=[(3,)])
    other = torch.optim.SGD(params, 0.1, momentum=0.9)
    set_gradients(params, 0)
    other.step()
    with pytest.raises(ValueError, match=r"parameter 0: expected .*'momentum_buffer'"):
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
    with pytest.raises(RuntimeError, match="expected dense gradients"):
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


@pytest.mark.parametrize(
    ("bound", "launcher", "ranks", "expected"),
    [(2, 8, 4, 2), (8, 64, 2, 8), (8, 8, 4, 2), (16, 32, 8, 4), (1, 2, 8, 1), (6, 2, 1, 6)],
    ids=["bound", "two of few", "unbound", "to a socket", "crowded", "alone"],
)  # fmt: skip
def test_threads_are_the_cores_of_the_rank(
    monkeypatch, bound, launcher, ranks, expected
):
    for name in cores.LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    if ranks > 1:
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(ranks))
    monkeypatch.setattr(cores, "cores_of_launcher", lambda _: launcher)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert (cores.launched()[1], cores.thread_budget()) == (ranks, expected)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cores.thread_budget() == 1


def run_bound(program: str, variables: dict[str, str]) -> subprocess.CompletedProcess:
    """Run a program in a shell's place: bound to one core, below a process that is, too."""
    first = min(os.sched_getaffinity(0))
    wrapper = (
        f"import os, subprocess, sys; os.sched_setaffinity(0, {{{first}}});"
        "sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    )
    return subprocess.run(
        [sys.executable, "-c", wrapper, program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_launcher_is_found_above_a_wrapper():
    program = (  # torch takes seconds, and is not used here
        "import sys, types; sys.modules['torch'] = types.ModuleType('torch');"
        "from adasum_hvd.offload import cores;"
        "print(cores.cores_of_rank(), cores.cores_of_launcher('LOCAL_WORLD_SIZE'))"
    )
    sizes = dict.fromkeys(cores.LOCAL_SIZES, "") | {"LOCAL_WORLD_SIZE": "2"}
    found = run_bound(program, sizes).stdout.split()
    assert found == ["1", str(len(os.sched_getaffinity(0)))]


def test_torchruns_one_thread_gives_one_hint(monkeypatch, caplog):
    monkeypatch.setattr(cores, "cores_of_rank", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")

    def logged(rank, **settings):
        caplog.clear()
        monkeypatch.setenv("RANK", rank)
        AdamOffload(parameters(shapes=[(4,)]), **settings)
        return [record.getMessage() for record in caplog.records]

    _, hint = logged("0")
    assert hint.endswith(
        "8 cores, because torchrun sets OMP_NUM_THREADS=1; pass num_threads=8"
    )
    assert len(logged("0", num_threads=8)) == 1
    assert not logged("1") and not logged("0", verbose=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert len(logged("0")) == 1


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
    model.weight.data.fill_(5.0)  # torch does not count this change
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


# ---- parameters on a device, which is pretended ----


class OnDevice(nn.Parameter):
    """A parameter on the CPU that says it is on a CUDA device."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


class Copies:
    """In place of `cuda.Transfers`: copies at once, and notes what was asked for."""

    def __init__(self):
        self.log, self.buffers = [], {}

    def watch(self, param):
        self.log.append(("watch", param.numel()))

    def collect(self, params, unscaled):
        self.log.append(("collect", [p.numel() for p in params], unscaled))

    def buffer(self, param):
        return self.buffers.setdefault(param, torch.empty(param.shape).to(param.dtype))

    def gradient(self, param):
        self.log.append(("gradient", param.numel()))
        return self.buffer(param).copy_(param.grad)

    def send(self, param):
        self.log.append(("send", param.numel()))
        param.copy_(self.buffer(param))

    def finish(self):
        self.log.append(("finish",))


def on_device(dtype) -> list[nn.Parameter]:
    shapes = [(7,), (2003,), (33, 5)]
    return [OnDevice(p.detach()) for p in parameters(dtype=dtype, shapes=shapes)]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_parameters_travel_once_each_and_in_order(monkeypatch, dtype, nesterov):
    monkeypatch.setattr(state, "Transfers", Copies)
    params = on_device(dtype)
    plain = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = offload(params, 0.01, use_nesterov=nesterov)
    expected = offload(plain, 0.01, use_nesterov=nesterov)
    big, small = params[1].numel(), params[2].numel()
    assert optimizer._transfers.log == [("watch", 7), ("watch", big), ("watch", small)]
    assert optimizer.plan().pinned == sum(p.nbytes for p in params)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(plain, step)
        del optimizer._transfers.log[:]
        optimizer.step()
        expected.step()
        log = optimizer._transfers.log
        assert log[0] == ("collect", [small, big, 7], False)
        for word in ("gradient", "send"):
            assert [n for w, n in log[1:-1] if w == word] == [small, big, 7]
        assert log[-1] == ("finish",)
    assert equal(map(optimizer.master, params), map(expected.master, plain))
    assert equal(params, plain)


def test_device_parameters_that_are_held_back(monkeypatch):
    monkeypatch.setattr(state, "Transfers", Copies)
    params = on_device(torch.bfloat16)
    optimizer = offload(params, 0.1)
    before = [p.detach().clone() for p in params]
    set_gradients(params, 0)
    optimizer.hold_back()
    optimizer.step()
    assert equal(params, before)
    assert not [entry for entry in optimizer._transfers.log if entry[0] == "send"]
    optimizer.publish()
    assert not equal(params, before)
    assert equal(params, [optimizer.master(p).bfloat16() for p in params])


# ---- in general ----


def test_examples_run():
    for module in (adam, optimizer):
        outcome = doctest.testmod(module)
        assert outcome.attempted > 0
        assert outcome.failed == 0
