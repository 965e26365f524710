"""Training as the torch cases do it, and one process that plays all ranks with the reference."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable

import torch
from torch import nn

import adasum_hvd.torch as hvd
from adasum_hvd import reference
from tests.parallel.harness.models import loss_of

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


REDUCTIONS = ("average", "sum", "adasum-grad", "adasum-delta", "adasum")
VARIANTS = ("average", "adasum-grad", "adasum-delta")  # what they are made of


def start() -> None:
    HOSTS[:] = hvd.allgather_object(os.environ.get("HOROVOD_HOSTNAME", "one"))


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


def distributed(
    model: nn.Module, op: str, lr: float = 0.05, momentum: float = 0.9, **kwargs
):
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    return hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), op=op, **kwargs
    )


def closure_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> Callable:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        loss.backward()
        return loss

    return closure


def backward(model: nn.Module, step: int = 0) -> None:
    loss_of(model, hvd.rank(), step).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
