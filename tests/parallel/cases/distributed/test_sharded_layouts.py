"""`adasum_replicate` on other layouts than one mesh of shards, and in whole training runs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from adasum_hvd import reference
from adasum_hvd.distributed import AdasumState, adasum_hook, adasum_replicate
from tests.parallel.harness.sharded import (
    TOLERANCE,
    Model,
    batch,
    check,
    everyone,
    loss_of,
    mesh_of,
    shard,
    whole,
)
from tests.parallel.harness.sharded import align as align
from tests.parallel.harness.sharded import init as init
from tests.parallel.harness.sharded import rank as rank
from tests.parallel.harness.sharded import shutdown as shutdown

CURVE = 1e-4  # of a loss: rounding of gradients, which AdamW's first steps enlarge


def mesh_with(name: str) -> DeviceMesh:
    """Return replicas x 2 of a dimension x shards: one shard unless there are 8 ranks."""
    shards = 2 if dist.get_world_size() % 8 == 0 else 1
    shape = dist.get_world_size() // 2 // shards, 2, shards
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", name, "shard"))


def train(model: nn.Module) -> list[float]:
    """Train 20 steps, and return the mean loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, rank())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return np.mean(everyone(losses), 0).tolist()


def case_loss_curve_of_unsharded_ddp() -> dict[str, list[float]]:
    """DDP with the same replicas: each is a group of ranks that are averaged."""
    model = Model()
    shard(model, 2)
    adasum_replicate(model, mesh_of(2)["replica"])
    plain = DistributedDataParallel(Model(), find_unused_parameters=True)
    state = AdasumState(group_op="average", group_size=2)
    plain.register_comm_hook(state, adasum_hook)
    sharded, unsharded = train(model), train(plain)
    assert np.abs(np.subtract(sharded, unsharded)).max() < CURVE
    assert sharded[-1] < 0.5 * sharded[0]  # it learns
    averaged = train(DistributedDataParallel(Model(), find_unused_parameters=True))
    assert np.abs(np.subtract(sharded, averaged)).max() > 10 * CURVE, (
        sharded,
        averaged,
    )
    return {"sharded": sharded, "DDP": unsharded, "DDP's average": averaged}


@pytest.mark.parametrize("passes", [1, 2])
def case_tensor_parallelism_in_fsdp2(passes: int) -> None:
    """Weights sharded over both dimensions, and over one of them."""
    mesh = mesh_with("tensor")
    plain = Model(inner=32)
    model = copy.deepcopy(plain)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    replicas = adasum_replicate(model, mesh["replica"])
    ranks = 2 * mesh["shard"].size()
    check(plain, model, replicas, ranks, same_batch=ranks, passes=passes, clip=False)


def case_several_parameter_groups_in_one_module() -> None:
    """Experts: each rank of a replica has its own, next to weights that are sharded."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp
    from torch.distributed.tensor import Shard

    size = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (size, 2, 1), mesh_dim_names=("r", "s", "expert"))
    alone = fsdp.FSDPMeshInfo(mesh["expert"], shard_mesh_dim=0)
    plain = Model()
    model = copy.deepcopy(plain)
    for block in model.blocks:
        own = {id(parameter) for parameter in block.up.parameters()}
        fully_shard(
            block,
            mesh=mesh["s"],
            shard_placement_fn=lambda p, own=own: (
                fsdp.ShardPlacementResult(Shard(0), alone) if id(p) in own else None
            ),
        )
        assert len(block._get_fsdp_state()._fsdp_param_groups) == 2
    fully_shard(model, mesh=mesh["s"])
    adasum_replicate(model, mesh["r"])
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            loss_of(each, 100 * step + rank()).backward()
        pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
        for (name, parameter), local in pairs:
            if local.grad is None:
                continue
            ranks = everyone(local.grad.double().numpy().reshape(-1))
            if ".up." in name:
                vectors = ranks[rank() % 2 :: 2]
            else:
                vectors = [np.mean(ranks[k : k + 2], 0) for k in range(0, 2 * size, 2)]
            error = whole(parameter.grad).reshape(-1) - reference.adasum(vectors)
            assert np.abs(error).max() < TOLERANCE, name


@pytest.mark.parametrize("fsdp", [False, True], ids=["plain", "fsdp2"])
def case_pipeline_stages(fsdp: bool) -> None:
    """Each stage over its replicas; the gradients of three microbatches are reduced once."""
    mesh = mesh_with("stage")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(7, 12), nn.Tanh()), nn.Linear(12, 7)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    index = mesh["stage"].get_local_rank()
    module = layers[index]
    if fsdp:
        fully_shard(module, mesh=mesh["shard"])
    replicas = adasum_replicate(module, mesh["replica"])
    stage = PipelineStage(
        module, index, 2, torch.device("cpu"), group=mesh["stage"].get_group()
    )
    schedule = ScheduleGPipe(stage, 3, loss_fn=functional.cross_entropy)
    for step in range(2):
        inputs, targets = batch(10 * step + mesh["replica"].get_local_rank())
        plain.zero_grad()
        functional.cross_entropy(plain(inputs), targets).backward()
        gradients = everyone([p.grad.numpy().reshape(-1) for p in plain.parameters()])
        module.zero_grad()
        with replicas.no_sync():
            if index == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets)
        replicas.synchronize()
        first = 2 * index  # each stage has a weight and a bias
        for number, parameter in enumerate(module.parameters()):
            ranks = 2 * mesh["shard"].size()  # of a replica; all have its gradient
            vectors = [own[first + number] for own in gradients[::ranks]]
            error = whole(parameter.grad).reshape(-1) - reference.adasum(vectors)
            assert np.abs(error).max() < TOLERANCE


def case_communication_overlaps_with_backward() -> None:
    """Blocks are being reduced when backward comes to the model's first weight."""
    model = Model()
    shard(model, 2)
    begun: list[int] = []
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    model.first.weight.register_post_accumulate_grad_hook(
        lambda _: begun.append(len(replicas._futures))
    )
    for number in range(3):
        model.zero_grad()
        loss_of(model, number).backward()
    assert begun == [0, 3, 3], begun  # the first pass counts hooks
