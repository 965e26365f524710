"""Attributes that a gradient scaler sets on an optimizer, and their effect in `step()`.

torch's scaler sets `found_inf` and `grad_scale` on optimizers that support it, and calls `step()`
in any case: see `adasum_hvd/torch/amp.py`.
"""

from __future__ import annotations

from typing import Any

import torch

# Set by adasum_hvd's GradScaler while it steps: all ranks have agreed on overflow.
AGREED = "_adasum_scaler_agreed"


def forget_scaler(optimizer: Any) -> None:
    """Remove a scaler's attributes from the optimizer, as torch's scaler does after a `step()`."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


def must_skip(optimizer: Any, consistent: bool) -> bool:
    """Return whether this `step()` must be skipped because a scaler found an overflow.

    Args:
        optimizer: a distributed optimizer inside `step()`.
        consistent: the gradients that the scaler checked are equal on all ranks.

    Raises:
        RuntimeError: torch's own scaler checked gradients that differ between ranks.
    """
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return False
    if not consistent and not getattr(optimizer, AGREED, False):
        forget_scaler(optimizer)
        variant = "gradient" if optimizer._reduces_gradients else "delta"
        raise RuntimeError(
            f"{variant} variant on several ranks: expected a scaler that decides the same on "
            "all ranks, but got torch's GradScaler; use adasum_hvd.torch.GradScaler"
            + (
                ", or call optimizer.synchronize() before scaler.step() and step inside "
                "optimizer.skip_synchronize()"
                if optimizer._reduces_gradients
                and not optimizer._adasum.parameters.any_partial
                else ""
            )
        )
    if bool(found):
        return True
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        torch._foreach_div_(gradients, scale.item())
    # Done here, so that an optimizer that supports them does not unscale again.
    optimizer.grad_scale = optimizer.found_inf = None
    return False
