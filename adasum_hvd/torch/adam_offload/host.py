"""The arithmetic of `AdamOffload`: torch's fused CPU Adam, led to MindSpore's results.

The kernel divides `sqrt(v)` by `sqrt(1 - beta2^t)` before it adds eps, so it is given
`eps / sqrt(1 - beta2^t)`. Nesterov's numerator `beta1 m + (1 - beta1) g` is what the kernel's
own update of the first moment makes of a copy of the new `m`: so `m` is updated first, and
the kernel works on the copy. What the kernel cannot do in one go (another gradient dtype,
scaled gradients, Nesterov) is done on pieces that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from adasum_hvd import adam

PIECE_ELEMENTS = 1 << 18  # per thread


@dataclass(frozen=True)
class Hyper:
    """What one call of the kernel has in common.

    Attributes:
        lr: learning rate of this step.
        betas: decay rates of the moments.
        eps: as the user gave it.
        weight_decay: L2 penalty.
        scale: what the gradients are too large by.
        use_nesterov: Nesterov's numerator.
        torch_eps: eps is added to the bias-corrected root, as torch does.
        step: of this update, counted from 1.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    scale: float
    use_nesterov: bool
    torch_eps: bool
    step: int

    @cached_property
    def kernel_eps(self) -> float:
        """The eps for which the kernel's result is ours."""
        if self.torch_eps:
            return self.eps
        return self.eps / adam.corrections(*self.betas, self.step)[1]

    @cached_property
    def kernel_step(self) -> torch.Tensor:
        """The step as the kernel wants it."""
        return torch.tensor(float(self.step), dtype=torch.float32, device="cpu")


@dataclass(slots=True)
class Job:
    """One parameter's update, or a piece of it: contiguous host tensors of one shape.

    Attributes:
        param: whose update it is.
        weights: float32 or float64, updated in place.
        grad: of any float dtype.
        exp_avg: first moment, as `weights`.
        exp_avg_sq: second moment, as `weights`.
        out: receives the new weights in its own dtype, or None.
        report: say when it is done.
    """

    param: torch.Tensor
    weights: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    out: torch.Tensor | None
    report: bool

    def pieces(self, elements: int) -> Iterator[Job]:
        """Yield the job in pieces of at most so many elements."""
        total = self.weights.numel()
        if total <= elements:
            yield self
            return
        pieces = [
            tensor.detach().view(-1).split(elements)
            for tensor in (self.weights, self.grad, self.exp_avg, self.exp_avg_sq)
        ]
        outs: Sequence[torch.Tensor | None] = [None] * len(pieces[0])
        if self.out is not None:
            outs = self.out.detach().view(-1).split(elements)
        for index, (w, g, m, v) in enumerate(zip(*pieces, strict=True)):
            report = self.report and index == len(outs) - 1
            yield Job(self.param, w, g, m, v, outs[index], report)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads inside."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class HostAdam:
    """Updates weights and moments in host memory; keeps two pieces of scratch, no state."""

    _hyper: Hyper  # of the batch that is being filled
    _plain: bool

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def scratch_bytes(self) -> int:
        """Return the bytes of the scratch buffers."""
        return sum(t.numel() * t.element_size() for t in self._scratch.values())

    def run(
        self,
        work: Iterable[tuple[Hyper, Job]],
        done: Callable[[torch.Tensor], None],
        batch_elements: float = float("inf"),
    ) -> None:
        """Update every job, in order.

        Args:
            work: what to do, with one `Hyper` object for all jobs that share it; taken one by
                one, so that a job may wait for its gradient.
            done: called with a parameter as soon as it is updated, where its job says so.
            batch_elements: jobs that the kernel can do alone are handed to it together, up to
                so many elements.
        """
        batch: list[Job] = []
        filled, shared = 0, None
        piece_elements = PIECE_ELEMENTS * torch.get_num_threads()
        for hyper, job in work:
            plain = _is_plain(hyper, job)
            limit = batch_elements if plain else piece_elements
            kind = (id(hyper), plain, job.weights.dtype)
            for piece in (job,) if plain else job.pieces(piece_elements):
                size = piece.weights.numel()
                if batch and (kind != shared or filled + size > limit):
                    self._flush(batch, done)
                    filled = 0
                if not batch:
                    shared, self._hyper, self._plain = kind, hyper, plain
                batch.append(piece)
                filled += size
        if batch:
            self._flush(batch, done)

    def _flush(self, batch: list[Job], done: Callable[[torch.Tensor], None]) -> None:
        hyper, decay = self._hyper, self._hyper.weight_decay
        weights = [job.weights for job in batch]
        grads = [job.grad for job in batch]
        exp_avgs = [job.exp_avg for job in batch]
        if not self._plain:
            grads, decay = self._unscaled(weights, grads)
            if hyper.use_nesterov:
                torch._foreach_lerp_(exp_avgs, grads, 1.0 - hyper.betas[0])
                copies, _ = self._scratch_for(1, exp_avgs)
                torch._foreach_copy_(copies, exp_avgs)
                exp_avgs = copies
        exp_avg_sqs = [job.exp_avg_sq for job in batch]
        _kernel(hyper, decay, weights, grads, exp_avgs, exp_avg_sqs)
        for job in batch:
            if job.out is not None:
                job.out.copy_(job.weights)
            if job.report:
                done(job.param)
        batch.clear()

    def _unscaled(
        self, weights: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], float]:
        """Return gradients for the kernel, and the weight decay that is left to it."""
        hyper = self._hyper
        scaled, decay = hyper.scale != 1.0, hyper.weight_decay
        exact = all(g.dtype == w.dtype for g, w in zip(grads, weights, strict=True))
        if exact and not scaled and not (hyper.use_nesterov and decay):
            return grads, decay
        # In scratch: the kernel could unscale, but would overwrite the caller's gradients.
        copies, flat = self._scratch_for(0, weights)
        torch._foreach_copy_(copies, grads)
        if decay:
            torch._foreach_add_(copies, weights, alpha=decay * hyper.scale)
        if scaled:
            flat.mul_(1.0 / hyper.scale)
        return copies, 0.0

    def _scratch_for(
        self, which: int, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return scratch in the tensors' shapes, and all of that as one flat tensor."""
        dtype, sizes = tensors[0].dtype, [tensor.numel() for tensor in tensors]
        elements = max(sum(sizes), PIECE_ELEMENTS * torch.get_num_threads())
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.shape[1] < elements:
            scratch = torch.empty(2, elements, dtype=dtype, device="cpu")
            self._scratch[dtype] = scratch
        flat = scratch[which, : sum(sizes)]
        if len(tensors) == 1:
            return [flat.view(tensors[0].shape)], flat
        views = [
            piece.view(tensor.shape)
            for piece, tensor in zip(flat.split(sizes), tensors, strict=True)
        ]
        return views, flat


def _is_plain(hyper: Hyper, job: Job) -> bool:
    """Return whether the kernel alone gives the result."""
    return (
        job.grad.dtype == job.weights.dtype
        and hyper.scale == 1.0
        and not hyper.use_nesterov
    )


def _kernel(
    hyper: Hyper,
    weight_decay: float,
    weights: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
) -> None:
    torch._fused_adam_(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [hyper.kernel_step] * len(weights),
        lr=hyper.lr,
        beta1=hyper.betas[0],
        beta2=hyper.betas[1],
        weight_decay=weight_decay,
        eps=hyper.kernel_eps,
        amsgrad=False,
        maximize=False,
    )
