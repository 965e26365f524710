"""Other layouts than one mesh of shards, and whole training runs."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext

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
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from adasum_hvd import reference
from adasum_hvd.distributed import (
    AdasumState,
    LocalSGD,
    ReplicaMismatch,
    adasum_all_reduce,
    adasum_hook,
    adasum_replicate,
    check_replicas,
    clip_grad_norm_,
    mark_worker_local,
    reduce_changes,
)
from adasum_hvd.distributed.sharding import repeated
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
    check(plain, model, replicas, ranks, same_batch=ranks, passes=passes)


def case_several_parameter_groups_in_one_module() -> None:
    """Experts: each rank of a replica has its own, next to weights that are sharded."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp
    from torch.distributed.tensor import Shard

    if not hasattr(fsdp, "ShardPlacementResult"):
        pytest.skip("torch before 2.11 shards a module over one mesh")
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
    assert not repeated(model)  # so that experts may differ
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


PLAN = {"1": ColwiseParallel(), "3": RowwiseParallel()}


def layers_of() -> nn.Sequential:
    """Return layers of which `PLAN` leaves the first and the last one plain."""
    torch.manual_seed(0)
    up, down = nn.Linear(6, 8), nn.Linear(8, 6)
    return nn.Sequential(nn.LayerNorm(6), up, nn.Tanh(), down, nn.Linear(6, 1))


def layouts() -> Iterator[tuple[str, nn.Module]]:
    """Yield a name and a module: several meshes, plain parameters, and empty shards."""
    mesh = mesh_with("tensor")
    yield "plain", layers_of()
    for name in ("tensor", "tensor in fsdp2", "two meshes"):
        model = layers_of()
        if name == "two meshes":
            fully_shard(model[1], mesh=mesh["tensor"])
            fully_shard(model, mesh=mesh_of(2)["shard"])
        else:
            parallelize_module(model, mesh["tensor"], PLAN)
        if name == "tensor in fsdp2":
            fully_shard(model, mesh=mesh["shard"])
        yield name, model


@pytest.mark.parametrize("norm_type", [2.0, 1, 3.5, 0.5, "inf", 0, -1.0, "-inf"])
def case_clipping(norm_type: float) -> None:
    """One norm on all ranks: torch's of the whole model."""
    for name, model in layouts():
        for foreach in (None, False):
            model.zero_grad()
            model(torch.arange(24.0).view(4, 6).sin()).square().mean().backward()
            plain = [nn.Parameter(torch.ones_like(p)) for p in layers_of().parameters()]
            for mine, own in zip(plain, model.parameters(), strict=True):
                mine.grad = torch.from_numpy(whole(own.grad)).float()
            right = nn.utils.clip_grad_norm_(plain, 1e-3, float(norm_type))
            norm = clip_grad_norm_(model.parameters(), 1e-3, norm_type, foreach=foreach)
            torch.testing.assert_close(norm, right, rtol=1e-5, atol=0, msg=name)
            assert len(set(everyone(norm.item()))) == 1
            for mine, own in zip(plain, model.parameters(), strict=True):
                np.testing.assert_allclose(whole(own.grad), mine.grad, 1e-4, 1e-9)


def case_clipping_without_gradients_and_with_infinite_ones() -> None:
    for _, model in layouts():
        assert clip_grad_norm_(model.parameters(), 1.0) == 0
        used = model[1].weight
        used.grad = torch.ones_like(used)
        assert clip_grad_norm_(used, 100.0) == clip_grad_norm_(
            model.parameters(), 100.0
        )
        if rank() == 0:  # only one shard, and only one rank
            getattr(used.grad, "_local_tensor", used.grad)[0, 0] = np.inf
        mesh = getattr(used, "device_mesh", None)
        here = 0 in ([rank()] if mesh is None else mesh.mesh.flatten().tolist())
        before = whole(used.grad)
        words = r"expected finite gradients, but got a norm of inf \(rank"
        with pytest.raises(RuntimeError, match=words) if here else nullcontext():
            clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=True)
        np.testing.assert_array_equal(whole(used.grad), before)
    assert clip_grad_norm_([], 1.0) == 0


def in_ddp(mesh: DeviceMesh, dimension: str, plan: dict, **arguments) -> nn.Module:
    """Return DDP with the hook over layers on a dimension of a mesh."""
    model = parallelize_module(layers_of(), mesh[dimension], plan)
    wrapped = DistributedDataParallel(model, device_mesh=mesh["replica"])
    state = AdasumState(mesh["replica"], **arguments)
    wrapped.register_comm_hook(state, adasum_hook)
    return wrapped


