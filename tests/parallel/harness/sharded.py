"""A model, its shards and the ranks' data, for cases of sharded models under torchrun."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tensor import Shard  # where torch 2.4 has it, too
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from adasum_hvd import reference
from adasum_hvd.distributed import clip_grad_norm_

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard

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


def wholes(tensors: Iterable[torch.Tensor]) -> list[np.ndarray]:
    """Return whole tensors; the rows that FSDP2 divides over one mesh come in one exchange."""
    tensors = list(tensors)
    mesh = getattr(tensors[0], "device_mesh", None)
    if mesh is None or any(
        getattr(tensor, "device_mesh", None) != mesh or tensor.placements != (Shard(0),)
        for tensor in tensors
    ):
        return [whole(tensor) for tensor in tensors]
    ranks: list = [None] * mesh.size()
    local = [tensor.detach().to_local().double().numpy() for tensor in tensors]
    dist.all_gather_object(ranks, local, mesh.get_group())
    return [np.concatenate(parts) for parts in zip(*ranks, strict=True)]


def everyone(thing: object) -> list:
    things: list = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def digest(model: nn.Module) -> str:
    data = b"".join(value.tobytes() for value in wholes(model.parameters()))
    return hashlib.sha256(data).hexdigest()


def shard(model: nn.Module, shards: int, **arguments) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(shards)["shard"], **arguments)
    fully_shard(model, mesh=mesh_of(shards)["shard"], **arguments)


def shard_counts() -> list[int]:
    size = dist.get_world_size()
    return [count for count in range(1, size + 1) if size % count == 0]


def correct(plain: nn.Module, shards: int) -> Iterator:
    """Yield by parameter the AdaSum over replicas of the mean over a replica's ranks."""
    gradients = [None if p.grad is None else p.grad.numpy() for p in plain.parameters()]
    ranks = everyone(gradients)
    for own in zip(*ranks, strict=True):
        if own[0] is None:
            yield None
            continue
        groups = [own[k : k + shards] for k in range(0, len(own), shards)]
        means = [np.mean(group, 0, dtype=np.float64).reshape(-1) for group in groups]
        yield reference.adasum(means).reshape(own[0].shape)


def check(
    plain: Model,
    model: nn.Module,
    replicas,
    shards: int,
    *,
    steps: int = 3,
    passes: int = 1,
    same_batch: int = 1,
    set_to_none: bool = True,
    tolerance: float = TOLERANCE,
) -> None:
    """Train a sharded model, and compare gradients and norms with the unsharded model's.

    Args:
        plain: the unsharded model.
        model: the sharded one.
        replicas: of the model.
        shards: ranks in a replica.
        steps: how many.
        passes: of each step.
        same_batch: consecutive ranks that have the same data.
        set_to_none: as of `zero_grad`.
        tolerance: relative to a gradient's largest element.
    """
    optimizers = [
        torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), 1e-2)
        for m in (model, plain)
    ]
    source = rank() // same_batch
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none)
        for k in range(passes):
            number = 1000 * step + 100 * k + source
            loss_of(plain, number).backward()
            with nullcontext() if k == passes - 1 else replicas.no_sync():
                loss_of(model, number).backward()
        expected = correct(plain, shards)
        used = []
        for (name, mine), other, value in zip(
            model.named_parameters(), plain.parameters(), expected, strict=True
        ):
            if value is None:
                assert mine.grad is None, name
            else:
                used.append((name, mine.grad, other, value))
        gradients = wholes(gradient for _, gradient, _, _ in used)
        for (name, _, other, value), found in zip(used, gradients, strict=True):
            error = np.abs(found - value).max()
            assert error <= tolerance * max(1e-3, np.abs(value).max()), (name, error)
            # Both train on with the same gradient, so that rounding does not add up.
            other.grad = torch.from_numpy(found).float()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm, expected_norm)
        for optimizer in optimizers:
            optimizer.step()
    assert len(set(everyone(digest(model)))) == 1
