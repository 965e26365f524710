"""Units: parameters of a model that are reduced together, and who holds their other shards."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from adasum_hvd.base.marks import is_marked_local, times_marked
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.exchange import Shards
from adasum_hvd.distributed.sharding import is_fsdp_module, local_of, shard_groups

_BUCKET_BYTES = 25 << 20  # of parameters outside FSDP modules, as DDP's buckets


class Unit(NamedTuple):
    """The parameters of one FSDP module or a bucket of others, all of one dtype and device."""

    names: Sequence[str]
    parameters: Sequence[torch.nn.Parameter]
    shards: Sequence[Shards]

    def locals(self) -> list[torch.Tensor]:
        """Return this rank's shards of the parameters, which share their memory."""
        return [local_of(parameter).detach() for parameter in self.parameters]

    def copies(self) -> list[torch.Tensor]:
        """Return copies of `locals`."""
        return [local.clone() for local in self.locals()]


class Selection:
    """Which parameters of a model belong to units, by their state now: trained, and not marked."""

    def __init__(self, model: torch.nn.Module):
        named = dict(model.named_parameters())
        self._frozen = {n: p for n, p in named.items() if not p.requires_grad}
        self._reduced = {n: p for n, p in named.items() if _is_reduced(p)}
        self._ids = {id(parameter) for parameter in self._reduced.values()}
        self._times_marked = times_marked()

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def hooks(self, what: str) -> list[RemovableHandle]:
        """Let backward `check` where a pass reaches frozen parameters, and perhaps no others."""
        found, check = [], weakref.WeakMethod(self.check)
        for parameter in self._frozen.values():
            if parameter.is_floating_point() and not is_marked_local(parameter):
                parameter.requires_grad_(True)  # torch takes no hook otherwise
                hook = parameter.register_post_accumulate_grad_hook
                found.append(hook(partial(call_weakly, check, what)))
                parameter.requires_grad_(False)
        return found

    def check(self, what: str, _: object = None) -> None:
        """Raise RuntimeError if other parameters would have to be reduced by now.

        Args:
            what: the function or class that reduces the model, for the message.
            _: the parameter that backward has reached.
        """
        for name, parameter in self._frozen.items():
            if _is_reduced(parameter):
                raise RuntimeError(
                    f"{what}: expected {name} to stay frozen, but got requires_grad=True, and it "
                    f"would not be reduced (rank {dist.get_rank()}); call remove(), and {what} "
                    "again, when other parameters are trained"
                )
        if self._times_marked == times_marked():
            return
        for name, parameter in self._reduced.items():
            if is_marked_local(parameter):
                raise RuntimeError(
                    f"{what}: expected {name} to stay a reduced parameter, but it was marked as "
                    f"worker-local since (rank {dist.get_rank()}); call mark_worker_local before "
                    f"{what}, or remove() and call it again"
                )
        self._times_marked = times_marked()


def _is_reduced(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and not is_marked_local(parameter)


def call_weakly(method: weakref.WeakMethod[Any], *arguments: Any) -> None:
    """Call a method of an object, while there is one."""
    if (call := method()) is not None:
        call(*arguments)


def units_of(model: torch.nn.Module) -> list[Unit]:
    """Return a model's units, in about the order in which backward finishes them.

    Parameters that are frozen now, or marked with `mark_worker_local`, are left out. All ranks
    call it in the same order.
    """
    communicators: dict[Any, Communicator] = {}
    units = []
    for members in grouped(model):
        names, parameters = zip(*members, strict=True)
        units.append(Unit(names, parameters, _shards(parameters, communicators)))
    return units


def grouped(model: torch.nn.Module) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """Return the names and parameters of each unit, the same on all ranks; sends nothing."""
    owner: dict[int, object] = {}
    for module in model.modules():  # a child comes after its parent
        if is_fsdp_module(module):
            owner |= {id(parameter): module for parameter in module.parameters()}
    found: dict[tuple[Any, ...], list[tuple[str, torch.nn.Parameter]]] = {}
    room: dict[tuple[Any, ...], int] = {}
    for name, parameter in reversed(list(model.named_parameters())):
        if not _is_reduced(parameter):
            continue
        local, dtype = local_of(parameter), gradient_dtype(parameter)
        key = id(owner.get(id(parameter))), local.dtype, dtype, local.device
        # Of an even shard, because ranks with uneven ones must have the same units.
        whole = parameter.numel() * parameter.element_size()
        room[key] = room.get(key, 0) + whole // _shard_count(parameter)
        number = 0 if id(parameter) in owner else room[key] // _BUCKET_BYTES
        # At the place of its first parameter, whose gradient comes last: a root module of FSDP
        # has embeddings and a head, and is finished after all blocks between them.
        members = found.pop(unit := (*key, number), [])
        found[unit] = [*members, (name, parameter)]
    return list(found.values())


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient, which since torch 2.10 may be another one."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _shard_count(parameter: torch.Tensor) -> int:
    return math.prod(map(dist.get_world_size, shard_groups(parameter)))


def _shards(
    parameters: Sequence[torch.nn.Parameter], communicators: dict[Any, Communicator]
) -> list[Shards]:
    """Return which parameters are sharded over which groups; groups' communicators are shared."""
    by_group: dict[Any, list[int]] = {}
    for number, parameter in enumerate(parameters):
        for group in shard_groups(parameter):
            by_group.setdefault(group, []).append(number)
    for group in by_group:
        if group not in communicators:
            # FSDP uses the group, too, while a lane runs.
            communicators[group] = Communicator(group, apart=True)
    return [
        Shards(communicators[group], tuple(numbers))
        for group, numbers in by_group.items()
    ]
