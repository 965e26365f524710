"""`adasum_replicate` under torchrun: sharded models against AdaSum of whole tensors in NumPy."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from adasum_hvd import reference
from adasum_hvd.distributed import adasum_replicate

# Float32 sums over shards and over the batch, in another order than without shards.
TOLERANCE = 2e-6
MESHES: dict[tuple[int, int], DeviceMesh] = {}


def init() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def rank() -> int:
    return dist.get_rank()


def align() -> None:
    dist.barrier()


def shutdown() -> None:
    dist.destroy_process_group()


def mesh_of(shards: int) -> DeviceMesh:
    """Return the mesh of replicas with this many shards; each is made once."""
    shape = dist.get_world_size() // shards, shards
    if shape not in MESHES:
        MESHES[shape] = init_device_mesh(
            "cpu", shape, mesh_dim_names=("replica", "shard")
        )
    return MESHES[shape]


class Block(nn.Module):
    """A residual block with sizes that no number of shards divides."""

    def __init__(self, width: int, inner: int, checkpointed: bool):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A small network.

    Args:
        inner: width inside a block.
        checkpointed: recompute the blocks in backward.
        runs: how often the blocks run in a pass.
        tied: the first layer's weight is the last one's, too.
    """

    def __init__(
        self, inner: int = 31, checkpointed=False, runs: int = 1, tied: bool = False
    ):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(7, 10), nn.Linear(10, 7, bias=False)
        self.blocks = nn.ModuleList(Block(10, inner, checkpointed) for _ in range(3))
        self.unused = nn.Linear(3, 2)
        self.runs = runs
        if tied:
            self.first.weight = nn.Parameter(self.first.weight.detach().clone())
            self.last.weight = nn.Parameter(self.first.weight.detach().clone())
            self.last = nn.Linear(7, 10, bias=False)
            self.last.weight = self.first.weight
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.runs):
            for block in self.blocks:
                x = block(x)
        return x @ self.last.weight if self.tied else self.last(x)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(6, 7, generator=generator)
    return inputs, torch.randint(0, 7, (6,), generator=generator)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    inputs, targets = batch(number)
    return functional.cross_entropy(model(inputs).float(), targets)


def whole(tensor: torch.Tensor) -> np.ndarray:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().double().numpy()


def everyone(thing: object) -> list:
    things: list = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def correct(plain: nn.Module, shards: int, data_of_shards: bool) -> Iterator:
    """Yield by parameter the AdaSum over replicas of the mean over a replica's ranks."""
    gradients = [None if p.grad is None else p.grad.numpy() for p in plain.parameters()]
    ranks = everyone(gradients)
    for own in zip(*ranks, strict=True):
        if own[0] is None:
            yield None
            continue
        groups = [own[k : k + shards] for k in range(0, len(own), shards)]
        if not data_of_shards:
            groups = [group[:1] for group in groups]
        means = [np.mean(group, 0, dtype=np.float64).reshape(-1) for group in groups]
        yield reference.adasum(means).reshape(own[0].shape)


def digest(model: nn.Module) -> str:
    data = b"".join(whole(p).tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()


def check(
    plain: Model,
    model: nn.Module,
    replicas,
    shards: int,
    *,
    steps: int = 3,
    passes: int = 1,
    data_of_shards: bool = True,
    clip: bool = True,
    set_to_none: bool = True,
    tolerance: float = TOLERANCE,
) -> None:
    """Train a sharded model, and compare each step's gradients with the unsharded model's."""
    optimizers = [
        torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), 1e-2)
        for m in (model, plain)
    ]
    source = rank() if data_of_shards else rank() // shards
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none)
        for k in range(passes):
            number = 1000 * step + 100 * k + source
            loss_of(plain, number).backward()
            with nullcontext() if k == passes - 1 else replicas.no_sync():
                loss_of(model, number).backward()
        expected = correct(plain, shards, data_of_shards)
        for (name, mine), theirs, value in zip(
            model.named_parameters(), plain.parameters(), expected, strict=True
        ):
            if value is None:
                assert mine.grad is None, name
                continue
            error = np.abs(whole(mine.grad) - value).max()
            assert error <= tolerance * max(1e-3, np.abs(value).max()), (name, error)
            # Both train on with the same gradient, so that rounding does not add up.
            theirs.grad = torch.from_numpy(whole(mine.grad)).float()
        if clip:
            for each in (model, plain):
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
    assert len(set(everyone(digest(model)))) == 1


