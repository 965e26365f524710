"""`AdasumMonitor` on torch optimizers, against the reference on the same tensors."""

from __future__ import annotations

import copy
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import adasum_hvd.torch as hvd
from adasum_hvd.horovod import binding
from adasum_hvd.torch import wire
from tests.parallel.harness import expected_records, noise
from tests.parallel.harness.models import (
    loss_of,
    model_of,
    sgd,
    weights,
)
from tests.parallel.harness.torch_training import (
    HOSTS,
    start,
)

STEPS = 3
__all__ = ["start"]


def tensors_of(model: nn.Module, step: int, op: str) -> dict[str, list[np.ndarray]]:
    """Return what all ranks reduce in a step, by name and rank."""
    found: dict[str, list[np.ndarray]] = {n: [] for n, _ in model.named_parameters()}
    for rank in range(hvd.size()):
        one = copy.deepcopy(model)
        one.zero_grad()
        loss_of(one, rank, step).backward()
        if op == "adasum-delta":
            torch.optim.SGD(one.parameters(), 0.05).step()
        pairs = zip(model.parameters(), one.named_parameters(), strict=True)
        for old, (name, new) in pairs:
            tensor = new.grad if op == "adasum-grad" else new.detach() - old.detach()
            found[name].append(tensor.numpy())
    return found


def run(op: str, every: int, **options) -> tuple[list, list, torch.Tensor]:
    """Return the records, what they must be of, and the weights at the end."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.05),
        model.named_parameters(),
        op=op,
        **options,
    )
    records: list = []
    monitor = hvd.AdasumMonitor(optimizer, every, records.append) if every else None
    reduced = []
    for step in range(STEPS):
        reduced.append(tensors_of(model, step, op))
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    if monitor is not None:
        monitor.close()
    return records, reduced, weights(model)


@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta"])
def case_monitor_records_both_variants(op: str) -> None:
    *_, plain = run(op, 0)
    every = 1 if op == "adasum-grad" else 2
    records, reduced, trained = run(op, every, bucket_bytes=2000)
    assert torch.equal(trained, plain), "the monitor has changed a bit"
    if hvd.rank() or hvd.size() == 1:
        assert not records
        return
    steps = [*range(every, STEPS + 1, every)]
    assert [record["step"] for record in records] == steps
    path = binding.transport_description(wire.LIBRARY)
    for record in records:
        assert record["ranks"] == hvd.size()
        vectors = reduced[record["step"] - 1]
        expected_records.check(record["tensors"], vectors, HOSTS, path)


def case_monitor_names_what_travels_in_two_bytes() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        records, reduced, _ = run("adasum-grad", 2, compression=compression)
        for record in records:
            vectors = reduced[record["step"] - 1]
            path = binding.transport_description(wire.LIBRARY)
            expected_records.check(record["tensors"], vectors, HOSTS, path, 0.05)


class _Closed:
    """A sink that counts how often it is closed."""

    count = 0

    def __init__(self, record: dict) -> None:
        pass

    @classmethod
    def close(cls) -> None:
        cls.count += 1


def case_monitor_follows_parameters_and_leaves_out_what_none_has() -> None:
    model = model_of()
    unused = nn.Parameter(torch.ones(3))
    named = [*model.named_parameters(), ("unused", unused)]
    optimizer = hvd.DistributedOptimizer(
        sgd([p for _, p in named]), named, op=hvd.AdasumGrad
    )
    folder = Path(tempfile.mkdtemp())
    monitors = [
        hvd.AdasumMonitor(optimizer, 1, folder / "run.jsonl"),
        hvd.AdasumMonitor(optimizer, 3, [folder / "other.jsonl", _Closed]),
    ]
    for step in range(6):
        if step == 3:
            model[0].weight.requires_grad_(False)
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        if step == 4:
            monitors[0].close()  # the other goes on
    monitors[1].close()
    if hvd.rank() or hvd.size() == 1:
        assert not list(folder.iterdir())
        return
    assert _Closed.count == 1
    lines = (folder / "run.jsonl").read_text().splitlines()
    records = {one["step"]: one["tensors"] for one in map(json.loads, lines)}
    assert set(records) == {1, 2, 3, 5}  # what was asked for in step 4 has gone
    assert list(records[3]) == [name for name, _ in model.named_parameters()]
    assert list(records[5]) == list(records[3])[1:]
    others = (folder / "other.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in others] == [3, 6]
    assert json.loads(others[0])["tensors"] == records[3]


@pytest.mark.parametrize(
    ("ours", "first"), [(True, False), (True, True), (False, True)]
)
def case_monitor_divides_by_the_scale_of_the_loss(ours: bool, first: bool) -> None:
    def record(scale: float) -> dict:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), op=hvd.AdasumGrad
        )
        make = hvd.GradScaler if ours else torch.amp.GradScaler
        scaler = make("cpu", init_scale=scale)
        records: list = []
        given = {} if ours else {"scaler": scaler}
        monitor = hvd.AdasumMonitor(optimizer, 1, records.append, **given)
        scaler.scale(loss_of(model, hvd.rank(), 0)).backward()
        if first:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
        with optimizer.skip_synchronize() if first else nullcontext():
            scaler.step(optimizer)
        scaler.update()
        monitor.close()
        return records[0]["tensors"] if records else {}

    assert record(1024.0) == record(1.0)


def case_the_noise_scale_is_that_of_per_example_gradients() -> None:
    model, inputs, labels = noise.model_and_examples()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.0),
        model.named_parameters(),
        op=hvd.AdasumGrad,
    )
    records: list = []
    monitor = hvd.AdasumMonitor(optimizer, 1, records.append)
    for step in range(noise.steps(hvd.size())):
        drawn = noise.draw(hvd.rank(), step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[drawn]), labels[drawn]).backward()
        optimizer.step()
    monitor.close()
    if records:
        noise.check(records, noise.direct_scale(model, inputs, labels))
    assert bool(records) == (hvd.rank() == 0 and hvd.size() > 1)


def case_monitor_refuses() -> None:
    model = model_of()
    average = hvd.DistributedOptimizer(sgd(model.parameters()))
    with pytest.raises(ValueError, match="an AdaSum op, but got op=Average"):
        hvd.AdasumMonitor(average, 1, [])
    with pytest.raises(TypeError, match="from DistributedOptimizer or an AdasumState"):
        hvd.AdasumMonitor(sgd(model.parameters()), 1, [])
    if hvd.size() == 1:
        return
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum)
    with pytest.raises(ValueError, match=rf"every=2 on rank 1 .*rank {hvd.rank()}\)"):
        hvd.AdasumMonitor(optimizer, 1 + min(hvd.rank(), 1), [])
    with pytest.raises(ValueError, match=r"an integer >= 1, but got 0 \(on rank 0"):
        hvd.AdasumMonitor(optimizer, hvd.rank() and 1, [])
    with pytest.raises(TypeError, match=r"expected paths.*got 7 \(on rank 0, seen by"):
        hvd.AdasumMonitor(optimizer, 1, 7)
