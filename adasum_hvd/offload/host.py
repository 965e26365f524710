"""The arithmetic of `AdamOffload`: torch's fused CPU Adam with MindSpore's results.

The kernel divides `sqrt(v)` by `sqrt(1 - beta2^t)` before it adds eps, so it gets
`eps / sqrt(1 - beta2^t)`. Nesterov's numerator `beta1 m + (1 - beta1) g` is the kernel's own update
of the first moment, applied to the new `m`: so `m` is updated first, and the kernel gets a copy.
The kernel gets updates in batches. Updates that need scratch (another gradient dtype, scaled
gradients, Nesterov) are split into pieces, so that a batch of them fits in the cache.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from adasum_hvd.offload.settings import Settings

PIECE_ELEMENTS = 1 << 18  # per thread, in a batch that needs scratch
# The number of ranks on the host, as launchers tell it; the innermost launcher first.
_LOCAL_SIZES = (
    *("HOROVOD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)


@dataclass(slots=True)
class Update:
    """One parameter's update, or a piece of it: contiguous host tensors of one shape.

    Attributes:
        settings: one object for all updates that share it.
        weights: float32 or float64, updated in place.
        grad: of any float dtype; only read.
        exp_avg: first moment, as `weights`.
        exp_avg_sq: second moment, as `weights`.
        out: receives the new weights in its own dtype, or None.
        completes: the parameter that this update finishes and `run` reports, or None.
    """

    settings: Settings
    weights: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    out: torch.Tensor | None = None
    completes: torch.Tensor | None = None

    @property
    def copies_gradient(self) -> bool:
        """Whether the kernel needs a converted copy of the gradient."""
        settings = self.settings
        return (
            self.grad.dtype != self.weights.dtype
            or settings.loss_scale != 1.0
            or (settings.use_nesterov and settings.l2_penalty != 0.0)
        )

    def pieces(self, elements: int) -> Iterator[Update]:
        """Yield the update in pieces of at most so many elements."""
        if self.weights.numel() <= elements:
            yield self
            return
        weights, grads, exp_avgs, exp_avg_sqs = (
            tensor.detach().view(-1).split(elements)
            for tensor in (self.weights, self.grad, self.exp_avg, self.exp_avg_sq)
        )
        outs: Sequence[torch.Tensor | None] = [None] * len(weights)
        if self.out is not None:
            outs = self.out.detach().view(-1).split(elements)
        last = [None] * (len(weights) - 1) + [self.completes]
        columns = weights, grads, exp_avgs, exp_avg_sqs, outs, last
        for piece in zip(*columns, strict=True):
            yield Update(self.settings, *piece)


def _launched() -> tuple[str, int]:
    """Return a variable of the launcher and its value, the ranks on this host."""
    sizes = ((name, os.environ.get(name, "")) for name in _LOCAL_SIZES)
    return next(((n, int(size)) for n, size in sizes if size.isdecimal()), ("", 1))


def ranks_here() -> int:
    """Return the ranks on this host; 1 without a launcher."""
    return _launched()[1]


@functools.cache
def cores_of_launcher(variable: str) -> int:
    """Return the cores that this host's ranks have together: those of their launcher.

    It binds ranks, but not itself. Processes between it and a rank, such as a shell that sets up
    the rank's environment, are bound as the rank.

    Args:
        variable: set by the launcher in all of these.
    """
    pid, mark = os.getppid(), f"\0{variable}=".encode()
    with suppress(OSError):  # the process of another user, or of another container
        while mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
            pid = int(fields.split()[1])
    try:
        return len(os.sched_getaffinity(pid))
    except OSError:
        return len(os.sched_getaffinity(0))


def cores_of_rank() -> int:
    """Return this rank's share of the launcher's cores, at most those that it is bound to."""
    bound, (variable, ranks) = len(os.sched_getaffinity(0)), _launched()
    if ranks < 2:
        return bound
    return max(1, min(bound, cores_of_launcher(variable) // ranks))


def thread_budget() -> int:
    """Return the cores of this rank, at most the number of threads that torch uses."""
    return min(torch.get_num_threads(), cores_of_rank())


def hint_of_threads() -> str:
    """Return how to use this rank's cores if torchrun restricts torch to one; "" otherwise."""
    cores, variables = cores_of_rank(), os.environ
    restricted = (
        "TORCHELASTIC_RUN_ID" in variables and variables.get("OMP_NUM_THREADS") == "1"
    )
    if not restricted or thread_budget() == cores:
        return ""
    return (
        f"AdamOffload: a step uses 1 of this rank's {cores} cores, because torchrun sets "
        f"OMP_NUM_THREADS=1; pass num_threads={cores}"
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads inside the context."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


class HostAdam:
    """Updates weights and moments in host memory; keeps two scratch tensors, but no state."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def run(
        self,
        updates: Iterable[Update],
        done: Callable[[torch.Tensor], None],
        direct_elements: float = float("inf"),
    ) -> None:
        """Do every update, in order.

        Args:
            updates: consumed one by one, so that each may wait for its gradient.
            done: called with `completes` of each update right after it.
            direct_elements: limit of a batch without scratch; a larger tensor is its own batch.
        """
        for batch in _batches(updates, direct_elements):
            self._update(batch)
            for update in batch:
                if update.out is not None:
                    update.out.copy_(update.weights)
                if update.completes is not None:
                    done(update.completes)

    def _update(self, batch: list[Update]) -> None:
        settings = batch[0].settings
        decay, decoupled = settings.weight_decay, settings.decoupled_weight_decay
        weights = [update.weights for update in batch]
        grads = [update.grad for update in batch]
        exp_avgs = [update.exp_avg for update in batch]
        exp_avg_sqs = [update.exp_avg_sq for update in batch]
        if batch[0].copies_gradient:
            grads = self._unscaled(settings, weights, grads)
            decay -= settings.l2_penalty
        if settings.use_nesterov:
            torch._foreach_lerp_(exp_avgs, grads, 1.0 - settings.betas[0])
            _, copies = self._scratch_like(exp_avgs, 1)
            torch._foreach_copy_(copies, exp_avgs)
            exp_avgs = copies
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        kernel(
            weights,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [settings.kernel_step] * len(weights),
            lr=settings.lr,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            weight_decay=decay,
            eps=settings.kernel_eps,
            amsgrad=False,
            maximize=False,
        )

    def _unscaled(
        self,
        settings: Settings,
        weights: list[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return g of the formula in scratch; the caller's gradients do not change."""
        flat, copies = self._scratch_like(weights, 0)
        torch._foreach_copy_(copies, grads)
        scale, decay = settings.loss_scale, settings.l2_penalty
        if decay:
            torch._foreach_add_(copies, weights, alpha=decay * scale)
        if scale != 1.0:
            flat.mul_(1.0 / scale)
        return copies

    def _scratch_like(
        self, tensors: list[torch.Tensor], which: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return one of the two scratch tensors, and views of it in the tensors' shapes."""
        sizes = [tensor.numel() for tensor in tensors]
        elements = PIECE_ELEMENTS * torch.get_num_threads()  # no batch has more
        key = which, tensors[0].dtype
        if key not in self._scratch or self._scratch[key].numel() < elements:
            self._scratch[key] = torch.empty(elements, dtype=key[1], device="cpu")
        flat = self._scratch[key].narrow(0, 0, sum(sizes))
        if len(tensors) == 1:  # a piece of a large parameter; split() is slower
            return flat, [flat.view(tensors[0].shape)]
        views = zip(flat.split(sizes), tensors, strict=True)
        return flat, [view.view(tensor.shape) for view, tensor in views]


def _batches(
    updates: Iterable[Update], direct_elements: float
) -> Iterator[list[Update]]:
    """Yield lists of updates, or of their pieces, for one call of the kernel each."""
    piece_elements = PIECE_ELEMENTS * torch.get_num_threads()
    batch: list[Update] = []
    filled, shared = 0, None
    for update in updates:
        copies, settings = update.copies_gradient, update.settings
        direct = not copies and not settings.use_nesterov
        limit = direct_elements if direct else piece_elements
        kind = id(settings), copies, update.weights.dtype
        for piece in (update,) if direct else update.pieces(piece_elements):
            elements = piece.weights.numel()
            if batch and (kind != shared or filled + elements > limit):
                yield batch
                batch, filled = [], 0
            shared = kind
            batch.append(piece)
            filled += elements
    if batch:
        yield batch
