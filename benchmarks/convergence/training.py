"""Trains one model with all workers in this process.

Optimizers are torch's own. A variant that reduces gradients has one set of weights; one that
reduces changes has a set, and an optimizer, per worker: tensors whose first axis is workers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from adasum_hvd.distributed.adascale import AdaScale
from convergence.lamb import LAMB
from convergence.lars import LARS
from convergence.reductions import agreement, reduce_workers
from convergence.repairs import REPAIRS
from convergence.workloads import Workload, workload

MOMENTUM, DECAY, WARM_UP = 0.9, 5e-4, 0.17
JUDGED = 20  # times per run
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, 1.0),
    "momentum": lambda params: torch.optim.SGD(params, 1.0, momentum=MOMENTUM),
    "adam": lambda params: torch.optim.Adam(params, 1.0, fused=True),
    "adamw": lambda params: torch.optim.AdamW(
        params, 1.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    ),
    "lamb": lambda params: LAMB(params, 1.0),
    "lamb-weights": lambda params: LAMB(params, 1.0, adapts_all=False),
    "momentum-decay": lambda params: torch.optim.SGD(
        params, 1.0, momentum=MOMENTUM, weight_decay=DECAY
    ),
    "momentum-0.8": lambda params: torch.optim.SGD(params, 1.0, momentum=0.8),
    "lars": lambda params: LARS(params, 1.0, MOMENTUM),
    "lars-decay": lambda params: LARS(params, 1.0, MOMENTUM, DECAY),
}


@dataclass(frozen=True)
class Setting:
    """The parameters of one run; `key` names it in the raw files.

    `op` with "-delta" reduces the change of `local_steps` steps of each worker's optimizer,
    any other reduces gradients. `budget` is epochs (digits) or tokens (text), of all workers
    together. `outer` is the momentum of torch's SGD with Nesterov's step, at the rate
    `outer_lr`, which applies the reduced change; 0 adds the change as it is. `repair` is one of
    `REPAIRS`.

    With a `target`, an accuracy or a loss, the rate is constant after the warm-up, and the run
    ends when the budget is used up and the target is reached, or after `most_steps`. `phases`
    and `scaling` are those of `changing.py`.
    """

    work: str
    optimizer: str
    op: str
    workers: int
    lr: float
    budget: int
    seed: int = 1
    split: str = "test"
    batch: int = 0  # 0: the workload's own
    local_steps: int = 1
    outer: float = 0.0
    outer_lr: float = 1.0
    group_size: int = 1
    wire: str = "float32"
    repair: str = ""
    target: float = 0.0
    most_steps: int = 0
    warm_up: float = WARM_UP
    phases: str = ""
    scaling: str = ""

    @property
    def key(self) -> str:
        """Return every field that is not its default, in order."""
        values = asdict(self)
        plain = {field.name: field.default for field in fields(self)}
        return " ".join(f"{k}={v}" for k, v in values.items() if v != plain[k])

    @property
    def reduces_changes(self) -> bool:
        """Whether each worker has an optimizer of its own."""
        return self.op.endswith("-delta")


class Trained(NamedTuple):
    """The record of a run, and its weights."""

    record: dict[str, Any]
    weights: list[torch.Tensor]


def schedule(step: int, steps: int, lr: float) -> float:
    """Return the rate of a step: linear up over WARM_UP of all steps, then linear to 0."""
    warm = max(1, round(WARM_UP * steps))
    return lr * min((step + 1) / warm, (steps - step) / max(1, steps - warm))


def noise(gradients: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return `sum |g_i|^2` and `|mean g|^2` over all tensors (workers, ...) together."""
    squares = sum(float(tensor.square().sum()) for tensor in gradients)
    return squares, sum(float(tensor.mean(0).square().sum()) for tensor in gradients)


class Workers:
    """The gradients of all workers, each on its own examples."""

    def __init__(self, model: nn.Module, work: Workload) -> None:
        self._model, self._work = model, work
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())

        def loss(
            weights: dict[str, torch.Tensor],
            inputs: torch.Tensor,
            targets: torch.Tensor,
        ) -> torch.Tensor:
            return work.loss(functional_call(model, weights, (inputs,)), targets)

        self._alike = vmap(grad(loss), in_dims=(None, 0, 0))
        self._apart = vmap(grad(loss), in_dims=(0, 0, 0))

    def alike(self, examples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients (workers, ...) at the model's weights.

        Args:
            examples: inputs and targets, (workers, batch, ...).
        """
        if len(examples[0]) == 1:  # vmap is slow for one
            loss = self._work.loss(self._model(examples[0][0]), examples[1][0])
            found = torch.autograd.grad(loss, self._parameters)
            return [gradient[None] for gradient in found]
        weights = [parameter.detach() for parameter in self._parameters]
        return list(self._alike(self._named(weights), *examples).values())

    def apart(
        self, weights: Sequence[torch.Tensor], examples: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """As `alike`, at each worker's own weights (workers, ...)."""
        return list(self._apart(self._named(weights), *examples).values())

    def _named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(self._names, tensors, strict=True))


