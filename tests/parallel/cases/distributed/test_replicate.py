"""`adasum_replicate` under torchrun: sharded models against AdaSum of whole tensors in NumPy."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
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
from adasum_hvd.distributed import (
    ReplicaMismatch,
    adasum_replicate,
    check_replicas,
    mark_worker_local,
    native,
    replica_mesh,
)
from tests.parallel.harness.sharded import (
    MESHES,
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

BUFFERS = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float8_e4m3fn,
    torch.float64, torch.complex64,
)  # fmt: skip


def case_any_number_of_shards() -> None:
    """Replicas x shards: with 4 ranks 4x1, 2x2 and 1x4, with 6 also 3x2 and 2x3."""
    for shards in shard_counts():
        plain = Model()
        model = copy.deepcopy(plain)
        shard(model, shards)
        replicas = adasum_replicate(model, mesh_of(shards)["replica"])
        check(plain, model, replicas, shards, steps=8)


@pytest.mark.parametrize("everywhere", [True, False])
def case_all_shards_by_the_core_or_none(everywhere: bool) -> None:
    """If one rank has no core, its replicas and the ranks of all other shards do without it."""
    plain = Model()
    model = copy.deepcopy(plain)
    shard(model, 2)
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    off = not everywhere and rank() == 1
    with mock.patch.dict(os.environ, {native.SETTING: "off"} if off else {}):
        check(plain, model, replicas, 2, steps=2)
    known = native._known(replicas._communicator).items()
    by_core = [bool(choice.groups) for key, choice in known if key[2]]
    expected = everywhere and os.environ.get(native.SETTING) != "off"
    assert everyone(by_core) == [[expected]] * dist.get_world_size()


def weights_of(gram: torch.Tensor) -> torch.Tensor:
    """Weigh each replica by its norm."""
    norms = gram.diagonal(dim1=1, dim2=2)
    return norms / norms.sum(1, keepdim=True).clamp_min(1e-300)


@pytest.mark.parametrize("rule", ["mean", "norms"])
def case_rules_of_shards(rule: str) -> None:
    """A function's matrices are those of whole tensors."""
    plain = Model()
    model = copy.deepcopy(plain)
    shard(model, 2)
    function = weights_of if rule == "norms" else rule
    adasum_replicate(model, mesh_of(2)["replica"], rule=function)
    for one in (plain, model):
        loss_of(one, rank()).backward()
    gradients = [None if p.grad is None else p.grad.numpy() for p in plain.parameters()]
    ranks = everyone(gradients)
    for parameter, *own in zip(model.parameters(), *ranks, strict=True):
        if own[0] is None:
            continue
        pairs = [np.stack(own[k : k + 2]) for k in range(0, len(own), 2)]
        means = np.stack([pair.mean(0, dtype=np.float64).ravel() for pair in pairs])
        norms = np.ones(len(means)) if rule == "mean" else (means**2).sum(1)
        expected = (norms / norms.sum()) @ means
        error = np.abs(whole(parameter.grad).ravel() - expected).max()
        assert error <= TOLERANCE * np.abs(means).max()


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
    check(plain, model, replicas, 2, same_batch=2, passes=passes)


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
    for module in (model[0], model):
        fully_shard(module, mesh=mesh_of(2)["shard"])
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
    refused("rule: expected one of adasum", nn.Linear(4, 4), rule="median")
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    refused(r"weight is on the meta device.*; call to_empty\(\)", empty)
    refused("weight has dtype torch.complex64", nn.Linear(4, 4, dtype=torch.complex64))
    refused("dense gradients, but the model has", nn.Embedding(4, 4, sparse=True))
    with mock.patch.object(replica_mesh, "GLOO_SUMS", True):
        model = Model()
        shard(model, 2)
        refused("the model is sharded on CPUs, where .* sums gradients", model)
    # Ranks of other replicas, of other shards and without a problem raise, too.
    last = dist.get_world_size() - 1
    own = mesh if rank() == last else mesh["replica"]
    refused(rf"got 2 dimensions on rank {last} of {last + 1};", nn.Linear(4, 4), own)
    refused("or their process group, but got str", nn.Linear(4, 4), "replica")
    refused("expected a torch.nn.Module, but got Tensor", torch.ones(1))
    some = dist.new_group([0, 1])
    refused("a group without it on rank 2 of", nn.Linear(4, 4), some)
    one = nn.Linear(5 if rank() == last else 4, 4)
    refused(rf"got weight=.* on rank {last} and .* on rank 1;", one)
    wide = 3 if rank() >= 2 else 4
    refused("expected the same arguments", nn.Linear(wide, 4))
    partly = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(partly[0], mesh=mesh["shard"])
    refused(r"1.weight is outside fully_shard.* call fully_shard on the model", partly)
    for kind, model in different():
        refused(rf"got .*{kind}.* on rank {last} and ", model)


