"""Parallel modes found by DistributedOptimizer, and parameters that not all ranks hold."""

from __future__ import annotations

import copy
import os
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import adasum_hvd.torch as hvd
from adasum_hvd import reference
from tests.parallel.harness import process_sets

TOLERANCE = 1e-6


def start() -> None:
    path = os.path.join(tempfile.mkdtemp(), "store")
    path = hvd.broadcast_object(path)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=hvd.rank(), world_size=hvd.size()
    )


def sgd(module: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1, **options)


def refuses(match: str, optimizer, **options) -> None:
    for op in ("adasum-delta", "adasum-grad", "average"):
        with pytest.raises(RuntimeError, match=match) as caught:
            hvd.DistributedOptimizer(optimizer, op=op, **options)
        assert f"this is rank {hvd.rank()} of {hvd.size()}" in str(caught.value)


@pytest.mark.parametrize("use_orig_params", (False, True))
@pytest.mark.filterwarnings("ignore")
def case_fsdp1(use_orig_params: bool) -> None:
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(
        nn.Linear(8, 8), device_id=cpu, use_orig_params=use_orig_params
    )
    match = (
        r"FullyShardedDataParallel on all ranks.*shard it by fully_shard and use "
        r'adasum_hvd\.distributed\.adasum_replicate.*allow_modes=\("fsdp1",\)'
    )
    refuses(match, sgd(model))
    refuses(match, sgd(model), model=model)


def case_fsdp2() -> None:
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (hvd.size(),)))
    remedy = r'.*adasum_hvd\.distributed\.adasum_replicate\(model, mesh\["replica"\]\)'
    found = r"2 parameters that are DTensors.*Shard\(dim=0\)"
    refuses(found + remedy, sgd(model))
    allowed = r'.*allow_modes=\("fsdp2",\)'
    refuses("FSDPModule" + remedy + allowed, sgd(model), model=model)


def case_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (hvd.size(),), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    match = r"DTensors.*named \('tp',\).*adasum_replicate.*mark_worker_local"
    refuses(match, sgd(model))
    hvd.mark_worker_local(*model[0].parameters())
    hvd.broadcast_parameters(model[1].state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(model), op="adasum-delta")
    torch.manual_seed(0)
    model(torch.randn(3, 8)).sum().backward()
    before = model[0].weight.to_local().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight.to_local(), before)
    hvd.check_replicas(model[1])


