"""Units: parameters of a model that are reduced together, and who holds their other shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adasum_hvd.common.marks import is_marked_local
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.exchange import Shards
from adasum_hvd.distributed.reduction import reduce_tensors
from adasum_hvd.distributed.rules import Rule
from adasum_hvd.distributed.sharded_types import is_fsdp_module
from adasum_hvd.distributed.sharding import local_of, shard_groups

_BUCKET_BYTES = 25 << 20  # of parameters outside FSDP modules, as DDP's buckets


class Unit(NamedTuple):
    """The parameters of one FSDP module or a bucket of others, all of one dtype and device."""

    names: Sequence[str]
    parameters: Sequence[torch.nn.Parameter]
    shards: Sequence[Shards]

    def locals(self) -> list[torch.Tensor]:
        """Return this rank's shards of the parameters, which share their memory."""
        return [local_of(parameter).detach() for parameter in self.parameters]

    def reduce(
        self, tensors: Sequence[torch.Tensor], communicator: Communicator, rule: Rule
    ) -> None:
        """Reduce tensors that are laid out as `locals`, in place.

        Collective: the communicator's ranks, and the ranks that hold the other shards; blocks on
        a CPU.
        """
        reduce_tensors(tensors, communicator, rule, self.shards)


class Frozen:
    """The parameters of a model that are frozen now, and so belong to no unit."""

    def __init__(self, model: torch.nn.Module):
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad
        }

    def check(self, what: str) -> None:
        """Raise RuntimeError if one is trained by now, because it would not be reduced.

        Args:
            what: the function or class that reduces the model, for the message.
        """
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and not is_marked_local(parameter):
                raise RuntimeError(
                    f"{what}: expected {name} to stay frozen, but got requires_grad=True, and it "
                    f"would not be reduced (rank {dist.get_rank()}); call remove(), and {what} "
                    "again, when other parameters are trained"
                )


def units_of(model: torch.nn.Module) -> list[Unit]:
    """Return a model's units, in about the order in which backward finishes them.

    Parameters that are frozen now, or marked with `mark_worker_local`, are left out. All ranks
    call it in the same order.
    """
    owner: dict[int, object] = {}
    for module in model.modules():  # a child comes after its parent
        if is_fsdp_module(module):
            owner |= {id(parameter): module for parameter in module.parameters()}
    found: dict[tuple[Any, ...], list[tuple[str, torch.nn.Parameter]]] = {}
    room: dict[tuple[Any, ...], int] = {}
    for name, parameter in reversed(list(model.named_parameters())):
        if not parameter.requires_grad or is_marked_local(parameter):
            continue
        local = local_of(parameter)
        key = id(owner.get(id(parameter))), local.dtype, local.device
        room[key] = room.get(key, 0) + local.numel() * local.element_size()
        number = 0 if id(parameter) in owner else room[key] // _BUCKET_BYTES
        # At the place of its first parameter, whose gradient comes last: a root module of FSDP
        # has embeddings and a head, and is finished after all blocks between them.
        members = found.pop(unit := (*key, number), [])
        found[unit] = [*members, (name, parameter)]
    communicators: dict[Any, Communicator] = {}
    units = []
    for members in found.values():
        names, parameters = zip(*members, strict=True)
        units.append(Unit(names, parameters, _shards(parameters, communicators)))
    return units


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
