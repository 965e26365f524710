"""How ranks meet that another launcher has started: by torch's process group, or its store."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from horovod.torch import mpi_ops

from adasum_hvd.launch import schedulers, start
from adasum_hvd.launch.assignment import Hello
from adasum_hvd.launch.meeting import Answer, InStore, Meeting
from adasum_hvd.launch.place import LaunchError, Place


def before_init() -> None:
    """Give Horovod its variables, if another launcher has started this process.

    A process group that is there says who is who; else the environment does.

    Raises:
        LaunchError: see :func:`adasum_hvd.launch.start.before_init`.

    Collective: every rank; blocks until all are here.
    """
    mpi_built = mpi_ops.mpi_built()
    in_group = dist.is_available() and dist.is_initialized()
    if not in_group:
        start.before_init(mpi_built, _over_torchs_store)
    elif dist.get_world_size() > 1 and not start.is_horovods(os.environ, mpi_built):
        here = [os.environ.get("MASTER_ADDR") or socket.gethostname()]
        dist.broadcast_object_list(here, 0, _group())
        start.start(_place_in_group(here[0]), _over_group)


@functools.cache
def _group() -> dist.ProcessGroup | None:
    """Return a group of all ranks whose objects travel from host memory. Collective."""
    if "gloo" in dist.get_backend():
        return None
    return dist.new_group(backend="gloo")


def _place_in_group(address: str) -> Place:
    rank, size = dist.get_rank(), dist.get_world_size()
    said = schedulers.read(os.environ) if "RANK" in os.environ else None
    if said is not None and (said.rank, said.size) == (rank, size):
        return said
    local_rank = os.environ.get("LOCAL_RANK", "")
    known = int(local_rank) if local_rank.isdecimal() else None
    return Place("torch.distributed", rank, size, address, 0, known)


def _over_group(mine: Hello, answer_to: Callable[[Sequence[Hello]], Answer]) -> Answer:
    """Meet by the process group's objects."""
    hellos: list[Hello] = [mine] * mine.place.size
    dist.all_gather_object(hellos, mine, _group())
    answer = [answer_to(hellos) if mine.place.rank == 0 else {}]
    dist.broadcast_object_list(answer, 0, _group())
    return answer[0]


@functools.cache
def _store_of(place: Place) -> dist.Store:
    """Return torch's store on MASTER_PORT; a later process group shares it."""
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    seconds = start.timeout_seconds(os.environ)
    try:
        store = dist.TCPStore(
            place.address,
            place.port,
            is_master=place.rank == 0 and not agent_has_it,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise LaunchError(
            f"{place.scheduler}: required rank 0's store on {place.address}, port "
            f"{place.port}, got none ({error}; this is rank {place.rank} of {place.size}); start "
            "all ranks, with the same MASTER_ADDR and with a free MASTER_PORT"
        ) from error
    return dist.PrefixStore("adasum_hvd", store)


def _over_torchs_store(place: Place) -> Meeting:
    return InStore(_store_of(place))
