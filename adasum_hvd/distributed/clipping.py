"""`clip_grad_norm_` for sharded models."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.sharding import complete, local_of, numbers_by_group


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    r"""Scale gradients in place so that their norm is at most `max_norm`.

    The norm `(\sum |g|^p)^{1/p}` is that of the unsharded model, for plain parameters and for
    DTensors on any meshes together. torch's function takes those of one mesh only.

    Args:
        parameters: one or several; those without a gradient count as zero.
        max_norm: of all gradients together.
        norm_type: p; 2, infinity or any other number.
        error_if_nonfinite: raise if the norm is NaN or infinite.
        foreach: False: one kernel for each gradient.

    Returns:
        The norm before, a plain tensor without dimensions, float32, or float64 if a gradient is.
        All ranks of a replica get the same bits, and all replicas after `adasum_replicate`.

    Raises:
        RuntimeError: on every rank: `error_if_nonfinite`, and the norm is NaN or infinite. The
            gradients are unchanged.

    Collective: the ranks of the parameters' meshes, with the same parameters in the same order;
    8 bytes for each parameter travel.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_(weight, 1.0)
        tensor(5.)
    """
    several = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
    if not several:
        return torch.tensor(0.0)
    norm_type = float(norm_type)
    norms = _norms(several, norm_type, foreach)
    for group, numbers in numbers_by_group(several).items():
        rows = Communicator(group).all_gather(norms[numbers])
        norms[numbers] = torch.linalg.vector_norm(rows, norm_type, dim=0)
    total = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not total.isfinite():
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise RuntimeError(
            f"clip_grad_norm_: expected finite gradients, but got a norm of {total.item()} (rank "
            f"{rank}); skip this step, or leave out error_if_nonfinite"
        )
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    gradients = [local_of(p.grad) for p in several if p.grad is not None]
    for device in {gradient.device for gradient in gradients}:
        here = [gradient for gradient in gradients if gradient.device == device]
        torch._foreach_mul_(here, factor.to(device))
    is_double = any(gradient.dtype == torch.float64 for gradient in gradients)
    return total if is_double else total.float()


def _norms(
    parameters: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """Return float64 [parameters]: the norms of this rank's parts of their gradients."""
    parts = {
        number: local_of(complete(parameter.grad, parameter))
        for number, parameter in enumerate(parameters)
        if parameter.grad is not None
    }
    parts = {number: part for number, part in parts.items() if part.numel()}
    # What is missing, or has no elements, changes no norm.
    neutral = 0.0 if norm_type >= 0 else torch.inf
    device = local_of(parameters[0]).device
    norms = torch.full((len(parameters),), neutral, dtype=torch.float64, device=device)
    if parts:
        norm = partial(torch.linalg.vector_norm, ord=norm_type, dtype=torch.float64)
        several = [*parts.values()]
        found = (
            map(norm, several)
            if foreach is False
            else torch._foreach_norm(several, norm_type, dtype=torch.float64)
        )
        norms[[*parts]] = torch.stack([each.to(device) for each in found])
    return norms
