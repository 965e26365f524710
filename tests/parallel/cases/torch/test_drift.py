"""Mistakes that make replicas diverge silently: an error on all ranks, or equal replicas."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import adasum_hvd.torch as hvd
from adasum_hvd.torch.optimizer import checks
from tests.parallel.harness import process_sets
from tests.parallel.harness.models import (
    loss_of,
    model_of,
    weights,
)
from tests.parallel.harness.torch_training import (
    VARIANTS,
    backward,
    distributed,
    train,
)


@pytest.mark.parametrize("op", ["average", "adasum-grad"])
def case_skip_synchronize_without_synchronize(op: str) -> None:
    model = model_of()
    optimizer = distributed(model, op)
    before = weights(model)
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
        loss = loss_of(model, hvd.rank(), 0)
        (loss if scaler is None else scaler.scale(loss)).backward()
        with (
            optimizer.skip_synchronize(),
            pytest.raises(RuntimeError, match=r"expected synchronize\(\) since the"),
        ):
            optimizer.step() if scaler is None else scaler.step(optimizer)
        assert torch.equal(weights(model), before)
        optimizer.zero_grad()
    train(model, optimizer, 0, 1)
    hvd.check_replicas(model)


@pytest.mark.parametrize("op", ["average", "adasum-grad"])
def case_gradients_assigned_after_synchronize(op: str) -> None:
    model = model_of()
    optimizer = distributed(model, op)
    for inside in (False, True):
        optimizer.zero_grad()
        backward(model)
        optimizer.synchronize()
        model[0].weight.grad = torch.full_like(model[0].weight, 0.1)
        if inside:  # the caller's word that they are the same everywhere
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="got another one, which has"):
                optimizer.step()
    backward(model)
    optimizer.synchronize()
    optimizer.step()  # with the gradients as they are
    hvd.check_replicas(model)


@pytest.mark.parametrize(
    "kwargs", ({}, {"backward_passes_per_step": 2}), ids=["one_pass", "two_passes"]
)
@pytest.mark.parametrize("op", ["average", "adasum-grad"])
def case_gradients_changed_in_a_bucket_that_has_not_started(
    kwargs: dict, op: str
) -> None:
    """A parameter that no rank uses, or a remainder of accumulation, holds a bucket up."""
    model = model_of()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = distributed(model, op, **kwargs)
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(RuntimeError, match="got one changed between backward"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    hvd.check_replicas(model)


@pytest.mark.parametrize("op", VARIANTS)
def case_hooks_see_reduced_weights(op: str) -> None:
    model = model_of()
    optimizer = distributed(model, op)
    seen: list[torch.Tensor] = []
    order: list[str] = []
    optimizer.register_step_pre_hook(lambda *_, order=order: order.append("pre"))
    optimizer.register_step_post_hook(
        lambda *_, model=model, seen=seen: seen.append(weights(model))
    )
    train(model, optimizer, 0, 1)
    assert len(seen) == 2 and len(order) == 2
    assert torch.equal(seen[-1], weights(model))
    for after in seen:
        everyone = hvd.allgather_object(after)
        assert all(torch.equal(after, other) for other in everyone)


@pytest.mark.parametrize("op", ["average", "adasum-grad"])
def case_a_step_left_out_by_one_rank(op: str) -> None:
    model = model_of()
    optimizer = distributed(model, op)
    with pytest.raises(
        RuntimeError, match=r"same number of steps .*another on ranks \[1\]"
    ):
        for step in range(2 * checks.EVERY):
            optimizer.zero_grad()
            backward(model, step)
            if not (step == 1 and hvd.rank() == 1):
                optimizer.step()


@pytest.mark.parametrize("op", VARIANTS)
def case_steps_left_out_by_all_ranks(op: str) -> None:
    """Which is nobody's business."""
    model = model_of()
    optimizer = distributed(model, op)
    for step in range(2 * checks.EVERY):
        optimizer.zero_grad()
        backward(model, step)
        if step % 4 == 0:
            optimizer.step()
    hvd.check_replicas(model)


