"""Under torchrun: arguments of `reduce_changes`, `LocalSGD`, `adasum_replicate` have an effect."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import (
    PeriodicModelAverager,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

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
    check,
    digest,
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

RATE = 0.125


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(3, 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE)


def own_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step with this rank's data."""
    optimizer.zero_grad()
    data = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank()))
    model(data).square().sum().backward()
    optimizer.step()


def check_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    joined: Callable[[list[np.ndarray]], np.ndarray],
) -> None:
    """Take a step, and compare each change with what `joined` makes of the ranks' changes."""
    starts = [whole(parameter) for parameter in model.parameters()]
    own_step(model, optimizer)
    for start, parameter in zip(starts, model.parameters(), strict=True):
        expected = joined(everyone(-RATE * whole(parameter.grad)))
        change = whole(parameter) - start
        np.testing.assert_allclose(change, expected, rtol=1e-5, atol=TOLERANCE)


def total(changes: list[np.ndarray]) -> np.ndarray:
    return np.sum(changes, 0)


def mean(changes: list[np.ndarray]) -> np.ndarray:
    return np.mean(changes, 0)


def case_reduce_changes_in_one_group() -> None:
    model = model_of()
    optimizer = sgd(model)
    reduce_changes(optimizer, group_op="sum", group_size=dist.get_world_size())
    check_step(model, optimizer, total)


def case_reduce_changes_of_some_ranks() -> None:
    size = dist.get_world_size()
    some, rest = [0, 2], [k for k in range(size) if k not in (0, 2)]
    mine = some if rank() in some else rest
    groups = [dist.new_group(ranks) for ranks in (some, rest)]
    own = groups[mine is rest]

    def of_group(changes: list[np.ndarray]) -> np.ndarray:
        return reference.adasum([changes[k] for k in mine])

    model = model_of()
    optimizer = sgd(model)
    reduce_changes(optimizer, own)  # two groups next to each other
    check_step(model, optimizer, of_group)
    model = model_of()
    optimizer = sgd(model)
    if mine is some:
        reduce_changes(optimizer, own)
        check_step(model, optimizer, of_group)
    else:  # its change stays its own
        check_step(model, optimizer, lambda changes: changes[rank()])
    digests = everyone(digest(model))
    assert digests[0] == digests[2] and len(set(digests)) == size - 1


def case_local_sgd_by_another_rule() -> None:
    model = model_of()
    optimizer = sgd(model)
    LocalSGD(optimizer, model, mesh_of(1)["replica"], every=1, rule="mean")
    check_step(model, optimizer, mean)


def case_local_sgd_in_one_group() -> None:
    model = model_of()
    optimizer = sgd(model)
    groups = {"group_op": "sum", "group_size": dist.get_world_size()}
    LocalSGD(optimizer, model, mesh_of(1)["replica"], every=1, **groups)
    check_step(model, optimizer, total)


def case_optimizers_whose_steps_are_collective() -> None:
    class WSAM(torch.optim.SGD):
        """As that of pytorch_optimizer, which averages gradients by itself."""

    model = model_of()
    plain = torch.optim.SGD(model.parameters(), RATE)
    for optimizer in (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=RATE),
        PostLocalSGDOptimizer(plain, PeriodicModelAverager(2)),
        WSAM(model.parameters(), RATE),
    ):
        kind = type(optimizer)
        with pytest.raises(ValueError, match=f"got {kind.__name__}, whose ranks send"):
            reduce_changes(optimizer)
        with pytest.raises(ValueError, match=f"got {kind.__name__}, whose ranks send"):
            LocalSGD(optimizer, model, mesh_of(1)["replica"], every=1)


@pytest.mark.parametrize("overlap", [True, False])
def case_layers_that_run_more_often_than_before(overlap: bool) -> None:
    """FSDP calls the hooks once a run in a pass that follows others in `no_sync()`."""
    plain = Model()
    model = copy.deepcopy(plain)
    shard(model, 2)
    replicas = adasum_replicate(model, mesh_of(2)["replica"], overlap=overlap)
    check(plain, model, replicas, 2, steps=1, passes=2)
    plain.runs = model.runs = 2
    if not overlap:
        check(plain, model, replicas, 2, steps=2, passes=2)
        return
    model.zero_grad()
    with replicas.no_sync():
        loss_of(model, rank()).backward()
    with pytest.raises(RuntimeError, match=r"at most 1 times.*pass overlap=False"):
        loss_of(model, rank()).backward()


def case_replicas_that_train_other_parameters() -> None:
    model = model_of()
    last = dist.get_world_size() - 1
    model.bias.requires_grad_(rank() != last)
    with pytest.raises(ValueError, match=rf"requires_grad=False.* on rank {last} and"):
        adasum_replicate(model, mesh_of(1)["replica"])