def case_local_parts_of_dtensors_are_refused() -> None:
    """torch trains them under DDP. AdaSum of parts is not that of whole tensors."""
    mesh, x = mesh_with("tensor"), torch.ones(2, 6)
    words = r"but got a DTensor or its local part.*use adasum_replicate or LocalSGD"
    wrapped = in_ddp(mesh, "tensor", PLAN)
    parts = [*wrapped.parameters()]
    optimizer = torch.optim.SGD(parts, 0.1)
    for reduce in (
        lambda: wrapped(x).sum().backward(),
        lambda: adasum_all_reduce(parts, mesh["replica"]),
    ):
        with pytest.raises(ValueError, match=words):
            reduce()
    end = reduce_changes(optimizer, mesh["replica"])
    before = [part.detach().clone() for part in parts]
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    end()
    assert all(map(torch.equal, parts, before))
    module = in_ddp(mesh, "tensor", PLAN).module
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    words = "1.weight is the local part of a DTensor.*pass the module as it is before"
    for call in (
        lambda: adasum_replicate(module, mesh["replica"]),
        lambda: LocalSGD(optimizer, module, mesh["replica"], 1),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def case_local_parts_that_are_whole_are_reduced() -> None:
    """On a mesh of one rank, replicated, or by a mean, whose parts are parts of the mean."""
    mesh = mesh_with("tensor")
    norm = {"0": SequenceParallel(sequence_dim=0, use_local_output=True)}
    ones = init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replica", "one")
    )
    for on, dimension, plan, rule in (
        (ones, "one", PLAN, "adasum"),
        (mesh, "tensor", PLAN, "mean"),
        (mesh, "tensor", norm, "adasum"),
    ):
        wrapped = in_ddp(on, dimension, plan, rule=rule)
        parts = [*wrapped.parameters()]
        replica = on["replica"].get_local_rank()
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(replica))
        wrapped(x).square().sum().backward()
        alone = layers_of()
        alone(x).square().sum().backward()
        for number, (part, own) in enumerate(
            zip(parts, alone.parameters(), strict=True)
        ):
            size = on.size() // on["replica"].size()
            vectors = everyone(own.grad.numpy().reshape(-1))[::size]
            joined = reference.adasum(vectors)
            if rule == "mean":
                joined = np.mean(vectors, 0)
            right = joined.reshape(own.shape)
            for side, (full, kept) in enumerate(
                zip(own.shape, part.shape, strict=True)
            ):
                start = kept * on[dimension].get_local_rank() if kept < full else 0
                right = right.take(range(start, start + kept), side)
            # Sequence parallelism adds up the norm's gradients of two equal inputs.
            factor = 2 if plan is norm and number < 2 else 1
            np.testing.assert_allclose(part.grad, factor * right, 1e-4, 1e-5)


@pytest.mark.parametrize("way", ["tensor", "tensor in fsdp2"])
def case_copies_in_a_replica(way: str) -> None:
    """Parameters that tensor parallelism leaves whole must stay alike on all ranks."""
    mesh = mesh_with("tensor")

    def model_of(seed: int = 0) -> nn.Module:
        model = layers_of()
        nn.init.normal_(model[4].weight, generator=torch.Generator().manual_seed(seed))
        parallelize_module(model, mesh["tensor"], PLAN)
        if way == "tensor in fsdp2":
            fully_shard(model, mesh=mesh["shard"])
        return model

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1)

    own = mesh["tensor"].get_local_rank()
    words = r"expected equal tensors on all 2 ranks, but got another {} on ranks"
    other = model_of(seed=own)
    for call in (
        lambda: adasum_replicate(other, mesh["replica"]),
        lambda: LocalSGD(sgd(other), other, mesh["replica"], 1),
    ):
        with pytest.raises(ValueError, match=words.format("4.weight")):
            call()
    mark_worker_local(other[4].weight)
    adasum_replicate(other, mesh["replica"])
    for local in (False, True):
        model = model_of()
        optimizer = sgd(model)
        if local:
            LocalSGD(optimizer, model, mesh["replica"], 1)
        else:
            adasum_replicate(model, mesh["replica"])
        assert check_replicas(model, group=mesh["replica"])
        torch.manual_seed(own)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                optimizer.zero_grad()
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
                model(nn.functional.dropout(x)).square().sum().backward()
                optimizer.step()
        name = r"0\.weight|4\.\w+"
        messages = [
            w for w in caught if re.search(words.format(f"({name})"), str(w.message))
        ]
        assert messages, [str(w.message) for w in caught]
        with pytest.raises(ReplicaMismatch, match="expected equal tensors on all 2"):
            check_replicas(model, group=mesh["replica"])
