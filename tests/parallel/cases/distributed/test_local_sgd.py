"""`LocalSGD` under torchrun: windows of local steps against AdaSum of whole changes in NumPy."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from adasum_hvd import reference
from adasum_hvd.distributed import (
    LocalSGD,
    adasum_replicate,
    mark_worker_local,
    reduce_changes,
)
from tests.parallel.harness.sharded import (
    TOLERANCE,
    Model,
    digest,
    everyone,
    loss_of,
    mesh_of,
    shard,
    shard_counts,
    whole,
    wholes,
)
from tests.parallel.harness.sharded import align as align
from tests.parallel.harness.sharded import init as init
from tests.parallel.harness.sharded import rank as rank
from tests.parallel.harness.sharded import shutdown as shutdown


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)


def train(model: nn.Module, optimizer, steps: range, source: int | None = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, 100 * step + (rank() if source is None else source)).backward()
        optimizer.step()


class Simulated:
    """The same training without shards: means inside a replica, AdaSum across, in float64."""

    def __init__(self, shards: int, outer: bool):
        self.model, self.shards = Model(), shards
        self.optimizer = sgd(self.model)
        self.outer = nesterov(self.model) if outer else None

    def window(self, steps: range) -> None:
        starts = [p.detach().clone() for p in self.model.parameters()]
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, 100 * step + rank()).backward()
            group = mesh_of(self.shards)["shard"].get_group()
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad.div_(self.shards), group=group)
            self.optimizer.step()
        pairs = zip(self.model.parameters(), starts, strict=True)
        changes = everyone([(p.detach() - old).double().numpy() for p, old in pairs])
        for own in zip(
            self.model.parameters(), starts, *changes[:: self.shards], strict=True
        ):
            parameter, old, *replicas = own
            joined = reference.adasum([change.reshape(-1) for change in replicas])
            joined = torch.from_numpy(joined).float().view(old.shape)
            if self.outer is None:
                parameter.data.copy_(old + joined)
            else:
                parameter.data.copy_(old)
                parameter.grad = -joined
        if self.outer is not None:
            self.outer.step()


def check(model: nn.Module, expected: nn.Module, name: str = "") -> None:
    """Compare weights, and set the expected ones to the others so that rounding stays small."""
    found = wholes(model.parameters())
    for mine, correct in zip(found, expected.parameters(), strict=True):
        error = np.abs(mine - whole(correct)).max()
        assert error <= TOLERANCE, (name, error)
        correct.data.copy_(torch.from_numpy(mine))
    assert len(set(everyone(digest(model)))) == 1


@pytest.mark.parametrize("outer", [False, True], ids=["direct", "outer_optimizer"])
def case_equals_the_reference(outer: bool) -> None:
    for shards in shard_counts():
        expected = Simulated(shards, outer)
        model = Model()
        shard(model, shards)
        optimizer = sgd(model)
        local_sgd = LocalSGD(
            optimizer,
            model,
            mesh_of(shards)["replica"],
            3,
            nesterov(model) if outer else None,
        )
        for window in range(3):
            steps = range(3 * window, 3 * window + 3)
            train(model, optimizer, steps)
            expected.window(steps)
            check(model, expected.model, f"{shards} shards, window {window}")
        local_sgd.remove()


def case_the_delta_variant_of_an_unsharded_model() -> None:
    """With windows of one step, bit for bit."""
    models = Model(), Model()
    optimizers = [sgd(model) for model in models]
    end = reduce_changes(optimizers[0])
    local_sgd = LocalSGD(optimizers[1], models[1], mesh_of(1)["replica"], 1)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(4))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    end()
    local_sgd.remove()
    train(models[1], optimizers[1], range(4, 5))
    assert len(set(everyone(digest(models[1])))) == dist.get_world_size()


def case_equal_changes_of_all_ranks_are_a_warning() -> None:
    """As under DDP, which has averaged their gradients; only in the first reduction."""
    for source, expected in ((0, [True, False]), (None, [False, False])):
        models = Model(), Model()
        optimizers = [sgd(model) for model in models]
        reduce_changes(optimizers[0])
        LocalSGD(optimizers[1], models[1], mesh_of(1)["replica"], 1)
        for model, optimizer in zip(models, optimizers, strict=True):
            for step, warns in enumerate(expected):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    train(model, optimizer, range(step, step + 1), source)
                messages = [str(one.message) for one in caught]
                assert any("the same change" in text for text in messages) == warns, (
                    messages
                )


def case_an_outer_optimizer_that_only_adds() -> None:
    """A rate of 1 without momentum is no outer optimizer; gradients come back to the program."""
    models = Model(), Model()
    for model in models:
        shard(model, 2)
        optimizer = sgd(model)
        outer = torch.optim.SGD(model.parameters(), 1.0) if model is models[0] else None
        LocalSGD(optimizer, model, mesh_of(2)["replica"], 2, outer)
        train(model, optimizer, range(4))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert torch.equal(one.grad.to_local(), other.grad.to_local())


def case_a_last_partial_window() -> None:
    model = Model()
    shard(model, 2)
    optimizer, expected = sgd(model), Simulated(2, outer=True)
    local_sgd = LocalSGD(optimizer, model, mesh_of(2)["replica"], 5, nesterov(model))
    train(model, optimizer, range(2))
    assert local_sgd.local_step == 2
    assert len(set(everyone(digest(model)))) == dist.get_world_size() // 2
    local_sgd.synchronize()
    expected.window(range(2))
    check(model, expected.model)
    before = digest(model)
    local_sgd.synchronize()  # between windows
    assert local_sgd.local_step == 0 and digest(model) == before


def folder() -> str:
    """Return a folder that all ranks know."""
    return everyone(tempfile.mkdtemp())[0]


def saved(model: nn.Module, optimizer, local_sgd: LocalSGD) -> dict:
    names = "model", "optimizer"
    state = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    return state | {"local_sgd": local_sgd}


@pytest.mark.parametrize("steps", [4, 2, 6], ids=["middle", "first", "between"])
def case_resume(steps: int) -> None:
    """A replica's checkpoint, resumed with its shards, and by an unsharded model."""
    path = folder()

    def begin(shards: int) -> tuple:
        model = Model()
        model.unused = None  # torch cannot load an optimizer that has no state of it
        if shards > 1:
            shard(model, shards)
        optimizer, outer = sgd(model), nesterov(model)
        mesh = mesh_of(shards)["replica"]
        return model, optimizer, LocalSGD(optimizer, model, mesh, 3, outer)

    def resume(shards: int) -> tuple:
        model, optimizer, local_sgd = begin(shards)
        state = saved(model, optimizer, local_sgd)
        group = mesh_of(shards)["shard"].get_group()
        checkpoint.load(state, checkpoint_id=replica_folder, process_group=group)
        set_state_dict(
            model, optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip
        return model, optimizer, local_sgd

    model, optimizer, local_sgd = begin(2)
    train(model, optimizer, range(steps))
    replica_folder = os.path.join(path, str(rank() // 2))
    checkpoint.save(
        saved(model, optimizer, local_sgd),
        checkpoint_id=replica_folder,
        process_group=mesh_of(2)["shard"].get_group(),
    )
    dist.barrier()
    train(model, optimizer, range(steps, 9))

    again, optimizer, local_sgd = resume(2)
    assert local_sgd.local_step == steps % 3
    train(again, optimizer, range(steps, 9))
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())

    # Twice as many replicas, in equal pairs: AdaSum of equal changes is that change.
    plain, optimizer, local_sgd = resume(1)
    for step in range(steps, 9):
        optimizer.zero_grad()
        for source in range(rank() // 2 * 2, rank() // 2 * 2 + 2):
            (loss_of(plain, 100 * step + source) / 2).backward()
        optimizer.step()
    check(model, plain)


def case_state_of_another_model_is_refused() -> None:
    model = nn.Linear(3, 2)
    mesh = mesh_of(1)["replica"]
    local_sgd = LocalSGD(sgd(model), model, mesh, 2)
    state = local_sgd.state_dict()
    other = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"starts: expected .*0\.bias.* got \['bias"):
        LocalSGD(sgd(other), other, mesh, 2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"outer_optimizer: expected .* but got \[\]"):
        LocalSGD(sgd(model), model, mesh, 2, sgd(model)).load_state_dict(state)


def refused(words: str, model: nn.Module, every, outer=None, **arguments) -> None:
    optimizer = arguments.pop("optimizer", None) or sgd(model)
    mesh = arguments.pop("mesh", None) or mesh_of(2)["replica"]
    with pytest.raises(ValueError, match=words):
        LocalSGD(optimizer, model, mesh, every, outer, **arguments)


def case_what_is_refused_on_every_rank() -> None:
    model = nn.Linear(4, 4)
    last = dist.get_world_size() - 1
    odd = rank() == last  # the ranks of other shards raise, too
    refused(rf"got every=4 on rank {last} and 3 on rank", model, 4 if odd else 3)
    refused(rf"every: expected .* got 0 on rank {last}", model, 0 if odd else 3)
    refused("every: expected an integer >= 1, but got True", model, True)
    outer = torch.optim.SGD(model.parameters(), 0.5 if odd else 0.7)
    refused(r"got outer_optimizer=\('SGD'.*'0.5'.*", model, 3, outer)
    some = torch.optim.SGD([model.weight], 0.7)
    refused("outer_optimizer: expected all .* 1 are missing", model, 3, some)
    strange = sgd(nn.Sequential(model, nn.Linear(4, 4)))
    refused("optimizer: expected .* got 2 others", model, 3, optimizer=strange)
    some = torch.optim.SGD([model.weight], 0.1)
    refused("optimizer: expected all .* 1 are missing", model, 3, optimizer=some)
    refused("rule: expected one of adasum", model, 3, rule="median")
    mesh = mesh_of(2) if odd else mesh_of(2)["replica"]
    refused(rf"got 2 dimensions on rank {last}", model, 3, mesh=mesh)
    hybrid = nn.Linear(4, 4)
    fully_shard(hybrid, mesh=mesh_of(2))
    refused(r"LocalSGD: .*\(HSDP\)", hybrid, 3)


def case_other_numbers_of_steps_leave_the_start() -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    local_sgd = LocalSGD(optimizer, model, mesh_of(1)["replica"], 3)
    before = digest(model)
    for _ in range(2 if rank() == 1 else 1):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(ValueError, match="local_step=2 on rank 1 and 1 on rank 0"):
        local_sgd.synchronize()
    assert digest(model) == before and local_sgd.local_step == 0


def case_nan_of_one_replica_stays_in_its_tensor() -> None:
    model = Model()
    shard(model, 2)
    optimizer = sgd(model)
    LocalSGD(optimizer, model, mesh_of(2)["replica"], 2)
    train(model, optimizer, range(1))
    if rank() == 0:  # one shard of one replica
        model.blocks[0].up.weight.data.to_local()[0, 0] = float("nan")
    loss = model.blocks[1].up.weight.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        bad = name == "blocks.0.up.weight"
        assert np.isnan(whole(parameter)).all() == bad, name
        assert np.isfinite(whole(parameter)).all() == (not bad), name


def case_frozen_and_unused_parameters() -> None:
    model = Model()
    model.blocks[1].up.requires_grad_(False)
    shard(model, 2)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
    before = whole(model.blocks[1].up.weight), whole(model.unused.weight)
    LocalSGD(optimizer, model, mesh_of(2)["replica"], 2)
    train(model, optimizer, range(4))
    after = whole(model.blocks[1].up.weight), whole(model.unused.weight)
    assert all(map(np.array_equal, before, after))
    assert len(set(everyone(digest(model)))) == 1


def case_a_parameter_that_is_trained_later_is_named() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = sgd(model)
    LocalSGD(optimizer, model, mesh_of(1)["replica"], 2)
    model.bias.requires_grad_(True)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="LocalSGD: expected bias to stay frozen"):
        optimizer.step()


def case_a_parameter_that_comes_later_is_named() -> None:
    """By a new group, or in the place of another one; replicas would diverge."""
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    local_sgd = LocalSGD(optimizer, model, mesh_of(1)["replica"], 2)
    model.scale = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [model.scale]})
    model.scale.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="got 1 others in group 1 of the opt"):
        optimizer.step()
    assert torch.equal(model.scale.data, torch.ones(2))
    local_sgd.remove()
    LocalSGD(optimizer, model, mesh_of(1)["replica"], 1)
    model.scale.grad = torch.full((2,), float(rank()))
    optimizer.step()
    assert len(set(everyone(digest(model)))) == 1
    model.bias = nn.Parameter(torch.zeros(2))
    optimizer.param_groups[0]["params"][1] = model.bias
    with pytest.raises(RuntimeError, match="got 1 others in group 0"):
        optimizer.step()


