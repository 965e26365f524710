"""The messages of a reduction: slices from rank to rank, and small tables to all.

On Gloo every byte travels in a message with a tag, so that a thread can reduce while the program
uses the group for other collectives. A process group of its own would not do: torch names groups
that some ranks make by the number of groups that a process knows, which may differ. Gloo's own
all-gather takes five times as long, because it stages every slice.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import pickle
import reprlib
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from adasum_hvd import core
from adasum_hvd.base.options import warn_of_one_group
from adasum_hvd.distributed.rules import Rule

# Far from the tags that programs count up, and from 0, torch's default.
_FIRST_TAG = 1 << 20
_tags: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()
_sites: weakref.WeakKeyDictionary[Any, Sites] = weakref.WeakKeyDictionary()
# What gathers tables of CPU tensors, by owner.
_cores: weakref.WeakKeyDictionary[Any, core.Group] = weakref.WeakKeyDictionary()


class RanksLost(RuntimeError):
    """The ranks cannot go on together.

    One did not respond in time, its connection closed, or it makes another reduction.
    """


def group_of(group: Any) -> Any:
    """Return a process group, that of a mesh of one dimension, or for None the default one."""
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "get_group") and getattr(group, "ndim", 1) == 1:
        return group.get_group()
    no_group = dist.GroupMember.NON_GROUP_MEMBER
    if isinstance(group, dist.ProcessGroup) or group == no_group:
        return group
    raise ValueError(
        "AdaSum: expected a process group or a mesh of one dimension, but got "
        f"{type(group).__name__} (rank {dist.get_rank()} of {dist.get_world_size()}); reductions "
        "take no ReduceOp, and other arguments by their names"
    )


class Started(NamedTuple):
    """A message, or several."""

    ranks: list[int]  # that it is from or for
    work: dist.Work


class Communicator:
    """The ranks of a process group.

    Args:
        group: the process group, or its mesh of one dimension; the default group if None.
        apart: another thread may use it at the same time as the others of the group. All ranks
            make these in the same order.

    Raises:
        ValueError: this rank is not in the group, or it is no group.
    """

    rank: int  # this rank's number in the group
    size: int
    ranks: list[int]  # their numbers in the job
    job_size: int
    hosts: tuple[int, ...] | None = None  # of each rank, if that need not be asked
    may_use_core = True  # the ranks stay, so that connections of their own pay
    _is_whole = True  # all ranks of the process group

    def __init__(self, group: Any = None, apart: bool = False):
        group = group_of(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                "AdaSum: expected a process group that this rank is in, but got one that it is "
                f"not in (rank {dist.get_rank()} of {dist.get_world_size()}); call it on the "
                "group's ranks only"
            )
        # Lanes are kept by group, and must not keep it.
        self._group: Callable[[], Any] = weakref.ref(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.job_size = dist.get_world_size()
        self.backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
        self._backends = dict(part.split(":") for part in self.backends.split(","))
        self.apart = apart
        tags = _tags.setdefault(group, itertools.count(_FIRST_TAG + 1))
        self._tag = next(tags) if apart else _FIRST_TAG

    def among(self, ranks: Sequence[int]) -> Communicator:
        """Return a communicator of some of these ranks, by their numbers here, this one included.

        All of them make it, in the same order. Messages have the tag of this one's: ranks that are
        in several of these use them in the same order.
        """
        some = copy.copy(self)
        some.rank, some.size = ranks.index(self.rank), len(ranks)
        some.ranks = [self.ranks[rank] for rank in ranks]
        some.hosts = tuple(hosts_of(self)[rank] for rank in ranks)
        some.apart, some._is_whole = True, False
        return some

    @property
    def group(self) -> Any:
        """The process group; RuntimeError if it has been destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                "AdaSum: expected a process group, but it has been destroyed; make a new state or "
                f"call for the new group (rank {self.rank} of {self.size})"
            )
        return group

    @property
    def owner(self) -> Any:
        """The owner of connections: this, if only one thread uses it, or else the process group."""
        return self if self.apart else self.group

    def gather_by(self, group: core.Group) -> None:
        """Gather tables by these ranks' core from now on, unless another one does."""
        _cores.setdefault(self.owner, group)

    @contextmanager
    def naming_ranks(self) -> Iterator[None]:
        """Raise `RanksLost` where the core does."""
        try:
            yield
        except core.Unresponsive as error:
            raise RanksLost(
                f"AdaSum: expected all {self.size} ranks of the group to reduce, but {error} "
                f"(seen by rank {self.ranks[self.rank]} of {self.job_size})"
            ) from error

    @property
    def control_device(self) -> torch.device:
        """The device on which small tables that the program reads are gathered."""
        if "cpu" in self._backends:
            return torch.device("cpu")
        kind = next(iter(self._backends))
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def on_gloo(self, device: torch.device) -> bool:
        """Return whether tensors of a device travel over Gloo; ValueError if they cannot travel."""
        if device.type not in self._backends:
            raise ValueError(
                f"AdaSum: expected tensors on {' or '.join(self._backends)}, but got some on "
                f"{device} (rank {self.rank} of {self.size}); give init_process_group() a "
                "backend for that device, such as cpu:gloo,cuda:nccl"
            )
        return self._backends[device.type] == "gloo"

    def scatter(self, flat: torch.Tensor, bounds: Sequence[int]) -> list[torch.Tensor]:
        """Send all ranks their slices, from one bound to the next; return all ranks' of this one.

        This rank's own is a view of `flat`.
        """
        slices = [flat[a:b] for a, b in pairwise(bounds)]
        count = slices[self.rank].numel()
        # Rows begin at 16 bytes, so that a device can load them wide.
        rows = flat.new_empty((self.size - 1, -(-count // 8) * 8))
        received = list(rows[:, :count].unbind())
        received.insert(self.rank, slices[self.rank])
        self._exchange(slices, received)
        return received

    def gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        """Send this rank's slice of `flat` to all ranks, and receive their slices in place."""
        self._spread([flat[a:b] for a, b in pairwise(bounds)])

    def all_gather(self, table: torch.Tensor) -> torch.Tensor:
        """Return [ranks, ...]: every rank's small table, all of one shape."""
        tables = table.new_empty((self.size, *table.shape))
        if table.is_cpu and (by_core := _cores.get(self.owner)):
            mine = table.contiguous()
            with self.naming_ranks():
                by_core.gather(mine.data_ptr(), tables.data_ptr(), mine.nbytes)
            return tables
        tables[self.rank] = table
        self._spread(list(tables.unbind()))
        return tables

    def all_gather_object(self, thing: Any) -> list[Any]:
        """Return every rank's object, which is pickled; blocks."""
        data = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        device = self.control_device
        lengths = self.all_gather(torch.tensor([len(data)], device=device))
        table = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
        table[: len(data)] = data.to(device)
        rows = self.all_gather(table).cpu()
        return [
            pickle.loads(row[:length].numpy().tobytes())
            for row, length in zip(rows, lengths.flatten().tolist(), strict=True)
        ]

    def gather_if_different(self, thing: Any) -> list[Any] | None:
        """Return every rank's object if two differ in their `repr`, else None; blocks."""
        digest = bytearray(hashlib.sha256(repr(thing).encode()).digest())
        table = torch.frombuffer(digest, dtype=torch.uint8).to(self.control_device)
        rows = self.all_gather(table)
        return None if (rows == rows[0]).all() else self.all_gather_object(thing)

    def _spread(self, parts: list[torch.Tensor]) -> None:
        """Fill the other ranks' parts, as this rank's is on all ranks."""
        mine = parts[self.rank]
        is_collective = self._is_whole and all(part.numel() for part in parts)
        if is_collective and not self.on_gloo(mine.device):
            dist.all_gather(parts, mine, group=self.group)
        else:
            self._exchange([mine] * self.size, parts)

    def _exchange(
        self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
    ) -> None:
        """Send `out[r]` to rank r and receive `into[r]` from it, for all others at once."""
        self.wait(self.start(out, into))

    def start(
        self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]
    ) -> list[Started]:
        """Start to send `out[r]` to rank r and to receive `into[r]`, for all others at once."""
        self.on_gloo(out[0].device)
        message = partial(dist.P2POp, group=self.group, tag=self._tag)
        operations = []
        for distance in range(1, self.size):
            to, of = (self.rank + distance) % self.size, self.rank - distance
            if out[to].numel():
                operations.append(message(dist.isend, out[to], self.ranks[to]))
            if into[of].numel():
                operations.append(message(dist.irecv, into[of], self.ranks[of]))
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            self._raise_unresponsive(self.ranks, error)
        one_each = len(works) == len(operations)  # NCCL has one for all of them
        peers = [[one.peer] for one in operations] if one_each else [self.ranks]
        return [*map(Started, peers, works)]

    def wait(self, messages: list[Started]) -> None:
        """Wait for started messages; an error drops the others, and with them their buffers."""
        try:
            for message in messages:
                message.work.wait()
        except RuntimeError as error:
            self._raise_unresponsive(message.ranks, error)
        finally:
            messages.clear()

    def _raise_unresponsive(self, ranks: list[int], error: RuntimeError) -> NoReturn:
        """Raise `RanksLost` for torch's error, which is of a message of one of these ranks."""
        ranks = [rank for rank in ranks if rank != self.ranks[self.rank]]
        several = len(ranks) > 1
        who = f"one of ranks {reprlib.repr(ranks)}" if several else f"rank {ranks[0]}"
        raise RanksLost(
            f"AdaSum: expected messages from all ranks, but {who} did not respond (seen by "
            f"rank {self.ranks[self.rank]} of {self.job_size}): {error}"
        ) from error

    def close(self) -> None:
        """Close the process group's connections on Gloo, so that no rank waits for this one."""
        # Gloo does so when a wait has timed out: here that for a message that nobody sends.
        nothing = torch.empty(1, device="cpu")
        for other in self.ranks:
            with suppress(RuntimeError, ValueError):  # one that has ended, and this one
                work = dist.irecv(nothing, other, self.group, _FIRST_TAG - 1)
                work.wait(timedelta(milliseconds=1))


class Sites(NamedTuple):
    """Numbers by rank."""

    hosts: tuple[int, ...]
    places: tuple[int, ...]  # whose ranks can share memory


def hosts_of(communicator: Communicator) -> tuple[int, ...]:
    """Return for each rank the number of its host. Collective on a group's first call; blocks."""
    return communicator.hosts or sites_of(communicator).hosts


def sites_of(communicator: Communicator) -> Sites:
    """Return where the ranks of the process group are; as `hosts_of`."""
    known = _sites.get(communicator.group)
    if known is None:
        name = os.environ.get("ADASUM_HVD_HOSTNAME")
        file = Path("/proc/sys/kernel/random/boot_id")
        boot = file.read_text() if file.exists() else ""
        network = Path("/proc/self/ns/net")  # in which abstract sockets can connect
        place = name, boot, network.exists() and os.readlink(network)
        # Names of hosts repeat where nobody set them, boots do not.
        host = (name, "") if name else (socket.gethostname(), boot)
        sites = zip(*communicator.all_gather_object((host, place)), strict=True)
        known = _sites[communicator.group] = Sites(*map(_numbered, sites))
    return known


def _numbered(names: Sequence[Any]) -> tuple[int, ...]:
    """Return for each name the number of its first occurrence among different ones."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def check_groups(communicator: Communicator, rule: Rule) -> None:
    """Warn if the ranks are one group, which AdaSum does not join. Collective as `hosts_of`."""
    hosts = hosts_of(communicator)
    on_host = hosts.count(hosts[communicator.rank])
    warn_of_one_group(
        rule.group_op, rule.group_size, communicator.rank, communicator.size, on_host
    )
