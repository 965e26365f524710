"""Are all ranks still the same model? And what is in force in this job?"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from horovod.torch import mpi_ops

from adasum_hvd import options
from adasum_hvd.torch import ops as torch_ops
from adasum_hvd.torch.functions import allgather_object

_calls: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by model


class ReplicaMismatch(RuntimeError):
    """Replicas hold different values; the message names the first tensor and the ranks."""


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _tensors(
    model: torch.nn.Module, optimizer: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    if optimizer is None or getattr(optimizer, "_variant", "gradient") == "delta":
        return  # the delta variant's optimizer state is local by design
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{names.get(id(parameter), 'unnamed')}.{key}", value


def check_replicas(
    model: torch.nn.Module,
    optimizer: Any = None,
    every: int = 1,
    process_set: Any = mpi_ops.global_process_set,
) -> bool:
    """Compare parameters, buffers and optimizer state over the ranks, bit for bit.

    Args:
        model: its parameters (worker-local ones excepted) and buffers.
        optimizer: its state tensors too, except for the delta variant, where they differ.
        every: do it on every k-th call for this model only, and return at once otherwise.
        process_set: the ranks to compare.

    Returns:
        True when a comparison was made, False when this call was left out.

    Raises:
        ReplicaMismatch: on every rank; names the first tensor that differs and the ranks.

    Collective: every rank of `process_set`; blocks when it compares.
    """
    calls = _calls[model] = _calls.get(model, 0) + 1
    if (calls - 1) % every:
        return False
    local = {
        name
        for name, parameter in model.named_parameters()
        if getattr(parameter, "_adasum_worker_local", False)
    }
    mine = [
        (name, _digest(tensor))
        for name, tensor in _tensors(model, optimizer)
        if not any(name == skip or name.startswith(f"{skip}.") for skip in local)
    ]
    everyone = allgather_object(mine, "adasum.check_replicas", process_set)
    longest = max(everyone, key=len)
    for position, expected in enumerate(longest):
        found = [ranks[position : position + 1] for ranks in everyone]
        different = [rank for rank, entry in enumerate(found) if entry != found[0]]
        if different:
            raise ReplicaMismatch(
                f"replicas: required equal tensors on all {len(everyone)} ranks, got another "
                f"{expected[0]} on ranks {different} than on rank 0 (this is rank "
                f"{mpi_ops.rank()}); broadcast the parameters from rank 0, and look for data or "
                "random numbers that differ where they must not"
            )
    return True


def banner(optimizer: Any) -> str:
    """Return one line that says what is in force: backend, ranks, groups, variant, wire.

    Example:
        >>> if hvd.rank() == 0:                       # doctest: +SKIP
        ...     print(hvd.banner(optimizer))
    """
    wire = {str(b.flat.dtype).removeprefix("torch.") for b in optimizer._buckets}
    return options.banner(
        optimizer._options,
        torch_ops.settings(),
        "MPI" if mpi_ops.mpi_enabled() else "Gloo",
        sorted(wire),
        optimizer.extra_bytes(),
    )
