"""Are all ranks still the same model? What both frameworks' `check_replicas` share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from adasum_hvd.common import options
from adasum_hvd.common.agreement import first_difference

Digests = list[tuple[str, str]]  # a tensor's name, and the hash of its bits
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by model


class ReplicaMismatch(RuntimeError):
    """Replicas hold different values; the message names the first tensor and the ranks."""


def is_due(model: Any, every: int) -> bool:
    """Return whether this call for `model`, which it counts, is a k-th one.

    Raises:
        ValueError: `every` is no integer of at least 1.
    """
    options.check_count("check_replicas: every", every)
    calls = _calls[model] = _calls.get(model, 0) + 1
    return (calls - 1) % every == 0


def compare(ranks: Sequence[int], digests: Sequence[Digests], rank: int) -> None:
    """Raise unless all of these ranks have the same.

    Args:
        ranks: in the job.
        digests: of each of them.
        rank: this one, for the message.

    Raises:
        ReplicaMismatch: they differ; names the first tensor that does, and the ranks.
    """
    differs = first_difference(digests)
    if differs is None:
        return
    position, others = differs
    name, _ = next(d[position] for d in digests if len(d) > position)
    raise ReplicaMismatch(
        f"replicas: required equal tensors on all {len(ranks)} ranks, got another {name} on ranks "
        f"{[ranks[index] for index in others]} than on rank {ranks[0]} (this is rank {rank}); "
        f"broadcast the parameters from rank {ranks[0]}, and look for data or random numbers "
        "that differ where they must not"
    )