def case_zero_redundancy() -> None:
    model = nn.Linear(3, 3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    refuses("ZeroRedundancyOptimizer.*was made from", optimizer)
    hvd.DistributedOptimizer(optimizer, allow_modes=("zero_redundancy",))


def case_pipeline() -> None:
    module = nn.Linear(3, 3)
    stage = PipelineStage(module, hvd.rank(), hvd.size(), torch.device("cpu"))
    found = rf"a PipelineStage of {hvd.size()} stages on all ranks"
    refuses(found, sgd(module), model=stage)
    # Without the stage object, layers that differ show it.
    other = nn.Linear(3, 3 + hvd.rank())
    with pytest.raises(ValueError, match="pipeline stages and shards cannot"):
        hvd.DistributedOptimizer(sgd(other))


def case_ddp() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    refuses(
        r"DistributedDataParallel on all ranks.*ddp\.module", sgd(model), model=model
    )


def case_one_rank_is_enough() -> None:
    module = nn.Linear(3, 3)
    last = hvd.size() - 1
    stage = PipelineStage(module, 0, hvd.size(), torch.device("cpu"))
    model = stage if hvd.rank() == last else module
    refuses(rf"stages on rank {last}:", sgd(module), model=model)
    with pytest.raises(
        ValueError, match=r"expected names of ddp, fsdp1.*got 'pipeline'"
    ):
        hvd.DistributedOptimizer(sgd(module), allow_modes="pipeline")
    hvd.DistributedOptimizer(sgd(module), model=model, allow_modes=["pipeline"])


def case_ranks_of_a_process_set_have_their_numbers_in_the_job() -> None:
    first, last = hvd.size() - 2, hvd.size() - 1
    pair = process_sets.of(first, last)
    if pair.included():
        module = nn.Linear(3, 3)
        stage = PipelineStage(module, 0, hvd.size(), torch.device("cpu"))
        model = stage if hvd.rank() == last else module
        match = rf"of {hvd.size()} stages on rank {last}:"
        refuses(match, sgd(module), model=model, process_set=pair)
        size = 1 << 20 if hvd.rank() == last else 1 << 21
        match = f"bucket_bytes={1 << 20} on rank {last} and {1 << 21} on rank {first} "
        with pytest.raises(ValueError, match=match):
            hvd.DistributedOptimizer(sgd(module), process_set=pair, bucket_bytes=size)


# ---- parameters that some ranks hold ----


def halves():
    """Return the process sets of this rank's half of the ranks, and of the other one."""
    half = hvd.size() // 2
    sets = [process_sets.of(*range(half)), process_sets.of(*range(half, 2 * half))]
    mine = hvd.rank() // half
    return sets[mine], sets[1 - mine]


class Mixed(nn.Module):
    """A trunk that all ranks hold, and an expert of another shape on each half."""

    def __init__(self) -> None:
        super().__init__()
        half = hvd.rank() // (hvd.size() // 2)
        torch.manual_seed(7)
        self.trunk = nn.Linear(4, 4)
        self.expert = nn.Linear(4, 2 + half)
        torch.manual_seed(100 + hvd.rank())
        self.inputs = torch.randn(5, 4)

    def loss(self) -> torch.Tensor:
        return self.expert(self.trunk(self.inputs).tanh()).square().sum()


def adasum_over(ranks, tensor: torch.Tensor) -> np.ndarray:
    """Return the reference's AdaSum of the ranks' `tensor`."""
    everyone = hvd.allgather_object(tensor.detach().numpy())
    return reference.adasum([everyone[rank] for rank in ranks])


def case_replicated_over_process_sets() -> None:
    """Each tensor is reduced over exactly the ranks that hold it; replicas stay equal."""
    mine, _ = halves()
    for op in ("adasum-delta", "adasum-grad"):
        model = Mixed()
        hvd.mark_replicated_over(mine, *model.expert.parameters())
        optimizer = hvd.DistributedOptimizer(
            sgd(model, momentum=0.9), model.named_parameters(), op=op
        )
        for _ in range(3):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
        hvd.check_replicas(model, optimizer)
    for op in ("adasum-delta", "adasum-grad"):
        plain = Mixed()
        hvd.mark_replicated_over(mine, *plain.expert.parameters())
        optimizer = hvd.DistributedOptimizer(
            sgd(plain), plain.named_parameters(), op=op
        )
        before = [p.detach().clone() for p in plain.parameters()]
        gradients = torch.autograd.grad(plain.loss(), list(plain.parameters()))
        plain.loss().backward()
        optimizer.step()
        for index, parameter in enumerate(plain.parameters()):
            ranks = range(hvd.size()) if index < 2 else mine.ranks
            delta = adasum_over(ranks, 0.1 * gradients[index])
            np.testing.assert_allclose(
                parameter.detach(),
                before[index].numpy() - delta,
                rtol=0,
                atol=TOLERANCE,
            )
    hvd.check_replicas(plain)
    if hvd.size() == 4:
        if hvd.rank() == 3:
            plain.expert.bias.data[0] += 1
        with pytest.raises(
            hvd.ReplicaMismatch, match=r"expert.bias on ranks \[3\] than on rank 2"
        ):
            hvd.check_replicas(plain)


def case_a_change_of_some_ranks_is_no_sparse_gradient() -> None:
    """A trunk that is frozen during backward only: its bucket announces nothing."""
    mine, _ = halves()
    model = Mixed()
    hvd.mark_replicated_over(mine, *model.expert.parameters())
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), op="average"
    )
    model.trunk.requires_grad_(False)
    model.loss().backward()
    model.trunk.requires_grad_(True)
    optimizer.step()
    assert not model.expert.weight.grad.is_sparse


@pytest.mark.parametrize("op", ("adasum-delta", "adasum-grad"))
def case_marks_after_wrapping(op: str) -> None:
    """They count from the step after the next on, whose hooks are there already."""
    mine, _ = halves()
    torch.manual_seed(7)
    late, early = (torch.nn.Linear(2, 3) for _ in range(2))
    early.load_state_dict(late.state_dict())
    hvd.mark_replicated_over(mine, early.weight)
    for model in (late, early):
        optimizer = hvd.DistributedOptimizer(sgd(model), op=op)
        hvd.mark_replicated_over(mine, model.weight)
        begin = copy.deepcopy(model.state_dict())
        for _ in range(2):
            model.load_state_dict(begin)
            optimizer.zero_grad()
            model(torch.arange(2.0) + hvd.rank()).square().sum().backward()
            optimizer.step()
    assert torch.equal(late.weight, early.weight)
    assert torch.equal(late.bias, early.bias)
    everyone = hvd.allgather_object(late.weight.tolist())
    holders = [r for r in range(hvd.size()) if everyone[r] == late.weight.tolist()]
    assert holders == list(mine.ranks)


