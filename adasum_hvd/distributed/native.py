"""Reductions by the core, for CPU tensors of ranks that share a host.

The ranks agree once per communicator: all of them use the core, or none. Then this engine's
results have the bits of Horovod's op on such ranks. Elsewhere torch's operations reduce
(`reduction.py`), which round at other places.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from adasum_hvd import __version__, core
from adasum_hvd.distributed.communicator import Communicator, Unresponsive
from adasum_hvd.distributed.rules import Rule
from adasum_hvd.distributed.topology import boot_id, hosts_of
from adasum_hvd.monitor.statistics import width

SETTING = "ADASUM_HVD_CORE"  # "off": torch's operations
LIMIT = "of the process group's timeout"


class Rows(NamedTuple):
    """A record for a monitor: see `monitor.statistics.TensorRecord`."""

    sizes: tuple[int, ...]
    rows: NDArray[np.float64]  # [tensors, width(sizes)]


class _Choice(NamedTuple):
    """A group of the core, or why there is none."""

    group: core.Group | None
    why_not: str


# By communicator that only one thread uses, or else by process group; then by the rule's groups.
_chosen: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], _Choice]]
_chosen = weakref.WeakKeyDictionary()


def _known(communicator: Communicator) -> dict[tuple[str, int], _Choice]:
    owner = communicator if communicator.apart else communicator.group
    return _chosen.setdefault(owner, {})


def choose(communicator: Communicator, rule: Rule) -> _Choice:
    """Return the core's group of these ranks, or why they have none; the same on all ranks.

    Collective on the first call; blocks then.
    """
    key = (rule.group_op, rule.group_size)
    known = _known(communicator)
    if key not in known:
        known[key] = _agree(communicator, rule)
    return known[key]


def chosen(communicator: Communicator, rule: Rule) -> _Choice | None:
    """Return what these ranks have agreed on before, if they have."""
    return _known(communicator).get((rule.group_op, rule.group_size))


def described(communicator: Communicator, rule: Rule) -> str:
    """Return how tensors of this host are reduced, and if not by the core, why."""
    choice = chosen(communicator, rule)
    if choice is None:
        return "reduced by the core or by torch, which the first reduction finds out"
    if choice.group is None:
        return f"reduced by torch's operations ({choice.why_not})"
    return f"reduced by the core ({choice.group})"


def reduces(
    tensor: torch.Tensor, communicator: Communicator, rule: Rule, shards: Sequence[Any]
) -> bool:
    """Return whether the core can reduce a tensor; the same on all ranks."""
    whole = tensor.is_cpu and rule.kind == "adasum" and not shards
    return whole and communicator.may_use_core


def _agree(communicator: Communicator, rule: Rule) -> _Choice:
    group, why = None, core.why_missing()
    if os.environ.get(SETTING) == "off":
        why = f"{SETTING}=off"
    hosts = hosts_of(communicator)
    if not why:
        try:
            group = core.Group(
                communicator.rank, hosts, communicator.ranks, rule.group_op, rule.group_size,
                _timeout_seconds(communicator.group), LIMIT,
            )  # fmt: skip
        except core.CoreError as error:
            why = str(error)
    here = (group.name, group.nonce) if group else (0, 0)
    everyone = communicator.all_gather_object(
        (why, (_machine(), core.ABI, __version__), here)
    )
    problem = _first([why for why, _, _ in everyone], communicator)
    if not problem and len({place for _, place, _ in everyone}) > 1:
        problem = "the ranks are on several machines, or have other versions"
    if group is None or problem:
        return _Choice(None, problem)
    try:
        names, nonces = zip(*(here for _, _, here in everyone), strict=True)
        group.connect(names, nonces)
    except core.CoreError as error:
        why = str(error)
    problems = communicator.all_gather_object(why)
    if problem := _first(problems, communicator):
        return _Choice(None, problem)
    group.confirm([True] * communicator.size)
    return _Choice(group, "")


def _first(problems: Sequence[str], communicator: Communicator) -> str:
    named = zip(communicator.ranks, problems, strict=True)
    return next((f"{why} (rank {rank})" for rank, why in named if why), "")


def _machine() -> tuple[str, str]:
    """Return what processes have in common that can connect by abstract sockets."""
    network = Path("/proc/self/ns/net")
    return boot_id(), os.readlink(network) if network.exists() else ""


def _timeout_seconds(group: Any) -> float:
    """Return the timeout of a process group's messages of CPU tensors."""
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (
        AttributeError,
        RuntimeError,
    ):  # a backend without options, or of another torch
        timeout = dist.default_pg_timeout
    return timeout.total_seconds()


def reduce_flat(
    group: core.Group,
    flat: torch.Tensor,
    sizes: Sequence[int],
    communicator: Communicator,
    at: int | None = None,
    observe: bool = False,
) -> Rows | None:
    """Reduce concatenated tensors in place.

    Args:
        group: of the core.
        flat: one-dimensional and contiguous.
        sizes: elements of each tensor.
        communicator: the ranks.
        at: another address of `flat`'s memory, which the ranks share.
        observe: return rows for a monitor.

    Raises:
        Unresponsive: a rank has ended, or did not respond within the group's timeout.
    """
    table: NDArray[Any] = _table(tuple(sizes), flat.element_size()).copy()
    table["input"] += flat.data_ptr() if at is None else at
    table["output"] = table["input"]
    rows = None
    if observe:
        rows = Rows(group.levels, np.zeros((len(sizes), width(group.levels))))
        step = rows.rows.strides[0]
        table["observation"] = rows.rows.ctypes.data + step * np.arange(len(sizes))
    _reduce(group, table, flat.dtype, communicator)
    return rows


def reduce_each(
    group: core.Group, tensors: Sequence[torch.Tensor], communicator: Communicator
) -> None:
    """Reduce tensors of one dtype in place, each where it is; as :func:`reduce_flat`."""
    dense = [t if t.is_contiguous() and not t.is_neg() else t.clone(
        memory_format=torch.contiguous_format) for t in tensors]  # fmt: skip
    table: NDArray[Any] = np.zeros(len(dense), core.TENSOR)
    table["input"] = table["output"] = [tensor.data_ptr() for tensor in dense]
    table["elements"] = [tensor.numel() for tensor in dense]
    _reduce(group, table, tensors[0].dtype, communicator)
    for tensor, reduced in zip(tensors, dense, strict=True):
        if tensor is reduced:
            torch.autograd.graph.increment_version(tensor)
        else:
            tensor.copy_(reduced)


@lru_cache(maxsize=1024)
def _table(sizes: tuple[int, ...], element_bytes: int) -> NDArray[Any]:
    """Return the table of a flat buffer at address 0."""
    table: NDArray[Any] = np.zeros(len(sizes), core.TENSOR)
    table["elements"] = sizes
    table["input"][1:] = np.cumsum(table["elements"][:-1]) * element_bytes
    return table


def _reduce(
    group: core.Group,
    table: NDArray[Any],
    dtype: torch.dtype,
    communicator: Communicator,
) -> None:
    try:
        group.reduce(table, str(dtype).removeprefix("torch."))
    except core.Unresponsive as error:
        here = communicator.ranks[communicator.rank]
        raise Unresponsive(
            f"AdaSum: expected all {communicator.size} ranks of the group to reduce, but {error} "
            f"(seen by rank {here} of {communicator.job_size})"
        ) from error
