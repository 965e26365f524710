"""A tiny training for each optimizer, and what plain training shows about the optimizer.

Batches depend on a rank and a step only. Random numbers start anew with each step, so that an
optimizer that draws some draws the same in a job and in a simulation.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import optimizer_list
import torch
from torch import nn

STEPS, SAVED_AFTER = 8, 4
# Models and param groups, in the order in which they are tried.
SHAPES = ("layers", "matrices", "groups", "embedding")
# How a step is taken: after backward; with a closure; with both; after backward with a graph.
CALLS = ("backward", "closure", "both", "graph")
_PROBED = range(2, 7)  # steps

Weights = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An optimizer, and how plain training with it runs.

    Attributes:
        package: a key of `optimizer_list.MODULES`.
        name: in this package.
        shape: one of `SHAPES`.
        call: one of `CALLS`.
        keeps: the part of a change of the weights, made between steps, that the next step leaves.
            It is 1 if the parameters are the only weights. It is 0 if the step computes weights
            from a copy.
        loads: plain training goes on from its `state_dict()`.
        evaluates: it has `train` and `eval`.
    """

    package: str
    name: str
    shape: str
    call: str
    keeps: float = 1.0
    loads: bool = True
    evaluates: bool = False

    def build(self) -> Training:
        """Return a training with the weights that all begin with."""
        torch.manual_seed(1)
        model = _model(self.shape)
        return Training(self, model, self.optimizer(model))

    def optimizer(self, model: nn.Module) -> Any:
        """Return a new optimizer, ready to train."""
        groups: Any = list(model.parameters())
        if self.shape == "groups":
            matrices = [p for p in groups if p.ndim > 1]
            vectors = [p for p in groups if p.ndim == 1]
            groups = [
                {"params": matrices, "use_muon": True},
                {"params": vectors, "use_muon": False},
            ]
        made = optimizer_list.make(self.package, self.name, model, groups)
        with suppress(
            AttributeError
        ):  # most have none; a wrapper's may look for one inside
            made.train()
        return made


def _model(shape: str) -> nn.Module:
    if shape == "embedding":
        return nn.Embedding(16, 8, sparse=True)
    bias = shape != "matrices"
    return nn.Sequential(
        nn.Linear(8, 8, bias=bias), nn.Tanh(), nn.Linear(8, 8, bias=bias)
    )


@dataclass
class Training:
    """A model and its optimizer, which may be wrapped."""

    case: Case
    model: nn.Module
    optimizer: Any

    def weights(self) -> Weights:
        """Return copies of the parameters."""
        return [p.detach().clone() for p in self.model.parameters()]

    @torch.no_grad()
    def set_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Write the parameters, in place."""
        for p, weight in zip(self.model.parameters(), weights, strict=True):
            p.copy_(weight)

    def loss(self, rank: int, step: int) -> torch.Tensor:
        """Return the loss of a rank's batch."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        if self.case.shape == "embedding":
            inputs = torch.randint(16, (6,), generator=generator)
        else:
            inputs = torch.randn(4, 8, generator=generator)
        outputs = self.model(inputs)
        targets = torch.randn(outputs.shape, generator=generator)
        return (outputs - targets).pow(2).mean()

    def backward(self, rank: int, step: int) -> torch.Tensor:
        """Compute the gradients of a rank's batch; return its loss."""
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = self.loss(rank, step)
            loss.backward(create_graph=self.case.call == "graph")
        return loss

    def step(self, backward: Callable[[], Any], number: int) -> None:
        """Take a step with the gradients that `backward` computes."""
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)
        if self.case.call != "closure":
            backward()
        if self.case.call in ("closure", "both"):
            self.optimizer.step(backward)
        else:
            self.optimizer.step()

    def saved(self) -> tuple[Weights, Any]:
        """Return what a checkpoint holds."""
        return self.weights(), copy.deepcopy(self.optimizer.state_dict())

    def load(self, saved: tuple[Weights, Any]) -> None:
        """Go on from a checkpoint."""
        weights, state = saved
        self.set_weights(weights)
        self.optimizer.load_state_dict(state)
        if self.case.evaluates:
            self.optimizer.train()


def plain(case: Case, resumed: bool = False) -> list[Weights]:
    """Return the weights after each step of plain training on the first rank's batches."""
    training, found = case.build(), []
    for number in range(STEPS):
        if resumed and number == SAVED_AFTER:
            saved, training = training.saved(), case.build()
            training.load(saved)
        training.step(partial(training.backward, 0, number), number)
        found.append(training.weights())
    return found


def survey(package: str, name: str) -> dict[str, Any]:
    """Return a case's fields, or why plain training does not run: {"error": ...}."""
    errors = []
    for shape in SHAPES:
        for call in CALLS:
            case = Case(package, name, shape, call)
            try:
                weights = [case.build().weights(), *plain(case)]
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
                continue
            if not all(torch.isfinite(one).all() for each in weights for one in each):
                errors.append("weights that are not finite")
            elif all(map(torch.equal, weights[0], weights[-1])):
                errors.append("weights do not change")
            else:
                return asdict(_observed(case))
    return {"package": package, "name": name, "error": errors[0][:200]}


def _observed(case: Case) -> Case:
    training, fields = case.build(), dict[str, Any]()
    training.step(partial(training.backward, 0, 0), 0)  # SPlus has no average before it
    with suppress(AttributeError):  # of this one, or of an inner one
        training.optimizer.eval()
        training.optimizer.train()
        fields["evaluates"] = True
    case = Case(**asdict(case) | fields)
    try:
        plain(case, resumed=True)
    except Exception:
        fields["loads"] = False
    fields["keeps"] = round(_kept(case), 3)
    return Case(**asdict(case) | fields)


def _kept(case: Case) -> float:
    """Return the least part of a change of the weights that a next step leaves.

    Gradients do not depend on the weights, unless an optimizer differentiates them.
    """
    generator = torch.Generator().manual_seed(3)
    shifts = [
        1e-3 * torch.randn(p.shape, generator=generator)
        for p in case.build().model.parameters()
    ]

    def until(last: int, shifted_before: int | None) -> Weights:
        training = case.build()
        for number in range(last + 1):
            if number == shifted_before:
                pairs = zip(training.weights(), shifts, strict=True)
                training.set_weights([weight + shift for weight, shift in pairs])
            training.step(partial(_given, training, number), number)
        return training.weights()

    parts = []
    for number in _PROBED:
        pairs = zip(until(number, number), until(number, None), shifts, strict=True)
        products = [((a - b) * s).sum().item() for a, b, s in pairs]
        parts.append(sum(products) / sum(s.pow(2).sum().item() for s in shifts))
    return min(parts)


def _given(training: Training, number: int) -> torch.Tensor:
    if training.case.call == "graph" or training.case.shape == "embedding":
        return training.backward(0, number)
    training.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(number)
    for p in training.model.parameters():
        p.grad = 0.1 * torch.randn(p.shape, generator=generator)
    return torch.tensor(1.0)
