"""The torch DistributedOptimizer against one process that plays all ranks with the reference."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable

import numpy as np
import process_sets
import pytest
import torch
from torch import nn
from torch.nn import functional

import adasum_hvd.torch as hvd
from adasum_hvd import reference

HOSTS: list[str] = []
STEPS = 6


class Lamb(torch.optim.Optimizer):
    """A layer-wise optimizer as a user would write it; a required argument, no foreach."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = state["m"] / (state["v"].sqrt() + group["eps"])
                update += group["weight_decay"] * p
                trust = p.norm() / update.norm() if p.norm() > 0 else 1.0
                p.add_(update, alpha=float(-group["lr"] * trust))
        return loss


OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05),
    "momentum": lambda params: torch.optim.SGD(
        params, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "adam": lambda params: torch.optim.Adam(params, 0.01),
    "adamw-fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "lamb": lambda params: Lamb(params, 0.02),
}
VARIANTS = ("average", "sum", "adasum-grad", "adasum-delta", "adasum")


def start() -> None:
    HOSTS[:] = hvd.allgather_object(os.environ.get("HOROVOD_HOSTNAME", "one"))


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 130), nn.Tanh(), nn.Linear(130, 3)
    )


def batch_of(rank: int, step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(size, 12, generator=generator),
        torch.randint(0, 3, (size,), generator=generator),
    )


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    images, labels = batch_of(rank, step)
    return functional.cross_entropy(model(images), labels)


def reduce_tensors(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(tensors)
    if op == "average":
        return stacked.mean(0)
    if op == "sum":
        return stacked.sum(0)
    return torch.from_numpy(reference.adasum([t.numpy() for t in tensors], HOSTS)).to(
        stacked.dtype
    )


class Simulation:
    """All ranks in one process: a replica and an optimizer each, the reference in between."""

    def __init__(self, make_optimizer: Callable, op: str, size: int, model: nn.Module):
        self.models = [copy.deepcopy(model) for _ in range(size)]
        self.optimizers = [make_optimizer(m.parameters()) for m in self.models]
        self.op, self.delta = op, op in ("adasum", "adasum-delta")

    def backward(self, step: int, loss: Callable = loss_of) -> None:
        for rank, model in enumerate(self.models):
            loss(model, rank, step).backward()

    def parameters(self):
        return zip(*(model.parameters() for model in self.models), strict=True)

    @torch.no_grad()
    def step(self, before_step: Callable = lambda model: None) -> None:
        if not self.delta:
            for replicas in self.parameters():
                gradient = reduce_tensors([p.grad for p in replicas], self.op)
                for p in replicas:
                    p.grad.copy_(gradient)
        old = [p.detach().clone() for p in self.models[0].parameters()]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            before_step(model)
            optimizer.step()
        if self.delta:
            for start, replicas in zip(old, self.parameters(), strict=True):
                new = start + reduce_tensors(
                    [p.detach() - start for p in replicas], self.op
                )
                for p in replicas:
                    p.copy_(new)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def check_same_everywhere(model: nn.Module) -> None:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    assert len(set(hvd.allgather_object(digest.hexdigest()))) == 1, (
        "replicas have drifted apart"
    )


def check_equal(model: nn.Module, expected: nn.Module, tolerance: float = 2e-6) -> None:
    for (name, p), q in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        difference = (p - q).abs().max().item()
        assert difference <= tolerance * max(1.0, q.abs().max().item()), (
            f"{name}: {difference}"
        )


def case_every_variant_and_optimizer() -> None:
    for name, make_optimizer in OPTIMIZERS.items():
        for op in VARIANTS:
            model = model_of()
            simulation = Simulation(make_optimizer, op, hvd.size(), model)
            optimizer = make_optimizer(model.parameters())
            wrapped = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), op=op
            )
            assert isinstance(wrapped, type(optimizer))
            for step in range(STEPS):
                wrapped.zero_grad()
                simulation.zero_grad()
                before = [p.detach().clone() for p in model.parameters()]
                loss_of(model, hvd.rank(), step).backward()
                simulation.backward(step)
                assert all(  # the reduction under way leaves the weights alone
                    torch.equal(a, b)
                    for a, b in zip(before, model.parameters(), strict=True)
                )
                wrapped.step()
                simulation.step()
            check_same_everywhere(model)
            # Adam's first steps are sign-like: rounding in tiny gradients is amplified.
            check_equal(
                model,
                simulation.models[0],
                2e-6 if name in ("sgd", "momentum") else 5e-5,
            )


