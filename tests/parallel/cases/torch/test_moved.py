"""Gradients that are copied into their bucket during backward, and changed by the user."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn

import adasum_hvd.torch as hvd
from tests.parallel.harness.models import (
    loss_of,
    wide_model,
)
from tests.parallel.harness.torch_training import (
    backward,
    check_equal,
    check_same_everywhere,
    distributed,
    train,
)
from tests.parallel.harness.torch_training import start as start

CHANGED = "expected as backward has left it, but got one changed"


def case_large_gradients_move_into_their_bucket_at_once() -> None:
    """Before backward is through; they are reduced as if each had come alone."""
    model = wide_model()
    mine = wide_model()
    optimizer = distributed(model, hvd.AdasumGrad, lr=0.0)
    for step in range(2):
        optimizer.zero_grad()
        mine.zero_grad()
        for one in (model, mine):
            backward(one, step)
        memory = {
            b.flat.untyped_storage().data_ptr() for b in optimizer._adasum.flat_buckets
        }
        for parameter in model.parameters():
            moved = parameter.grad.untyped_storage().data_ptr() in memory
            assert moved == (parameter.dim() == 2 and hvd.size() > 1)
        optimizer.step()
        for p, q in zip(model.parameters(), mine.parameters(), strict=True):
            alone = hvd.allreduce(q.grad, op=hvd.AdasumGrad, name=f"alone.{q.shape}")
            assert torch.equal(p.grad, alone)
    if hvd.size() > 1:
        backward(model, 0)
        next(model.parameters()).grad.mul_(2)
        with pytest.raises(RuntimeError, match=CHANGED):
            optimizer.step()
        optimizer.zero_grad()


def case_a_gradient_with_a_graph_stays() -> None:
    """It can be differentiated, as in a gradient penalty; a part of the bucket could not."""
    model = wide_model()
    optimizer = distributed(model, hvd.AdasumGrad)
    loss_of(model, hvd.rank(), 0).backward(create_graph=True)
    weight = next(model.parameters())
    assert weight.grad.requires_grad
    (second,) = torch.autograd.grad(weight.grad.square().sum(), weight)
    assert second.abs().sum() > 0
    optimizer.step()
    optimizer.zero_grad()
    check_same_everywhere(model)


def check_like_a_plain_run(disturb: Callable[[nn.Module], None]) -> None:
    """Check that what is done to a model between two steps changes nothing."""
    models = [wide_model(), wide_model()]
    optimizers = [distributed(model, hvd.AdasumGrad, lr=1e-3) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, step)
        if step == 0:
            disturb(models[0])
        check_same_everywhere(models[0])
    check_equal(*models, 0)


def case_gradients_that_left_their_bucket_are_taken_in_again() -> None:
    def convert(model: nn.Module) -> None:
        model.double()
        model.float()

    def prune(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 0.5

    check_like_a_plain_run(convert)
    check_like_a_plain_run(prune)


@pytest.mark.parametrize("kind", ["double", "half", "bfloat16"])
def case_a_model_of_large_layers_is_converted_between_steps(kind: str) -> None:
    model = wide_model()
    optimizer = distributed(model, hvd.AdasumGrad, lr=1e-4)
    train(model, optimizer, 0)
    optimizer.zero_grad()
    getattr(model, kind)()
    train(model, optimizer, 1, 2)
    assert next(model.parameters()).grad.dtype == getattr(torch, kind)
    hvd.check_replicas(model)


def case_what_is_done_to_a_moved_gradient_is_refused() -> None:
    """The change would be lost, or reduced on one rank and not on another."""
    if hvd.size() == 1:
        pytest.skip("one rank has no buckets")

    def point_elsewhere(model: nn.Module) -> None:
        model[0].weight.grad.data = model[0].weight.grad.data * 0.5

    def convert(model: nn.Module) -> None:
        model.double()

    def scale(model: nn.Module) -> None:
        model[0].weight.grad.mul_(2)

    for change, stays in product((point_elsewhere, convert, scale), (False, True)):
        model = wide_model()
        optimizer = distributed(model, hvd.AdasumGrad, lr=1e-3)
        if stays:  # where the last step has left it
            backward(model, 0)
        else:  # without a part of the first layer: versions of the two then differ
            model[2](torch.ones(2, 2000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not stays)
        backward(model, 1)
        change(model)
        with pytest.raises(RuntimeError, match=CHANGED):
            optimizer.step()
        optimizer.zero_grad()


def case_passes_are_not_changed_after_a_backward_pass() -> None:
    model = wide_model()
    optimizer = distributed(model, hvd.AdasumGrad)
    backward(model, 0)
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match="expected no backward pass since"):
            optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    for step in range(2):
        if step and hvd.size() > 1:  # a new bucket would hold the reduced first pass
            with pytest.raises(
                RuntimeError, match=r"add_param_group.+no backward pass"
            ):
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        backward(model, step)
    optimizer.step()
    model[0].bias.requires_grad_(False)
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    backward(model, 2)
    optimizer.step()
    check_same_everywhere(model)


def case_a_parameter_is_frozen_after_uneven_passes() -> None:
    """The round runs twice, with the same result."""
    models = [wide_model(), wide_model()]
    for model in models:
        optimizer = distributed(
            model, hvd.AdasumGrad, lr=1e-3, backward_passes_per_step=2
        )
        for step in range(2 - hvd.rank() % 2):
            backward(model, step)
        if model is models[0]:
            model[0].bias.requires_grad_(False)
        optimizer.step()
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        if one is not models[0][0].bias:
            assert torch.equal(one.grad, other.grad)
