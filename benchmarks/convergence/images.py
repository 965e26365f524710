"""The shared part of the workloads of images: their loss, their accuracy, their steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

_AT_ONCE = 1000  # images that are judged together


class Images:
    """Images with labels for training, and others that judge; an epoch is one pass."""

    separate_validation = True

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        judged: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._images, self._labels = images, labels
        self._judged, self._truth = judged

    def steps(self, budget: int, batch: int, workers: int) -> int:
        """As the protocol's; the budget is in epochs."""
        return max(1, budget * len(self._images) // (batch * workers))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As the protocol's."""
        return functional.cross_entropy(outputs, targets)

    def judge(self, model: nn.Module, last: bool) -> dict[str, float]:
        """As the protocol's: the accuracy."""
        return {"accuracy": self.level(model)}

    @torch.no_grad()
    def level(self, model: nn.Module, far_below: float = 0.0) -> float:
        """As the protocol's: the accuracy."""
        hits = 0
        for begin in range(0, len(self._judged), _AT_ONCE):
            rows = slice(begin, begin + _AT_ONCE)
            right = model(self._judged[rows]).argmax(1) == self._truth[rows]
            hits += int(right.sum())
            if begin == 0 and hits < far_below * len(right):
                return hits / len(right)
        return hits / len(self._judged)

    def score(self, record: dict[str, Any]) -> float:
        """As the protocol's: the last accuracy, negative."""
        return -record.get("accuracy", 0.0)
