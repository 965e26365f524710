"""`LocalSGD` and `reduce_changes` with optimizers that are not a plain one of torch."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from adasum_hvd.distributed import LocalSGD, reduce_changes
from tests.parallel.harness import optimizers
from tests.parallel.harness.sharded import (
    Model,
    digest,
    everyone,
    loss_of,
    mesh_of,
    shard,
)
from tests.parallel.harness.sharded import align as align
from tests.parallel.harness.sharded import init as init
from tests.parallel.harness.sharded import rank as rank
from tests.parallel.harness.sharded import shutdown as shutdown

SGD = torch.optim.SGD


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank())
    images = torch.randn(4, 3, generator=generator)
    model(images.to(next(model.parameters()).dtype)).pow(2).sum().backward()


def train(model: nn.Module, optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def are_equal(model: nn.Module) -> bool:
    return len(set(everyone(digest(model)))) == 1


def begin(optimizer, model: nn.Module, every: int) -> None:
    """Reduce changes in either way."""
    if every == 1:
        reduce_changes(optimizer)
    else:
        LocalSGD(optimizer, model, dist.group.WORLD, every)


# ---- one step of the user's ----


class Child(SGD):
    def step(self, closure=None):
        return super().step(closure)


class Grandchild(Child):
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return loss


class Wrapper(torch.optim.Optimizer):
    """Made without `super().__init__()`, as timm's and pytorch_optimizer's Lookahead."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups
        self.state, self.defaults = defaultdict(dict), inner.defaults
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    def step(self, closure=None):
        return self.inner.step(closure)


class Sharing(Wrapper):
    """Has the attributes of the inner optimizer, and so its hooks."""

    def __init__(self, inner):
        self.__dict__.update(inner.__dict__)
        self.inner = inner


class Scheduled(Wrapper):
    """A schedule has exchanged `step` before torch lets it run hooks."""

    def __init__(self, inner):
        super().__init__(inner)
        torch.optim.lr_scheduler.LambdaLR(self, lambda _: 1.0)

    def step(self, closure=None):
        return super().step(closure)


KINDS = {
    "child": lambda p: Child(p, 0.1),
    "grandchild": lambda p: Grandchild(p, 0.1),
    "wrapper": lambda p: Wrapper(Child(p, 0.1)),
    "sharing": lambda p: Sharing(Child(p, 0.1)),
    "scheduled": lambda p: Scheduled(Child(p, 0.1)),
}


@pytest.mark.parametrize(
    "kind", ["child", "grandchild", "wrapper", "sharing", "scheduled"]
)
def case_a_step_inside_a_step_counts_once(kind: str) -> None:
    """torch runs the hooks of a class and of its parents, once each has been made."""
    SGD([nn.Parameter(torch.ones(1))], 0.1)
    Child([nn.Parameter(torch.ones(1))], 0.1)
    expected, model, each = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    each.load_state_dict(expected.state_dict())
    LocalSGD(plain := SGD(expected.parameters(), 0.1), expected, dist.group.WORLD, 3)
    model.load_state_dict(expected.state_dict())
    optimizer, counts = KINDS[kind](model.parameters()), []
    local_sgd = LocalSGD(optimizer, model, dist.group.WORLD, 3)
    for step in range(4):
        train(expected, plain, range(step, step + 1))
        train(model, optimizer, range(step, step + 1))
        counts.append(local_sgd.local_step)
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, other)
    assert counts == [1, 2, 0, 1]
    for parameter in each.parameters():
        dist.broadcast(parameter.data, 0)
    reduce_changes(optimizer := KINDS[kind](each.parameters()))
    for step in range(3):
        train(each, optimizer, range(step, step + 1))
        assert are_equal(each)


def case_a_step_that_raised_is_no_part_of_the_next() -> None:
    class Fails(Child):
        fails = True

        def step(self, closure=None):
            super().step(closure)
            if self.fails:
                raise MemoryError("out of memory")

    model = nn.Linear(3, 2)
    local_sgd = LocalSGD(
        optimizer := Fails(model.parameters(), 0.1), model, dist.group.WORLD, 2
    )
    with pytest.raises(MemoryError):
        train(model, optimizer, range(1))
    assert local_sgd.local_step == 0
    Fails.fails = False
    train(model, optimizer, range(1, 2))
    assert local_sgd.local_step == 1 and not are_equal(model)
    train(model, optimizer, range(2, 3))
    assert local_sgd.local_step == 0 and are_equal(model)


