"""Draws from a fixed set of examples, and the noise scale of their per-example gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from adasum_hvd.monitor.noise import noise_of
from tests.parallel.harness.models import model_of

EXAMPLES, BATCH, BATCHES = 2048, 4, 400
TOLERANCE = 0.2


def model_and_examples() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model, inputs, and labels that a linear map of the inputs decides."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(EXAMPLES, 12, generator=generator)
    teacher = torch.randn(12, 3, generator=generator)
    return model_of(), inputs, (inputs @ teacher).argmax(1)


def steps(ranks: int) -> int:
    """Return how many steps give enough batches, however many ranks share them."""
    return BATCHES // ranks


def draw(rank: int, step: int) -> torch.Tensor:
    """Return the indices of a rank's batch, drawn with replacement."""
    generator = torch.Generator().manual_seed(10_000 * rank + step)
    return torch.randint(0, EXAMPLES, (BATCH,), generator=generator)


def direct_scale(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the noise scale in batches, from the gradient of every example."""
    weights = list(model.parameters())
    rows = []
    for x, y in zip(inputs.split(1), labels.split(1), strict=True):
        each = torch.autograd.grad(functional.cross_entropy(model(x), y), weights)
        rows.append(torch.cat([gradient.flatten() for gradient in each]))
    found = torch.stack(rows).double()
    mean = found.mean(0)
    variance = (found - mean).square().sum(1).mean()
    return float(variance / BATCH / mean.square().sum())


def check(records: list[dict[str, Any]], expected: float) -> None:
    """Compare the noise scale in a monitor's records with the direct one."""
    assert len(records) >= steps(records[0]["ranks"]) - 3
    # An input of AdaSum is the mean of a group: its batch is that of all the group's ranks.
    together = records[0]["ranks"] / records[0]["joined"]
    actual = noise_of(records).scale * together
    assert abs(actual / expected - 1) < TOLERANCE, (actual, expected)