def case_hyperparameters_that_differ() -> None:
    for op in ("average", "adasum-grad"):
        model = model_of()
        optimizer = distributed(model, op)
        train(model, optimizer, 0, 1)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + hvd.rank())
        with pytest.raises(RuntimeError, match=r"same hyperparameters.*lr=0\.[12]"):
            train(model, optimizer, *range(checks.EVERY))
    model = model_of()  # each rank's own business in the delta variant
    optimizer = distributed(model, "adasum-delta", lr=0.1 * (1 + hvd.rank()))
    train(model, optimizer, *range(checks.EVERY + 1))
    hvd.check_replicas(model)


@pytest.mark.parametrize("op", VARIANTS)
def case_training_goes_on_after_join(op: str) -> None:
    """Uneven data, and as many rounds on no two ranks: all count anew."""
    model = model_of()
    optimizer = distributed(model, op)
    for _ in range(2):
        train(model, optimizer, *range(checks.EVERY - 2 * hvd.rank()))
        optimizer.zero_grad()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        train(model, optimizer, *range(checks.EVERY + 2))
    hvd.check_replicas(model)


@pytest.mark.parametrize("op", VARIANTS)
def case_groups_of_a_rank_alone(op: str) -> None:
    """A learning rate of its own for worker-local parameters is nobody else's business."""
    model = model_of()
    hvd.mark_worker_local(*model[4].parameters())
    groups = [
        {"params": [*model[0].parameters(), *model[2].parameters()]},
        {"params": model[4].parameters(), "lr": 0.01 * (1 + hvd.rank())},
    ]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, 0.05), op=op)
    train(model, optimizer, 0, 1)
    hvd.check_replicas(model)


@pytest.mark.parametrize("op", ["average", "adasum-grad"])
def case_gradients_that_share_memory(op: str) -> None:
    """The version of one counts up with the others': nobody has changed it."""
    parts = [nn.Parameter(torch.ones(3, 4)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parts, 0.1), op=op, backward_passes_per_step=2
    )
    for _ in range(2):
        for factor in (1.0, 2.0 + hvd.rank()):
            (torch.cat(parts) * factor).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    for part in parts:
        everyone = hvd.allgather_object(part.detach())
        assert all(torch.equal(part, other) for other in everyone)


class Sam(torch.optim.SGD):
    """SAM's two calls, both of which a training loop makes itself."""

    def perturb(self) -> None:
        self.old = [p.detach().clone() for g in self.param_groups for p in g["params"]]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(0.05 * p.grad / p.grad.norm())
        self.zero_grad()

    def second_step(self) -> None:
        with torch.no_grad():
            parameters = [p for g in self.param_groups for p in g["params"]]
            torch._foreach_copy_(parameters, self.old)
            torch._foreach_sub_(parameters, [0.1 * p.grad for p in parameters])
        self.zero_grad()


@pytest.mark.parametrize("op", VARIANTS)
def case_training_without_step(op: str) -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(Sam(model.parameters(), 0.1), op=op)
    with pytest.warns(UserWarning, match="SAM's first_step and second_step"):
        for step in range(3):
            backward(model, step)
            optimizer.perturb()
            backward(model, step)
            optimizer.second_step()


def case_groups_of_generators() -> None:
    model = model_of()
    lists = [model[0].parameters(), (p for p in model[2].parameters())]
    optimizer = distributed(model, "average", groups=lists)
    assert len(optimizer._adasum.buckets) == 3  # two groups, and the rest
    train(model, optimizer, 0)
    optimizer.zero_grad()
    model[0].requires_grad_(False)
    train(model, optimizer, 0)
    assert len(optimizer._adasum.buckets) == 2


def case_gradients_that_are_not_zeroed() -> None:
    """AdaSum of sums is not the sum of AdaSums: a warning, once."""
    for op, clears, passes in (
        (hvd.AdasumGrad, None, 1),
        (hvd.AdasumGrad, None, 2),
        (hvd.AdasumGrad, False, 2),
        (hvd.AdasumGrad, True, 1),
        (hvd.Average, None, 1),
    ):
        model = nn.Linear(200, 200)  # whose weight moves into its bucket at once
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.0),
            op=op,
            backward_passes_per_step=passes,
        )
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(3):
                for _ in range(passes):
                    model(torch.ones(1, 200)).sum().backward()
                optimizer.step()
                if clears is not None:
                    optimizer.zero_grad(set_to_none=clears)
        texts = [str(each.message) for each in found]
        sums = [
            each.filename == __file__ and "AdaSum of such sums" in str(each.message)
            for each in found
        ]
        warns = clears is None and op is hvd.AdasumGrad and hvd.size() > 1
        assert sum(sums) == warns, (op, clears, passes, texts)


