"""Comparison of the ranks' calls before a tensor is sent, and the errors if they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from adasum_hvd.common.agreement import first_difference
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.sharded_types import shard_problem

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Call(NamedTuple):
    """The arguments of a reduction on one rank."""

    settings: tuple[tuple[str, object], ...]
    tensors: tuple[tuple[tuple[int, ...], str, str], ...]  # shape, dtype, device type
    problem: str = ""  # why this rank cannot reduce


def listed(tensors: Any) -> list[Any]:
    """Return one tensor, or an iterable of them, as a list.

    Raises:
        ValueError: it is neither.
    """
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
        return Call((), (), problem)
    described = tuple(
        (tuple(t.shape), str(t.dtype).removeprefix("torch."), t.device.type)
        for t in tensors
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
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"expected a dtype among {names}, but got {tensor.dtype}"
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    if any(count > 1 and stride == 0 for count, stride in sides):
        return (
            "expected tensors whose elements have memory of their own, but got an expanded one; "
            "clone it"
        )
    return ""


def agree(what: str, call: Call, communicator: Communicator) -> None:
    """Raise on every rank unless all ranks are about to do the same.

    Args:
        what: the function, for the message.
        call: what this rank is about to do.
        communicator: the ranks.

    Raises:
        ValueError: the ranks differ, or one of them cannot; with the first difference.

    Collective: all ranks; blocks. Eight bytes travel, more only before an error.
    """
    _raise(what, difference(call, communicator), communicator)


def agree_in_job(what: str, call: Call, communicator: Communicator) -> None:
    """Raise as `agree`, but on every rank of the job.

    Collective: all ranks of the job, each with its own communicator; blocks.
    """
    job = Communicator()
    problems = job.all_gather_object(difference(call, communicator))
    _raise(what, next(filter(None, problems), ""), job)


def _raise(what: str, problem: str, communicator: Communicator) -> None:
    if problem:
        here = communicator.ranks[communicator.rank]
        raise ValueError(f"{what}: {problem} (this is rank {here})")


def difference(call: Call, communicator: Communicator) -> str:
    """Return why the ranks cannot do what they are about to do, the same on all ranks, or "".

    Collective: all ranks of the communicator; blocks.
    """
    digest = hashlib.sha256(repr(call).encode()).digest()[:8]
    number, device = (
        int.from_bytes(digest, "little", signed=True),
        communicator.control_device,
    )
    digests = communicator.all_gather(torch.tensor([number], device=device))
    if len(set(digests.flatten().tolist())) == 1 and not call.problem:
        return ""
    return _difference(communicator.all_gather_object(call), communicator)


def _difference(calls: Sequence[Call], communicator: Communicator) -> str:
    """Return the first problem or difference, the same on all ranks."""
    ranks = communicator.ranks
    for rank, call in zip(ranks, calls, strict=True):
        if call.problem:
            got, *remedy = call.problem.split("; ", 1)
            where = f"{got} on rank {rank} of {communicator.job_size}"
            return "; ".join([where, *remedy])
    settings = first_difference([call.settings for call in calls])
    if settings is not None:
        position, (other, *_) = settings
        first, second = (calls[k].settings[position : position + 1] for k in (0, other))
        same_name = first and second and first[0][0] == second[0][0]
        expected = first[0][1] if same_name else _named(first)
        return (
            f"expected the same arguments on all ranks, but got {_named(second)} on rank "
            f"{ranks[other]} and {expected} on rank {ranks[0]}; pass the same ones on every rank"
        )
    tensors = first_difference([call.tensors for call in calls])
    if tensors is None:
        return "expected the same call on all ranks, but got different ones"
    position, (other, *_) = tensors
    found = [_described(calls[k].tensors[position : position + 1]) for k in (0, other)]
    return (
        f"expected the same tensors in the same order on all ranks, but got {found[1]} as tensor "
        f"{position} on rank {ranks[other]} and {found[0]} on rank {ranks[0]}; pass tensors of "
        "the same shapes and dtypes on every rank"
    )


def _named(setting: Sequence[tuple[str, object]]) -> str:
    return f"{setting[0][0]}={setting[0][1]}" if setting else "no more"


def _described(found: Sequence[tuple[tuple[int, ...], str, str]]) -> str:
    if not found:
        return "none"
    ((shape, dtype, device),) = found
    return f"{dtype} {list(shape)} on {device}"
