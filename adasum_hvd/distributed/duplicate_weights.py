"""Search for optimizers that keep a copy of the weights: the delta variant cannot reduce it.

Examples are a float32 master, torchao's copy on the host and schedule-free's `z`. The local step
computes weights from this copy, and so overwrites the reduced weights with this rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from adasum_hvd.distributed.sharding import local_of


def find(
    optimizer: torch.optim.Optimizer, attributes: Sequence[str]
) -> tuple[str, ...]:
    """Return the places of copies of all parameters, right after a local step.

    Copies that are equal at other times, such as Lookahead's slow weights, are not found.

    Args:
        optimizer: its state and attributes are searched, and those of inner optimizers.
        attributes: names of the optimizer's own attributes.

    Returns:
        Descriptions such as "state 'z'"; empty unless all parameters that differ from
        others (a gradient, more than one element, not all of them zero) have a copy. Of sharded
        ones this rank's shards are compared.
    """
    parameters = [
        local_of(parameter.detach())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    parameters = [each for each in parameters if each.numel() > 1 and bool(each.any())]
    own = {parameter.data_ptr() for parameter in parameters}
    by_shape: dict[torch.Size, list[tuple[str, torch.Tensor]]] = {}
    for name in attributes:
        for where, tensor in _tensors(name, getattr(optimizer, name, None), 5):
            local = local_of(tensor.detach())
            if local.data_ptr() not in own:
                by_shape.setdefault(local.shape, []).append((where, local))
    places: list[str] = []
    for parameter in parameters:
        equal = [
            where
            for where, tensor in by_shape.get(parameter.shape, ())
            if _equals(tensor, parameter)
        ]
        if not equal:
            return ()
        places += equal
    return tuple(sorted(set(places)))


def _equals(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    return torch.equal(tensor.to(parameter.device, parameter.dtype), parameter)


def _tensors(where: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (where, tensor) of all dense tensors in containers and inner optimizers."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield where, value
    elif depth and isinstance(value, torch.optim.Optimizer):
        for name in ("state", "param_groups"):
            yield from _tensors(f"{where}.{name}", getattr(value, name), depth - 1)
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            inner = f"{where} {key!r}" if isinstance(key, str) else where
            yield from _tensors(inner, item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(where, item, depth - 1)
