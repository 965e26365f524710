"""Reductions by the core, for CPU tensors: docs/distributed.md, "The core"."""

from __future__ import annotations

import ctypes
import os
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from adasum_hvd import __version__, core
from adasum_hvd.base.options import turned_off
from adasum_hvd.distributed.checks import is_plain
from adasum_hvd.distributed.coefficients import symmetric
from adasum_hvd.distributed.communicator import (
    Communicator,
    Started,
    hosts_of,
    sites_of,
)
from adasum_hvd.distributed.exchange import Shards
from adasum_hvd.distributed.rules import Coefficients, Rule, checked
from adasum_hvd.monitor.statistics import TensorRecord, width

SETTING = "ADASUM_HVD_CORE"  # turned off: torch's operations
LIMIT = "of the process group's timeout"
_LEAST_BYTES = 64 << 10  # of a bucket that is worth a mapping of its own


class Choice(NamedTuple):
    """Groups of the core, of these ranks and of those with other shards; or why there are none."""

    groups: tuple[core.Group, ...] = ()
    why_not: str = ""


# By communicator that only one thread uses, or else by process group; then by how a group joins
# its ranks, and by the ranks that hold other shards.
_Key = tuple[str, int, tuple[Communicator, ...]]
_chosen: weakref.WeakKeyDictionary[Any, dict[_Key, Choice]]
_chosen = weakref.WeakKeyDictionary()


def _known(communicator: Communicator) -> dict[_Key, Choice]:
    return _chosen.setdefault(communicator.owner, {})


def _joining(communicator: Communicator, rule: Rule) -> tuple[str, int]:
    """Return the core's arguments for a rule; a mean is that of one group."""
    if rule.kind == "mean":
        return "average", communicator.size
    return rule.group_op, rule.group_size


def choose(
    communicator: Communicator, rule: Rule, shards: Sequence[Shards] = ()
) -> Choice:
    """Return the core's groups, or why there are none; the same on all ranks.

    Collective on the first call, the ranks of the shards included; blocks then.
    """
    others = tuple(one.communicator for one in shards)
    key, known = (*_joining(communicator, rule), others), _known(communicator)
    if key not in known:
        known[key] = (
            _agree_with_shards(communicator, rule, others)
            if others
            else _agree(communicator, rule)
        )
    return known[key]


def chosen(communicator: Communicator, rule: Rule) -> Choice:
    """Return what these ranks have agreed on before, if they have."""
    return _known(communicator).get((*_joining(communicator, rule), ())) or Choice()


def described(communicator: Communicator, rule: Rule) -> str:
    """Return how tensors of this host are reduced, and if not by the core, why."""
    choice = chosen(communicator, rule)
    if choice.groups:
        return f"reduced by the core ({choice.groups[0]})"
    if choice.why_not:
        return f"reduced by torch's operations ({choice.why_not})"
    return "reduced by the core or by torch, which the first reduction finds out"


def _agree_with_shards(
    communicator: Communicator, rule: Rule, others: Sequence[Communicator]
) -> Choice:
    """Choose the core for all shards of a tensor, or for none."""
    choices = [choose(communicator, rule)]
    choices += [choose(one, Rule("adasum")) for one in others]
    problem = next((one.why_not for one in choices if one.why_not), "")
    for one in (communicator, *others):
        problem = next(filter(None, one.all_gather_object(problem)), "")
    groups = chain.from_iterable(one.groups for one in choices)
    return Choice(why_not=problem) if problem else Choice((*groups,))


def _agree(communicator: Communicator, rule: Rule) -> Choice:
    group, why = None, turned_off(SETTING) or core.why_missing()
    hosts, places = hosts_of(communicator), sites_of(communicator).places
    network = _Messages(communicator) if len(set(places)) > 1 else None
    if network and not communicator.on_gloo(torch.device("cpu")):
        why = why or "the ranks are on several hosts, and not on Gloo"
    if not why:
        try:
            group = core.Group(
                communicator.rank, hosts, places, communicator.ranks,
                *_joining(communicator, rule), _timeout_seconds(communicator.group), LIMIT, network,
            )  # fmt: skip
        except core.CoreError as error:
            why = str(error)
    version = core.ABI, __version__
    name = group and (group.name, group.nonce)
    everyone = communicator.all_gather_object((why, version, name))
    whys, versions, names = zip(*everyone, strict=True)
    problem = _first(whys, communicator)
    if not problem and len(set(versions)) > 1:
        problem = "the ranks have different versions"
    if group is None or problem:
        return Choice(why_not=problem)
    try:
        group.connect(*zip(*names, strict=True))
    except core.CoreError as error:
        why = str(error)
    if problem := _first(communicator.all_gather_object(why), communicator):
        return Choice(why_not=problem)
    if not network:
        communicator.gather_by(group)
    return Choice((group,))


class _Messages:
    """Messages of the core to ranks on other hosts."""

    def __init__(self, communicator: Communicator):
        # A copy, because what owns the group's connections must not be kept by them.
        self._communicator = copy(communicator)
        self._started: deque[list[Started]] = deque()

    def start(self, messages: NDArray[Any]) -> None:
        out, into = (
            [*map(_bytes_at, messages[way].tolist(), messages[f"{way}_bytes"].tolist())]
            for way in ("send", "receive")
        )
        self._started.append(self._communicator.start(out, into))

    def wait(self) -> None:
        self._communicator.wait(self._started.popleft())

    def abort(self) -> None:
        self._started.clear()
        self._communicator.close()


