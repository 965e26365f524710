"""What parts the replicas without a word elsewhere: noticed here, on every rank."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from cases_torch_optimizer import batch_of, distributed, loss_of, model_of
from torch import nn
from torch.nn import functional

import adasum_hvd.torch as hvd
from adasum_hvd.torch.optimizer import rounds

VARIANTS = ("average", "adasum-grad", "adasum-delta")


def backward(model: nn.Module, step: int = 0) -> None:
    loss_of(model, hvd.rank(), step).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def case_skip_synchronize_without_synchronize() -> None:
    for op in ("average", "adasum-grad"):
        model = model_of()
        optimizer = distributed(model, op)
        before = weights(model)
        for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
            loss = loss_of(model, hvd.rank(), 0)
            (loss if scaler is None else scaler.scale(loss)).backward()
            with (
                optimizer.skip_synchronize(),
                pytest.raises(
                    RuntimeError, match=r"required synchronize\(\) since the"
                ),
            ):
                optimizer.step() if scaler is None else scaler.step(optimizer)
            assert torch.equal(weights(model), before)
            optimizer.zero_grad()
        train(model, optimizer, 0, 1)
        hvd.check_replicas(model)


def case_gradients_assigned_after_synchronize() -> None:
    for op in ("average", "adasum-grad"):
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
        hvd.check_replicas(model)


def case_gradients_changed_in_a_bucket_that_has_not_started() -> None:
    """A parameter that no rank uses, or a remainder of accumulation, holds a bucket up."""
    for op in ("average", "adasum-grad"):
        for kwargs in ({}, {"backward_passes_per_step": 2}):
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


def case_hooks_see_reduced_weights() -> None:
    for op in VARIANTS:
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


def case_a_step_left_out_by_one_rank() -> None:
    for op in ("average", "adasum-grad"):
        model = model_of()
        optimizer = distributed(model, op)
        with pytest.raises(
            RuntimeError, match=r"same number of steps .*another on ranks \[1\]"
        ):
            for step in range(2 * rounds.EVERY):
                optimizer.zero_grad()
                backward(model, step)
                if not (step == 1 and hvd.rank() == 1):
                    optimizer.step()


def case_steps_left_out_by_all_ranks() -> None:
    """Which is nobody's business."""
    for op in VARIANTS:
        model = model_of()
        optimizer = distributed(model, op)
        for step in range(2 * rounds.EVERY):
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
            train(model, optimizer, *range(rounds.EVERY))
    model = model_of()  # each rank's own business in the delta variant
    optimizer = distributed(model, "adasum-delta", lr=0.1 * (1 + hvd.rank()))
    train(model, optimizer, *range(rounds.EVERY + 1))
    hvd.check_replicas(model)


class Masters(torch.optim.SGD):
    """float32 weights of bfloat16 parameters, kept in the state as many optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    master = self.state[p].setdefault("master", p.detach().float())
                    master -= group["lr"] * p.grad.float()
                    p.copy_(master)


class ScheduleFree(torch.optim.SGD):
    """The first step of schedule-free SGD: `z` beside the weights."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    z -= group["lr"] * p.grad
                    p.copy_(z)


class OnHost(torch.optim.SGD):
    """Weights of its own outside of the state, each with an optimizer, as torchao's offload."""

    @torch.no_grad()
    def step(self, closure=None):
        if not hasattr(self, "inner"):
            self.inner = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.inner:
                    mine = nn.Parameter(p.detach().clone())
                    self.inner[p] = torch.optim.SGD([mine], group["lr"])
                (mine,) = self.inner[p].param_groups[0]["params"]
                mine.grad = p.grad.clone()
                self.inner[p].step()
                p.copy_(mine)