def case_a_marked_parameter_keeps_its_own_change() -> None:
    model = nn.Linear(3, 2)
    mark_worker_local(model.bias)
    optimizer, outer = sgd(model), torch.optim.SGD(model.parameters(), 1.0)
    LocalSGD(optimizer, model, mesh_of(1)["replica"], 1, outer)
    model.bias.data.fill_(0)
    (rank() * model(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    assert torch.equal(model.bias.data, torch.full((2,), -0.05 * rank()))
    assert len({value.sum().item() for value in everyone(model.weight.data)}) == 1


def case_tensor_parallelism() -> None:
    """Sharded weights, and plain parameters next to them."""
    expected, model = Simulated(2, outer=False), Model(inner=32)
    expected.model = copy.deepcopy(model)
    expected.optimizer = sgd(expected.model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh_of(2)["shard"], plan)
    optimizer = sgd(model)
    LocalSGD(optimizer, model, mesh_of(2)["replica"], 2)
    # The ranks of a replica have the same batch.
    with mock.patch(f"{__name__}.rank", lambda: dist.get_rank() // 2):
        train(model, optimizer, range(2))
        expected.window(range(2))
    check(model, expected.model)


def case_replicas_of_replicas() -> None:
    """Gradients are reduced inside a region, and changes across regions."""
    size = dist.get_world_size()
    if size % 4:
        pytest.skip("regions of two replicas: the size is not divisible by 4")
    names = ("region", "replica", "shard")
    mesh = init_device_mesh("cpu", (2, 2, size // 4), mesh_dim_names=names)
    model = Model()
    shard(model, 1)
    optimizer = sgd(model)
    adasum_replicate(model, mesh["replica"])
    LocalSGD(optimizer, model, mesh["region"], 2)
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        assert len(set(everyone(digest(model)))) == 2 - step


@contextmanager
def bytes_sent():
    """Count the bytes of this rank's messages, by the ranks of their group."""
    sent: dict[tuple[int, ...], int] = {}
    send = dist.batch_isend_irecv

    def count(operations: list) -> list:
        for one in operations:
            if one.op is dist.isend:
                ranks = tuple(dist.get_process_group_ranks(one.group))
                size = one.tensor.numel() * one.tensor.element_size()
                sent[ranks] = sent.get(ranks, 0) + size
        return send(operations)

    with mock.patch.object(dist, "batch_isend_irecv", count):
        yield sent


def case_traffic_between_replicas_falls_by_the_steps_of_a_window() -> None:
    """Exactly, after the first window; Gram matrices of the shards included.

    By torch's operations, because the core sends no messages.
    """
    traffic = []
    for every in (1, 4):
        model = Model()
        shard(model, 2)
        optimizer = sgd(model)
        local_sgd = LocalSGD(optimizer, model, mesh_of(2)["replica"], every)
        with mock.patch.dict(os.environ, ADASUM_HVD_CORE="0"):
            train(model, optimizer, range(every))
        with bytes_sent() as sent:
            train(model, optimizer, range(8))
        traffic.append(sent)
        assert local_sgd.local_step == 0
    assert len(traffic[0]) == 2  # replicas, and shards
    assert traffic[0] == {ranks: 4 * size for ranks, size in traffic[1].items()}
