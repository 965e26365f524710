"""Comparison of the ranks' calls before a tensor is sent, and the errors if they differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from adasum_hvd.base.agreement import first_difference
from adasum_hvd.base.replicas import ReplicaMismatch
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.sharding import shard_problem

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Call(NamedTuple):
    """The arguments of a reduction on one rank."""

    settings: tuple[tuple[str, object], ...] = ()
    tensors: tuple[str, ...] = ()  # dtype, shape and type of device of each
    problem: Exception | None = None  # why this rank cannot reduce
    weights: tuple[tuple[str, int], ...] = ()  # names, checksums


def listed(tensors: Any) -> list[Any]:
    """Return one tensor, or an iterable of them, as a list; ValueError if it is neither."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    try:
        return list(tensors)
    except TypeError:
        raise ValueError(
            f"expected tensors, but got {type(tensors).__name__}"
        ) from None


def call_of(tensors: Sequence[Any], settings: Mapping[str, object]) -> Call:
    """Return the description of a call, or the reason why it cannot be done."""
    problem = next(filter(None, map(_problem, tensors)), "")
    devices = {str(t.device) for t in tensors if isinstance(t, torch.Tensor)}
    if not problem and len(devices) > 1:
        problem = (
            f"expected tensors on one device, but got {' and '.join(sorted(devices))}"
        )
    if problem:
        return Call(problem=ValueError(problem))
    described = tuple(
        f"{_name(t.dtype)} {list(t.shape)} on {t.device.type}" for t in tensors
    )
    return Call(tuple(settings.items()), described)


def _problem(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"expected tensors, but got {type(tensor).__name__}"
    if problem := shard_problem(tensor):
        return problem
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        kinds = {"meta": tensor.is_meta, "nested": tensor.is_nested}
        got = next((kind for kind, it_is in kinds.items() if it_is), tensor.layout)
        return f"expected dense tensors, but got one that is {got}"
    if tensor.dtype not in DTYPES:
        names = ", ".join(map(_name, DTYPES))
        return f"expected a dtype among {names}, but got {tensor.dtype}"
    if not tensor.is_contiguous() and (
        _span(tensor) < tensor.numel() or 0 in _strides(tensor)
    ):
        return (
            "expected tensors whose elements have memory of their own, but got an expanded one; "
            "clone it"
        )
    return ""


def _strides(tensor: torch.Tensor) -> list[int]:
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for count, stride in sides if count > 1]


def _span(tensor: torch.Tensor) -> int:
    """Return the elements from the first to the last one of a tensor in memory."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((count - 1) * stride for count, stride in sides)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the elements are in memory as they are, one after the other."""
    return tensor.is_contiguous() and not tensor.is_neg()


def overlap(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether two tensors share elements; of one with gaps, only the first counts."""
    spans = []
    for tensor in filter(torch.numel, tensors):
        begin, count = tensor.data_ptr(), tensor.numel()
        whole = tensor.is_contiguous() or _span(tensor) == count
        spans.append((begin, begin + (count if whole else 1) * tensor.itemsize))
    pairs = itertools.pairwise(sorted(spans))
    return any(end > begin for (_, end), (begin, _) in pairs)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def agree(
    what: str,
    call: Call,
    communicator: Communicator,
    shards: Iterable[Communicator] = (),
) -> None:
    """Raise on every rank unless all ranks are about to make the same call of `what`.

    The ranks that hold other shards, or all of the job, raise, too. Collective; blocks.

    Raises:
        ValueError: the ranks differ; with the first difference.
        ReplicaMismatch: their weights differ.
        Exception: the problem of a rank.
    """
    calls = communicator.gather_if_different(call)
    if calls is None and call.problem:
        calls = [call] * communicator.size
    problem = _first_of(calls, communicator) if calls else None
    for others in shards:
        if different := others.gather_if_different(problem):
            problem = next(filter(None, different))
    if problem is not None:
        here = communicator.ranks[communicator.rank]
        raise type(problem)(f"{what}: {problem} (this is rank {here})")


def _first_of(calls: Sequence[Call], communicator: Communicator) -> Exception:
    """Return the first problem or difference, the same on all ranks."""
    ranks = communicator.ranks
    for rank, call in zip(ranks, calls, strict=True):
        if call.problem:
            got, *remedy = str(call.problem).split("; ", 1)
            where = f"{got} on rank {rank} of {communicator.job_size}"
            return type(call.problem)("; ".join([where, *remedy]))
    if settings := first_difference([call.settings for call in calls]):
        position, (other, *_) = settings
        first, second = (calls[k].settings[position : position + 1] for k in (0, other))
        same_name = first and second and first[0][0] == second[0][0]
        expected = first[0][1] if same_name else _named(first)
        return ValueError(
            f"expected the same arguments on all ranks, but got {_named(second)} on rank "
            f"{ranks[other]} and {expected} on rank {ranks[0]}; pass the same ones on every rank"
        )
    if tensors := first_difference([call.tensors for call in calls]):
        position, (other, *_) = tensors
        got, expected = (
            "".join(calls[k].tensors[position : position + 1]) or "none"
            for k in (other, 0)
        )
        return ValueError(
            f"expected the same tensors in the same order on all ranks, but got {got} as "
            f"tensor {position} on rank {ranks[other]} and {expected} on rank {ranks[0]}; "
            "pass tensors of the same shapes and dtypes on every rank"
        )
    weights = first_difference([call.weights for call in calls])
    assert weights is not None  # nothing else can differ
    position, several = weights
    return ReplicaMismatch(
        "expected the same weights on all ranks at the start of a window, but got another "
        f"{calls[0].weights[position][0]} on ranks {[ranks[k] for k in several]} than on rank "
        f"{ranks[0]}; change weights between steps alike on all ranks, bit for bit, or inside the "
        "optimizer's step(), broadcast weights that differ from the beginning, and resume the "
        "middle of a window with the state_dict() of LocalSGD"
    )


def _named(setting: Sequence[tuple[str, object]]) -> str:
    return f"{setting[0][0]}={setting[0][1]}" if setting else "no more"