def case_parameters_hold_weights_between_backward_and_step() -> None:
    for op in ("adasum-grad", "adasum-delta"):
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=op
        )
        before = copy.deepcopy(model.state_dict())
        loss_of(model, hvd.rank(), 0).backward()
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        optimizer.step()
        assert not any(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def case_differing_models_are_refused_on_all_ranks() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    model = nn.Linear(3, 4 + hvd.rank())
    with pytest.raises(
        ValueError, match=r"required the same parameters.*weight.*\(4, 3\).*\(5, 3\)"
    ):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            model.named_parameters(),
            op=hvd.Adasum,
        )
    model = nn.Linear(3, 4, bias=hvd.rank() == 0)
    with pytest.raises(ValueError, match="2 and 1 parameters"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), op=hvd.Adasum
        )


def case_wrong_arguments_of_the_optimizer() -> None:
    model = model_of()
    make = lambda **kwargs: hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), **kwargs
    )
    with pytest.raises(ValueError, match="required unique names, got twice: \\['a'\\]"):
        make(named_parameters=[("a", p) for p in model.parameters()], op="adasum")
    with pytest.raises(ValueError, match=r"got none for group0\.param1"):
        make(named_parameters=list(model.named_parameters())[:1], op="adasum")
    with pytest.raises(ValueError, match=r"\(name, parameter\) tuples"):
        make(named_parameters=model.parameters(), op="adasum")
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        make(gradient_predivide_factor=2.0, op="adasum")
    with pytest.raises(
        ValueError, match="backward_passes_per_step: required an integer >= 1"
    ):
        make(backward_passes_per_step=0, op="adasum")
    for groups in (-1, True):
        with pytest.raises(ValueError, match="groups: required an integer >= 0 or"):
            make(groups=groups, op="adasum")
    for factor in (0.0, float("nan"), -1.0):
        with pytest.raises(ValueError, match="required a finite number > 0, got"):
            make(gradient_predivide_factor=factor, op="average")
    with pytest.raises(NotImplementedError, match=r"required Compression\.none"):
        make(compression=object(), op="adasum")
    with pytest.raises(NotImplementedError, match=r"none or Compression\.fp16, got"):
        make(compression=hvd.Compression.bf16, op="average")


def distributed(
    model: nn.Module, op: str, lr: float = 0.05, momentum: float = 0.9, **kwargs
):
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    return hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), op=op, **kwargs
    )


def sgd(params):
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def case_clipping() -> None:
    """Gradient variant: the reduced gradient is clipped; delta variant: the local one."""
    for op in ("average", "adasum-grad", "adasum-delta"):
        model = model_of()
        optimizer, simulation = (
            distributed(model, op),
            Simulation(sgd, op, hvd.size(), model),
        )
        untouched = copy.deepcopy(model)
        free = Simulation(sgd, op, hvd.size(), untouched)
        for step in range(STEPS):
            optimizer.zero_grad()
            simulation.zero_grad()
            free.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            simulation.backward(step)
            free.backward(step)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
            simulation.step(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05))
            free.step()
        check_same_everywhere(model)
        check_equal(model, simulation.models[0])
        with pytest.raises(AssertionError):
            check_equal(model, free.models[0])


