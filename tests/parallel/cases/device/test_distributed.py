"""The engine on torch.distributed with CUDA tensors over NCCL.

ADASUM_TEST_DEVICE=cpu runs the same on the host, to try the cases themselves.
"""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from adasum_hvd import reference
from adasum_hvd.distributed import (
    AdasumState,
    LocalSGD,
    adasum_all_reduce,
    adasum_hook,
    adasum_replicate,
)
from tests.parallel.cases.distributed.test_all_reduce import align as align
from tests.parallel.cases.distributed.test_all_reduce import gather
from tests.parallel.cases.distributed.test_all_reduce import rank as rank
from tests.parallel.cases.distributed.test_all_reduce import shutdown as shutdown
from tests.parallel.harness import conformance
from tests.parallel.harness.conformance import CHECKS, Engine, by_levels, tensor_of
from tests.parallel.harness.models import batch_of, model_of, sgd, weights

SHARDED = 1e-5  # of the largest element: float32 sums in other orders
DEVICE = os.environ.get("ADASUM_TEST_DEVICE", "cuda")


def init() -> None:
    if DEVICE == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local % torch.cuda.device_count())
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")


def reduce_several(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    on_device = [tensor.to(DEVICE) for tensor in tensors]
    adasum_all_reduce(on_device, async_op=True).wait()
    return [tensor.cpu() for tensor in on_device]


def reduce_in_place(tensor: torch.Tensor, name: str) -> torch.Tensor:
    on_device = tensor.to(DEVICE, copy=True)
    adasum_all_reduce(on_device)
    return tensor.copy_(on_device)


def engine() -> Engine:
    return Engine(
        rank(),
        [0] * dist.get_world_size(),
        lambda tensor, name: reduce_in_place(tensor.clone(), name),
        reduce_in_place,
        reduce_several,
        gather,
    )


def case_every_dtype_and_size() -> None:
    conformance.every_dtype_and_size(engine())


@pytest.mark.parametrize("check", CHECKS)
def case_conformance(check: str) -> None:
    getattr(conformance, check)(engine())


def case_levels_of_two_hosts() -> None:
    """Messages of some of a group's ranks, also as the first ones of the group."""
    if dist.get_world_size() != 4:
        pytest.skip("needs two hosts of two ranks")
    sizes = (70_001, 300, 0, 9000)
    for group_op in ("adasum", "average"):
        group = dist.new_group()
        several = [
            [tensor_of(r, size, torch.bfloat16) for size in sizes] for r in range(4)
        ]
        mine = [tensor.to(DEVICE, copy=True) for tensor in several[rank()]]
        with mock.patch.dict(os.environ, ADASUM_HVD_HOSTNAME=f"host{rank() // 2}"):
            adasum_all_reduce(mine, group, group_op=group_op)
        for number, found in enumerate(mine):
            expected = by_levels([own[number] for own in several], (2, 2), group_op)
            assert (found.cpu() != expected).sum() <= 1 + sizes[number] // 1000


def step(model: torch.nn.Module, optimizer, number: int) -> None:
    images, labels = batch_of(rank(), number)
    images, labels = images.to(DEVICE), labels.to(DEVICE)
    if DEVICE == "cuda" and number > 2:  # buckets are known
        torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    optimizer.step()


def case_hook_without_synchronisation() -> None:
    """DDP comes to the weights of single reductions, and no step waits for the device."""
    plain = model_of().to(DEVICE)
    optimizer = sgd(plain.parameters())
    optimizer.register_step_pre_hook(
        lambda *_: adasum_all_reduce([p.grad for p in plain.parameters()])
    )
    model = DistributedDataParallel(model_of().to(DEVICE), bucket_cap_mb=0.004)
    model.register_comm_hook(AdasumState(), adasum_hook)
    with_ddp = sgd(model.parameters())
    for number in range(6):
        step(plain, optimizer, 0 if DEVICE == "cuda" else number)
        step(model, with_ddp, 0 if DEVICE == "cuda" else number)
    assert torch.equal(weights(model.module), weights(plain))
    step(model, with_ddp, 3)
    conformance.check_same_everywhere(engine(), [weights(model.module)])


def case_wait_raises_the_errors() -> None:
    """Also where the call itself queues the work, and so sees them first."""
    if dist.get_world_size() == 1:
        pytest.skip("one rank needs no rule")
    ones = torch.ones(2, device=DEVICE)
    work = adasum_all_reduce(ones, rule=lambda gram: gram[0], async_op=True)
    with pytest.raises(ValueError, match=r"expected coefficients of shape \(1, "):
        work.wait()


def sharded_model() -> tuple[torch.nn.Module, DeviceMesh]:
    """Return the model on as many shards as two replicas leave, and the mesh."""
    replicas = 2 if dist.get_world_size() % 2 == 0 else dist.get_world_size()
    shape = replicas, dist.get_world_size() // replicas
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replica", "shard"))
    model = model_of().to(DEVICE)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    return model, mesh


def whole(tensor: torch.Tensor) -> np.ndarray:
    return tensor.full_tensor().detach().cpu().double().numpy()


def loss_on_device(model: torch.nn.Module, number: int) -> torch.Tensor:
    images, labels = batch_of(rank(), number)
    outputs = model(images.to(DEVICE))
    return torch.nn.functional.cross_entropy(outputs, labels.to(DEVICE))


def case_sharded_gradients() -> None:
    """Against the gradients that each replica had by itself."""
    model, mesh = sharded_model()
    shards = mesh["shard"].size()
    loss_on_device(model, 0).backward()
    replicas = gather([whole(p.grad).reshape(-1) for p in model.parameters()])[::shards]
    adasum_replicate(model, mesh["replica"])
    for _ in range(2):  # reduced at the end of backward, then while it goes on
        model.zero_grad()
        loss_on_device(model, 0).backward()
        for number, parameter in enumerate(model.parameters()):
            expected = reference.adasum([own[number] for own in replicas])
            error = np.abs(whole(parameter.grad).reshape(-1) - expected).max()
            assert error <= SHARDED * np.abs(expected).max()


def case_local_steps_of_a_sharded_model() -> None:
    """Against the weights to which each replica had come by itself."""
    alone, mesh = sharded_model()
    model, _ = sharded_model()
    starts = [whole(p).reshape(-1) for p in model.parameters()]
    optimizers = [sgd(one.parameters()) for one in (alone, model)]
    LocalSGD(optimizers[1], model, mesh["replica"], 3)
    for number in range(3):
        for one, optimizer in zip((alone, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss_on_device(one, number).backward()
            optimizer.step()
    shards = mesh["shard"].size()
    ends = gather([whole(p).reshape(-1) for p in alone.parameters()])[::shards]
    for number, parameter in enumerate(model.parameters()):
        changes = [own[number] - starts[number] for own in ends]
        expected = starts[number] + reference.adasum(changes)
        error = np.abs(whole(parameter).reshape(-1) - expected).max()
        assert error <= SHARDED * np.abs(expected).max()
