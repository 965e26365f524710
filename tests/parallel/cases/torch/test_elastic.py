"""The state of an elastic torch job: its objects, their values after a restore, its sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import adasum_hvd.torch as hvd
from tests.parallel.harness.models import loss_of, model_of, weights
from tests.parallel.harness.torch_training import check_same_everywhere, distributed
from tests.parallel.harness.torch_training import start as start

SCHEDULES = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=12
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}  # fmt: skip


def trained(model: nn.Module, optimizer, schedule, steps: range) -> list[float]:
    """Train, and return the learning rate of each step."""
    rates = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return rates


@pytest.mark.parametrize("name", ["step", "lambda", "one_cycle", "sequential"])
@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta", ""])
def case_elastic_schedule_drives_the_trained_optimizer(op: str, name: str) -> None:
    """On every rank, from the start and as one that begins anew; without an op it is plain."""

    def made() -> tuple:
        model = model_of()
        plain = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(plain, op=op) if op else plain
        return model, optimizer, SCHEDULES[name](optimizer)

    expected = trained(*made(), range(9))
    model, optimizer, schedule = made()
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, step=0)
    state.sync()
    assert state.schedule is schedule and schedule.optimizer is optimizer
    rates = trained(model, optimizer, schedule, range(3))
    state.step = 3
    state.save()
    trained(model, optimizer, schedule, range(3, 5))
    state.restore()
    rates += trained(model, optimizer, schedule, range(3, 6))
    state.step = 6
    state.save()
    if hvd.rank():
        schedule.step()
        state._commits = state.step = 0
    state.sync()
    assert state.step == 6 and schedule.optimizer is optimizer
    rates += trained(model, optimizer, schedule, range(6, 9))
    assert rates == expected
    if op:
        check_same_everywhere(model)


def case_elastic_restores_one_commit_twice() -> None:
    model = model_of()
    optimizer = distributed(model, "average")
    schedule = SCHEDULES["step"](optimizer)
    trained(model, optimizer, schedule, range(1))
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule)
    state.save()
    ends = []
    for _ in range(3):
        trained(model, optimizer, schedule, range(1, 3))
        ends.append(weights(model))
        state.restore()
    assert all(np.array_equal(ends[0], end) for end in ends)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("op", ["adasum-grad", "adasum-delta"])
def case_elastic_gradients_of_lost_passes(op: str, passes: int) -> None:
    """Also with `zero_grad()` after the commit, which keeps a step's earlier passes alone."""

    def train(state: hvd.elastic.TorchState, passes_now: range, fails: bool) -> None:
        for number in passes_now:
            loss_of(state.model, hvd.rank(), number).backward()
            is_last = (number + 1) % passes == 0
            if is_last:
                state.optimizer.step()
            if number + 1 == commit:
                state.save()
                if not fails:  # but hosts have changed
                    return
            if is_last:
                state.optimizer.zero_grad()

    ends = []
    # Passes before the commit, after which some are lost or none.
    for commit, fails in ((6, False), (2, False), (2, True), (3, True)):
        model = model_of()
        plain = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(
            plain, op=op, backward_passes_per_step=passes
        )
        state = hvd.elastic.TorchState(model, optimizer)
        train(state, range(commit), fails)
        for _ in range(passes - commit % passes if fails else 0):
            loss_of(model, hvd.rank(), 7).backward()
        if fails:
            state.restore()
        state.sync()
        train(state, range(commit, 6), fails)
        ends.append(weights(model))
    assert all(torch.equal(ends[0], end) for end in ends)


def case_elastic_gradients_of_a_plain_optimizer() -> None:
    """Hosts change between the step and `zero_grad()`, as in a commit."""
    model = model_of()
    state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), 0.1))
    loss_of(model, 0, 1).backward()
    state.optimizer.step()
    state.save()
    state.sync()
    assert all(p.grad is None for p in model.parameters())


class Average:
    """An average of weights as users write one."""

    def __init__(self, model: nn.Module, saves: bool):
        self.model, self.mean = model, weights(model)
        if saves:
            self.state_dict = lambda: {"mean": self.mean}
            self.load_state_dict = lambda state: setattr(self, "mean", state["mean"])

    def update(self) -> None:
        self.mean = 0.5 * self.mean + 0.5 * weights(self.model)


def case_elastic_average_of_the_trained_weights() -> None:
    model = model_of(hvd.rank())
    mean = Average(model, saves=True)
    moving = torch.optim.swa_utils.AveragedModel(model)
    state = hvd.elastic.TorchState(model, mean=mean, moving=moving)
    state.sync()
    assert state.mean is mean and mean.model is model
    first = weights(model)
    with torch.no_grad():
        model[0].weight.add_(1)
    mean.update()
    moving.update_parameters(model)
    assert torch.equal(mean.mean, 0.5 * first + 0.5 * weights(model))
    assert torch.equal(weights(moving.module), weights(model))
    state.restore()
    assert torch.equal(mean.mean, first) and torch.equal(weights(model), first)
    assert int(moving.n_averaged) == 0
    check_same_everywhere(moving.module)


