"""Models and data: LeNet-5 on digits, a ResNet on glyphs, a GPT on Python's source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from adasum_hvd.tools.torch_digits import LeNet5, digits
from convergence.glyphs import Glyphs
from convergence.images import Images
from convergence.text import GPT, SHAPES, corpus, cut, loss_on

TARGET = 0.95  # the accuracy whose first step the tables give
_VALIDATION = 237  # images


class Workload(Protocol):
    """A model, its data, and its measurements."""

    batch: int  # examples per worker and step, unless a setting says otherwise
    separate_validation: (
        bool  # rates are chosen by runs of their own, on fewer examples
    )

    def model(self) -> nn.Module:
        """Return a new model; torch's random state decides on its weights."""

    def steps(self, budget: int, batch: int, workers: int) -> int:
        """Return how many steps go through `budget` (epochs, or tokens) together."""

    def draws(
        self, seed: int, workers: int, batch: int
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield inputs and targets (workers, batch, ...) of step after step, without end."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return one worker's loss."""

    def judge(self, model: nn.Module, last: bool) -> dict[str, float]:
        """Return the measurements of a judged step, or of the `last` one."""

    def level(self, model: nn.Module, far_below: float = 0.0) -> float:
        """Return the level to compare with a target: the split's accuracy, or minus its loss.

        If the accuracy on the first 1000 images is below `far_below`, it is returned.
        """

    def score(self, record: dict[str, Any]) -> float:
        """Return the cost by which learning rates are chosen; smaller is better."""


class Text:
    """Sequences of the standard library's bytes; one per worker and step."""

    batch, separate_validation = 1, False

    def __init__(self, name: str, split: str) -> None:
        self._shape, self._split = SHAPES[name], split

    def model(self) -> nn.Module:
        """As the protocol's."""
        return GPT(self._shape)

    def steps(self, budget: int, batch: int, workers: int) -> int:
        """As the protocol's; the budget is in tokens."""
        return max(1, budget // (self._shape.context * batch * workers))

    def draws(
        self, seed: int, workers: int, batch: int
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """As the protocol's."""
        rng, text, context = (
            np.random.default_rng(seed),
            corpus(""),
            self._shape.context,
        )
        while True:
            starts = rng.integers(0, len(text) - context - 1, (workers, batch))
            found = cut(text, torch.from_numpy(starts), context)
            yield found[..., :-1], found[..., 1:]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As the protocol's: nats per byte."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def judge(self, model: nn.Module, last: bool) -> dict[str, float]:
        """As the protocol's: losses in nats per byte."""
        splits = ("validation", "test") if last else ("validation",)
        context = self._shape.context
        return {split: round(loss_on(model, split, context), 5) for split in splits}

    def level(self, model: nn.Module, far_below: float = 0.0) -> float:
        """As the protocol's: minus the loss in nats per byte."""
        return -loss_on(model, self._split, self._shape.context)

    def score(self, record: dict[str, Any]) -> float:
        """As the protocol's: the last validation loss."""
        return record.get("validation", float("inf"))


class Digits(Images):
    """LeNet-5 on 1437 images; 8 per worker and step."""

    batch = 8

    def __init__(self, name: str, split: str) -> None:
        images, labels, *judged = digits()
        if split == "validation":
            judged = [images[-_VALIDATION:], labels[-_VALIDATION:]]
            images, labels = images[:-_VALIDATION], labels[:-_VALIDATION]
        super().__init__(images, labels, (judged[0], judged[1]))

    def model(self) -> nn.Module:
        """As the protocol's."""
        return LeNet5()

    def draws(
        self, seed: int, workers: int, batch: int
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """As the protocol's: each worker's images are drawn without replacement."""
        rng = np.random.default_rng(seed)
        while True:
            chosen = [
                rng.choice(len(self._images), batch, replace=False)
                for _ in range(workers)
            ]
            indices = torch.from_numpy(np.stack(chosen))
            yield self._images[indices], self._labels[indices]


def workload(name: str, split: str) -> Workload:
    """Return the workload of a setting."""
    kinds: dict[str, Any] = {"digits": Digits, "glyphs": Glyphs}
    return kinds.get(name, Text)(name, split)