def case_clip_delta_norm() -> None:
    model = model_of()
    optimizer = distributed(model, "adasum-delta", clip_delta_norm=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    change = torch.cat(
        [(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
    )
    assert abs(change.norm().item() - 1e-3) < 1e-5
    check_same_everywhere(model)


def case_accumulation() -> None:
    """backward_passes_per_step: gradients add up, then one step and one reduction."""
    for op in ("average", "adasum-grad", "adasum-delta"):
        model = model_of()
        optimizer = distributed(model, op, backward_passes_per_step=3)
        simulation = Simulation(sgd, op, hvd.size(), model)
        for step in range(3):
            optimizer.zero_grad()
            simulation.zero_grad()
            for part in range(3):
                loss_of(model, hvd.rank(), 10 * step + part).backward()
                simulation.backward(10 * step + part)
            optimizer.step()
            simulation.step()
        check_same_everywhere(model)
        check_equal(model, simulation.models[0])
    if hvd.size() > 1:
        model = model_of()
        optimizer = distributed(model, "adasum-grad")
        loss_of(model, hvd.rank(), 0).backward()
        with pytest.raises(RuntimeError, match="required at most 1 backward passes"):
            loss_of(model, hvd.rank(), 1).backward()
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), 2).backward()
        optimizer.step()
        check_same_everywhere(model)


def case_local_steps() -> None:
    model = model_of()
    optimizer = distributed(model, "adasum-delta", local_steps=3)
    replicas = [copy.deepcopy(model) for _ in range(hvd.size())]
    locals_ = [sgd(r.parameters()) for r in replicas]
    for window in range(2):
        start = [p.detach().clone() for p in replicas[0].parameters()]
        for step in range(3 * window, 3 * window + 3):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            for rank, (replica, local) in enumerate(
                zip(replicas, locals_, strict=True)
            ):
                local.zero_grad()
                loss_of(replica, rank, step).backward()
                local.step()
        with torch.no_grad():
            for old, *tensors in zip(
                start, *(r.parameters() for r in replicas), strict=True
            ):
                new = old + reduce_tensors([t - old for t in tensors], "adasum")
                for tensor in tensors:
                    tensor.copy_(new)
        check_same_everywhere(model)
        check_equal(model, replicas[0])


def case_exact_resume() -> None:
    """Saved and loaded at any step, in the middle of a window too: the same bits."""
    for op, kwargs in (
        ("adasum-grad", {}),
        ("adasum-delta", {}),
        ("adasum-delta", {"local_steps": 3}),
    ):
        straight = model_of()
        optimizer = distributed(straight, op, **kwargs)
        saved = None
        for step in range(6):
            if step == 2:
                saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
            optimizer.zero_grad()
            loss_of(straight, hvd.rank(), step).backward()
            optimizer.step()
        resumed = model_of(1)
        again = distributed(resumed, op, **kwargs)
        resumed.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        for step in range(2, 6):
            again.zero_grad()
            loss_of(resumed, hvd.rank(), step).backward()
            again.step()
        for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(p, q)
        plain = torch.optim.SGD(model_of().parameters(), 0.05, momentum=0.9)
        plain.load_state_dict(optimizer.state_dict())


def case_broadcast_optimizer_state() -> None:
    """One rank comes back from a checkpoint, the others start afresh: no step is taken."""
    model = model_of()
    optimizer = distributed(model, "adasum-grad", lr=0.01 * (1 + hvd.rank()))
    if hvd.rank() == 0:
        for p in model.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 3.0)
    before = copy.deepcopy(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    assert optimizer.param_groups[0]["lr"] == 0.01
    for p in model.parameters():
        assert torch.equal(
            optimizer.state[p]["momentum_buffer"], torch.full_like(p, 3.0)
        )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="required a root_rank of"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=99)


def case_copies() -> None:
    """On one rank alone too: a copy is a plain optimizer, and says so."""
    import pickle

    for op in ("adasum-grad", "adasum-delta"):
        model = model_of()
        optimizer = distributed(model, op)
        loss_of(model, hvd.rank(), 0).backward()
        optimizer.step()
        if hvd.rank() == 0:
            for copied in (
                lambda pair: copy.deepcopy(pair),
                lambda pair: pickle.loads(pickle.dumps(pair)),
            ):
                with pytest.warns(UserWarning, match="SGD: the copy .* is a plain"):
                    other_model, other = copied((model, optimizer))
                assert type(other) is torch.optim.SGD
                before = [p.detach().clone() for p in other_model.parameters()]
                for p, q in zip(before, model.parameters(), strict=True):
                    assert torch.equal(p, q)
                other.zero_grad()
                loss_of(other_model, 0, 1).backward()
                other.step()
                for p, q in zip(before, other_model.parameters(), strict=True):
                    assert not torch.equal(p, q)
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), 1).backward()
        optimizer.step()
        check_same_everywhere(model)


def case_schedulers_groups_and_add_param_group() -> None:
    for op in ("adasum-grad", "adasum-delta"):
        model, extra = model_of(), nn.Linear(3, 3)
        hvd.broadcast_parameters(extra.state_dict(), root_rank=0)
        layers = list(model.children())
        groups = [
            {"params": layers[0].parameters(), "lr": 0.1},
            {"params": [*layers[2].parameters(), *layers[4].parameters()]},
        ]
        optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9)
        before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, op=op)
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        optimizer.add_param_group({"params": extra.parameters(), "lr": 0.2})
        rates = []
        for step in range(3):
            optimizer.zero_grad()
            images, labels = batch_of(hvd.rank(), step)
            functional.cross_entropy(extra(model(images)), labels).backward()
            optimizer.step()
            before.step()
            after.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates == pytest.approx([0.1 * 0.45**k for k in (1, 2, 3)])
        check_same_everywhere(model)
        check_same_everywhere(extra)


