"""The delta variant's change of weights: formed by the op, or by torch where the op cannot."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional

import adasum_hvd.torch as hvd
from adasum_hvd.torch.optimizer.buckets import weight_change


def trained(in_op: bool, disturb=lambda model, step: None, **kwargs) -> list:
    """Train three steps, one forward pass in between, and return the parameters."""
    torch.manual_seed(0)
    # 41 x 200 elements lie on several slices, the rest on one.
    model = nn.Sequential(nn.Linear(41, 200), nn.Tanh(), nn.Linear(200, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    kind = weight_change.ChangeInOpBucket if in_op else weight_change.ChangeBucket
    with mock.patch.object(
        weight_change,
        "op_takes",
        side_effect=lambda *arguments: in_op,
    ):
        wrapped = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), op=hvd.AdasumDelta, **kwargs
        )
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        inputs = torch.randn(8, 41, generator=generator)
        wrapped.zero_grad()
        functional.cross_entropy(model(inputs), torch.arange(8) % 3).backward()
        wrapped.step()
        disturb(model, step)
    assert all(type(bucket) is kind for bucket in wrapped._adasum.buckets)
    return [parameter.detach().clone() for parameter in model.parameters()]


def case_the_op_and_torch_agree_on_every_bit() -> None:
    for kwargs in ({}, {"bucket_bytes": 1}, {"local_steps": 2}):
        in_op, in_torch = trained(True, **kwargs), trained(False, **kwargs)
        for a, b in zip(in_op, in_torch, strict=True):
            assert torch.equal(a, b), kwargs
    digests = hvd.allgather_object([p.sum().item() for p in in_op])
    assert digests == [digests[0]] * hvd.size()


def case_weights_that_move_are_found() -> None:
    def move(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    for a, b in zip(trained(True, move), trained(True), strict=True):
        assert torch.equal(a, b)


def case_changes_between_windows_are_seen_in_one_pass() -> None:
    """In the pass that records the start; a comparison of all weights would be a second one."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")

    def none(weight: nn.Parameter, earlier: torch.Tensor) -> None:
        pass

    def moved(weight: nn.Parameter, earlier: torch.Tensor) -> None:
        weight.data = weight.data.clone()

    def one_unit(weight: nn.Parameter, earlier: torch.Tensor) -> None:
        old = weight.data[7, 3]
        weight.data[7, 3] = torch.nextafter(old, torch.tensor(9.0))

    def exchanged(weight: nn.Parameter, earlier: torch.Tensor) -> None:
        old = weight.data.clone()
        weight.data[5], weight.data[6] = old[6], old[5]

    def rolled_back(weight: nn.Parameter, earlier: torch.Tensor) -> None:
        weight.data = earlier

    for change in (none, moved, one_unit, exchanged, rolled_back):
        earlier = {}
        seen, compared = [], []

        def spy(bucket, of=weight_change.ChangeInOpBucket.begin_window, seen=seen):
            seen.append(of(bucket))
            return seen[-1]

        def compare(bucket, of=weight_change.ChangeBucket.begin_window, to=compared):
            to.append(bucket)
            return of(bucket)

        def disturb(
            model: nn.Module, step: int, change=change, earlier=earlier
        ) -> None:
            earlier[step] = model[0].weight.data.clone()
            if step == 1:
                change(model[0].weight, earlier[0])

        with (
            mock.patch.object(weight_change.ChangeInOpBucket, "begin_window", spy),
            mock.patch.object(weight_change.ChangeBucket, "begin_window", compare),
        ):
            trained(True, disturb)
        assert seen == [True, False, change not in (none, moved), False], change
        assert len(compared) == 1  # nothing to compare with before the first reduction


def case_other_shapes_at_the_same_address_are_refused() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")

    weight = nn.Parameter(torch.ones(3, 200))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], 0.1), op=hvd.AdasumDelta
    )
    for rows in (3, 2):
        weight.data = weight.data[:rows]
        weight.grad = torch.ones(rows, 200)
        if rows == 3:
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"of shape \(3, 200\), .* shape \(2, 200\)"):
        optimizer.step()


