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
from adasum_hvd.distributed.communicator import Communicator, RanksLost
from adasum_hvd.distributed.exchange import Shards
from adasum_hvd.distributed.reduction import reduce_tensors
from adasum_hvd.distributed.rules import Rule
from adasum_hvd.distributed.sharding import (
    is_fsdp_module,
    is_reduced,
    local_of,
    numbers_by_group,
    shard_groups,
)

_BUCKET_BYTES = 25 << 20  # of parameters outside FSDP modules, as DDP's buckets
MISSING, REDUCED, NEW = range(3)  # states of a gradient before a reduction


class Unit(NamedTuple):
    """The parameters of one FSDP module or a bucket of others, all of one dtype and device."""

    names: Sequence[str]
    parameters: Sequence[torch.nn.Parameter]
    shards: Sequence[Shards]

    def locals(self) -> list[torch.Tensor]:
        """Return this rank's shards of the parameters, which share their memory."""
        return [local_of(parameter).detach() for parameter in self.parameters]


class Selection:
    """Which parameters of a model belong to units, by their state now."""

    def __init__(self, what: str, model: torch.nn.Module):
        self._what = what  # reduces them, for messages
        named = dict(model.named_parameters())
        self._frozen = {n: p for n, p in named.items() if not p.requires_grad}
        self._reduced = {n: p for n, p in named.items() if is_reduced(p)}
        self._ids = {id(parameter) for parameter in self._reduced.values()}
        self._times_marked = times_marked()

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def hooks(self) -> list[RemovableHandle]:
        """Let backward `check` where a pass reaches frozen parameters, and perhaps no others."""
        found, check = [], weakref.WeakMethod(self.check)
        for parameter in self._frozen.values():
            if parameter.is_floating_point() and not is_marked_local(parameter):
                parameter.requires_grad_(True)  # torch takes no hook otherwise
                hook = parameter.register_post_accumulate_grad_hook
                found.append(hook(partial(call_weakly, check)))
                parameter.requires_grad_(False)
        return found

    def check(self, _: object = None) -> None:
        """Raise RuntimeError if other parameters would have to be reduced by now."""
        what = self._what
        for name, parameter in self._frozen.items():
            if is_reduced(parameter):
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


@torch._disable_dynamo  # which would trace a hook in a compiled step
def call_weakly(method: weakref.WeakMethod[Any], *arguments: Any) -> None:
    """Call a method of an object, while there is one."""
    if (call := method()) is not None:
        call(*arguments)


def units_of(model: torch.nn.Module) -> list[Unit]:
    """Return a model's units, in about the order in which backward finishes them.

    All ranks call it in the same order.
    """
    communicators: dict[Any, Communicator] = {}
    units = []
    for members in grouped(model):
        names, parameters = zip(*members, strict=True)
        shards = []
        for group, numbers in numbers_by_group(parameters).items():
            if group not in communicators:
                # FSDP uses the group, too, while a lane runs.
                communicators[group] = Communicator(group, apart=True)
            shards.append(Shards(communicators[group], tuple(numbers)))
        units.append(Unit(names, parameters, shards))
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
        if not is_reduced(parameter):
            continue
        local, dtype = local_of(parameter), gradient_dtype(parameter)
        key = id(owner.get(id(parameter))), local.dtype, dtype, local.device
        # Of an even shard, because ranks with uneven ones must have the same units.
        count = math.prod(map(dist.get_world_size, shard_groups(parameter)))
        whole = parameter.numel() * parameter.element_size()
        room[key] = room.get(key, 0) + whole // count
        number = 0 if id(parameter) in owner else room[key] // _BUCKET_BYTES
        # At the place of its first parameter, whose gradient comes last: a root module of FSDP
        # has embeddings and a head, and is finished after all blocks between them.
        members = found.pop(unit := (*key, number), [])
        found[unit] = [*members, (name, parameter)]
    return list(found.values())


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient; since torch 2.10 it may be another one."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class Progress:
    """How far a backward pass has come with a unit."""

    def __init__(self, unit: Unit):
        self.unit = unit
        # The most hooks of any pass of a kind so far, if there was one.
        self._most: dict[bool, list[int]] = {}
        self.begin_pass(accumulated=False)

    @property
    def expected(self) -> list[int]:
        """The most hooks of any pass of this kind so far, at least one for each parameter."""
        return self._most.get(self._accumulated, [1] * len(self.unit.parameters))

    @property
    def is_complete(self) -> bool:
        """Whether this pass has fired as many hooks as any pass of its kind so far."""
        return self._accumulated in self._most and self.fired == self.expected

    def begin_pass(self, accumulated: bool) -> None:
        """Begin a pass, also after one that broke off."""
        # After passes without a reduction FSDP fires the hooks of a module that runs twice two
        # times, and otherwise once.
        self._accumulated = accumulated
        self.fired = [0] * len(self.unit.parameters)  # hooks in this pass

    def end_pass(self) -> None:
        """Keep the number of hooks."""
        if any(self.fired):
            self._most[self._accumulated] = list(map(max, self.expected, self.fired))


def reduce_unit(
    unit: Unit,
    rule: Rule,
    gradients: list[torch.Tensor],
    header: list[int],
    communicator: Communicator,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Reduce this rank's shards of a unit's gradients in place; runs in a lane.

    Gradients that an earlier pass has reduced, and this one has not touched on any replica, stay as
    they are: a sum of equal gradients is not the gradient.

    The header, which goes first, has the number of the pass, that of the unit in it, and the state
    of each gradient. It is as long for all units, so that replicas which reduce different ones can
    tell.

    Returns:
        The gradients, and int64 [replicas, parameters]: their states before.

    Raises:
        RanksLost: a replica reduces another unit or pass; on all replicas. On a CUDA device that
            is the device's assertion.

    Collective: the replicas, and the ranks that hold the other shards; blocks on a CPU.
    """
    device = gradients[0].device
    rows = communicator.all_gather(torch.tensor(header, device=device))
    _check(rows[:, :2])
    everywhere = rows[:, 2 : 2 + len(gradients)]
    is_new = (everywhere == NEW).any(0)
    if device.type == "cpu" and not is_new.any():
        return gradients, everywhere
    kept = {
        number: gradients[number].clone()
        for number, state in enumerate(header[2:])
        if state == REDUCED
    }
    reduce_tensors(gradients, communicator, rule, unit.shards)
    for number, before in kept.items():
        found = torch.where(is_new[number], gradients[number], before)
        gradients[number].copy_(found)
    return gradients, everywhere


_EXPECTED = (
    "adasum_replicate: expected gradients of one pass and unit from all replicas"
)


def _check(places: torch.Tensor) -> None:
    """Raise unless all replicas are at one place; a device's values are not waited for."""
    is_equal = (places == places[0]).all()
    if places.device.type == "cuda":
        torch._assert_async(is_equal, _EXPECTED)
    elif places.device.type == "cpu" and not is_equal:
        got = ", ".join(f"pass {one} unit {unit}" for one, unit in places.tolist())
        raise RanksLost(
            f"{_EXPECTED}, but got those of {got} (by replica; rank {dist.get_rank()}); if a pass "
            "fails on one replica, end the job on all of them"
        )