def _bytes_at(address: int, count: int) -> torch.Tensor:
    if not count:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = (ctypes.c_char * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _first(problems: Sequence[str], communicator: Communicator) -> str:
    named = zip(communicator.ranks, problems, strict=True)
    return next((f"{why} (rank {rank})" for rank, why in named if why), "")


def _timeout_seconds(group: Any) -> float:
    timeout = dist.default_pg_timeout
    # A backend without options, or of another torch.
    with suppress(AttributeError, RuntimeError):
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds()


class Reducer(NamedTuple):
    """Reduces tensors by the core; raises RanksLost, and what the rule raises."""

    group: core.Group
    communicator: Communicator
    rule: Coefficients | None  # None: AdaSum, or a mean
    shards: Sequence[tuple[core.Group, Sequence[int]]]  # and the tensors that have them

    def reduce_flat(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        at: int | None = None,
        observe: bool = False,
    ) -> TensorRecord | None:
        """Reduce concatenated tensors in place; arguments as of `reduction.reduce_buffer`."""
        table: NDArray[Any] = _table(tuple(sizes), flat.element_size()).copy()
        table["input"] += flat.data_ptr() if at is None else at
        table["output"] = table["input"]
        record = None
        if observe:
            ranks = (self.communicator.size,)
            levels = self.group.levels if self.rule is None else ranks
            rows = np.zeros((len(sizes), width(levels)))
            places = rows.strides[0] * np.arange(len(rows))
            table["observation"] = rows.ctypes.data + places
            record = TensorRecord(0, levels, rows.ravel())
        self._reduce(table, flat.dtype)
        return record

    def reduce_each(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reduce tensors of one dtype in place, each where it is."""
        dense = [t if is_plain(t) else t.clone(
            memory_format=torch.contiguous_format) for t in tensors]  # fmt: skip
        table: NDArray[Any] = np.zeros(len(dense), core.TENSOR)
        table["input"] = table["output"] = [tensor.data_ptr() for tensor in dense]
        table["elements"] = [tensor.numel() for tensor in dense]
        self._reduce(table, tensors[0].dtype)
        for tensor, reduced in zip(tensors, dense, strict=True):
            if tensor is reduced:
                torch.autograd.graph.increment_version(tensor)
            else:
                tensor.copy_(reduced)

    def _reduce(self, table: NDArray[Any], dtype: torch.dtype) -> None:
        name, rule = str(dtype).removeprefix("torch."), self.rule
        call = None if rule is None else partial(_coefficients, rule)
        with self.communicator.naming_ranks():
            self.group.reduce(table, name, self.shards, call)


def _coefficients(
    rule: Coefficients, grams: NDArray[np.float64]
) -> NDArray[np.float64]:
    gram = symmetric(torch.from_numpy(grams))
    return checked(rule(gram), gram).detach().numpy()


@lru_cache(maxsize=1024)
def _table(sizes: tuple[int, ...], element_bytes: int) -> NDArray[Any]:
    """Return the table of a flat buffer at address 0."""
    table: NDArray[Any] = np.zeros(len(sizes), core.TENSOR)
    table["elements"] = sizes
    table["input"][1:] = np.cumsum(table["elements"][:-1]) * element_bytes
    return table


class SharedBuckets:
    """The buckets of one DDP model, moved to memory that the ranks share: nothing is copied."""

    def __init__(self, communicator: Communicator, rule: Rule) -> None:
        self._ranks = communicator, rule
        # By address; kept, as DDP does anyway, so that no other tensor gets the address.
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        # Those that came once: DDP's final buckets come again, those of fp16_compress_wrapper not.
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._copies = False  # the system has no more such memory

    def address(self, flat: torch.Tensor) -> int | None:
        """Return the core's address of a bucket, which is moved on the second call.

        None if the core does not reduce it, or if it cannot be moved; this rank then copies, and
        the others need not know.
        """
        if not (flat.is_cpu and flat.layout is torch.strided):
            return None
        storage = flat.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            return None
        if not chosen(*self._ranks).groups:
            return None
        begin, is_long = storage.data_ptr(), storage.nbytes() >= _LEAST_BYTES
        if begin not in self._storages and is_long and not self._copies:
            try:
                begin = self._move(storage)
            except RuntimeError as error:  # of torch's or the core's
                self._copies = True
                warnings.warn(
                    f"adasum_hook: expected memory that the ranks share, but got: {error}; "
                    "leave more of it to the job, or gradients are copied in each step",
                    stacklevel=2,
                )
        if begin not in self._storages:
            return None
        return self._storages[begin][1] + flat.data_ptr() - begin

    # `share_memory_` gives the storage a mapping of its own, which all views of it follow. The
    # core puts its own memory under that mapping, and torch's file is emptied.
    def _move(self, storage: torch.UntypedStorage) -> int:
        storage.share_memory_()
        begin = storage.data_ptr()
        other = core.share(begin, storage.nbytes())
        # torch keeps the storage's Python object as long as the storage.
        weakref.finalize(storage, core.free, other).atexit = False
        self._storages[begin] = storage, other
        os.ftruncate(storage._share_fd_cpu_()[0], 0)
        return begin
