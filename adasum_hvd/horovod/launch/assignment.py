"""From the `RankInfo` of all ranks to the variables that Horovod reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from adasum_hvd.horovod.launch.launch_context import LaunchContext, LaunchError
from adasum_hvd.horovod.launch.route import Route


@dataclass(frozen=True)
class RankInfo:
    """A rank's message to the others: its context, host name and route to rank 0."""

    context: LaunchContext
    hostname: str
    route: Route


@dataclass(frozen=True)
class Slot:
    """The place of a rank in Horovod's job: HOROVOD_RANK, ... without the prefix.

    The cross rank counts the hosts that have a rank with this local rank, as Horovod does.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str


def server_address(infos: Sequence[RankInfo]) -> str:
    """Return the address by which all ranks reach rank 0's host."""
    remote = [info.route for info in infos if not info.route.stays]
    return remote[0].to if remote else "127.0.0.1"


def assign(infos: Sequence[RankInfo]) -> list[Slot]:
    """Return every rank's slot, for any placement; raise LaunchError if ranks contradict others."""
    _check_ranks(infos)
    hosts: dict[object, list[int]] = {}
    for rank, info in enumerate(infos):
        number = info.context.cross_rank
        hosts.setdefault(info.hostname if number is None else number, []).append(rank)
    local = {}
    for key, ranks in hosts.items():
        for rank, local_rank in zip(ranks, _local_ranks(infos, ranks), strict=True):
            local[rank] = key, local_rank
    names = _names(infos, hosts)
    slots = []
    for rank in range(len(infos)):
        host, local_rank = local[rank]
        across = [key for key, ranks in hosts.items() if len(ranks) > local_rank]
        here = local_rank, len(hosts[host]), across.index(host), len(across)
        slots.append(Slot(rank, len(infos), *here, names[host]))
    return slots


def _check_ranks(infos: Sequence[RankInfo]) -> None:
    for rank, info in enumerate(infos):
        if (info.context.rank, info.context.size) != (rank, len(infos)):
            raise LaunchError(
                f"{info.context.scheduler}: expected ranks 0 to {len(infos) - 1} and a size of "
                f"{len(infos)} on all of them, but got rank {info.context.rank} of "
                f"{info.context.size} on host {info.hostname} in place of rank {rank}; give "
                "every process the variables of one job"
            )


def _local_ranks(infos: Sequence[RankInfo], ranks: Sequence[int]) -> list[int]:
    """Return the local ranks of a host's ranks: as the launcher set them, else counted."""
    contexts = [infos[rank].context for rank in ranks]
    actual = [context.local_rank for context in contexts]
    expected = list(range(len(ranks)))
    sizes = {context.local_size for context in contexts} - {None}
    if set(actual) == {None} and sizes <= {len(ranks)}:
        return expected
    known = [number for number in actual if number is not None]
    if sorted(known) != expected or not sizes <= {len(ranks)}:
        raise LaunchError(
            f"{contexts[0].scheduler}: expected local ranks {expected} and a local size "
            f"of {len(ranks)} for ranks {list(ranks)} on host {infos[ranks[0]].hostname}, but "
            f"got local ranks {actual} and local sizes {sorted(map(str, sizes))}; give every "
            "host the variables of all its ranks, and every host its own name"
        )
    return known


def _names(
    infos: Sequence[RankInfo], hosts: dict[object, list[int]]
) -> dict[object, str]:
    """Return the hosts' names; equal names get a number."""
    names = {key: infos[ranks[0]].hostname for key, ranks in hosts.items()}
    times = Counter(names.values())
    return {
        key: name if times[name] == 1 else f"{name}.{number}"
        for number, (key, name) in enumerate(names.items())
    }