@pytest.mark.parametrize("op", VARIANTS)
def case_set_backward_passes_per_step(op: str) -> None:
    model = model_of()
    optimizer = distributed(model, op)
    train(model, optimizer, 0)
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    for step in range(2):
        backward(model, step)
    optimizer.step()
    hvd.check_replicas(model)
    with pytest.raises(ValueError, match="expected an integer >= 1, but got 0"):
        optimizer.set_backward_passes_per_step(0)


@pytest.mark.parametrize("op", VARIANTS)
def case_what_is_no_optimizer(op: str) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, but got"):
        hvd.DistributedOptimizer(model_of(), op=op)
    lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match=r"group0\.param0.*one forward pass first"):
        hvd.DistributedOptimizer(torch.optim.SGD(lazy.parameters(), 0.1), op=op)


def case_an_earlier_optimizer_of_the_same_parameters() -> None:
    model = model_of()
    earlier = distributed(model, "average")
    optimizer = distributed(model, "average")
    train(model, optimizer, 0)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="earlier DistributedOptimizer of the same"):
        backward(model)
    del earlier
    optimizer.zero_grad()
    train(model, optimizer, 0)


def case_process_sets_are_refused_in_elastic_jobs() -> None:
    model, some = model_of(), process_sets.of(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_ELASTIC", "1")
        for use in (
            lambda: distributed(model, "average", process_set=some),
            lambda: hvd.mark_replicated_over(some, *model.parameters()),
        ):
            with pytest.raises(NotImplementedError, match="expected all ranks in an"):
                use()
        with pytest.raises(NotImplementedError, match="got an elastic job"):
            hvd.DistributedGradReducer(model.parameters())


@pytest.mark.parametrize("op", VARIANTS)
def case_optimizers_that_differ(op: str) -> None:
    """The first step names the first difference; learning rates may differ with delta."""
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    for kinds, options, difference in (
        ((sgd, adam), {}, r"optimizer=torch\.optim\S*\.Adam"),
        ((adam, adam), {"betas": (0.8, 0.999)}, r"betas=\[0\.8, 0\.999\]"),
        ((sgd, sgd), {"weight_decay": 0.1}, r"weight_decay=0\.1"),
    ):
        model, is_other = model_of(), hvd.rank() == 1
        if op == "adasum-delta":
            options = {"lr": 0.5, "foreach": False, **options}
        plain = kinds[is_other](model.parameters(), **(options if is_other else {}))
        optimizer = hvd.DistributedOptimizer(plain, op=op)
        match = f"same hyperparameters on all ranks, but got {difference} on rank 1"
        with pytest.raises(RuntimeError, match=match):
            train(model, optimizer, 0)


@pytest.mark.parametrize("op", VARIANTS)
def case_parameters_frozen_by_one_rank(op: str) -> None:
    """An error on every rank at once, which names the parameter: before the first step or later."""
    for step_of_change in (0, 1, checks.EVERY):
        for unfreezes in (False, True):
            model = model_of()
            model[2].requires_grad_(not unfreezes)
            optimizer = distributed(model, op)
            with pytest.raises(ValueError, match=r"same parameters .*'2\.weight'"):
                for step in range(checks.EVERY + 2):
                    if step == step_of_change and hvd.rank() == 1:
                        model[2].requires_grad_(unfreezes)
                    train(model, optimizer, step)
                    hvd.allreduce(torch.ones(1), name="a metric of the script")
            assert step == step_of_change


@pytest.mark.parametrize("op", VARIANTS)
def case_parameters_replaced_by_one_rank(op: str) -> None:
    """The lists are equal, and the replicas of an optimizer's state are not."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), op=op
    )
    train(model, optimizer, 0)
    if hvd.rank() == 1:
        optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(40, 12))
    with pytest.raises(ValueError, match=r"but got others on ranks \[1\] only"):
        train(model, optimizer, 1)