def case_unused_and_frozen() -> None:
    """A parameter that only some ranks used moves alike everywhere; one that none used, not."""
    for op in ("adasum-grad", "adasum-delta", "average"):
        model = nn.ModuleList([nn.Linear(4, 2) for _ in range(4)])
        for p in model.parameters():
            torch.nn.init.constant_(p, 0.3)
        model[3].requires_grad_(False)
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad],
            0.1,
            momentum=0.9,
            weight_decay=0.1,
        )
        optimizer = hvd.DistributedOptimizer(optimizer, op=op)
        for _ in range(3):
            optimizer.zero_grad()
            used = [model[0]] + [model[1]] * (hvd.rank() == 0)
            sum(layer(torch.ones(1, 4)).sum() for layer in used).backward()
            optimizer.step()
        check_same_everywhere(model)
        for untouched in (model[2], model[3]):
            assert all(
                torch.equal(p, torch.full_like(p, 0.3)) for p in untouched.parameters()
            )
        for moved in (model[0], model[1]):
            assert not any(
                torch.equal(p, torch.full_like(p, 0.3)) for p in moved.parameters()
            )


def case_unfreezing_later() -> None:
    """Fine-tuning: a layer that is unfrozen after the wrapping is reduced from then on."""
    for op in ("adasum-grad", "adasum-delta"):
        model = model_of()
        model[0].requires_grad_(False)
        optimizer = distributed(model, op)
        for step in range(4):
            if step == 2:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            check_same_everywhere(model)
        assert not torch.equal(model[0].weight, model_of()[0].weight)


def case_zero_grad() -> None:
    for op in ("adasum-grad", "adasum-delta"):
        for to_none in (True, False):
            model = model_of()
            optimizer, simulation = (
                distributed(model, op),
                Simulation(sgd, op, hvd.size(), model),
            )
            for step in range(3):
                loss_of(model, hvd.rank(), 100 + step).backward()  # dropped
                optimizer.zero_grad(set_to_none=to_none)
                simulation.zero_grad()
                loss_of(model, hvd.rank(), step).backward()
                simulation.backward(step)
                optimizer.step()
                simulation.step()
                optimizer.zero_grad(to_none)
            check_same_everywhere(model)
            check_equal(model, simulation.models[0])


def case_groups_compression_and_buckets() -> None:
    results = []
    settings = [{}, {"groups": 2}, {"bucket_bytes": 1}, {"start_copy": "host"}]
    first = None
    for op in ("adasum-grad", "adasum-delta"):
        for kwargs in settings:
            model = model_of()
            if "groups" in kwargs:
                params = list(model.parameters())
                if op == "adasum-delta":
                    kwargs = {"groups": [params[:2], params[3:]]}
            optimizer = distributed(model, op, **kwargs)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, hvd.rank(), step).backward()
                optimizer.step()
            results.append(
                torch.cat([p.detach().flatten() for p in model.parameters()])
            )
            first = results[-1] if not kwargs else first
            assert torch.equal(results[-1], first), "bucketing changed the result"
        for compression, rtol in (
            (hvd.Compression.fp16, 0.02),
            (hvd.Compression.bf16, 0.1),
        ):
            model = model_of()
            optimizer = distributed(model, op, compression=compression)
            before = hvd.counters().bytes
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, hvd.rank(), step).backward()
                optimizer.step()
            check_same_everywhere(model)
            rounded = torch.cat([p.detach().flatten() for p in model.parameters()])
            torch.testing.assert_close(rounded, first, rtol=rtol, atol=rtol / 10)
            if hvd.size() > 1:
                assert not torch.equal(rounded, first)
                assert sum(optimizer.extra_bytes().values()) > 0
                travelled = hvd.counters().bytes - before
                assert 2 * 3 * rounded.numel() <= travelled < 2.1 * 3 * rounded.numel()


