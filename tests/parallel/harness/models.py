"""The models that torch cases train, their data and their optimizer; without an engine."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 130), nn.Tanh(), nn.Linear(130, 3)
    )


def wide_model(seed: int = 0) -> nn.Module:
    """Return a model of the same inputs whose matrices are large enough to move one by one."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 2000), nn.Tanh(), nn.Linear(2000, 150))


def batch_of(rank: int, step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(size, 12, generator=generator),
        torch.randint(0, 3, (size,), generator=generator),
    )


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    images, labels = batch_of(rank, step)
    images = images.to(next(model.parameters()).dtype)
    return functional.cross_entropy(model(images), labels)


def sgd(params):
    return torch.optim.SGD(params, 0.05, momentum=0.9)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