def shard(model: nn.Module, shards: int, **arguments) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(shards)["shard"], **arguments)
    fully_shard(model, mesh=mesh_of(shards)["shard"], **arguments)


def shard_counts() -> list[int]:
    size = dist.get_world_size()
    return [count for count in range(1, size + 1) if size % count == 0]


def case_any_number_of_shards() -> None:
    """Replicas x shards: with 4 ranks 4x1, 2x2 and 1x4, with 6 also 3x2 and 2x3."""
    for shards in shard_counts():
        plain = Model()
        model = copy.deepcopy(plain)
        shard(model, shards)
        replicas = adasum_replicate(model, mesh_of(shards)["replica"])
        check(plain, model, replicas, shards, steps=20 if shards == 2 else 4)


@pytest.mark.parametrize(
    ("model", "fsdp", "training"),
    [
        ({}, {}, {"passes": 3}),
        ({}, {}, {"set_to_none": False}),
        ({"runs": 2}, {}, {"steps": 4}),
        ({"runs": 2}, {}, {"passes": 2}),
        ({"checkpointed": True}, {}, {}),
        ({"tied": True}, {}, {}),
        ({}, {"reshard_after_forward": False}, {}),
    ],
    ids=[
        "accumulation", "zeroed", "runs_twice", "runs_twice_accumulated", "checkpointing",
        "tied", "no_reshard",
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


@pytest.mark.parametrize("reduced", ["bfloat16", "float32"])
def case_mixed_precision(reduced: str) -> None:
    """Against the replicas' own gradients, which bfloat16 has rounded."""
    model = Model()
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduced))
    shard(model, 2, mp_policy=policy)
    loss_of(model, rank()).backward()
    used = [p for p in model.parameters() if p.grad is not None]
    local = everyone([whole(p.grad).reshape(-1) for p in used])[::2]
    model.zero_grad()
    adasum_replicate(model, mesh_of(2)["replica"])
    loss_of(model, rank()).backward()
    for parameter, *values in zip(used, *local, strict=True):
        error = whole(parameter.grad).reshape(-1) - reference.adasum(values)
        assert np.abs(error).max() < TOLERANCE


def case_cpu_offload() -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    shard(model, 2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    check(plain, model, replicas, 2)


def case_frozen_parameters() -> None:
    plain = Model()
    plain.blocks[1].up.requires_grad_(False)
    model = copy.deepcopy(plain)
    shard(model, 2)
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    check(plain, model, replicas, 2)


def case_tensor_parallelism() -> None:
    """Column and row sharded weights, and plain parameters next to them."""
    plain = Model(inner=32)
    model = copy.deepcopy(plain)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh_of(2)["shard"], plan)
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    # torch clips either DTensors or plain tensors.
    check(plain, model, replicas, 2, data_of_shards=False, clip=False)


def case_tensor_parallelism_in_fsdp2() -> None:
    size = dist.get_world_size()
    if size % 4:
        return
    names = ("replica", "shard", "tensor")
    mesh = init_device_mesh("cpu", (size // 4, 2, 2), mesh_dim_names=names)
    plain = Model(inner=32)
    model = copy.deepcopy(plain)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["shard"])
    replicas = adasum_replicate(model, mesh["replica"])
    loss_of(model, 3).backward()
    assert all(
        isinstance(g, torch.Tensor) for g in (p.grad for p in model.blocks.parameters())
    )
    replicas.remove()


def case_plain_model_without_overlap() -> None:
    for overlap in (True, False):
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
    refused("DeepSpeed ZeRO; use fully_shard", zero)
    refused(r"expected one dimension.*mesh\[\"replica\"\]", nn.Linear(4, 4), mesh)
    refused("rule: expected 'adasum'", nn.Linear(4, 4), rule="median")
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