def case_low_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for op in ("adasum-grad", "adasum-delta"):
            model = model_of().to(dtype)
            optimizer = distributed(model, op, lr=0.1)
            losses = []
            for step in range(8):
                optimizer.zero_grad()
                images, labels = batch_of(hvd.rank(), step % 2)
                loss = functional.cross_entropy(model(images.to(dtype)).float(), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert all(p.dtype == dtype for p in model.parameters())
            digests = [p.detach().float() for p in model.parameters()]
            everyone = hvd.allgather_object([d.sum().item() for d in digests])
            assert all(e == everyone[0] for e in everyone)
            means = np.mean(hvd.allgather_object(losses), axis=0)
            assert means[-2:].mean() < means[:2].mean()


def case_sparse_gradients() -> None:
    """Average and Sum gather rows; AdaSum of gradients takes them densely, or refuses them."""
    for op in ("average", "sum", "adasum-grad", "adasum-delta"):
        for dense in (True, False):
            torch.manual_seed(0)
            table = nn.Embedding(20, 4, sparse=True)
            expected = copy.deepcopy(table.weight.detach())
            optimizer = torch.optim.SGD(table.parameters(), 0.1)
            optimizer = hvd.DistributedOptimizer(
                optimizer, op=op, sparse_as_dense=dense
            )
            if not dense and op == "adasum-grad" and hvd.size() > 1:
                with pytest.raises(
                    ValueError, match=r"required a dense gradient.*sparse_as_dense=True"
                ):
                    table(torch.tensor([hvd.rank(), 5])).sum().backward()
                continue
            for step in range(3):
                optimizer.zero_grad()
                used = torch.tensor([hvd.rank(), 5])
                if step == 1 and hvd.rank() == 0:  # no gradient here, rows elsewhere
                    used = used[:0]
                table(used).sum().backward()
                optimizer.step()
                check_same_everywhere(table)
                for r in range(hvd.size()):
                    if step != 1 or r:
                        scale = hvd.size() if op == "average" else 1
                        expected[[r, 5]] -= 0.1 / scale
            if op in ("average", "sum"):
                torch.testing.assert_close(table.weight.detach(), expected)
            gathers = op in ("average", "sum") and not dense and hvd.size() > 1
            assert bool(getattr(optimizer, "_sparse", [])) == gathers
            if gathers:
                assert not optimizer._buckets and table.weight.grad.is_sparse


def case_sparse_beside_dense() -> None:
    """Rows that one rank alone has at first: the same weights as with dense gradients."""
    trained = []
    for dense in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Embedding(6, 3, sparse=not dense) for _ in range(2)])
        model.append(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), op="average"
        )
        for step in range(4):
            optimizer.zero_grad()
            hidden = model[0](torch.tensor([step, hvd.rank()])).sum(0)
            if hvd.rank() == step % hvd.size():
                hidden = hidden + model[1](torch.tensor([hvd.rank()])).sum(0)
            model[2](hidden).square().sum().backward()
            optimizer.step()
            check_same_everywhere(model)
        trained.append(model)
    check_equal(trained[1], trained[0])


def case_worker_local() -> None:
    model = model_of()
    hvd.mark_worker_local(model[4].weight)
    optimizer = distributed(model, "adasum-delta")
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    weights = hvd.allgather_object(model[4].weight.detach().numpy())
    assert hvd.size() == 1 or not np.array_equal(weights[0], weights[1])
    rest = nn.ModuleList([model[0], model[2]])
    check_same_everywhere(rest)
    if hvd.size() > 1:
        hvd.mark_worker_local(*model.parameters())
        optimizer = distributed(model, "adasum-grad")
        loss_of(model, hvd.rank(), 0).backward()
        with pytest.raises(RuntimeError, match="replicas would drift apart"):
            optimizer.step()


def closure_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> Callable:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        loss.backward()
        return loss

    return closure


def case_closures() -> None:
    for op in ("adasum-grad", "adasum-delta"):
        model = model_of()
        optimizer, simulation = (
            distributed(model, op),
            Simulation(sgd, op, hvd.size(), model),
        )
        for step in range(3):
            loss = optimizer.step(closure_of(model, optimizer, step))
            assert loss.item() > 0
            simulation.zero_grad()
            simulation.backward(step)
            simulation.step()
        check_same_everywhere(model)
        check_equal(model, simulation.models[0])
    model = model_of()
    lbfgs = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    optimizer = hvd.DistributedOptimizer(
        lbfgs, model.named_parameters(), op="adasum-grad"
    )

    optimizer.step(closure_of(model, optimizer, 0))
    check_same_everywhere(model)


def case_optimizer_of_a_process_set() -> None:
    if hvd.size() < 3:
        pytest.skip("needs 3 ranks")
    pair = process_sets.of(0, 2)
    model = model_of()
    optimizer = distributed(model, "adasum-delta", process_set=pair)
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    weights = hvd.allgather_object(model[0].weight.detach().numpy())
    assert np.array_equal(weights[0], weights[2])
    assert not np.array_equal(weights[0], weights[1])


