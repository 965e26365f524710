"""Gradients that were reduced, and whether backward has added to them since."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from adasum_hvd.distributed.sharding import local_of

# A gradient that was reduced, and how often it had been written in place by then.
Reduced: TypeAlias = tuple[weakref.ref[torch.Tensor], int]


def reduced_of(parameters: Iterable[torch.Tensor]) -> dict[int, Reduced]:
    """Count a write to the gradients of parameters, and note them, by the parameter's number."""
    present = {id(p): grad for p in parameters if (grad := p.grad) is not None}
    show_writes(present.values())
    return dict(zip(present, map(noted, present.values()), strict=True))


def noted(gradient: torch.Tensor) -> Reduced:
    """Note a gradient that was reduced."""
    return weakref.ref(gradient), _version(gradient)


def writes_to(gradient: torch.Tensor | None, reduced: Reduced) -> int | None:
    """Return how often it was written in place since; None if `gradient` is another tensor.

    Backward writes once, and `zero_grad(set_to_none=False)` before it once more.
    """
    tensor, version = reduced
    if gradient is None or tensor() is not gradient:
        return None
    return _version(gradient) - version


def show_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Count a write in each tensor's version, for one that torch cannot see: a collective's.

    AdamOffload takes a gradient whose version is that of its early copy for the same.
    """
    written = [t if type(t) is torch.Tensor else local_of(t) for t in tensors]
    try:
        torch.autograd.graph.increment_version(written)
    except (TypeError, RuntimeError):  # torch before 2.5 takes one at a time
        for tensor in written:
            torch.autograd.graph.increment_version(tensor)


def _version(gradient: torch.Tensor) -> int:
    # FSDP accumulates into the local tensor, which does not count as a write to the DTensor.
    if type(gradient) is torch.Tensor:  # most of them, at once
        return gradient._version
    local = local_of(gradient)
    return gradient._version + (0 if local is gradient else local._version)


class LastPass:
    """DDP's gradients after its last backward pass, to notice a pass that adds to them.

    AdaSum of sums is not the sum of AdaSums. Views of DDP's buckets (`gradient_as_bucket_view`)
    are not checked: all gradients of a bucket share their count of writes.
    """

    def __init__(self) -> None:
        self._reduced: dict[int, Reduced] = {}
        self._warned = False

    def check(self, parameters: Iterable[torch.Tensor]) -> None:
        """Warn, once, if backward has added to gradients of the last pass.

        Only a warning, because a program may zero them before its next step, as GANs do.
        """
        kept = [
            (p.grad, last)
            for p in parameters
            if (last := self._reduced.pop(id(p), None))
            and (gradient := last[0]()) is not None  # as after zero_grad()
            and not gradient._is_view()
        ]
        if self._warned or torch._C._current_graph_task_id() == -1:  # DDP's join()
            return
        # One that is unused in this pass has one write if it was zeroed, and the others two.
        written = [(writes_to(gradient, last), gradient) for gradient, last in kept]
        most = max((count for count, _ in written if count is not None), default=0)
        if most == 1 and any(g.any() for count, g in written if count == 1):
            self._warned = True
            warnings.warn(
                "adasum_hook: expected gradients of this step alone, but backward added to the "
                "reduced gradients of the last pass, and AdaSum of such sums is wrong; call "
                "zero_grad() between steps (not grad.data.zero_(), which is not seen), and wrap "
                "forward and backward of all passes of a step but the last in no_sync()",
                stacklevel=3,
            )

    def note(self, buckets: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Note the gradients of buckets of parameters at the end of the backward pass, if any."""
        if torch._C._current_graph_task_id() == -1:  # DDP's join()
            return
        queue = torch.autograd.Variable._execution_engine.queue_callback
        parameters = [*itertools.chain(*buckets.values())]
        queue(lambda: queue(lambda: self._note(parameters)))  # after DDP's own callback

    def _note(self, parameters: Sequence[torch.Tensor]) -> None:
        self._reduced = {} if self._warned else reduced_of(parameters)
