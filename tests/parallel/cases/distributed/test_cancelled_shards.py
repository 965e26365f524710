"""Gradients of replicas that nearly cancel, in tensors of which some ranks have no part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from adasum_hvd import reference
from adasum_hvd.distributed import adasum_replicate
from tests.parallel.harness.sharded import TOLERANCE, everyone, mesh_of, whole
from tests.parallel.harness.sharded import align as align
from tests.parallel.harness.sharded import init as init
from tests.parallel.harness.sharded import rank as rank
from tests.parallel.harness.sharded import shutdown as shutdown

# What the replicas' losses are multiplied by: the first two replicas' gradients nearly cancel.
FACTORS = 1.0, -1.001, 3.0, 2.0
INPUTS = torch.arange(1.0, 5.0)[None]  # one row, so that a gradient is rounded once


def scaled(vector, factor: float) -> np.ndarray:
    """Return a multiple, rounded as the gradient is."""
    return np.asarray(vector, np.float32) * np.float32(factor)


def check(parameter: nn.Parameter, vectors: list[np.ndarray]) -> None:
    error = whole(parameter.grad).ravel() - reference.adasum(vectors)
    assert np.abs(error).max() <= TOLERANCE * np.abs(vectors).max(), error


class Experts(nn.Module):
    """An expert of each rank, and a layer of all."""

    def __init__(self):
        super().__init__()
        self.expert, self.all = nn.Linear(4, 2, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.expert(x).sum(), self.all(x).sum()


def case_a_shard_that_is_empty() -> None:
    """The bias has one element, so that the second rank of a replica has none of it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    fully_shard(model, mesh=mesh_of(2)["shard"])
    adasum_replicate(model, mesh_of(2)["replica"])
    factors = FACTORS[: mesh_of(2)["replica"].size()]
    for _ in range(2):
        model.zero_grad()
        (model(INPUTS).sum() * factors[rank() // 2]).backward()
        for parameter, vector in (model.weight, INPUTS[0]), (model.bias, [1.0]):
            check(parameter, [scaled(vector, factor) for factor in factors])


def case_an_expert_of_one_rank() -> None:
    """Experts of one FSDP module, of which each rank has its own; that of the first cancels."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp
    from torch.distributed.tensor import Shard

    if not hasattr(fsdp, "ShardPlacementResult"):
        pytest.skip("torch before 2.11 shards a module over one mesh")
    size = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (size, 2, 1), mesh_dim_names=("r", "s", "expert"))
    alone = fsdp.FSDPMeshInfo(mesh["expert"], shard_mesh_dim=0)
    torch.manual_seed(0)
    model = Experts()
    own = id(model.expert.weight)
    fully_shard(
        model,
        mesh=mesh["s"],
        shard_placement_fn=lambda p: (
            fsdp.ShardPlacementResult(Shard(0), alone) if id(p) == own else None
        ),
    )
    adasum_replicate(model, mesh["r"])
    factor = FACTORS[rank() // 2] if rank() % 2 == 0 else 1.0 + rank()
    expert, every = model(INPUTS)
    (factor * expert + (1 + rank()) * every).backward()
    factors = everyone(factor)[rank() % 2 :: 2]
    check(
        model.expert.weight, [scaled(INPUTS.repeat(1, 2)[0], each) for each in factors]
    )
    means = [scaled(INPUTS.repeat(1, 4)[0], 2 * k + 1.5) for k in range(size)]
    check(model.all.weight, means)
