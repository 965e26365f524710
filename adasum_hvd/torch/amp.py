"""Mixed precision: an overflow on one rank must count on all ranks, or replicas diverge.

torch's scaler checks the gradients of its own rank. That suffices for reduced gradients, because
an infinity on one rank makes them non-finite on all, but not for the delta variant's local ones.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from horovod.torch.mpi_ops import Max, size

from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch import wire

# The count of Horovod's starts when a scaler began its step.
_BEGUN = "adasum_generation"


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose decisions are the same on all ranks.

    When any rank's gradients overflow, every rank skips the step and shrinks its scale. The scale
    also shrinks when the delta variant's reduced change is not finite. The weights are then those
    from before the step (or the window of local steps), but the optimizer's state includes the
    step.

    With the gradient variant the ranks compare their scales with their hyperparameters, because
    gradients of different scales must not be added. In an elastic job pass it to `TorchState`.
    docs/clipping.md has the lines.
    """

    def unscale_(self, optimizer: Any) -> None:
        """Reduce (gradient variant), unscale, and agree on overflow. Collective; blocks."""
        reduces_gradients = getattr(optimizer, "_reduces_gradients", None)
        if not self._enabled or reduces_gradients is None:
            super().unscale_(optimizer)
            return
        self._state_of(optimizer)
        reducer = optimizer._adasum
        if reduces_gradients:
            reducer.scaler = weakref.ref(self)
        if reduces_gradients and not reducer.synchronized:
            reducer.loss_scale = self._scale
            try:
                optimizer.synchronize()
            finally:
                reducer.loss_scale = None
        super().unscale_(optimizer)
        # Gradients reduced by all ranks are equal on all ranks; others are not.
        if not reduces_gradients or reducer.parameters.any_partial:
            self._agree(optimizer)

    def _state_of(self, optimizer: Any) -> dict[str, Any]:
        """Return torch's state of the current step; drop it if a rank's death ended the step."""
        state = self._per_optimizer_states[id(optimizer)]
        if state.setdefault(_BEGUN, wire.generation()) != wire.generation():
            del self._per_optimizer_states[id(optimizer)]
            forget_scaler(optimizer)
            return self._state_of(optimizer)
        return state

    def _agree(self, optimizer: Any) -> None:
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        process_set = optimizer._adasum.options.process_set
        if size() == 1 or not process_set.included():
            return
        if not found:
            found[torch.device("cpu")] = torch.zeros(())
        local = torch.stack([flag.cpu().reshape(1) for flag in found.values()]).amax(0)
        agreed = torch_ops.allreduce(
            local, name="adasum.found_inf", op=Max, process_set=process_set
        )
        for flag in found.values():
            flag.fill_(agreed.item())

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Take `optimizer.step()` on all ranks or on none. Collective; blocks."""
        if not self._enabled or not hasattr(optimizer, "_reduces_gradients"):
            return super().step(optimizer, *args, **kwargs)
        state = self._state_of(optimizer)
        if state["stage"] is torch.amp.grad_scaler.OptState.READY:
            self.unscale_(optimizer)
        reducer = optimizer._adasum
        reducer.scaler_agreed = True
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            reducer.scaler_agreed = False
        if reducer.change_overflowed:
            reducer.change_overflowed = False
            for flag in state["found_inf_per_device"].values():
                flag.fill_(1)
        return result


# torch's scaler sets `found_inf` and `grad_scale` on optimizers that support it, and calls their
# `step()` in any case.


def forget_scaler(optimizer: Any) -> None:
    """Remove a scaler's attributes from the optimizer, as torch's scaler does after a `step()`."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


def must_skip(optimizer: Any, consistent: bool) -> bool:
    """Return whether a scaler skips this `step()`; torch's must have seen equal gradients."""
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return False
    reducer = optimizer._adasum
    if not (consistent or reducer.scaler_agreed):
        forget_scaler(optimizer)
        reduces = optimizer._reduces_gradients
        synchronize = (
            ", or call optimizer.synchronize() before scaler.step() and step inside "
            "optimizer.skip_synchronize()"
        )
        helps = reduces and not reducer.parameters.any_partial
        raise RuntimeError(
            f"{'gradient' if reduces else 'delta'} variant on several ranks: expected a scaler "
            "that decides the same on all ranks, but got torch's GradScaler; use "
            f"adasum_hvd.torch.GradScaler{synchronize if helps else ''}"
        )
    if bool(found):
        return True
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        gradients = [p.grad for p in reducer.parameters if p.grad is not None]
        torch._foreach_div_(gradients, scale.item())
    # Done here, so that an optimizer that supports them does not unscale again.
    optimizer.grad_scale = optimizer.found_inf = None
    return False