def case_broadcast_leaves_marked_state_alone() -> None:
    mine, _ = halves()
    model = Mixed()
    hvd.mark_replicated_over(mine, *model.expert.parameters())
    optimizer = hvd.DistributedOptimizer(sgd(model, momentum=0.9), op="adasum-delta")
    model.loss().backward()
    optimizer.step()
    momentum = {p: s["momentum_buffer"].clone() for p, s in optimizer.state.items()}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for parameter, before in momentum.items():
        after = optimizer.state[parameter]["momentum_buffer"]
        everyone = hvd.allgather_object(after.tolist())
        if parameter.shape[0] == 4:  # the trunk: now the root's on all ranks
            assert everyone == everyone[:1] * hvd.size()
        else:
            assert torch.equal(after, before)


def case_torch_scaler_is_refused_where_ranks_differ() -> None:
    """Even after synchronize(): gradients of the two halves' experts are not the same."""
    mine, _ = halves()
    model = Mixed()
    hvd.mark_replicated_over(mine, *model.expert.parameters())
    optimizer = hvd.DistributedOptimizer(sgd(model), op="adasum-grad")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.loss()).backward()
    optimizer.synchronize()
    with (
        optimizer.skip_synchronize(),
        pytest.raises(RuntimeError, match=r"use adasum_hvd\.torch\.GradScaler$"),
    ):
        scaler.step(optimizer)


@pytest.mark.parametrize("op", ("adasum-delta", "adasum-grad"))
def case_partly_replicated_overflow(op: str) -> None:
    """An overflow in one half's expert skips the step on all ranks."""
    mine, _ = halves()
    model = Mixed()
    hvd.mark_replicated_over(mine, *model.expert.parameters())
    optimizer = hvd.DistributedOptimizer(sgd(model), op=op)
    scaler = hvd.GradScaler("cpu", init_scale=4.0)
    before = model.trunk.weight.detach().clone()
    scaler.scale(model.loss()).backward()
    if op == "adasum-grad":
        optimizer.synchronize()
    if hvd.rank() == 0:
        model.expert.bias.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.trunk.weight, before)
    assert scaler.get_scale() == 2.0


def case_replicated_refusals() -> None:
    mine, other = halves()
    model = Mixed()
    with pytest.raises(ValueError, match="a process set with this rank in it"):
        hvd.mark_replicated_over(other, *model.expert.parameters())
    unknown = hvd.ProcessSet([0, 1])
    needs = r"init\(process_sets=\[...\]\), or set HOROVOD_DYNAMIC_PROCESS_SETS=1"
    with pytest.raises(ValueError, match=needs):
        hvd.mark_replicated_over(unknown, *model.expert.parameters())
    with pytest.raises(ValueError, match=needs):
        hvd.DistributedOptimizer(sgd(model), process_set=unknown)
    if hvd.size() == 4:
        hvd.mark_replicated_over(mine, *model.expert.parameters())
        with pytest.raises(
            ValueError, match="clip_delta_norm: expected all parameters"
        ):
            hvd.DistributedOptimizer(sgd(model), op="adasum-delta", clip_delta_norm=1.0)
        # One rank of a set forgets a parameter: the ranks of the other set hear of it too.
        model.expert.bias.requires_grad_(hvd.rank() != 1)
        with pytest.raises(
            ValueError,
            match=r"of \[0, 1\], but got 2 and 1 parameters on ranks 0 and 1",
        ):
            hvd.DistributedOptimizer(sgd(model), op="adasum-delta")
        # A set that reaches beyond the optimizer's own.
        fresh = Mixed()
        hvd.mark_replicated_over(mine, *fresh.expert.parameters())
        inner = process_sets.of(0, 2)
        if inner.included():
            with pytest.raises(ValueError, match=r"rank 1 outside of \[0, 2\]"):
                hvd.DistributedOptimizer(sgd(fresh), process_set=inner)