def different() -> Iterator[tuple[str, nn.Module]]:
    """Yield what differs on the last rank, and a model."""
    here = rank() == dist.get_world_size() - 1
    for kind, one, other in (
        (r"cache=\(\(5,\)", torch.zeros(3), torch.zeros(5)),
        ("cache=.*float64", torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        ("no more", torch.zeros(3), None),
    ):
        model = nn.Linear(4, 4)
        model.register_buffer("cache", other if here else one)
        yield kind, model
    model = nn.Linear(4, 4)
    mark_worker_local(model.weight if here else model.bias)
    yield "weight=.*worker_local=True", model


def case_replicas_of_other_meshes() -> None:
    """torch sorts a group's ranks, and hosts decide on the tree: shards must have the same."""
    if dist.get_world_size() != 4:
        pytest.skip("meshes of four ranks")
    names = ("replica", "shard")
    crossed = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=names)
    model = nn.Linear(3, 4)
    fully_shard(model, mesh=crossed["shard"])
    refused("numbers the replicas in another order", model, crossed["replica"])
    plain = Model()
    model = copy.deepcopy(plain)
    shard(model, 2)
    host = "b" if rank() == 3 else "a"
    MESHES.clear()  # hosts are kept by group
    with mock.patch.dict(os.environ, ADASUM_HVD_HOSTNAME=host):
        mesh = mesh_of(2)["replica"]
        replicas = adasum_replicate(model, mesh, group_op="average")
    loss_of(model, rank()).backward()
    replicas.remove()
    MESHES.clear()
    used = [p.grad for p in model.parameters() if p.grad is not None]
    mean, alone = copy.deepcopy(plain), []
    for replica in range(2):
        mean.zero_grad()
        for number in (2 * replica, 2 * replica + 1):
            (loss_of(mean, number) / 2).backward()
        alone.append([p.grad.clone() for p in mean.parameters() if p.grad is not None])
    for found, *values in zip(used, *alone, strict=True):
        # The first shard's replicas share a host, so that all shards are averaged.
        error = whole(found) - np.mean([value.numpy() for value in values], 0)
        assert np.abs(error).max() < TOLERANCE


def case_misuse_is_named() -> None:
    model = nn.Linear(3, 2)
    replicas = adasum_replicate(model, mesh_of(1)["replica"])
    refused(r"weight is reduced by an earlier .*call remove\(\)", model)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) between steps"):
        model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()  # and goes on
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    model.bias.requires_grad_(False)
    replicas.remove()
    adasum_replicate(model, mesh_of(1)["replica"])
    model.bias.requires_grad_(True)
    model.zero_grad()
    with pytest.raises(
        RuntimeError, match=r"bias to stay frozen.*call remove\(\), and"
    ):
        model(torch.ones(1, 3)).sum().backward()


def case_buffers_of_any_dtype_and_layout() -> None:
    """All of them are the first replica's after the start."""
    own, model = float(rank()), nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    torch.nn.init.constant_(model.weight, own)
    buffers = [torch.full((2, 3), own).to(dtype) for dtype in BUFFERS]
    buffers += [torch.full((), own), torch.empty(0), torch.full((3, 2), own).t()]
    buffers += [torch.full((1,), own).expand(4), torch.full((2, 2), own)[:, :1]]
    for number, buffer in enumerate(buffers):
        model.register_buffer(f"b{number}", buffer)
    adasum_replicate(model, mesh_of(1)["replica"])
    for tensor in (model.weight, *model.buffers()):
        assert not tensor.to(torch.complex64).any(), tensor.dtype


def case_after_a_forward_pass() -> None:
    """An evaluation leaves whole parameters in FSDP's root."""
    plain = Model()
    model = copy.deepcopy(plain)
    shard(model, 2)
    with torch.no_grad():
        loss_of(model, 0)
    check(plain, model, adasum_replicate(model, mesh_of(2)["replica"]), 2)


def case_no_sync_in_no_sync() -> None:
    model = nn.Linear(3, 2)
    replicas = adasum_replicate(model, mesh_of(1)["replica"])
    with replicas.no_sync():
        with replicas.no_sync():
            (rank() * model(torch.ones(1, 3)).sum()).backward()
        (rank() * model(torch.ones(1, 3)).sum()).backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0 * rank()))


def case_a_marked_parameter_keeps_its_own_gradient() -> None:
    model = nn.Linear(3, 2)
    mark_worker_local(model.bias)
    adasum_replicate(model, mesh_of(1)["replica"])
    (rank() * model(torch.ones(1, 3)).sum()).backward()
    assert torch.equal(model.bias.grad, torch.full((2,), float(rank())))
    assert len({value.sum().item() for value in everyone(model.weight.grad)}) == 1


@pytest.mark.parametrize("fsdp", [False, True])
def case_a_gradient_is_reduced_once(fsdp: bool) -> None:
    """Passes over parts of a model, and FSDP modules without a root; a sum shows each time."""
    size = dist.get_world_size()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    if fsdp:
        for layer in model:
            fully_shard(layer, mesh=mesh_of(1)["shard"])
    mesh = mesh_of(1)["replica"]
    adasum_replicate(model, mesh, group_op="sum", group_size=size)
    ones = torch.ones(1, 2)
    for _ in range(3):
        model.zero_grad()
        if fsdp:
            model(ones).sum().backward()
        else:
            for layer in model:
                layer(ones).sum().backward()
        last = whole(model[2].bias.grad)
        assert np.array_equal(last, np.full(2, size)), last
        if not fsdp:
            assert np.array_equal(whole(model[0].weight.grad), np.full((2, 2), size))


def case_check_replicas_of_shards() -> None:
    """And of a tensor of one element whose stride is not 1."""
    model = Model()
    shard(model, 2)
    model.register_buffer("one", torch.zeros(1, 4)[:, :1])
    group = mesh_of(2)["replica"].get_group()
    assert check_replicas(model, group=group)
    if rank() == dist.get_world_size() - 1:
        model.blocks[0].up.weight.data.to_local().add_(1)
    other = dist.get_process_group_ranks(group)[-1] == dist.get_world_size() - 1
    with pytest.raises(ReplicaMismatch) if other else nullcontext():
        check_replicas(model, group=group)
