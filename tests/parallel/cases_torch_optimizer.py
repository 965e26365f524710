"""The torch DistributedOptimizer against one process that plays all ranks with the reference."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable

import numpy as np
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
    hvd.init()
    torch.set_num_threads(1)
    HOSTS.extend(hvd.allgather_object(os.environ.get("HOROVOD_HOSTNAME", "one")))


def align() -> None:
    hvd.barrier()


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
                loss_of(model, hvd.rank(), step).backward()
                simulation.backward(step)
                before = [p.detach().clone() for p in model.parameters()]
                assert all(
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
        return
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


def case_wrong_arguments() -> None:
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
    with pytest.raises(NotImplementedError, match=r"required Compression\.none"):
        make(compression=object(), op="adasum")


def case_allgather_object() -> None:
    gathered = hvd.allgather_object({"rank": hvd.rank(), "text": "x" * hvd.rank()})
    assert [g["rank"] for g in gathered] == list(range(hvd.size()))
    assert np.array_equal([len(g["text"]) for g in gathered], range(hvd.size()))