def case_replicas_with_other_units() -> None:
    """Of equal shards: `fully_shard` of each layer on the first replica only."""
    mesh = mesh_of(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model if rank() < 2 else ():
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(ValueError, match=r"got .*unit 0.* on rank . and .*unit 1.* on"):
        adasum_replicate(model, mesh["replica"])


def case_a_marked_buffer_is_not_broadcast() -> None:
    model = model_of()
    for name in ("own", "shared"):
        model.register_buffer(name, torch.full((2,), float(rank())))
    mark_worker_local(model.own)
    adasum_replicate(model, mesh_of(1)["replica"])
    assert torch.equal(model.own, torch.full((2,), float(rank())))
    assert not model.shared.any()


def case_an_outer_parameter_of_no_model() -> None:
    """An outer step has no gradient for it."""
    model, other = model_of(), nn.Parameter(torch.ones(3))
    gradient = other.grad = torch.full((3,), 2.0)
    outer = torch.optim.SGD([*model.parameters(), other], 0.5, momentum=0.5)
    optimizer = sgd(model)
    LocalSGD(optimizer, model, mesh_of(1)["replica"], 1, outer)
    own_step(model, optimizer)
    assert torch.equal(other, torch.ones(3))
    assert other.grad is gradient and torch.equal(gradient, torch.full((3,), 2.0))


def case_a_state_after_an_evaluation() -> None:
    """A forward pass leaves whole parameters in FSDP's root; the state has shards."""
    model = Model()
    shard(model, 2)
    optimizer = sgd(model)
    outer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    local_sgd = LocalSGD(optimizer, model, mesh_of(2)["replica"], 2, outer)
    for step in range(2):
        with torch.no_grad():
            loss_of(model, 0)
        state = local_sgd.state_dict()
        buffers = state["outer_optimizer"]["state"].values()
        saved = [*state["starts"].values(), *(b["momentum_buffer"] for b in buffers)]
        assert len(saved) == 2 * len(list(model.parameters()))
        for tensor in saved:
            assert isinstance(tensor, DTensor) and tensor.placements == (Shard(0),)
        optimizer.zero_grad()
        loss_of(model, 100 * step + rank()).backward()
        optimizer.step()


def case_a_state_from_before_the_first_outer_step() -> None:
    """Saving or loading it leaves that step the first: later ones dampen their gradients."""
    models = [model_of() for _ in range(3)]
    for saves, loads, model in zip((0, 1, 1), (0, 0, 1), models, strict=True):
        optimizer = sgd(model)
        outer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5, dampening=0.5)
        local_sgd = LocalSGD(optimizer, model, mesh_of(1)["replica"], 2, outer)
        own_step(model, optimizer)
        if saves:
            state = local_sgd.state_dict()
        if loads:
            local_sgd.load_state_dict(state)
        assert not outer.state
        for _ in range(3):
            own_step(model, optimizer)
    for one, *others in zip(*(model.parameters() for model in models), strict=True):
        assert all(torch.equal(one, other) for other in others)


def case_a_state_after_another_windows_outer_steps() -> None:
    """A later `LocalSGD` has ended no window, but its outer optimizer has a momentum."""
    losses = []
    for resumes in (False, True):
        model = model_of()
        optimizer = sgd(model)
        outer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
        for _ in range(2):  # phases
            local_sgd = LocalSGD(optimizer, model, mesh_of(1)["replica"], 1, outer)
            if resumes:
                local_sgd.load_state_dict(local_sgd.state_dict())
            own_step(model, optimizer)
            local_sgd.remove()
        losses.append(model.weight.detach().clone())
    assert torch.equal(*losses)


@pytest.mark.parametrize("use_orig_params", [False, True])
def case_changes_of_fsdp1_are_refused(use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(
        nn.Linear(6, 6),
        device_mesh=mesh_of(1)["shard"],
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )
    optimizer = sgd(model)
    reduce_changes(optimizer, mesh_of(1)["replica"])
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ValueError, match=r"flat ones of FSDP1.*use fully_shard"):
        optimizer.step()


def case_gradients_whose_sums_are_pending() -> None:
    """Sequence parallelism: each rank of a replica has the gradient of its part of a sequence."""
    plain = nn.LayerNorm(8)
    model = copy.deepcopy(plain)
    mesh = mesh_of(2)
    parallelize_module(model, mesh["shard"], SequenceParallel())
    adasum_replicate(model, mesh["replica"])
    generator = torch.Generator().manual_seed(rank() // 2)
    data = torch.randn(2, 6, 8, generator=generator)
    own = data.chunk(2, dim=1)[rank() % 2]
    (plain(data) * data.sin()).sum().backward()
    (model(own).to_local() * own.sin()).sum().backward()
    for mine, correct in zip(model.parameters(), plain.parameters(), strict=True):
        expected = reference.adasum(everyone(whole(correct.grad))[::2])
        assert mine.grad.placements == (Replicate(),)
        error = np.abs(whole(mine.grad) - expected).max()
        assert error <= TOLERANCE * np.abs(expected).max(), error


def case_local_sgd_and_a_late_mark() -> None:
    model = model_of()
    optimizer = sgd(model)
    LocalSGD(optimizer, model, mesh_of(1)["replica"], every=1)
    own_step(model, optimizer)
    mark_worker_local(model.bias)
    with pytest.raises(RuntimeError, match="LocalSGD: expected bias to stay a reduced"):
        own_step(model, optimizer)
