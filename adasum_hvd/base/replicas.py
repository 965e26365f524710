"""The comparison of replicas over the ranks: the part of `check_replicas` without a framework."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

from adasum_hvd.base import options
from adasum_hvd.base.agreement import first_difference

Digests = list[tuple[str, str]]  # a tensor's name, and the hash of its bits
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by model


class ReplicaMismatch(RuntimeError):
    """Replicas hold different values; the message names the first tensor and the ranks."""


def digest_of(dtype: Any, shape: Any, data: Any) -> str:
    """Return a hash of a tensor's dtype, shape and bits, which `data` holds end to end."""
    found = hashlib.sha256(repr((dtype, shape)).encode())
    found.update(data)
    return found.hexdigest()


def is_due(model: Any, every: int) -> bool:
    """Count this call for `model`, and return whether it is one of every `every` calls."""
    options.check_count("check_replicas: every", every)
    calls = _calls[model] = _calls.get(model, 0) + 1
    return (calls - 1) % every == 0


def compare(ranks: Sequence[int], digests: Sequence[Digests], rank: int) -> None:
    """Raise ReplicaMismatch, which names the first tensor, if the ranks' digests differ.

    The ranks are numbered in the job; this one is for the message.
    """
    difference = first_difference(digests)
    if difference is None:
        return
    position, others = difference
    name, _ = next(d[position] for d in digests if len(d) > position)
    raise ReplicaMismatch(
        f"replicas: expected equal tensors on all {len(ranks)} ranks, but got another {name} on "
        f"ranks {[ranks[k] for k in others]} than on rank {ranks[0]} (seen by rank {rank}); "
        f"broadcast the parameters from rank {ranks[0]}, and look for random numbers or data that "
        "differ between ranks by mistake"
    )
