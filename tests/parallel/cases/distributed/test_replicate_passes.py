"""`adasum_replicate` under torchrun: passes that break off or train other parameters."""

from __future__ import annotations

import copy
import gc
import io
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from adasum_hvd.distributed import (
    LocalSGD,
    adasum_replicate,
    check_replicas,
    mark_worker_local,
)
from adasum_hvd.distributed.units import grouped
from tests.parallel.harness.processes import until
from tests.parallel.harness.sharded import Model, check, everyone, mesh_of, shard
from tests.parallel.harness.sharded import align as align
from tests.parallel.harness.sharded import init as init
from tests.parallel.harness.sharded import rank as rank
from tests.parallel.harness.sharded import shutdown as shutdown


def case_only_parameters_that_were_frozen() -> None:
    """No other parameter's gradient tells that they would not be reduced."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    adasum_replicate(model, mesh_of(1)["replica"])
    assert not model[0].weight.requires_grad
    model[0].requires_grad_(True)
    model[1].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"expected 0\.\w+ to stay frozen"):
        model(torch.ones(1, 3)).sum().backward()


def case_synchronize_after_a_pass_that_broke_off() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.ones(2))
    model.b = nn.Parameter(torch.ones(2, dtype=torch.float64))
    size = dist.get_world_size()
    replicas = adasum_replicate(
        model, mesh_of(1)["replica"], group_op="sum", group_size=size
    )

    def loss(breaks: bool = False) -> torch.Tensor:
        x = model.a.double() * 1
        if breaks:
            x.register_hook(lambda gradient: 1 / 0)
        return (x * model.b).sum()

    loss().backward()
    model.zero_grad()
    with pytest.raises(ZeroDivisionError):
        loss(breaks=True).backward()
    model.zero_grad()
    with replicas.no_sync():
        loss().backward()
    replicas.synchronize()
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.full_like(parameter, size))
    with replicas.no_sync(), pytest.raises(RuntimeError, match="to the reduced grad"):
        loss().backward()


@pytest.mark.parametrize("by", ("adasum_replicate", "LocalSGD"))
def case_a_sharded_pass_that_broke_off(by: str) -> None:
    """FSDP's layers would train no more."""
    model, whole = nn.Linear(4, 4, bias=False), torch.full((4, 4), 0.5)
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=mesh_of(2)["shard"])
    optimizer, x = torch.optim.SGD(model.parameters(), 0.125), torch.ones(1, 4)
    if by == "LocalSGD":
        LocalSGD(optimizer, model, mesh_of(2)["replica"], every=2)
    else:
        adasum_replicate(model, mesh_of(2)["replica"])

    def loss() -> torch.Tensor:
        return model(x.requires_grad_()).sum()

    hook = model.weight.register_post_accumulate_grad_hook(lambda p: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss().backward()
    hook.remove()
    with pytest.raises(RuntimeError, match=by + r".*fully_shard train no more .*reset"):
        loss().backward()
        optimizer.step()
    if not hasattr(model, "reset_iter_state"):  # torch before 2.13
        return
    model.zero_grad()
    model.reset_iter_state()
    for _ in range(4):  # equal gradients of 1
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert torch.equal(model.weight.full_tensor(), whole)


def case_gradients_that_the_program_replaces() -> None:
    """They are not those that a pass has reduced, so that `synchronize` reduces them."""
    model, size = nn.Linear(3, 2), dist.get_world_size()
    replicas = adasum_replicate(
        model, mesh_of(1)["replica"], group_op="sum", group_size=size
    )
    model(torch.ones(1, 3)).sum().backward()
    reduced = model.weight.grad.clone()
    model.bias.grad = torch.full((2,), 1.0 + rank())
    replicas.synchronize()
    assert torch.equal(model.weight.grad, reduced)
    total = sum(range(1, size + 1))
    assert torch.equal(model.bias.grad, torch.full((2,), float(total)))


def case_parameters_that_were_replaced() -> None:
    """They would train without a reduction; the forward pass tells, before a backward."""
    mesh, words = (
        mesh_of(1)["replica"],
        r"got another one as .*weight.* call adasum_repl",
    )
    x = torch.ones(1, 3)

    def loaded(model: nn.Module) -> None:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    for change in (
        loaded,
        lambda model: nn.utils.parametrizations.weight_norm(model[0]),
        lambda model: model.append(nn.Linear(2, 2)),
        lambda model: fully_shard(model[0], mesh=mesh_of(2)["shard"]),
    ):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        replicas = adasum_replicate(model, mesh)
        model(x).sum().backward()
        model.zero_grad()
        change(model)
        with torch.no_grad():
            model(x)
        with pytest.raises(RuntimeError, match=words):
            model(x)
        replicas.remove()
        model(x)
    # A later call is for all of them, and no copy of a model is checked.
    model = nn.Sequential(nn.Linear(3, 3))
    adasum_replicate(model, mesh)
    loaded(model)
    adasum_replicate(model, mesh)
    for each in (model, copy.deepcopy(model)):
        each.append(nn.Identity())
        each(x).sum().backward()
    copied = copy.deepcopy(model)
    copied.append(nn.Linear(3, 2))
    copied(x).sum().backward()


def case_replaced_shards() -> None:
    """Whole parameters, which FSDP holds for a while, are no new ones; new shards are."""
    mesh = mesh_of(2)
    for again in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh["shard"], reshard_after_forward=False)
        fully_shard(model, mesh=mesh["shard"])
        adasum_replicate(model, mesh["replica"])
        x = torch.ones(1, 4)
        model.unshard()
        (model(x) + model(x)).sum().backward()
        model.zero_grad()
        if again:
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            with pytest.raises(RuntimeError, match=r"got another one as 0\.weight"):
                model(x)


