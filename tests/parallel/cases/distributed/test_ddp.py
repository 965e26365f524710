"""DDP with AdaSum's hooks, under torchrun: what the distributed optimizer gives, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import adasum_hvd.torch as hvd
from adasum_hvd.torch.ddp import AdasumState, adasum_hook, keep_local_hook
from tests.parallel.harness import ddp
from tests.parallel.harness.ddp import CHECKS, STEPS, train
from tests.parallel.harness.models import (
    loss_of,
    model_of,
    sgd,
    weights,
)


def init() -> None:
    """Begin as most scripts do: the process group first; Horovod takes the ranks from it."""
    dist.init_process_group("gloo")
    hvd.init()


def align() -> None:
    dist.barrier()


def by_optimizer(model: nn.Module, loss: Callable = loss_of, **options) -> torch.Tensor:
    """Return the weights that the distributed optimizer comes to."""
    options = {"op": hvd.AdasumGrad, **options}
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), **options
    )
    train(model, optimizer, loss, options.get("backward_passes_per_step", 1))
    return weights(model)


ENGINE = ddp.Hooked(
    AdasumState, adasum_hook, hvd.Compression.fp16, hvd.Compression.bf16, by_optimizer
)
wrapped = ENGINE.wrapped


def case_monitor_of_the_hook() -> None:
    """It records what the optimizer's does, by the parameters' names, also in new buckets."""
    of_hook: list = []
    of_optimizer: list = []
    model = model_of()
    plain = copy.deepcopy(model)
    state = AdasumState()
    wrapper = wrapped(model, state)
    monitor = hvd.AdasumMonitor(state, 1, of_hook.append, model.named_parameters())
    train(wrapper, sgd(wrapper.parameters()))
    monitor.close()
    optimizer = hvd.DistributedOptimizer(
        sgd(plain.parameters()), plain.named_parameters(), op=hvd.AdasumGrad
    )
    monitor = hvd.AdasumMonitor(optimizer, 1, of_optimizer.append)
    train(plain, optimizer)
    monitor.close()
    assert torch.equal(weights(wrapper.module), weights(plain))
    if hvd.rank():
        assert not of_hook and not of_optimizer
        return
    by_step = {record["step"]: record["tensors"] for record in of_optimizer}
    assert list(by_step) == [1, 2, 3, 4]
    # Which buckets there are shows in the first step, and others come after it.
    assert [record["step"] for record in of_hook] == [3, 4]
    for record in of_hook:
        assert record["tensors"] == by_step[record["step"]]


@pytest.mark.parametrize("check", CHECKS)
def case_hook(check: str) -> None:
    getattr(ddp, check)(ENGINE)


def case_fewer_calls_than_parameters() -> None:
    before, model = hvd.counters(), wrapped(model_of())
    train(model, sgd(model.parameters()))
    after = hvd.counters()
    # Six parameters with coefficients of their own, in fewer calls, step by step.
    assert after.tensors - before.tensors == STEPS * 6
    assert after.calls - before.calls < after.tensors - before.tensors


def case_mixed_precision_with_an_overflow_on_one_rank() -> None:
    plain = model_of()
    optimizer = hvd.DistributedOptimizer(
        sgd(plain.parameters()), plain.named_parameters(), op=hvd.AdasumGrad
    )
    scaler = hvd.GradScaler("cpu", init_scale=2.0**10)
    expected = ddp.train_scaled(plain, optimizer, scaler)
    assert torch.equal(ddp.overflow_on_one_rank(ENGINE), expected)


def case_delta_variant() -> None:
    expected = by_optimizer(model_of(), op=hvd.AdasumDelta)
    model = wrapped(model_of(), hook=keep_local_hook)
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


def case_process_set() -> None:
    if hvd.size() < 3:
        pytest.skip("a group of some of the ranks needs 3 ranks")
    ranks = [0, 2]
    process_set, group = hvd.add_process_set(ranks), dist.new_group(ranks)
    if hvd.rank() in ranks:
        expected = by_optimizer(model_of(), process_set=process_set)
        state = AdasumState(process_set=process_set)
        ddp.some_ranks(ENGINE, ranks, state, expected, group)
    else:
        with pytest.raises(
            ValueError, match=r"a process set that includes this rank.*rank 1"
        ):
            AdasumState(process_set=process_set)
    dist.barrier()
    hvd.remove_process_set(process_set)
    with pytest.raises(ValueError, match="set HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        AdasumState(process_set=hvd.ProcessSet(ranks))


def case_what_is_refused() -> None:
    model = wrapped(model_of())
    for op in (hvd.AdasumGrad, hvd.AdasumDelta):
        with pytest.raises(
            RuntimeError, match=r"register_comm_hook\(AdasumState\(\), adasum"
        ):
            hvd.DistributedOptimizer(sgd(model.parameters()), op=op, model=model)
    with pytest.raises(
        NotImplementedError, match=r"expected Compression\.none, .*got 'fp8'"
    ):
        AdasumState(compression="fp8")
    words = r"the same arguments of AdasumState on all ranks, but got compression=NoneCompressor on"
    with pytest.raises(ValueError, match=words):
        AdasumState(compression=None if hvd.rank() else hvd.Compression.fp16)
    with pytest.raises(
        TypeError, match=r"expected a bucket of Distrib.*got Tensor; FSDP"
    ):
        adasum_hook(AdasumState(), torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = wrapped(ddp.Rows())
        with pytest.raises(
            ValueError, match="AdasumGrad expected a dense tensor, but got one of"
        ):
            rows(torch.arange(3)).sum().backward()
    ddp.check_bits(
        wrapped(model_of()), by_optimizer(model_of())
    )  # and the next one works


@pytest.mark.parametrize("op", ("average", "adasum-grad", "adasum-delta"))
def case_an_optimizer_over_ddp_that_reduces(op: str) -> None:
    for allows in ({}, {"allow_modes": ["ddp"]}):
        model = model_of()
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
        del wrapper, optimizer


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
    with pytest.raises(ValueError, match=r"its local part.*use adasum_replicate"):
        wrapper(torch.ones(2, 6)).sum().backward()
