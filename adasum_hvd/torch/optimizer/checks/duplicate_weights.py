"""Optimizers that keep the weights a second time, which the delta variant cannot follow.

A float32 master, torchao's copy on the host, schedule-free's `z`: the local step makes weights
of the copy, and so overwrites what the ranks agreed on with what this rank had alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def find(
    optimizer: torch.optim.Optimizer, attributes: Sequence[str]
) -> tuple[str, ...]:
    """Return where every parameter stands a second time, right after a local step.

    Lookahead's slow weights and the like, which are equal at other times, are not seen.

    Args:
        optimizer: its state and attributes are looked through, inner optimizers' too.
        attributes: names of those that are the optimizer's own.

    Returns:
        Descriptions such as "state 'z'"; empty unless all parameters that differ from
        others (a gradient, more than one element, not all of them zero) have a copy.
    """
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.numel() > 1
        and parameter.grad is not None
        and bool(parameter.detach().any())
    ]
    own = {parameter.data_ptr() for parameter in parameters}
    by_shape: dict[torch.Size, list[tuple[str, torch.Tensor]]] = {}
    for name in attributes:
        for where, tensor in _tensors(name, getattr(optimizer, name, None), 5):
            if tensor.data_ptr() not in own:
                by_shape.setdefault(tensor.shape, []).append((where, tensor))
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
    there = tensor.detach().to(parameter.device, parameter.dtype)
    return torch.equal(there, parameter.detach())


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
