"""A user's own model on simulated workers: micro-batches of one process, joined by a rule."""

from __future__ import annotations

import copy
import math
import runpy
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset, default_collate

from adasum_hvd.distributed.adascale import AdaScale
from adasum_hvd.distributed.coefficients import adasum, mean

OPTIMIZERS: dict[str, Any] = {
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
# Average last, because it mostly needs the time that the others leave.
RULES: dict[str, Any] = {
    "AdaSum": lambda: adasum,
    "AdaScale": AdaScale,
    "Average": lambda: mean,
}
WORKERS = 4, 16
RATES = [10 ** (power / 2) for power in range(-8, 0)]  # tried if there is no rate
SEARCH = 1 / 6  # of the time, for them
HELD_OUT = 256  # examples at most; a tenth of fewer
APART = 1.08  # judged steps
GAIN = 0.95  # of one worker's lowest loss: the lowest one itself is mostly luck


class Run(NamedTuple):
    """One training."""

    workers: int
    rule: str
    steps: int  # to the first judged step with the target's loss; 0: it was not reached
    taken: int
    loss: float  # of the target, or else the lowest one; infinite if the run diverged


class Trial:
    """A model, its loss function and data, from `make()` of a user's file: docs/choose.md."""

    def __init__(self, file: Path, optimizer: str, batch: int, seed: int):
        self._optimizer, self._batch, self._seed = OPTIMIZERS[optimizer], batch, seed
        torch.manual_seed(seed)
        try:
            sys.path.insert(0, str(file.resolve().parent))
            # Not by its name, which an installed module may have, too.
            make = runpy.run_path(str(file.resolve()), run_name=file.stem)["make"]
            self._model, self._loss, data = make()
            self._data = TensorDataset(*data) if isinstance(data, tuple) else data
            self._parameters = [p for p in self._model.parameters() if p.requires_grad]
            if not self._parameters:
                raise ValueError("a model without parameters to train")
            self._start = copy.deepcopy(self._model.state_dict())
            order = torch.randperm(len(self._data)).tolist()
            held_out = order[: min(HELD_OUT, len(order) // 10 + 1)]
            self._train = torch.tensor(order[len(held_out) :])
            if len(self._train) < (least := max(WORKERS) * batch):
                raise ValueError(
                    f"{len(self._train)} examples to train on, fewer than the {least} of a step of "
                    f"{max(WORKERS)} workers: pass a smaller --batch"
                )
            self._held_out = self._examples(held_out)
            self._gradients(held_out[:batch])
            self._first = self._judge()
            if not math.isfinite(self._first):
                raise ValueError(f"a loss of {self._first} before the first step")
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [f.lineno for f in frames if f.filename == str(file.resolve())]
            raise ValueError(
                "advise --demo: expected a model, a loss function and pairs (input, target) from "
                f"make() of {file}, but got {type(error).__name__}: {error} (line "
                f"{lines[-1] if lines else 'unknown'}); write it as examples/advise_model.py does"
            ) from error

    def _examples(self, numbers: list[int]) -> Any:
        return default_collate([tuple(self._data[number]) for number in numbers])

    def _gradients(self, numbers: list[int]) -> list[torch.Tensor]:
        """Return one worker's flat gradients."""
        inputs, targets = self._examples(numbers)
        self._model.zero_grad()
        self._loss(self._model(inputs), targets).backward()
        return [
            (torch.zeros_like(p) if p.grad is None else p.grad).to_dense().flatten()
            for p in self._parameters
        ]

    @torch.no_grad()
    def _judge(self) -> float:
        """Return the mean loss of the held-out examples."""
        self._model.eval()
        inputs, targets = self._held_out
        loss = float(self._loss(self._model(inputs), targets))
        self._model.train()
        return loss

    def _draws(self, workers: int) -> Iterator[list[list[int]]]:
        """Yield each worker's examples, step after step: shuffled epochs without their rests."""
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            order = self._train[torch.randperm(len(self._train), generator=generator)]
            for step in order.split(workers * self._batch):
                if len(step) == workers * self._batch:
                    yield step.view(workers, -1).tolist()

    def _join(self, examples: list[list[int]], rule: Any) -> float:
        """Set the workers' joint gradients, and return the factor on the rate."""
        by_worker = [self._gradients(numbers) for numbers in examples]
        stacked = [torch.stack(rows) for rows in zip(*by_worker, strict=True)]
        gram = torch.stack([(wide := one.double()) @ wide.T for one in stacked])
        joined = zip(self._parameters, stacked, rule(gram), strict=True)
        for parameter, rows, own in joined:
            parameter.grad = (own.to(rows) @ rows).view_as(parameter)
        if not isinstance(rule, AdaScale):
            return 1.0
        rule.end_pass()
        return rule.gain

    def run(
        self,
        workers: int,
        name: str,
        rate: float,
        end: float,
        target: float = -math.inf,
        latest: float = 0.0,
    ) -> Run:
        """Train at a constant rate, until a target's loss or until `time.monotonic()` is `end`.

        Without a target it is the loss after GAIN of the way to the lowest one. Training goes on
        until `latest` if no loss is lower than the first yet.
        """
        self._model.load_state_dict(self._start)
        torch.manual_seed(self._seed)
        optimizer, rule = self._optimizer(self._parameters, lr=rate), RULES[name]()
        due, curve = 1, dict[float, int]()  # steps by loss, each lower than all before
        for taken, examples in enumerate(self._draws(workers), 1):
            gain = self._join(examples, rule)
            for group in optimizer.param_groups:
                group["lr"] = rate * gain
            optimizer.step()
            fell = min(curve, default=math.inf) < self._first
            is_over = time.monotonic() >= (end if fell else max(end, latest))
            if taken < due and not is_over:
                continue
            due, loss = math.ceil(taken * APART), self._judge()
            if not math.isfinite(loss):
                return Run(workers, name, 0, taken, math.inf)
            if loss < min(curve, default=math.inf):
                curve[loss] = taken
            if is_over or loss <= target:
                break
        lowest = min(curve)
        most = lowest + (1 - GAIN) * (self._first - lowest)
        goal = target if target > -math.inf else most
        steps = next((step for loss, step in curve.items() if loss <= goal), 0)
        return Run(workers, name, steps, taken, goal if steps else lowest)


def measure(
    trial: Trial, rate: float | None, seconds: float
) -> Iterator[tuple[float, Run]]:
    """Yield the rate and a run: of one worker, then of `WORKERS` to its loss, by each rule."""
    trial.run(1, "Average", RATES[0], 0.0)  # a step: torch loads much at the first one
    begin = time.monotonic()
    if rate is None:
        share, losses = seconds * SEARCH / len(RATES), {}
        for count, one in enumerate(RATES, 1):
            losses[one] = trial.run(1, "Average", one, begin + share * count).loss
        rate = min(losses, key=lambda one: losses[one])
    todo = [(workers, name) for workers in WORKERS for name in RULES]

    def end_of(workers: int, later: list[tuple[int, str]]) -> float:
        """Return when a run ends that leaves the later ones their parts of the time."""
        now, own = time.monotonic(), workers**0.5
        left = own + sum(each**0.5 for each, _ in later)
        return now + (begin + seconds - now) * own / left

    alone = trial.run(1, "Average", rate, end_of(1, todo), latest=begin + seconds)
    if not alone.steps:
        raise ValueError(
            f"advise --demo: expected one worker's loss to fall at the rate {rate:.3g}, but got "
            f"{alone.loss:.3g} at the lowest in {alone.taken} steps; pass a smaller --lr, or more "
            "--seconds"
        )
    yield rate, alone
    for place, (workers, name) in enumerate(todo, 1):
        end = end_of(workers, todo[place:])
        yield rate, trial.run(workers, name, rate, end, alone.loss)
