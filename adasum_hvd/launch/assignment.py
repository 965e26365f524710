"""From what all ranks say of themselves to the variables that Horovod wants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from adasum_hvd.launch.place import LaunchError, Place
from adasum_hvd.launch.route import Route


@dataclass(frozen=True)
class Hello:
    """What a rank tells the others: its place, its host's name and its way to rank 0."""

    place: Place
    hostname: str
    route: Route


@dataclass(frozen=True)
class Slot:
    """Where Horovod has a rank; as HOROVOD_RANK, ... without the prefix.

    The cross rank counts the hosts that have a rank of this local rank, as Horovod does.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str


def server_address(hellos: Sequence[Hello]) -> str:
    """Return the address under which all ranks reach rank 0's host."""
    remote = [hello.route for hello in hellos if not hello.route.stays]
    return remote[0].to if remote else "127.0.0.1"


def assign(hellos: Sequence[Hello]) -> list[Slot]:
    """Return every rank's slot, for any placement of ranks on hosts.

    Args:
        hellos: every rank's, in rank order.

    Raises:
        LaunchError: they contradict one another.
    """
    _check_ranks(hellos)
    hosts: dict[object, list[int]] = {}
    for rank, hello in enumerate(hellos):
        number = hello.place.cross_rank
        hosts.setdefault(hello.hostname if number is None else number, []).append(rank)
    local = {}
    for key, ranks in hosts.items():
        for rank, local_rank in zip(ranks, _local_ranks(hellos, ranks), strict=True):
            local[rank] = key, local_rank
    names = _names(hellos, hosts)
    slots = []
    for rank in range(len(hellos)):
        host, local_rank = local[rank]
        across = [key for key, ranks in hosts.items() if len(ranks) > local_rank]
        slots.append(
            Slot(
                rank,
                len(hellos),
                local_rank,
                len(hosts[host]),
                across.index(host),
                len(across),
                names[host],
            )
        )
    return slots


def _check_ranks(hellos: Sequence[Hello]) -> None:
    for rank, hello in enumerate(hellos):
        if (hello.place.rank, hello.place.size) != (rank, len(hellos)):
            raise LaunchError(
                f"{hello.place.scheduler}: required ranks 0 to {len(hellos) - 1} and a size of "
                f"{len(hellos)} on all of them, got rank {hello.place.rank} of "
                f"{hello.place.size} on host {hello.hostname} where rank {rank} was due; give "
                "every process the variables of one job"
            )


def _local_ranks(hellos: Sequence[Hello], ranks: Sequence[int]) -> list[int]:
    """Return the local ranks of a host's ranks: those that they have, or counted."""
    places = [hellos[rank].place for rank in ranks]
    found = [place.local_rank for place in places]
    wanted = list(range(len(ranks)))
    sizes = {place.local_size for place in places} - {None}
    if set(found) == {None} and sizes <= {len(ranks)}:
        return wanted
    known = [number for number in found if number is not None]
    if sorted(known) != wanted or not sizes <= {len(ranks)}:
        raise LaunchError(
            f"{places[0].scheduler}: required local ranks {wanted} and a local size of "
            f"{len(ranks)} of ranks {list(ranks)} on host {hellos[ranks[0]].hostname}, got "
            f"local ranks {found} and local sizes {sorted(map(str, sizes))}; give every host "
            "the variables of all its ranks, and every host a name of its own"
        )
    return known


def _names(
    hellos: Sequence[Hello], hosts: dict[object, list[int]]
) -> dict[object, str]:
    """Return the hosts' names, with a number where several have the same."""
    names = {key: hellos[ranks[0]].hostname for key, ranks in hosts.items()}
    times = Counter(names.values())
    return {
        key: name if times[name] == 1 else f"{name}.{number}"
        for number, (key, name) in enumerate(names.items())
    }