def case_scalers_and_closures() -> None:
    model = nn.Linear(3, 2)
    optimizer = Grandchild(model.parameters(), 0.1)
    local_sgd = LocalSGD(optimizer, model, dist.group.WORLD, 2)
    scaler, counts = torch.amp.GradScaler("cpu", init_scale=8.0), []
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 3)).pow(2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        counts.append(local_sgd.local_step)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        backward(model, 3)
        return torch.ones(())

    optimizer.step(closure)
    assert counts == [1, 0, 1] and local_sgd.local_step == 0 and are_equal(model)


def case_an_object_that_is_no_optimizer() -> None:
    model = nn.Linear(3, 2)

    class Duck:
        param_groups = SGD(model.parameters(), 0.1).param_groups

    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer.* Duck"):
        reduce_changes(Duck())
    last = dist.get_world_size() - 1  # all ranks raise
    one = Duck() if rank() == last else SGD(model.parameters(), 0.1)
    for arguments in ((one, model, dist.group.WORLD, 2),
                      (SGD(model.parameters(), 0.1), model, dist.group.WORLD, 2, one)):  # fmt: skip
        with pytest.raises(TypeError, match=rf"got Duck on rank {last} of .*; create"):
            LocalSGD(*arguments)


# ---- copies of the weights ----


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    "name",
    [
        "Master",
        "DroppingMaster",
        "OneMaster",
        "RandomlyRounded",
        "ScheduleFree",
        "Averaging",
        "FTRL",
    ],
)
def case_copies_are_an_error_in_the_first_window(name: str, every: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    kind = getattr(optimizers, name)
    if kind is optimizers.RandomlyRounded:
        model.bfloat16()
    begin(optimizer := kind(model.parameters()), model, every)
    before = digest(model)
    with pytest.raises(RuntimeError, match=rf"{name} that keeps them a second"):
        train(model, optimizer, range(every))
    assert digest(model) == before


@pytest.mark.parametrize("shards", [1, 2])
def case_copies_of_sharded_weights(shards: int) -> None:
    """The error leaves the weights of before."""
    model = Model()
    shard(model, shards)
    optimizer = optimizers.Master(
        [p for n, p in model.named_parameters() if "unused" not in n]
    )
    model.unused.requires_grad_(False)
    LocalSGD(optimizer, model, mesh_of(shards)["replica"], 1)
    before = digest(model)
    loss_of(model, dist.get_rank()).backward()
    with pytest.raises(RuntimeError, match=r"Master that keeps them .*'master'"):
        optimizer.step()
    assert digest(model) == before


def case_a_copy_after_a_warm_up() -> None:
    """Of a step that changes nothing."""
    model = nn.Linear(3, 2)
    LocalSGD(
        optimizer := optimizers.Master(model.parameters(), 0.0),
        model,
        dist.group.WORLD,
        1,
    )
    train(model, optimizer, range(1))
    with pytest.raises(RuntimeError, match="keeps them a second time"):
        train(model, optimizer, range(1, 2))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("first_rate", [0.1, 0.0])
@pytest.mark.parametrize("name", ["Record", "Slow", "Velocity", "QuantizedState"])
def case_states_that_are_no_copies(name: str, first_rate: float, every: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    begin(
        optimizer := getattr(optimizers, name)(model.parameters(), first_rate),
        model,
        every,
    )
    train(model, optimizer, range(4))
    assert are_equal(model)


# ---- weights that are changed between windows ----


def case_weights_that_differ_at_a_start_are_named() -> None:
    last = dist.get_world_size() - 1

    def scale(model: nn.Module) -> None:
        model.bias.data.mul_(1 + (rank() == last))

    def exchange(model: nn.Module) -> None:
        if rank() == last:
            model.bias.data.copy_(model.bias.data.flip(0))

    def load(model: nn.Module) -> None:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state["bias"][0] += rank() == last
        model.load_state_dict(state)

    for change in (scale, exchange, load):
        for every in (1, 2):
            torch.manual_seed(0)
            model = nn.Linear(3, 200)
            begin(optimizer := SGD(model.parameters(), 0.01), model, every)
            train(model, optimizer, range(every))
            change(model)
            before = digest(model)
            name = "bias" if every > 1 else "group0.param1"
            words = rf"start of a window, but got another {name} on ranks \[{last}\]"
            with pytest.raises(RuntimeError, match=words):
                train(model, optimizer, range(every, 2 * every))
            assert digest(model) == before
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
            train(model, optimizer, range(every))
            assert are_equal(model)


def case_weights_that_are_changed_alike() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    begin(optimizer := SGD(model.parameters(), 0.1), model, 1)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        model.weight.data.clamp_(-0.3, 0.3)
        assert are_equal(model)


def case_a_change_of_one_shard_is_an_error_on_all_ranks() -> None:
    """Also of the ranks that hold other shards, which would wait for the dot products."""
    model = Model()
    shard(model, 2)
    LocalSGD(optimizer := SGD(model.parameters(), 0.1), model, mesh_of(2)["replica"], 2)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, 100 * step + rank()).backward()
        if step == 2 and rank() == 0:
            model.blocks[0].up.weight.data.to_local().mul_(2)
        if step < 3:
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"another blocks\.0\.up\.weight on ranks"):
        optimizer.step()