def case_optimizers_with_weights_of_their_own() -> None:
    kinds = [(Masters, torch.bfloat16, "'master'"), (ScheduleFree, torch.float32, "'z'"),
             (OnHost, torch.float32, "inner"),
             (torch.optim.ASGD, torch.float32, "'ax'")]  # fmt: skip
    for kind, dtype, where in kinds:
        model = model_of().to(dtype)
        model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=dtype)))
        before = weights(model)
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), 0.1), model.named_parameters(), op="adasum-delta"
        )
        images, labels = batch_of(hvd.rank(), 0)
        functional.cross_entropy(model(images.to(dtype)).float(), labels).backward()
        with pytest.raises(RuntimeError, match=f"a second time .*{where}"):
            optimizer.step()
        assert torch.equal(weights(model), before)
        if kind is not torch.optim.ASGD:  # fine where gradients are reduced
            optimizer = distributed(model_of(), "average")


def case_a_copy_on_one_rank_is_everyones_error() -> None:
    model = model_of()
    kind = ScheduleFree if hvd.rank() == 1 else torch.optim.SGD
    optimizer = hvd.DistributedOptimizer(
        kind(model.parameters(), 0.1), op="adasum-delta"
    )
    backward(model)
    with pytest.raises(RuntimeError, match="keeps them a second time"):
        optimizer.step()


class Fails(torch.optim.SGD):
    """Raises half way, as one that runs out of memory."""

    fails = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * p.grad)
                if self.fails:
                    raise MemoryError("out of memory")


def case_a_local_step_that_raises() -> None:
    """On one rank, caught: its weights are those that the step began with."""
    for failing in (0, 1):
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            Fails(model.parameters(), 0.1), op="adasum-delta"
        )
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            if step == failing and hvd.rank() == 1:
                optimizer.fails, before = True, weights(model)
                with pytest.raises(MemoryError):
                    optimizer.step()
                assert torch.equal(weights(model), before)
                optimizer.fails = False
            optimizer.step()
        hvd.check_replicas(model)


def case_training_goes_on_after_join() -> None:
    """Uneven data, and as many rounds on no two ranks: all count anew."""
    for op in VARIANTS:
        model = model_of()
        optimizer = distributed(model, op)
        for _ in range(2):
            train(model, optimizer, *range(rounds.EVERY - 2 * hvd.rank()))
            optimizer.zero_grad()
            last = hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
            hvd.broadcast_optimizer_state(optimizer, root_rank=last)
            train(model, optimizer, *range(rounds.EVERY + 2))
        hvd.check_replicas(model)


def case_groups_of_a_rank_alone() -> None:
    """A learning rate of its own for worker-local parameters is nobody else's business."""
    for op in VARIANTS:
        model = model_of()
        hvd.mark_worker_local(*model[4].parameters())
        groups = [
            {"params": [*model[0].parameters(), *model[2].parameters()]},
            {"params": model[4].parameters(), "lr": 0.01 * (1 + hvd.rank())},
        ]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, 0.05), op=op)
        train(model, optimizer, 0, 1)
        hvd.check_replicas(model)


def case_gradients_that_share_memory() -> None:
    """The version of one counts up with the others': nobody has changed it."""
    for op in ("average", "adasum-grad"):
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


def case_weights_changed_through_data() -> None:
    """torch does not count it; the delta variant sees it all the same."""
    model, expected_model = model_of(), model_of()
    pair = [(m, distributed(m, "adasum-delta")) for m in (model, expected_model)]
    for step in range(3):
        for net, optimizer in pair:
            train(net, optimizer, step)
            for p in net.parameters():
                if net is model:
                    p.data.mul_(p.data.abs() > 0.05)
                else:
                    with torch.no_grad():
                        p.copy_(p * (p.abs() > 0.05))
    assert torch.equal(weights(model), weights(expected_model))
    hvd.check_replicas(model)
    frozen = nn.Parameter(torch.linspace(-1, 1, 1000))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([frozen], 0.1), op="adasum-delta"
    )
    for step in range(2):
        (0 * frozen).sum().backward()
        if step:
            frozen.data[3:5] = torch.tensor([0.0, 1e-3])
        optimizer.step()
    assert frozen[3] == 0 and frozen[4] == 1e-3


def moved(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """SAM's detour, with the rounding that `add_` and `sub_` leave."""
    with torch.no_grad():
        away = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
        torch._foreach_add_(list(model.parameters()), away)
    optimizer.zero_grad()
    backward(model, 1000 + step)
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), away)


