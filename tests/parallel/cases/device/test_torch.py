"""CUDA tensors, optimizers and AMP on every rank of a real job; ranks may share a device.

ADASUM_TEST_DEVICE=cpu runs the same on the host, to try the cases themselves.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest
import torch
from torch import nn

import adasum_hvd.torch as hvd
from adasum_hvd import reference
from tests.parallel.cases.torch.test_ops import (
    HOSTS,
    SIZES,
    TOLERANCE,
    note_hosts,
    tensor_of,
)

DEVICE = os.environ.get("ADASUM_TEST_DEVICE", "cuda")
EVENS: hvd.ProcessSet


def start() -> None:
    global EVENS
    if DEVICE == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    if hvd.size() > 1:
        EVENS = hvd.add_process_set(range(0, hvd.size(), 2))
    note_hosts()


def on_device(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return tensor_of(rank, size, dtype, seed).to(DEVICE)


def expected(size: int, dtype: torch.dtype, ranks, seed: int = 0) -> np.ndarray:
    inputs = [on_device(rank, size, dtype, seed).cpu() for rank in ranks]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    arrays = [tensor.to(wide).numpy() for tensor in inputs]
    return reference.adasum(arrays, [HOSTS[rank] for rank in ranks])


def check_close(got: torch.Tensor, expected: np.ndarray) -> None:
    assert got.device.type == DEVICE
    if got.numel():
        error = np.abs(got.double().cpu().numpy() - expected).max()
        largest = max(np.abs(expected).max(), 0.3 if got.numel() < 100 else 0.0)
        assert error <= TOLERANCE[got.dtype] * largest, f"error {error / largest}"


def digest_of(tensors) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(
            tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def check_same_everywhere(tensors) -> None:
    assert len(set(hvd.allgather_object(digest_of(tensors)))) == 1


def case_every_dtype_and_size() -> None:
    for dtype in TOLERANCE:
        results = []
        for size in SIZES:
            mine = on_device(hvd.rank(), size, dtype)
            before = mine.clone()
            result = hvd.allreduce(mine, op=hvd.Adasum, name=f"one.{dtype}.{size}")
            assert torch.equal(mine, before), "the input was changed"
            check_close(result, expected(size, dtype, range(hvd.size())))
            in_place = hvd.allreduce_(mine, op=hvd.Adasum, name=f"in.{dtype}.{size}")
            assert in_place is mine
            assert torch.equal(result, mine), "in place differs"
            results.append(result)
        tensors = [on_device(hvd.rank(), size, dtype) for size in SIZES]
        grouped = hvd.grouped_allreduce(tensors, op=hvd.Adasum, name=f"all.{dtype}")
        assert all(torch.equal(a, b) for a, b in zip(results, grouped, strict=True))
        check_same_everywhere(results)


def case_factors() -> None:
    """Horovod's division by local_size is not there."""
    mine = on_device(hvd.rank(), 5000, torch.float32, 1)
    plain = hvd.allreduce(mine, op=hvd.Adasum)
    scaled = hvd.allreduce(mine, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=3)
    torch.testing.assert_close(scaled, plain * 1.5, rtol=1e-6, atol=0)


def case_strided_views() -> None:
    mine = on_device(hvd.rank(), 10_000, torch.float32, 2)
    whole = hvd.allreduce(mine, op=hvd.Adasum)
    table = torch.zeros(100, 100, device=DEVICE)
    table.copy_(mine.view(100, 100).t())
    transposed = hvd.allreduce(table.t(), op=hvd.Adasum)
    assert torch.equal(transposed.reshape(-1), whole)
    shifted = torch.zeros(10_001, device=DEVICE)  # an address that no vector load takes
    shifted[1:] = mine
    assert torch.equal(hvd.allreduce(shifted[1:], op=hvd.Adasum), whole)