def case_who_forms_the_change() -> None:
    def kind_of(parameter: nn.Parameter, **kwargs) -> type:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], 0.1), op=hvd.AdasumDelta, **kwargs
        )
        return {type(bucket) for bucket in optimizer._adasum.flat_buckets}.pop()

    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    in_op, in_torch = weight_change.ChangeInOpBucket, weight_change.ChangeBucket
    assert kind_of(nn.Parameter(torch.ones(4, 3))) is in_op
    assert kind_of(nn.Parameter(torch.ones(4, 3, dtype=torch.float64))) is in_op
    assert kind_of(nn.Parameter(torch.ones(4, 3, dtype=torch.float16))) is in_op
    assert kind_of(nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))) is in_torch
    assert kind_of(nn.Parameter(torch.ones(4, 3).t())) is in_torch
    assert kind_of(nn.Parameter(torch.ones(4)), clip_delta_norm=1.0) is in_torch
    fp16 = hvd.Compression.fp16
    assert kind_of(nn.Parameter(torch.ones(4)), compression=fp16) is in_torch


def case_autograd_knows_that_weights_changed() -> None:
    weight = nn.Parameter(torch.ones(5))
    unused = nn.Parameter(torch.ones(5))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight, unused], 0.1), op=hvd.AdasumDelta
    )
    (weight * (1 + hvd.rank())).sum().backward()
    held = (weight * weight).sum()
    version = unused._version
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.backward()
    assert hvd.size() == 1 or unused._version > version


def case_memory() -> None:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], 0.1), op=hvd.AdasumDelta
    )
    start_bytes = 4000 if hvd.size() > 1 else 0
    assert optimizer.extra_bytes() == {"device": 0, "host": start_bytes}


def case_a_window_that_a_checkpoint_would_drop() -> None:
    """torch.distributed.checkpoint saves nothing but an optimizer's state and groups."""
    model = nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.5),
        op=hvd.AdasumDelta,
        local_steps=2,
    )
    model(torch.ones(1, 3)).sum().backward()
    for _ in range(2):
        between = get_optimizer_state_dict(model, optimizer)
        optimizer.step()
        if hvd.size() > 1:  # a single rank has no windows
            get_optimizer_state_dict(model, optimizer)
            with pytest.raises(RuntimeError, match=r"one \(local step 1\), and drops"):
                optimizer.step()
            assert optimizer.state_dict()["adasum_delta"]["local_step"] == 1
        optimizer.step()
    optimizer.step()
    get_optimizer_state_dict(model, optimizer)  # to load the other one
    set_optimizer_state_dict(model, optimizer, between)
    optimizer.step()


def case_a_window_of_other_buckets_is_refused() -> None:
    if hvd.size() == 1:
        pytest.skip("a single rank has no windows")
    torch.manual_seed(0)
    one, other = (
        hvd.DistributedOptimizer(
            torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1),
            op=hvd.AdasumDelta, local_steps=2, bucket_bytes=bucket_bytes,
        )
        for bucket_bytes in (1 << 20, 4)
    )  # fmt: skip
    one.step()
    with pytest.raises(
        ValueError, match=r"starts of \[\d, \d\] elements, but got \[8\]"
    ):
        other.load_state_dict(one.state_dict())


def case_a_refused_reduction_leaves_the_start() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    parameter = nn.Parameter(torch.full((6,), 2.0))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], 0.1), op=hvd.AdasumDelta
    )
    binding = weight_change.binding
    original = binding.register_weights

    def one_element_too_many(library, entry, address, elements, weights):
        original(library, entry, address, [7], weights)

    parameter.sum().backward()
    with (
        mock.patch.object(binding, "register_weights", one_element_too_many),
        pytest.raises(ValueError, match="expected segments of 6 elements"),
    ):
        optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((6,), 2.0))


def case_join_of_the_delta_variant() -> None:
    """A rank that has joined counts as no change, and its weights stay; then all train on."""
    parameter = nn.Parameter(torch.arange(9000.0))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], 1.0), op=hvd.AdasumDelta
    )
    (2 * parameter).sum().backward()
    if hvd.rank() > 0:
        optimizer.step()
    hvd.join()
    moved = 2.0 if hvd.rank() > 0 else 0.0  # the others' changes are parallel and equal
    assert torch.equal(parameter.detach(), torch.arange(9000.0) - moved)
    hvd.broadcast_parameters([parameter], root_rank=hvd.size() - 1)
    optimizer.step()
    moved = 4.0 if hvd.size() > 1 else 2.0
    assert torch.equal(parameter.detach(), torch.arange(9000.0) - moved)
