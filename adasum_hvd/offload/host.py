"""The arithmetic of `AdamOffload`: torch's fused CPU Adam with MindSpore's results.

The kernel divides `sqrt(v)` by `sqrt(1 - beta2^t)` before it adds eps, so it gets
`eps / sqrt(1 - beta2^t)`. Nesterov's numerator `beta1 m + (1 - beta1) g` is the kernel's own update
of the first moment, applied to the new `m`: so `m` is updated first, and the kernel gets a copy.
torch's NAdam has another numerator, with a schedule of beta1.

The kernel gets updates in batches. Updates that need scratch (another gradient dtype, scaled
gradients, Nesterov) are split into pieces, so that a batch of them fits in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch._utils import _unflatten_dense_tensors

PIECE_ELEMENTS = 1 << 18  # per thread, in a batch that needs scratch


@dataclass(frozen=True)
class Settings:
    """The formula's numbers in one step, for parameters that share them."""

    group: dict[str, Any]
    decay: float  # 0 for parameters of the group that have none
    step: float  # of these parameters, counted from 1
    scale: float  # all factors of the loss
    converts: bool  # gradients have another dtype than weights

    @property
    def adds_decay(self) -> bool:
        """Whether gradients need the weight decay before the kernel, for Nesterov's update."""
        is_decoupled = self.group["decoupled_weight_decay"]
        return bool(self.decay and not is_decoupled and self.group["use_nesterov"])

    @property
    def copies_gradients(self) -> bool:
        """Whether the kernel needs a converted copy of the gradients."""
        return self.converts or self.scale != 1.0 or self.adds_decay

    def kernel(self) -> Callable[..., Any]:
        """Return torch's kernel with these settings."""
        group, (beta1, beta2) = self.group, self.group["betas"]
        inside = 1.0 if group["torch_eps"] else math.sqrt(1.0 - beta2**self.step)
        decoupled = group["decoupled_weight_decay"]
        return partial(
            torch._fused_adamw_ if decoupled else torch._fused_adam_,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0 if self.adds_decay else self.decay,
            eps=group["eps"] / inside,
            amsgrad=False,
            maximize=False,
        )


class Update(NamedTuple):
    """One parameter's update, or a piece of it: contiguous host tensors of one shape."""

    weights: torch.Tensor  # float32 or float64, updated in place, as both moments
    grad: torch.Tensor  # of any float dtype; only read
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    out: torch.Tensor | None = None  # receives the new weights in its own dtype
    completes: torch.Tensor | None = None  # the parameter that is finished after it

    def pieces(self, elements: int) -> Iterator[Update]:
        """Yield the update in pieces of at most so many elements."""
        if self.weights.numel() <= elements:
            yield self
            return
        *tensors, completes = self
        columns: list[Any] = [
            tensor if tensor is None else tensor.detach().view(-1).split(elements)
            for tensor in tensors
        ]
        count = len(columns[0])
        columns = [column or [None] * count for column in columns]
        last = [None] * (count - 1) + [completes]
        for piece in zip(*columns, last, strict=True):
            yield Update(*piece)


class HostAdam:
    """Updates weights and moments in host memory; keeps scratch, but no state."""

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def run(
        self,
        settings: Settings,
        updates: Iterable[Update],
        done: Callable[[torch.Tensor], None],
        overlaps: bool = False,
    ) -> None:
        """Do updates of one dtype, in order; call `done` with `completes` of each.

        Each may wait for its gradient. With `overlaps` none waits for all.
        """
        limit = PIECE_ELEMENTS * torch.get_num_threads()
        kernel = settings.kernel()
        step = torch.tensor(settings.step, dtype=torch.float32, device="cpu")
        if settings.copies_gradients or settings.group["use_nesterov"]:
            updates = chain.from_iterable(update.pieces(limit) for update in updates)
            overlaps = True
        for batch in _batches(updates, limit if overlaps else math.inf):
            of_batch = partial(kernel, state_steps=[step] * len(batch))
            self._update(settings, of_batch, batch)
            for update in batch:
                if update.out is not None:
                    update.out.copy_(update.weights)
                if update.completes is not None:
                    done(update.completes)

    def _update(
        self, settings: Settings, kernel: Callable[..., Any], batch: list[Update]
    ) -> None:
        columns: list[Any] = [list(column) for column in zip(*batch, strict=True)]
        weights, grads, exp_avgs, exp_avg_sqs, *_ = columns
        group = settings.group
        if settings.copies_gradients:  # the caller's do not change
            flat, copies = self._scratch_like(weights, 0)
            torch._foreach_copy_(copies, grads)
            if settings.scale != 1.0:
                flat.mul_(1.0 / settings.scale)
            if settings.adds_decay:
                torch._foreach_add_(copies, weights, alpha=settings.decay)
            grads = copies
        if group["use_nesterov"]:
            torch._foreach_lerp_(exp_avgs, grads, 1.0 - group["betas"][0])
            _, copies = self._scratch_like(exp_avgs, 1)
            torch._foreach_copy_(copies, exp_avgs)
            exp_avgs = copies
        kernel(weights, grads, exp_avgs, exp_avg_sqs, [])

    def _scratch_like(
        self, tensors: list[torch.Tensor], which: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return one of two scratch tensors, and views of it in the tensors' shapes."""
        elements = PIECE_ELEMENTS * torch.get_num_threads()  # no batch has more
        dtype = tensors[0].dtype
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.shape[1] < elements:
            scratch = torch.empty((2, elements), dtype=dtype, device="cpu")
            self._scratch[dtype] = scratch
        flat = scratch[which, : sum(tensor.numel() for tensor in tensors)]
        return flat, list(_unflatten_dense_tensors(flat, tensors))


def _batches(updates: Iterable[Update], elements: float) -> Iterator[list[Update]]:
    """Yield lists of at most so many elements; a larger update is alone."""
    batch: list[Update] = []
    filled = 0
    for update in updates:
        if batch and filled + update.weights.numel() > elements:
            yield batch
            batch, filled = [], 0
        batch.append(update)
        filled += update.weights.numel()
    if batch:
        yield batch
