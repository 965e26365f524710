"""`adasum_replicate` under torchrun: what programs do with a model next to training it."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from adasum_hvd.distributed import adasum_replicate, mark_worker_local
from tests.parallel.harness.sharded import align as align
from tests.parallel.harness.sharded import init as init
from tests.parallel.harness.sharded import mesh_of
from tests.parallel.harness.sharded import rank as rank
from tests.parallel.harness.sharded import shutdown as shutdown

X = torch.ones(1, 3)


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def case_parameters_are_saved_and_loaded() -> None:
    model = model_of()
    adasum_replicate(model, mesh_of(1)["replica"])
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file)  # weights only, which is torch's default
    assert torch.equal(loaded["0.weight"], model[0].weight)
    other = nn.Module()  # of parameters that no handle reduces
    other.weight = loaded["0.weight"]
    adasum_replicate(other, mesh_of(1)["replica"])


def case_a_sharded_model_is_converted() -> None:
    mesh = mesh_of(2)
    model = model_of()
    fully_shard(model, mesh=mesh["shard"])
    replicas = adasum_replicate(model, mesh["replica"])
    replicas.remove()
    model.double()
    again = adasum_replicate(model, mesh["replica"])
    model(X.double()).sum().backward()
    model.zero_grad()
    model.float()
    with pytest.raises(RuntimeError, match="got another one as"):
        model(X)
    again.remove()


def case_a_scripted_model() -> None:
    model = torch.jit.script(nn.Linear(3, 2))
    adasum_replicate(
        model, mesh_of(1)["replica"], group_op="sum", group_size=dist.get_world_size()
    )
    model(X).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), dist.get_world_size()))


@pytest.mark.parametrize("plain", [False, True])
def case_functional_call_with_parameters_of_its_own(plain: bool) -> None:
    own_of = torch.Tensor.requires_grad_ if plain else nn.Parameter
    model = model_of()
    adasum_replicate(model, mesh_of(1)["replica"])
    own = {name: own_of(p.detach().clone()) for name, p in model.named_parameters()}
    functional_call(model, own, (X,)).sum().backward()
    assert all(p.grad is not None for p in own.values())
    assert all(p.grad is None for p in model.parameters())


def case_a_late_mark() -> None:
    model = model_of()
    replicas = adasum_replicate(model, mesh_of(1)["replica"])
    model(X).sum().backward()
    model.zero_grad()
    mark_worker_local(nn.Linear(1, 1).weight)  # of another model
    model(X).sum().backward()
    model.zero_grad()
    mark_worker_local(model[1].bias)
    with pytest.raises(RuntimeError, match=r"expected 1\.bias to stay a reduced"):
        model(X).sum().backward()
    replicas.remove()
    model.zero_grad()
    adasum_replicate(model, mesh_of(1)["replica"])
    model(X * (1 + dist.get_rank())).sum().backward()


def case_synchronize_after_a_pass_that_was_reduced() -> None:
    model, size = model_of(), dist.get_world_size()
    replicas = adasum_replicate(
        model, mesh_of(1)["replica"], group_op="sum", group_size=size
    )
    model(X).sum().backward()
    expected = model[0].weight.grad.clone()
    replicas.synchronize()
    assert torch.equal(model[0].weight.grad, expected)
    model.zero_grad()
    with replicas.no_sync():
        model(X).sum().backward()
    replicas.synchronize()
    replicas.synchronize()
    torch.testing.assert_close(model[0].weight.grad, expected)


def case_reentrant_checkpoints_that_accumulate() -> None:
    model = nn.Linear(3, 3)
    adasum_replicate(model, mesh_of(1)["replica"])
    x = X.clone().requires_grad_()
    y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="pass use_reentrant=False to checkpoint"):
        y.sum().backward()


def case_a_sparse_buffer() -> None:
    model = model_of()
    model.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="buffer edges is sparse"):
        adasum_replicate(model, mesh_of(1)["replica"])
    mark_worker_local(model.edges)
    adasum_replicate(model, mesh_of(1)["replica"])
