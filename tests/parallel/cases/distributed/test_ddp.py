"""Horovod's optimizers and DDP under torchrun: `keep_local_hook`, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import adasum_hvd.torch as hvd
from adasum_hvd import distributed, reference
from adasum_hvd.torch.ddp import keep_local_hook
from tests.parallel.harness import ddp
from tests.parallel.harness.ddp import train
from tests.parallel.harness.models import loss_of, model_of, sgd, weights


def init() -> None:
    """Begin as most scripts do: the process group first; Horovod takes the ranks from it."""
    dist.init_process_group("gloo")
    hvd.init()


def align() -> None:
    dist.barrier()


def wrapped(model: nn.Module, **options) -> DistributedDataParallel:
    return DistributedDataParallel(model, **(ddp.SMALL_BUCKETS | options))


def case_old_names_of_the_hook() -> None:
    """They are the hook of `adasum_hvd.distributed`, with its monitor, and warn."""
    with pytest.warns(DeprecationWarning, match="import it from there"):
        from adasum_hvd.torch.ddp import AdasumState, adasum_hook
    records: list = []
    model, state = wrapped(model_of()), AdasumState()
    assert type(state) is distributed.AdasumState
    model.register_comm_hook(state, adasum_hook)
    monitor = hvd.AdasumMonitor(state, 1, records.append, model.named_parameters())
    assert type(monitor) is distributed.AdasumMonitor
    train(model, sgd(model.parameters()))
    monitor.close()
    ddp.check_same_everywhere(model)
    several = dist.get_world_size() > 1
    assert bool(records) is (several and dist.get_rank() == 0)
    with pytest.raises(AttributeError, match="keep_all_hook"):
        from adasum_hvd.torch import ddp as ours

        _ = ours.keep_all_hook


def case_a_step_that_is_compiled_with_its_backward() -> None:
    """torch.compile traces functions that backward calls, and cannot trace the hook."""
    model = nn.Linear(3, 2)
    reducing = DistributedDataParallel(model)
    reducing.register_comm_hook(distributed.AdasumState(), distributed.adasum_hook)

    @torch.compile(backend="eager")
    def step(number: int) -> None:
        reducing(torch.full((1, 3), float(number))).sum().backward()

    step(1 + dist.get_rank())
    numbers = range(1, 1 + dist.get_world_size())
    expected = reference.adasum([np.full(6, float(n)) for n in numbers])
    found = model.weight.grad.flatten().double().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def case_delta_variant() -> None:
    plain = model_of()
    optimizer = hvd.DistributedOptimizer(
        sgd(plain.parameters()), plain.named_parameters(), op=hvd.AdasumDelta
    )
    train(plain, optimizer)
    expected = weights(plain)
    model = wrapped(model_of())
    model.register_comm_hook(None, keep_local_hook)
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()),
        model.named_parameters(),
        op=hvd.AdasumDelta,
        model=model,
    )
    train(model, optimizer)
    assert torch.equal(weights(model.module), expected)
    plain = DistributedDataParallel(model_of())
    optimizer = hvd.DistributedOptimizer(
        sgd(plain.parameters()), plain.named_parameters(), op=hvd.AdasumDelta
    )
    with plain.no_sync():
        train(plain.module, optimizer)
    assert torch.equal(weights(plain.module), expected)


def case_what_is_refused() -> None:
    model = wrapped(model_of())
    model.register_comm_hook(distributed.AdasumState(), distributed.adasum_hook)
    for op in (hvd.AdasumGrad, hvd.AdasumDelta):
        with pytest.raises(
            RuntimeError, match=r"register_comm_hook\(AdasumState\(\), adasum"
        ):
            hvd.DistributedOptimizer(sgd(model.parameters()), op=op, model=model)
    train(model, sgd(model.parameters()))
    ddp.check_same_everywhere(model)  # what was refused has left no trace


@pytest.mark.parametrize("op", ("average", "adasum-grad", "adasum-delta"))
def case_an_optimizer_over_ddp_that_reduces(op: str) -> None:
    for allows in ({}, {"allow_modes": ["ddp"]}):
        model = model_of()
        with pytest.raises(RuntimeError, match="not needed") as failed:
            DistributedDataParallel(nn.Linear(1, 1).requires_grad_(False))  # half-made
        wrapper = DistributedDataParallel(model)
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), op=op, **allows
        )
        with wrapper.no_sync():
            loss_of(wrapper, hvd.rank(), 0).backward()
        optimizer.step()
        del optimizer
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=op, **allows)
        optimizer.zero_grad()
        loss_of(wrapper, hvd.rank(), 1).backward()
        if not allows:
            with pytest.raises(
                RuntimeError, match="DistributedDataParallel has reduced"
            ):
                optimizer.step()
        elif op == "adasum-delta":
            optimizer.step()
            ddp.check_same_everywhere(model)
        optimizer.zero_grad()
        del wrapper, optimizer, failed


def case_local_parts_of_dtensors_are_refused() -> None:
    """torch trains them under DDP. AdaSum of parts is not that of whole tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(nn.Linear(6, 6), mesh, ColwiseParallel())
    with pytest.raises(
        ValueError, match=r"of x: expected a plain tensor, but got a DT"
    ):
        hvd.allreduce(model.weight, name="x", op=hvd.Adasum)
    _pre_dp_module_transform(model)
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"2 parameters that are DTensors.*Shard"):
        hvd.DistributedOptimizer(sgd(parameters), op=hvd.AdasumGrad)
    wrapper = wrapped(model)
    wrapper.register_comm_hook(distributed.AdasumState(), distributed.adasum_hook)
    with pytest.raises(ValueError, match=r"its local part.*use adasum_replicate"):
        wrapper(torch.ones(2, 6)).sum().backward()
