"""The rendezvous of ranks with torch: through its process group or its store."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from adasum_hvd.horovod.launch import launchers, variables
from adasum_hvd.horovod.launch.assignment import RankInfo
from adasum_hvd.horovod.launch.launch_context import LaunchContext, LaunchError
from adasum_hvd.horovod.launch.rendezvous import Rendezvous, Reply, through
from adasum_hvd.horovod.launch.variables import Expected


def before_init(mpi: str) -> Expected | None:
    """As `variables.before_init`, or by a process group of several ranks. Collective; blocks."""
    in_group = dist.is_available() and dist.is_initialized()
    if not in_group or dist.get_world_size() == 1:
        return variables.before_init(mpi, _over_torchs_store)
    of_group = Expected("the size of torch's process group", dist.get_world_size())
    if variables.starts_by_itself(os.environ, mpi):
        return variables.before_init(mpi) or of_group
    here = [os.environ.get("MASTER_ADDR") or socket.gethostname()]
    dist.broadcast_object_list(here, 0, _group())
    variables.set_for(_context_in_group(here[0]), _over_group)
    return of_group


@functools.cache
def _group() -> dist.ProcessGroup | None:
    """Return a group of all ranks whose objects travel from host memory. Collective."""
    if "gloo" in dist.get_backend():
        return None
    return dist.new_group(backend="gloo")


def _context_in_group(address: str) -> LaunchContext:
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = launchers.innermost(os.environ) if "RANK" in os.environ else None
    context = seen.context() if seen else None
    if context is not None and (context.rank, context.size) == (rank, size):
        return context
    local_rank = os.environ.get("LOCAL_RANK", "")
    known = int(local_rank) if local_rank.isdecimal() else None
    name = "torch.distributed"
    return LaunchContext(name, rank, size, address, local_rank=known)


def _over_group(
    mine: RankInfo, reply_to: Callable[[Sequence[RankInfo]], Reply]
) -> Reply:
    """Exchange the infos as objects of the process group."""
    infos: list[RankInfo] = [mine] * mine.context.size
    dist.all_gather_object(infos, mine, _group())
    reply = [reply_to(infos) if mine.context.rank == 0 else {}]
    dist.broadcast_object_list(reply, 0, _group())
    return reply[0]


@functools.cache
def _store_of(context: LaunchContext, port: int) -> dist.Store:
    """Return torch's store on MASTER_PORT; a later process group shares it."""
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    seconds = variables.timeout_seconds(os.environ)
    try:
        store = dist.TCPStore(
            context.address,
            port,
            is_master=context.rank == 0 and not agent_has_it,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise LaunchError(
            f"{context.scheduler}: expected rank 0's store on {context.address}, port "
            f"{port}, but it did not respond ({error}; rank {context.rank} of "
            f"{context.size}); start all ranks, with the same MASTER_ADDR and a free MASTER_PORT"
        ) from error
    return dist.PrefixStore("adasum_hvd", store)


def _over_torchs_store(context: LaunchContext) -> Rendezvous:
    if context.port is None or context.size == 1:
        return variables.over_http_store(context)
    return functools.partial(through, _store_of(context, context.port))
