"""`adasum_replicate` under torchrun: sharded models against AdaSum of whole tensors in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from adasum_hvd import reference
from adasum_hvd.distributed import adasum_replicate
from tests.parallel.harness.sharded import (
    TOLERANCE,
    Model,
    check,
    everyone,
    loss_of,
    mesh_of,
    shard,
    shard_counts,
    whole,
)
from tests.parallel.harness.sharded import align as align
from tests.parallel.harness.sharded import init as init
from tests.parallel.harness.sharded import rank as rank
from tests.parallel.harness.sharded import shutdown as shutdown


def case_any_number_of_shards() -> None:
    """Replicas x shards: with 4 ranks 4x1, 2x2 and 1x4, with 6 also 3x2 and 2x3."""
    for shards in shard_counts():
        plain = Model()
        model = copy.deepcopy(plain)
        shard(model, shards)
        replicas = adasum_replicate(model, mesh_of(shards)["replica"])
        check(plain, model, replicas, shards, steps=20)


@pytest.mark.parametrize(
    ("model", "fsdp", "training"),
    [
        ({}, {}, {"passes": 3}),
        ({}, {}, {"set_to_none": False}),
        ({"runs": 2}, {}, {"steps": 4}),
        ({"runs": 2}, {}, {"passes": 2}),
        ({"checkpointed": True}, {}, {}),
        ({"checkpointed": True, "runs": 2}, {}, {"passes": 2}),
        ({"tied": True}, {}, {"passes": 2}),
        ({}, {"reshard_after_forward": False}, {"passes": 2}),
    ],
    ids=[
        "accumulation", "zeroed", "runs_twice", "runs_twice_accumulated", "checkpointing",
        "checkpointing_runs_twice_accumulated", "tied_accumulated", "no_reshard_accumulated",
    ],
)  # fmt: skip
def case_fsdp2(model: dict, fsdp: dict, training: dict) -> None:
    plain = Model(**model)
    sharded = copy.deepcopy(plain)
    if model.get("tied"):  # FSDP wants tied parameters in one module
        fully_shard(sharded, mesh=mesh_of(2)["shard"])
    else:
        shard(sharded, 2, **fsdp)
    replicas = adasum_replicate(sharded, mesh_of(2)["replica"])
    check(plain, sharded, replicas, 2, **training)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("reduced", ["bfloat16", "float32"])
def case_mixed_precision(reduced: str, passes: int) -> None:
    """Against the replicas' own gradients, which bfloat16 has rounded."""
    model = Model()
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduced))
    shard(model, 2, mp_policy=policy)

    def backward(controls) -> None:
        for k in range(passes):
            controls.set_requires_gradient_sync(k == passes - 1)
            loss_of(model, rank() + 100 * k).backward()

    backward(model)
    used = [p for p in model.parameters() if p.grad is not None]
    local = everyone([whole(p.grad).reshape(-1) for p in used])[::2]
    model.zero_grad()
    backward(adasum_replicate(model, mesh_of(2)["replica"]))
    for parameter, *values in zip(used, *local, strict=True):
        error = whole(parameter.grad).reshape(-1) - reference.adasum(values)
        assert np.abs(error).max() < TOLERANCE


@pytest.mark.parametrize("passes", [1, 2])
def case_cpu_offload(passes: int) -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    shard(model, 2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    check(plain, model, replicas, 2, passes=passes)


def case_frozen_parameters() -> None:
    plain = Model()
    plain.blocks[1].up.requires_grad_(False)
    model = copy.deepcopy(plain)
    shard(model, 2)
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    check(plain, model, replicas, 2)


@pytest.mark.parametrize("passes", [1, 2])
def case_tensor_parallelism(passes: int) -> None:
    """Column and row sharded weights, and plain parameters next to them."""
    plain = Model(inner=32)
    model = copy.deepcopy(plain)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh_of(2)["shard"], plan)
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    # torch clips either DTensors or plain tensors.
    check(plain, model, replicas, 2, same_batch=2, clip=False, passes=passes)


@pytest.mark.parametrize("overlap", (True, False))
def case_plain_model_without_overlap(overlap: bool) -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    replicas = adasum_replicate(model, mesh_of(1)["replica"], overlap=overlap)
    check(plain, model, replicas, 1, passes=2)


def case_a_gradient_that_one_replica_lacks() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    adasum_replicate(model, mesh_of(1)["replica"])
    for step in range(3):
        model.zero_grad()
        used = model if rank() == step else model[:1]
        sum(layer(torch.ones(1, 2)).sum() for layer in used).backward()
        assert torch.equal(model[0].weight.grad, torch.ones(2, 2))  # identical inputs
        assert torch.equal(model[1].weight.grad, torch.ones(2, 2))  # zeros are neutral


def case_replicas_start_equal() -> None:
    torch.manual_seed(rank())
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank())
    fully_shard(model[0], mesh=mesh_of(2)["shard"])
    adasum_replicate(model, mesh_of(2)["replica"])
    weights = everyone(model[0].weight.to_local().detach().numpy().tobytes())
    assert len(set(weights[::2])) == len(set(weights[1::2])) == 1
    assert model[1].running_mean[0] == rank() % 2


def refused(words: str, model: nn.Module, mesh=None, **arguments) -> None:
    with pytest.raises(ValueError, match=words):
        adasum_replicate(model, mesh or mesh_of(2)["replica"], **arguments)


def case_what_is_refused_on_every_rank() -> None:
    mesh = mesh_of(2)
    hybrid = nn.Linear(4, 4)
    fully_shard(hybrid, mesh=mesh)
    refused(r"\(HSDP\).*mesh=mesh\[\"shard\"\]", hybrid)
    across = nn.Linear(4, 4)
    fully_shard(across, mesh=mesh["replica"])
    refused("have to hold the same shard", across)
    refused("pass the module inside it", DistributedDataParallel(nn.Linear(4, 4)))
    cpu = torch.device("cpu")
    group = mesh["shard"].get_group()
    refused("FSDP1", FullyShardedDataParallel(nn.Linear(4, 4), group, device_id=cpu))
    zero = nn.Linear(4, 4)
    zero.weight.ds_id = 0
    refused("DeepSpeed ZeRO on rank 0 of .; use fully_shard", zero)
    refused(r"expected one dimension.*mesh\[\"replica\"\]", nn.Linear(4, 4), mesh)
    refused("rule: expected 'adasum'", nn.Linear(4, 4), rule="median")
    # Ranks of other replicas, of other shards and without a problem raise, too.
    last = dist.get_world_size() - 1
    own = mesh if rank() == last else mesh["replica"]
    refused(rf"got 2 dimensions on rank {last} of {last + 1};", nn.Linear(4, 4), own)
    some = dist.new_group([0, 1])
    refused("a group without it on rank 2 of", nn.Linear(4, 4), some)
    one = nn.Linear(5 if rank() == last else 4, 4)
    refused(rf"got weight=.* on rank {last} and .* on rank 1;", one)
    wide = 3 if rank() >= 2 else 4
    refused("expected the same arguments", nn.Linear(wide, 4))


def case_misuse_is_named() -> None:
    model = nn.Linear(3, 2)
    adasum_replicate(model, mesh_of(1)["replica"])
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) between steps"):
        model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()  # and goes on
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