def case_ddp_around_it() -> None:
    """DDP averages the gradients, whichever of the two came first."""
    model = nn.Linear(3, 2)
    adasum_replicate(model, mesh_of(1)["replica"])
    around = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match="expected a model outside Distributed"):
        around(torch.ones(1, 3))
    model = nn.Linear(3, 2)
    replicate(model)
    with pytest.raises(ValueError, match="the model is under torch's replicate"):
        adasum_replicate(model, mesh_of(1)["replica"])


def case_a_step_in_a_hook() -> None:
    """An optimizer in backward would take the gradients before they are reduced."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    adasum_replicate(model, mesh_of(1)["replica"])

    def step(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with pytest.raises(RuntimeError, match=r"to stay until it is reduced.*after backw"):
        model(torch.ones(1, 3)).sum().backward()


def case_a_hook_that_comes_later_changes_local_gradients() -> None:
    """In every pass: those after the first one begin to reduce inside backward."""
    model, size = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), dist.get_world_size()
    with mock.patch("adasum_hvd.distributed.units._BUCKET_BYTES", 1):
        adasum_replicate(model, mesh_of(1)["replica"], group_op="sum", group_size=size)
    last = model[0].weight  # of backward, and alone in its unit

    def scale(parameter: torch.Tensor) -> None:
        if parameter is last:
            time.sleep(0.05)  # for a reduction that has begun too early
        parameter.grad.mul_(1 + rank())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(scale)
    for number in range(3):
        model.zero_grad()
        model(torch.full((1, 3), 1.0 + number)).sum().backward()
        local = model[1].weight.detach().sum(0).outer(torch.full((3,), 1.0 + number))
        torch.testing.assert_close(last.grad, local * (size * (size + 1) / 2))


def case_a_pass_that_one_replica_leaves() -> None:
    """Its next pass must not be joined with the rest of the others'."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    first = rank() == 0
    with mock.patch("adasum_hvd.distributed.units._BUCKET_BYTES", 48):
        adasum_replicate(model, mesh_of(1)["replica"])
    x = torch.ones(1, 3, requires_grad=True)
    model(x).sum().backward()  # counts the hooks
    model.zero_grad()
    dist.barrier()

    def broken(gradient: torch.Tensor) -> None:
        raise MemoryError

    if first:  # it has reduced some units by then
        middle = model[:2](x)
        middle.register_hook(broken)
        with pytest.raises(MemoryError):
            model[2:](middle).sum().backward()
        model.zero_grad()
    words = r"of one pass and unit.*pass 3 unit 0, pass 2 unit \d.*end the job on all"
    for _ in range(2):  # nothing is sent any more, so that nobody waits
        with pytest.raises(RuntimeError, match=words):
            model(x).sum().backward()
        model.zero_grad()


def case_versions_show_reductions() -> None:
    """AdamOffload copies a gradient again if its version has changed since its early copy."""
    for model in (nn.Linear(3, 1, bias=False), nn.Linear(3, 1)):
        adasum_replicate(model, mesh_of(1)["replica"])
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            seen = {}

            def note(parameter: torch.Tensor, seen: dict = seen) -> None:
                seen[parameter] = parameter.grad, parameter.grad._version

            handles = [
                p.register_post_accumulate_grad_hook(note) for p in model.parameters()
            ]
            (model(torch.ones(1, 3)) * (1 + rank())).sum().backward()
            for handle in handles:
                handle.remove()
            for parameter, (gradient, version) in seen.items():
                assert gradient is parameter.grad and version < gradient._version


def case_synchronize_without_gradients() -> None:
    """FSDP keeps whole gradients in no_sync(), which no hook sees. A replica may have none."""
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=mesh_of(2)["shard"])
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    with replicas.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\), because FSDP keeps whole"):
        replicas.synchronize()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    replicas.synchronize()  # of a step that reaches the model on no replica
    assert model.bias.grad is None
    plain = nn.Linear(3, 2)
    replicas = adasum_replicate(plain, mesh_of(1)["replica"])
    if rank():
        replicas.synchronize()
    else:
        plain(torch.ones(1, 3)).sum().backward()
    assert torch.equal(plain.bias.grad, torch.ones(2))