def scaled_training(
    model, optimizer, scaler, overflow_on: int | None, steps: int = 4
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if step == 1 and hvd.rank() == overflow_on:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def case_grad_scaler() -> None:
    """One rank overflows: all skip, all shrink the scale, and training goes on as one."""
    for op in ("adasum-grad", "adasum-delta", "average"):
        model = model_of()
        optimizer = distributed(model, op)
        scaler = hvd.GradScaler("cpu", init_scale=2.0**10)
        scaled_training(model, optimizer, scaler, overflow_on=hvd.size() - 1)
        check_same_everywhere(model)
        assert all(p.isfinite().all() for p in model.parameters())
        assert set(hvd.allgather_object(scaler.get_scale())) == {2.0**9}
        simulation = Simulation(sgd, op, hvd.size(), model_of())
        for step in (0, 2, 3):
            simulation.zero_grad()
            simulation.backward(step)
            simulation.step()
        check_equal(model, simulation.models[0], 1e-5)


def case_change_that_overflows() -> None:
    """Finite gradients whose change overflows on the wire: dropped, and the scale shrinks."""
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")
    for options in ({}, {"clip_delta_norm": 1e9}):
        weight = nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], 1e5),
            op="adasum-delta", compression=hvd.Compression.fp16, **options,
        )  # fmt: skip
        scaler = hvd.GradScaler("cpu", init_scale=4.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight.detach(), torch.ones(3))
        assert scaler.get_scale() == 2.0
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.5
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        assert torch.equal(weight.detach(), torch.full((3,), 0.5))
    weight = nn.Parameter(torch.full((3,), 3e38))  # the op adds where the weights are
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], 1e38), op="adasum-delta"
    )
    scaler = hvd.GradScaler("cpu", init_scale=1.0)
    scaler.scale(-2 * weight.sum() if hvd.rank() else 0 * weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.full((3,), 3e38))
    assert scaler.get_scale() == 0.5


def case_conversion_after_wrapping() -> None:
    """Other dtypes and memory layouts than at construction: the buckets follow."""
    conversions = (
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.double(),
        lambda model: model.half(),
        lambda model: model.bfloat16(),
    )
    for op in ("adasum-grad", "adasum-delta"):
        for convert in conversions:
            torch.manual_seed(0)
            model = nn.Conv2d(3, 4, 2)
            optimizer = distributed(model, op)
            convert(model)
            converted = copy.deepcopy(model)
            again = distributed(converted, op)
            for step in range(2):
                for net, each in ((model, optimizer), (converted, again)):
                    torch.manual_seed(10 * step + hvd.rank())
                    images = torch.randn(2, 3, 4, 4).to(net.weight.dtype)
                    each.zero_grad()
                    net(images).square().mean().backward()
                    each.step()
            hvd.check_replicas(model)
            for one, other in zip(
                model.parameters(), converted.parameters(), strict=True
            ):
                assert torch.equal(one, other)


def case_conversion_inside_a_step() -> None:
    if hvd.size() == 1:
        pytest.skip("needs 2 ranks")

    class Converting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data = parameter.data.double()

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        Converting(model.parameters(), 0.1), op="adasum-delta"
    )
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"got one that is torch\.float64, on cpu"):
        optimizer.step()


def case_torch_grad_scaler() -> None:
    """torch's scaler: right after an own synchronize(), an error that names ours otherwise."""
    for op in ("adasum-grad", "adasum-delta"):
        model = model_of()
        optimizer = distributed(model, op)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(loss_of(model, hvd.rank(), 0)).backward()
        if hvd.size() == 1:
            scaler.step(optimizer)
            continue
        with pytest.raises(RuntimeError, match=r"use adasum_hvd\.torch\.GradScaler"):
            scaler.step(optimizer)
    model = model_of()
    optimizer = distributed(model, "adasum-grad")
    simulation = Simulation(sgd, "adasum-grad", hvd.size(), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        simulation.zero_grad()
        scaler.scale(loss_of(model, hvd.rank(), step)).backward()
        simulation.backward(step)
        optimizer.synchronize()
        if step != 1:
            scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        simulation.step()
    check_same_everywhere(model)
    check_equal(model, simulation.models[0], 1e-5)


def case_allgather_object() -> None:
    gathered = hvd.allgather_object({"rank": hvd.rank(), "text": "x" * hvd.rank()})
    assert [g["rank"] for g in gathered] == list(range(hvd.size()))
    assert np.array_equal([len(g["text"]) for g in gathered], range(hvd.size()))