def case_kernels_before_and_after_the_reduction() -> None:
    """The reduction waits for what makes its input; what uses its result waits for it."""
    for k in range(5):
        base = on_device(hvd.rank(), 1 << 20, torch.float32, 300 + k)
        expected = hvd.allreduce(base * 2, op=hvd.Adasum, name=f"early.{k}") + 1
        late = torch.full_like(base, -1.0)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000_000)  # 0.1 s: many of Horovod's cycles
        late.copy_(base * 2)
        handle = hvd.allreduce_async_(late, op=hvd.Adasum, name=f"late.{k}")
        assert torch.equal(hvd.synchronize(handle) + 1, expected)


def case_cancelling_pairs() -> None:
    noise = 1e-7
    inputs = [
        (-1) ** rank * on_device(rank // 2, 50_000, torch.float32, 4)
        + noise * on_device(rank, 50_000, torch.float32, 5)
        for rank in range(hvd.size())
    ]
    result = hvd.allreduce(inputs[hvd.rank()], op=hvd.Adasum)
    expected = reference.adasum([tensor.cpu().numpy() for tensor in inputs], HOSTS)
    error = np.abs(result.cpu().numpy() - expected).max() / np.abs(expected).max()
    assert error <= 1e-6 + 10 * 2**-52 / noise


def case_process_set() -> None:
    if hvd.size() > 1 and hvd.rank() % 2 == 0:
        mine = on_device(hvd.rank(), 9000, torch.float32, 6)
        result = hvd.allreduce(mine, op=hvd.Adasum, process_set=EVENS)
        check_close(result, expected(9000, torch.float32, range(0, hvd.size(), 2), 6))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))
    return layers.to(DEVICE)


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    features = torch.randn(16, 20, generator=generator)
    return features.to(DEVICE), torch.randn(16, 5, generator=generator).to(DEVICE)


def trained(op, rank: int) -> list[torch.Tensor]:
    """Return the weights after ten steps of Adam."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), 0.01), model.named_parameters(), op=op
    )
    for step in range(10):
        features, targets = batch_of(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("op_name", ["AdasumGrad", "AdasumDelta"])
def case_optimizers_keep_replicas_together(op_name: str) -> None:
    op = getattr(hvd, op_name)
    weights = trained(op, hvd.rank())
    assert all(torch.isfinite(w).all() for w in weights)
    check_same_everywhere(weights)
    start_weights = [p.detach() for p in model_of().parameters()]
    moved = [not torch.equal(w, s) for w, s in zip(weights, start_weights, strict=True)]
    assert all(moved)


def case_delta_forms_its_change_in_the_op() -> None:
    before = hvd.counters()
    trained(hvd.AdasumDelta, hvd.rank())
    after = hvd.counters()
    reduced = after.delta_tensors - before.delta_tensors
    assert reduced == (10 * 4 if hvd.size() > 1 else 0)


def case_loss_scaling() -> None:
    """An overflow on one rank is skipped by all; then training goes on."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.05),
        model.named_parameters(),
        op=hvd.AdasumGrad,
    )
    scaler = hvd.GradScaler(DEVICE, init_scale=2.0**10)
    for step in range(8):
        features, targets = batch_of(step, hvd.rank())
        optimizer.zero_grad()
        dtype = torch.float16 if DEVICE == "cuda" else torch.bfloat16
        with torch.autocast(DEVICE, dtype):
            loss = nn.functional.mse_loss(model(features), targets)
        if step == 3 and hvd.rank() == 0:
            loss = loss * float("inf")
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, model.parameters(), strict=True)
        changed = any(not torch.equal(b, p) for b, p in pairs)
        assert changed == (step != 3)
    check_same_everywhere(list(model.parameters()))


def case_offloaded_adam() -> None:
    """AdamOffload inside the distributed optimizer: the same replicas everywhere."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        hvd.AdamOffload(model.parameters(), 0.01),
        model.named_parameters(),
        op=hvd.AdasumGrad,
    )
    for step in range(5):
        features, targets = batch_of(step, hvd.rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
    check_same_everywhere(list(model.parameters()))