class Detour(torch.optim.SGD):
    """SAM as a closure takes it: both passes inside one `step()`."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        parameters = [p for g in self.param_groups for p in g["params"]]
        away = [0.05 * p.grad / p.grad.norm() for p in parameters]
        torch._foreach_add_(parameters, away)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, away)
        return super().step()


def case_weights_moved_for_a_moment() -> None:
    """Rounding differs by rank; the replicas are the same bits all the same."""
    for kwargs in ({}, {"compression": hvd.Compression.bf16}, {"local_steps": 2}):
        model = model_of()
        optimizer = distributed(model, "adasum-delta", **kwargs)
        for step in range(24):
            optimizer.zero_grad()
            backward(model, step)
            moved(model, optimizer, step)
            optimizer.step()
        hvd.check_replicas(model)
    for op in VARIANTS:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(Detour(model.parameters(), 0.05), op=op)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), 0)
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)
        if op == "adasum-delta":  # SAM's two gradients differ by rank, its detour too
            hvd.check_replicas(model)


def case_weights_changed_between_steps() -> None:
    """Alike on all ranks: the new start. Otherwise: an error on all."""
    model = model_of()
    optimizer = distributed(model, "adasum-delta", momentum=0.0)
    train(model, optimizer, 0)
    expected_model = copy.deepcopy(model)
    expected = distributed(expected_model, "adasum-delta", momentum=0.0)
    with torch.no_grad():
        for p, q in zip(model.parameters(), expected_model.parameters(), strict=True):
            p.clamp_(-0.05, 0.05)
            q.copy_(p)
    for net, each in ((model, optimizer), (expected_model, expected)):
        train(net, each, *range(rounds.EVERY))
    assert torch.equal(weights(model), weights(expected_model))
    with torch.no_grad():
        model[0].weight.mul_(1 + 0.5 * hvd.rank())
    with pytest.raises(RuntimeError, match="same weights on all ranks at the start"):
        train(model, optimizer, *range(rounds.EVERY + 1))


def case_models_that_were_never_equal() -> None:
    model = model_of(seed=hvd.rank())
    optimizer = distributed(model, "adasum-delta")
    with pytest.raises(
        RuntimeError, match=r"before the first step, got others on ranks"
    ):
        train(model, optimizer, 0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, 0, 1)
    hvd.check_replicas(model)


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


def case_training_without_step() -> None:
    for op in VARIANTS:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(Sam(model.parameters(), 0.1), op=op)
        with pytest.warns(UserWarning, match="SAM's first_step and second_step"):
            for step in range(3):
                backward(model, step)
                optimizer.perturb()
                backward(model, step)
                optimizer.second_step()


def case_scheduler_from_before_warns_of_nothing() -> None:
    for op in VARIANTS:
        model = model_of()
        plain = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, 0)
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.05


def case_groups_of_generators() -> None:
    model = model_of()
    lists = [model[0].parameters(), (p for p in model[2].parameters())]
    optimizer = distributed(model, "average", groups=lists)
    assert len(optimizer._buckets) == 3  # two groups, and the rest
    train(model, optimizer, 0)
    optimizer.zero_grad()
    model[0].requires_grad_(False)
    train(model, optimizer, 0)
    assert len(optimizer._buckets) == 2


def case_set_backward_passes_per_step() -> None:
    for op in VARIANTS:
        model = model_of()
        optimizer = distributed(model, op)
        train(model, optimizer, 0)
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(2)
        for step in range(2):
            backward(model, step)
        optimizer.step()
        hvd.check_replicas(model)
        with pytest.raises(ValueError, match="required an integer >= 1, got 0"):
            optimizer.set_backward_passes_per_step(0)


def case_what_is_no_optimizer() -> None:
    for op in VARIANTS:
        with pytest.raises(TypeError, match=r"required a torch\.optim\.Optimizer, got"):
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


def case_elastic_jobs_are_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_ELASTIC", "1")
        with pytest.raises(NotImplementedError, match="got an elastic one"):
            distributed(model_of(), "average")
        with pytest.raises(NotImplementedError, match=r"init\(\).*an elastic one"):
            hvd.init()