class Job:
    """The weights of all workers, and one step after the other.

    `agreed` are those that all had after the last reduction; the model holds them.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, self.work = setting, workload(setting.work, setting.split)
        torch.manual_seed(setting.seed)
        self.model = self.work.model()
        self.workers = Workers(self.model, self.work)
        self.agreed = [parameter.detach() for parameter in self.model.parameters()]
        self.apart = [  # only where there is an optimizer per worker
            tensor.expand(setting.workers, *tensor.shape).clone(
                memory_format=torch.contiguous_format
            )
            for tensor in (self.agreed if setting.reduces_changes else [])
        ]
        # A gradient variant's one worker is the first axis of views.
        owned = self.apart or [tensor[None] for tensor in self.agreed]
        self._owned = owned
        self._optimizer = OPTIMIZERS[setting.optimizer](owned)
        self._outer = torch.optim.SGD(
            self.agreed,
            setting.outer_lr,
            momentum=setting.outer,
            nesterov=setting.outer > 0,
        )
        self._repair = REPAIRS[setting.repair]() if setting.repair else None
        self._since = 0  # steps since the workers last had the same weights
        # By which a schedule counts: steps, and with AdaScale one worker's steps.
        self.iterations = 0.0
        self._adascale = AdaScale()

    def horizon(self, workers: int) -> int:
        """Return the steps in which so many workers use up the budget."""
        batch = self.setting.batch or self.work.batch
        return self.work.steps(self.setting.budget, batch, workers)

    def warm_up(self) -> float:
        """Return the factor on the next step's rate: linear up to 1 over a share of the budget.

        AdaScale's schedule is one worker's, in which a step is as many iterations as its gain
        (Johnson et al. 2020, algorithm 1).
        """
        workers = 1 if self.setting.op == "adascale" else self.setting.workers
        over = max(1, round(self.setting.warm_up * self.horizon(workers)))
        return min(1.0, (math.floor(self.iterations) + 1) / over)

    def step(
        self, examples: Sequence[torch.Tensor], rate: float, look: bool
    ) -> tuple[float, float] | None:
        """Take a step; with `look`, return `agreement` of the vectors, if it reduced any."""
        if self._since:
            gradients = self.workers.apart(self.apart, examples)
        else:
            if self.setting.op == "average" and not look:
                # The mean of all is one gradient of one large batch, which is faster.
                examples = [each.flatten(0, 1)[None] for each in examples]
            gradients = self.workers.alike(examples)
        factor = self._gain(gradients)
        self.iterations += factor
        for group in self._optimizer.param_groups:
            group["lr"] = rate * factor
        if self.apart:
            return self._step_apart(gradients, rate, look)
        for weights, reduced in zip(self._owned, self._reduce(gradients), strict=True):
            weights.grad = reduced[None]
        self._optimizer.step()
        return agreement(gradients) if look else None

    def _gain(self, gradients: list[torch.Tensor]) -> float:
        """Return the method's factor on the rate."""
        workers = len(gradients[0])
        if self.setting.op != "adascale" or workers == 1:
            return 1.0
        self._adascale.update(*noise(gradients), workers)
        return self._adascale.gain

    def _step_apart(
        self, gradients: list[torch.Tensor], rate: float, look: bool
    ) -> tuple[float, float] | None:
        for weights, gradient in zip(self.apart, gradients, strict=True):
            weights.grad = gradient
        self._optimizer.step()
        self._since += 1
        if self._since < self.setting.local_steps:
            return None
        self.synchronize(gradients, rate)
        return agreement(self._changes) if look else None

    def synchronize(self, gradients: list[torch.Tensor] | None, rate: float) -> None:
        """Reduce the changes since the last reduction, and apply the result to all workers."""
        self._since = 0
        pairs = zip(self.apart, self.agreed, strict=True)
        self._changes = [weights - agreed for weights, agreed in pairs]
        if self._repair is not None:
            reduced = self._repair(self._changes, gradients, rate)
        else:
            reduced = self._reduce(self._changes)
        for agreed, change in zip(self.agreed, reduced, strict=True):
            agreed.grad = -change
        self._outer.step()
        for weights, agreed in zip(self.apart, self.agreed, strict=True):
            weights.copy_(agreed.expand_as(weights))

    def finish(self) -> None:
        """Reduce the changes of an unfinished window of local steps."""
        if self._since:
            self.synchronize(None, 0.0)

    def _reduce(self, stacked: list[torch.Tensor]) -> list[torch.Tensor]:
        setting = self.setting
        op = setting.op.removesuffix("-delta")
        return reduce_workers(stacked, op, setting.group_size, setting.wire).tensors


def train(setting: Setting, limit: int | None = None) -> Trained:
    """Return the record and weights of a run; `limit` ends it after so many of its steps.

    A run whose weights are not finite ends there, and its record says "diverged".
    """
    began = time.process_time()
    job = Job(setting)
    batch = setting.batch or job.work.batch
    steps = job.horizon(setting.workers)
    record: dict[str, Any] = {**asdict(setting), "steps": steps, "curve": []}
    record["parameters"] = sum(tensor.numel() for tensor in job.agreed)
    every = max(1, steps // JUDGED)
    for step, examples in _steps(job, batch, min(steps, limit or steps)):
        due = (step + 1) % every == 0 or step + 1 == steps
        found = job.step(examples, schedule(step, steps, setting.lr), look=due)
        if not due:
            continue
        if step + 1 == steps:
            job.finish()
        measured = job.work.judge(job.model, last=step + 1 == steps)
        point = {"step": step + 1, **measured}
        if found and setting.workers > 1:
            point["cosine"], point["orthogonality"] = found
        record["curve"].append(point)
        if not all(torch.isfinite(tensor).all() for tensor in job.agreed):
            record["diverged"] = step + 1
            break
        record |= measured
    record["seconds"] = round(time.process_time() - began, 1)
    return Trained(record, [tensor.clone() for tensor in job.agreed])


def _steps(
    job: Job, batch: int, steps: int
) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    setting = job.setting
    draws = job.work.draws(setting.seed, setting.workers, batch)
    return enumerate(examples for examples, _ in zip(draws, range(steps), strict=False))


def is_trained(record: dict[str, Any]) -> bool:
    """Return whether a run came to its end with finite figures."""
    values = [record.get(name) for name in ("validation", "test", "accuracy")]
    known = [value for value in values if value is not None]
    return bool(known) and "diverged" not in record and all(map(math.isfinite, known))