def case_elastic_objects_that_would_be_copied() -> None:
    """A copy of them would train or average a copy: an error on every rank, in the first line."""
    model = model_of()
    optimizer = distributed(model, "adasum-grad")
    schedule = lr_scheduler.StepLR(optimizer, 1)
    for attributes, text in (
        ({"both": [schedule]}, r"both \(list\): it refers to a \w+ of the training"),
        ({"mean": Average(model, saves=False)}, "refers to a Sequential of"),
        ({"groups": optimizer.param_groups}, "refers to a Parameter of"),
        ({"call": lambda: model(torch.ones(12))}, "refers to a Sequential of"),
        ({"layer": {"first": model[0]}}, "refers to a Linear of"),
        ({"batches": iter(range(3)), "more": (i for i in "ab")}, r"more \(generator\)"),
    ):
        with pytest.raises(TypeError, match=f"TorchState: expected attr.*{text}"):
            hvd.elastic.TorchState(model, optimizer, **attributes)
    sampler = hvd.elastic.ElasticSampler(range(3))
    loader = torch.utils.data.DataLoader(range(3), sampler=sampler)
    with pytest.raises(TypeError, match=r"loader .*: it refers to a ElasticSampler"):
        hvd.elastic.TorchState(model, sampler=sampler, loader=loader)
    with pytest.raises(TypeError, match=r"other .*: it refers to a"):
        hvd.elastic.TorchState(model, other={"optimizer": optimizer})
    state = hvd.elastic.TorchState(model, optimizer, schedule=None, best=None, step=3)
    state.sync()
    state.schedule = [schedule]
    with pytest.raises(TypeError, match=r"schedule \(list\)"):
        state.save()
    state.restore()
    assert state.schedule is None and state.step == 3


def case_elastic_attributes_that_ranks_lack() -> None:
    """Made by some ranks only: copied if it can be, else an error on every rank."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = hvd.elastic.TorchState(model, optimizer, best=None, schedule=None)
    state.sync()
    if hvd.rank() == 0:
        state.best = model_of(7)
        state.save()
    state.sync()
    check_same_everywhere(state.best)
    assert torch.equal(weights(state.best), weights(model_of(7)))
    schedule = lr_scheduler.StepLR(optimizer, 1)
    if hvd.rank() == 0:
        state.schedule = schedule
        state.save()
    if hvd.size() > 1:
        with pytest.raises(ValueError, match=r"on rank 0 of .*schedule .*refers to"):
            state.sync()
    state.schedule = schedule
    state.sync()
    assert state.schedule is schedule


class Choosy:
    """Loads its own state only."""

    def __init__(self) -> None:
        self.of = hvd.rank()

    def state_dict(self) -> dict:
        return vars(self)

    def load_state_dict(self, state: dict) -> None:
        if state["of"] != self.of:
            raise KeyError("of")


def case_elastic_state_that_one_rank_cannot_load() -> None:
    state = hvd.elastic.TorchState(choosy=Choosy())
    with pytest.raises(ValueError, match=r"on rank 1 of \d: KeyError: 'of'"):
        state.sync()


def case_elastic_restore_inside_attributes() -> None:
    """Also what has changed inside them since the commit; and what they share stays shared."""
    values = {"a": [1, {2}], "b": np.arange(3), "c": torch.ones(2)}
    state = hvd.elastic.TorchState(values=values, log=[], array=np.zeros(2), best={})
    state.best["log"] = state.log

    def change() -> None:
        state.log.append(len(state.log))
        state.array += 1
        state.values["a"][1].add(5)
        state.values["a"].append(3)
        state.values["b"][0] = state.values["c"][0] = 9
        state.values["d"] = 4

    def check(length: int, added: float) -> None:
        assert state.log == list(range(length)) and state.best["log"] is state.log
        assert state.array.tolist() == [added, added]
        assert state.values["a"][1] == ({2} if not length else {2, 5})
        assert len(state.values["a"]) == 2 + length
        assert state.values["b"].tolist() == ([9, 1, 2] if length else [0, 1, 2])
        assert state.values["c"].tolist() == ([9, 1] if length else [1, 1])
        assert ("d" in state.values) == bool(length)

    state.save()
    for _ in range(2):  # a restored value is none of the commit
        change()
        state.restore()
        check(0, 0)
    state.sync()
    change()
    state.save()
    change()
    state.restore()
    check(1, 1)
    state.sync()
    check(1, 1)


@pytest.mark.parametrize("shuffle", [False, True])
def case_elastic_sampler_of_few_samples(shuffle: bool) -> None:
    """Every rank gets as many, and all ranks together each sample that is left."""
    for samples in range(2 * hvd.size() + 2):
        for processed in range(samples + 2):
            sampler = hvd.elastic.ElasticSampler(range(samples), shuffle)
            state = {"epoch": 1, "processed_num": processed}
            sampler.load_state_dict(state)
            left = sampler.remaining_indices
            mine = list(sampler)
            assert len(mine) == len(sampler) == math.ceil(len(left) / hvd.size())
            order = torch.tensor(hvd.allgather_object(mine)).T.flatten().tolist()
            assert order[: len(left)] == left and set(order) == set(left)
    sampler = hvd.elastic.ElasticSampler(range(5 * hvd.size()), shuffle)
    state = hvd.elastic.TorchState(sampler=sampler)
    assert state.sampler is sampler
    sampler.record_batch(0, 2)
    state.save()
    sampler.record_batch(1, 2)
    state.restore()
    assert sampler.processed_num == 2 * hvd.size() and len(sampler) == 3