def case_names_of_the_optimizer_are_used() -> None:
    """If it was made from `named_parameters()`, since torch 2.6."""
    torch.manual_seed(rank())
    model = nn.Linear(3, 2)
    reduce_changes(optimizer := SGD(model.named_parameters(), 0.1))
    with pytest.raises(RuntimeError, match="another weight on ranks"):
        train(model, optimizer, range(1))


# ---- checkpoints ----


def case_a_checkpoint_without_the_window() -> None:
    """An error before the next step, which loses nothing; none if the window is saved, too."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    local_sgd = LocalSGD(optimizer, model, dist.group.WORLD, 3)
    for step, saved in enumerate((None, "optimizer", "both", "optimizer", "optimizer")):
        if saved:
            get_optimizer_state_dict(model, optimizer)
        if saved == "both":
            local_sgd.state_dict()
        if step == 1:
            before = digest(model)
            with pytest.raises(RuntimeError, match="without it 1 steps into a window"):
                train(model, optimizer, range(step, step + 1))
            assert digest(model) == before and local_sgd.local_step == 1
        if step == 4:
            local_sgd.synchronize()
        train(model, optimizer, range(step, step + 1))
    assert local_sgd.local_step == 1
    local_sgd.load_state_dict(local_sgd.state_dict())
    get_optimizer_state_dict(model, optimizer)  # to load that next
    train(model, optimizer, range(5, 6))


@pytest.mark.parametrize("every", [1, 2])
def case_a_compiled_step_is_reduced(every: int) -> None:
    """torch.compile runs the hooks of a step as they are, and compiles the rest."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    begin(optimizer := SGD(model.parameters(), 0.1), model, every)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(4):
        optimizer.zero_grad()
        backward(model, number)
        step()
        assert are_equal(model) == ((number + 1) % every == 0)


def case_a_second_reduction_of_the_same_changes_is_refused() -> None:
    """Its windows would begin before the reductions of the first one."""
    model, group = nn.Linear(3, 2), dist.group.WORLD
    optimizer = SGD(model.parameters(), 0.1)
    local_sgd = LocalSGD(optimizer, model, group, 2)
    with pytest.raises(ValueError, match="that LocalSGD reduces over the same ranks"):
        LocalSGD(optimizer, model, group, 3)
    with pytest.raises(
        ValueError, match="reduce_changes: expected an optimizer whose c"
    ):
        reduce_changes(optimizer)
    local_sgd.remove()
    end = reduce_changes(optimizer)
    with pytest.raises(ValueError, match="that reduce_changes reduces over the same r"):
        LocalSGD(optimizer, model, group, 2)
    end()
    if rank() == 0:
        end = reduce_changes(optimizer)
    with pytest.raises(ValueError, match="over the same ranks on rank 0 of "):
        LocalSGD(optimizer, model, group, 2)  # on every rank
    end()
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank()]
    reduce_changes(optimizer, alone)
    LocalSGD(optimizer, model, group, 2)  # over other replicas
    train(model, optimizer, range(2))
    assert are_equal(model)


def case_a_copy_would_not_reduce() -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), 0.1)
    local_sgd = LocalSGD(optimizer, model, dist.group.WORLD, 2)
    alone = "LocalSGD: the copy of its optimizer is a plain one"
    with (
        pytest.warns(UserWarning, match=alone),
        pytest.raises(TypeError, match="LocalSGD: expected no copy, because a copy of"),
    ):
        copy.deepcopy((model, optimizer, local_sgd))
    with pytest.warns(UserWarning, match=alone):
        plain = copy.deepcopy((model, optimizer))[1]
    assert "__getstate__" not in vars(plain)
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    reduce_changes(optimizer, groups[rank()])()
    with pytest.warns(UserWarning, match=alone):
        copy.deepcopy(optimizer)  # whose other windows go on
    local_sgd.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(optimizer)


class TupleState(SGD):
    def __getstate__(self):
        return self.defaults, self.state, self.param_groups

    def __setstate__(self, state):
        self.defaults, self.state, self.param_groups = state


def case_an_optimizer_whose_state_is_no_dictionary_is_copied() -> None:
    optimizer = TupleState(nn.Linear(3, 2).parameters(), 0.1)
    reduce_changes(optimizer)
    with pytest.warns(UserWarning, match="the copy of its optimizer is a plain one"):
        assert len(copy.deepcopy(optimizer).param_groups[0]["params"]) == 2