def case_uneven_shards_have_the_same_units() -> None:
    """A bucket ends by the bytes of even shards."""
    model = nn.Sequential(*(nn.Linear(1 << 20, 3, bias=False) for _ in range(5)))
    for layer in model:
        parallelize_module(layer, mesh_of(2)["shard"], ColwiseParallel())
    units = [[name for name, _ in members] for members in grouped(model)]
    assert len(units) == 2 and all(each == units for each in everyone(units))


def case_gradients_of_another_dtype() -> None:
    """A replica that does not use a parameter sends zeros of the gradient's dtype."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(torch.bfloat16)
    if not hasattr(model[0].weight, "grad_dtype"):
        pytest.skip("torch before 2.10 has no grad_dtype")
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    adasum_replicate(model, mesh_of(1)["replica"])
    ones = torch.ones(1, 3, dtype=torch.bfloat16)
    (model[0](ones) if rank() else model(ones)).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert len({g.sum().item() for g in everyone(model[1].weight.grad)}) == 1


def case_an_error_waits_for_the_other_units() -> None:
    """Else the next pass would write gradients that a thread still reduces."""
    model = nn.Module()
    model.a = nn.Parameter(torch.ones(2))
    model.b = nn.Parameter(torch.ones(2, dtype=torch.float64))
    calls = []

    def rule(gram: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        if len(calls) == 1:
            raise KeyError("the first unit")
        time.sleep(0.5 if len(calls) == 2 else 0.0)
        return torch.ones_like(gram[:, 0])

    adasum_replicate(model, mesh_of(1)["replica"], rule=rule)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(KeyError) if not calls else nullcontext():
            (model.a.sum() + model.b.sum().float()).backward()
    size = dist.get_world_size()
    assert all(bool((p.grad == size).all()) for p in model.parameters())


def case_a_model_is_freed_without_remove() -> None:
    model = nn.Linear(3, 2)
    adasum_replicate(model, mesh_of(1)["replica"])
    model(torch.ones(1, 3)).sum().backward()
    gone = [weakref.ref(each) for each in (model, model.weight)]
    del model
    # The reduction's thread may be about to drop its gradients.
    until(lambda: gc.collect() >= 0 and [one() for one in gone] == [None, None])


def case_a_container_may_go() -> None:
    """The call is collective over the job, so that several parts of a model are passed together."""
    part = nn.Linear(3, 2)
    adasum_replicate(nn.ModuleList([part, nn.Linear(2, 1)]), mesh_of(1)["replica"])
    gc.collect()
    (rank() * part(torch.ones(1, 3)).sum()).backward()
    assert len({g.sum().item() for g in everyone(part.weight.grad)}) == 1
    assert copy.deepcopy(part).weight.grad is None
    saved = io.BytesIO()
    torch.save(part, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    loaded(torch.ones(1, 3)).sum().backward()  # with no handle: nothing is reduced
    assert torch.equal(loaded.weight.grad, torch.ones(2, 3))


class OwnSwitch(NamedTuple):
    """FSDP's own switch, with the handle's name."""

    model: nn.Module

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)


@pytest.mark.parametrize("own", [False, True], ids=["handle", "fsdp"])
def case_accumulation_after_a_step_of_one_pass(own: bool) -> None:
    """FSDP fires the hooks of a module that runs twice once, and twice after no_sync()."""
    plain = Model(runs=2)
    model = copy.deepcopy(plain)
    shard(model, 2)
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    switch = OwnSwitch(model) if own else replicas
    for passes in (1, 2, 1, 3, 2):
        check(plain, model, switch, 2, steps=2, passes=passes)


def case_accumulation_that_no_forward_pass_shows() -> None:
    """FSDP's own switch, in a program that does not call the model but its parts."""
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    for layer in (a, b):
        fully_shard(layer, mesh=mesh_of(2)["shard"])
    adasum_replicate(nn.ModuleList([a, b]), mesh_of(2)["replica"])

    def loss() -> torch.Tensor:
        return b(torch.tanh(a(torch.tanh(a(torch.ones(1, 3)))))).sum()

    loss().backward()
    for parameter in (*a.parameters(), *b.parameters()):
        parameter.grad = None
    for on in (False, True):
        for layer in (a, b):
            layer.set_requires_gradient_sync(on)
        words = r"the handle's no_sync\(\), not by FSDP's set_requires_gradient_sync"
        with pytest.raises(RuntimeError, match=words) if on else nullcontext():
            loss().backward()


def case_synchronize_after_fsdps_own_switch() -> None:
    """FSDP keeps whole gradients then, too."""
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=mesh_of(2)["shard"])
    replicas = adasum_replicate(model, mesh_of(2)["replica"])
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\), because FSDP keeps whole"):
        replicas.synchronize()


def case_remove_leaves_no_handle() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    mark_worker_local(*model[1].parameters())
    handle = adasum_replicate(model, mesh_of(1)["replica"])
    reference = weakref.ref(handle)
    handle.remove()
    del handle
    gc.collect()
    assert reference() is None


def case_digests_under_another_default_device() -> None:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    with torch.device("meta"):
        assert check_replicas(model)
