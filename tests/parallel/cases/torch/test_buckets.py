"""The memory of the torch optimizer's buckets: gradients are views of it, ranks share it."""

from __future__ import annotations

import copy
import gc
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import adasum_hvd.torch as hvd
from adasum_hvd.horovod import binding
from adasum_hvd.torch.wire import LIBRARY
from tests.parallel.harness.models import (
    loss_of,
    model_of,
    wide_model,
)
from tests.parallel.harness.processes import shared_mappings
from tests.parallel.harness.torch_training import (
    STEPS,
    check_equal,
    check_same_everywhere,
    distributed,
)
from tests.parallel.harness.torch_training import start as start


def case_gradients_are_views_of_buckets() -> None:
    """Without a copy back, and without one in where they are kept; the same weights as with."""
    if hvd.size() == 1:
        pytest.skip("one rank has no buckets")
    models = [model_of(), model_of()]
    optimizers = [distributed(model, hvd.AdasumGrad) for model in models]
    for step in range(STEPS):
        addresses = [p.grad.data_ptr() if step else 0 for p in models[0].parameters()]
        optimizers[0].zero_grad(set_to_none=False)
        optimizers[1].zero_grad(set_to_none=True)
        assert all(p.grad is None for p in models[1].parameters())
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            memory = {
                b.flat.untyped_storage().data_ptr()
                for b in optimizer._adasum.flat_buckets
            }
            for parameter in model.parameters():
                assert parameter.grad.untyped_storage().data_ptr() in memory
        kept = [p.grad.data_ptr() for p in models[0].parameters()]
        assert step == 0 or kept == addresses
    check_equal(models[0], models[1], 0)
    check_same_everywhere(models[0])
    optimizers[0].zero_grad(set_to_none=False)
    loss_of(models[0], hvd.rank(), 0).backward()
    next(models[0].parameters()).grad.mul_(2)
    with pytest.raises(RuntimeError, match="expected as backward has left it"):
        optimizers[0].step()
    optimizers[0].zero_grad()


def case_gradients_keep_their_parameters_layout() -> None:
    """A view of the bucket would be of another one, on which fused optimizers are slow."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    model = model.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    optimizer = distributed(model, hvd.AdasumGrad)
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for one in (model, plain):
        one(images).sum().backward()
    optimizer.step()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad.stride() == other.grad.stride()
        # All ranks had the same gradient, which is then its own AdaSum.
        assert torch.equal(parameter.grad, other.grad)


def case_buckets_give_their_memory_back() -> None:
    """Descriptors and mapped memory, of this rank's and of the others' buckets."""

    def held() -> tuple[int, int]:
        return shared_mappings(), len(list(Path("/proc/self/fd").iterdir()))

    seen = []
    for _ in range(8):
        model = nn.Linear(700, 700)  # more than every rank reduces by itself
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = distributed(model, hvd.AdasumGrad)
        model(torch.ones(1, 700)).sum().backward()
        optimizer.step()
        seen.append(held())
        del model, optimizer
        gc.collect()
    assert max(seen[4:]) <= max(seen[:4]), seen


def case_many_tensors_are_staged_a_window_at_a_time() -> None:
    """64 MB, of which no more than 18 are copied to memory that ranks share at once."""

    def mapped() -> dict[str, int]:
        sizes = {}
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "memfd:adasum_hvd" in line:
                span, _, _, _, inode, *_ = line.split()
                first, last = (int(end, 16) for end in span.split("-"))
                sizes[inode] = last - first
        return sizes

    if hvd.size() == 1 or "network" in binding.transport_description(LIBRARY):
        pytest.skip("needs ranks that share memory")
    before = mapped()
    torch.manual_seed(hvd.rank())
    tensors = [torch.randn(1 << 18) for _ in range(64)]
    together = hvd.grouped_allreduce(tensors, op=hvd.AdasumGrad)
    new = [size for inode, size in mapped().items() if inode not in before]
    assert max(new, default=0) <= 20 << 20, new
    for tensor, reduced in list(zip(tensors, together, strict=True))[::9]:
        assert torch.equal(hvd.allreduce(tensor, op=hvd.AdasumGrad), reduced)


def case_a_round_that_is_dropped_changes_no_gradient() -> None:
    """A parameter is frozen between backward and step: what was under way is reduced anew."""
    ops = (hvd.Sum, hvd.Average, hvd.AdasumGrad)
    for op, make in product(ops, (model_of, wide_model)):
        results = []
        for set_to_none in (True, False):
            model = make()
            optimizer = distributed(model, op, lr=0.0)
            first = next(model.parameters())
            for step in range(2):
                optimizer.zero_grad(set_to_none)
                loss_of(model, hvd.rank(), step).backward()
                if step:
                    first.requires_grad_(False)
                optimizer.step()
            results.append([p.grad for p in model.parameters() if p is not first])
        for mine, other in zip(*results, strict=True):
            assert torch.equal(mine, other), op
