"""Mixed precision: an overflow on one rank must count on all ranks, or replicas diverge.

torch's scaler checks the gradients of its own rank. That suffices for reduced gradients, because
an infinity on one rank makes them non-finite on all. It does not suffice for the delta variant,
whose gradients stay local.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from horovod.torch.mpi_ops import Max, size

from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch import wire
from adasum_hvd.torch.optimizer import scaling

# The count of Horovod's starts when a scaler began its step.
_BEGUN = "adasum_generation"


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose decisions are the same on all ranks.

    A drop-in replacement: `scale`, `unscale_`, `step`, `update` and the state dict are
    torch's. When any rank's gradients overflow, every rank skips the step and shrinks its scale.
    The scale also shrinks when the delta variant's reduced change is not finite. The weights are
    then those from before the step (or the window of local steps), but the optimizer's state
    includes the step.

    With the gradient variant the ranks compare their scales with their hyperparameters, because
    gradients of different scales must not be added. In an elastic job pass it to `TorchState`.

    Example:
        >>> scaler = hvd.GradScaler("cuda")       # doctest: +SKIP
        >>> scaler.scale(loss).backward()         # doctest: +SKIP
        >>> scaler.step(optimizer)                # doctest: +SKIP
        >>> scaler.update()                       # doctest: +SKIP
    """

    def unscale_(self, optimizer: Any) -> None:
        """Reduce (gradient variant), unscale, and agree on overflow. Collective; blocks."""
        reduces_gradients = getattr(optimizer, "_reduces_gradients", None)
        if not self._enabled or reduces_gradients is None:
            super().unscale_(optimizer)
            return
        self._state_of(optimizer)
        if reduces_gradients:
            optimizer._adasum.scaler = weakref.ref(self)
        if reduces_gradients and not optimizer._adasum.synchronized:
            optimizer._adasum.loss_scale = self._scale
            try:
                optimizer.synchronize()
            finally:
                optimizer._adasum.loss_scale = None
        super().unscale_(optimizer)
        # Gradients reduced by all ranks are equal on all ranks; others are not.
        if not reduces_gradients or optimizer._adasum.parameters.any_partial:
            self._agree(optimizer)

    def _state_of(self, optimizer: Any) -> dict[str, Any]:
        """Return torch's state of the current step; drop it if a rank's death ended the step."""
        state = self._per_optimizer_states[id(optimizer)]
        if state.setdefault(_BEGUN, wire.generation()) != wire.generation():
            del self._per_optimizer_states[id(optimizer)]
            scaling.forget_scaler(optimizer)
            return self._state_of(optimizer)
        return state

    def _agree(self, optimizer: Any) -> None:
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        process_set = optimizer._adasum.options.process_set
        if size() == 1 or not process_set.included():
            return
        local = torch.stack([flag.cpu().reshape(()) for flag in found.values()] or
                            [torch.zeros(())]).max()  # fmt: skip
        agreed = torch_ops.allreduce(
            local.reshape(1), name="adasum.found_inf", op=Max, process_set=process_set
        )
        if not found:
            found[torch.device("cpu")] = agreed.reshape(())
        for flag in found.values():
            flag.fill_(agreed.item())

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Take `optimizer.step()` on all ranks or on none. Collective; blocks."""
        if not self._enabled or not hasattr(optimizer, "_reduces_gradients"):
            return super().step(optimizer, *args, **kwargs)
        state = self._state_of(optimizer)
        if state["stage"] is torch.amp.grad_scaler.OptState.READY:
            self.unscale_(optimizer)
        setattr(optimizer, scaling.AGREED, True)
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            delattr(optimizer, scaling.AGREED)
        if getattr(optimizer._adasum, "change_overflowed", False):
            optimizer._adasum.change_overflowed = False
            for flag in state["found_inf_per_device"].values():
                flag.fill_(1)
        return result
