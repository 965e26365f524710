"""Setting Horovod's variables in ranks that another launcher has started."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from horovod.runner.http.http_server import RendezvousServer

from adasum_hvd.horovod.launch import launchers, route
from adasum_hvd.horovod.launch.assignment import RankInfo, assign, server_address
from adasum_hvd.horovod.launch.launch_context import LaunchContext, LaunchError
from adasum_hvd.horovod.launch.rendezvous import HttpStore, Rendezvous, Reply, through

START_TIMEOUT_SECONDS = 300.0


class Expected(NamedTuple):
    """A number of ranks and its source, for messages; None if the source does not tell it."""

    source: str
    size: int | None


def timeout_seconds(environment: Mapping[str, str]) -> float:
    """Return how long ranks wait for one another to start: HOROVOD_START_TIMEOUT."""
    text = environment.get("HOROVOD_START_TIMEOUT") or str(START_TIMEOUT_SECONDS)
    try:
        return float(text)
    except ValueError as error:
        raise LaunchError(
            f"HOROVOD_START_TIMEOUT: expected seconds, but got {text!r}; unset it"
        ) from error


def starts_by_itself(environment: Mapping[str, str], mpi: str) -> bool:
    """Return whether Horovod finds the ranks without our variables.

    It does if its own variables are set, and if an MPI of its family (`preflight.mpi_of`) knows the
    ranks, unless HOROVOD_CONTROLLER decides.
    """
    seen = launchers.innermost(environment)
    if seen is not None and seen.launcher is launchers.HOROVOD:
        return True
    controller = environment.get("HOROVOD_CONTROLLER", "").lower()
    read_by_mpi = controller == "mpi" or (seen is not None and seen.is_read_by(mpi))
    return bool(mpi) and controller != "gloo" and read_by_mpi


def context_to_start(environment: Mapping[str, str], mpi: str) -> LaunchContext | None:
    """Return this process's context if Horovod needs our variables, else None."""
    if starts_by_itself(environment, mpi):
        return None
    if seen := launchers.innermost(environment):
        return seen.context()
    # Without our variables, Horovod would send by MPI, which it has not started.
    asks_gloo = environment.get("HOROVOD_CONTROLLER", "").lower() == "gloo"
    return LaunchContext("one process", 0, 1, "127.0.0.1") if asks_gloo else None


def serve(infos: Sequence[RankInfo]) -> Reply:
    """Start Horovod's rendezvous server; return its address and every rank's slot.

    The server runs as long as the process: later process sets and starts use it, too.
    """
    try:
        slots = assign(infos)
    except LaunchError as error:
        return {"error": str(error)}
    server = RendezvousServer()
    port = server.start()
    # With the slots, the server would clear a scope after it has counted them. It sometimes
    # counts wrong, and a later start then finds old addresses. Without, each rank deletes its own.
    server.init([])
    listed = [asdict(slot) for slot in slots]
    return {"address": server_address(infos), "port": port, "slots": listed}


def variables_of(
    reply: Reply, rank: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return Horovod's variables for a rank; keep an interface that was chosen before."""
    if "error" in reply:
        raise LaunchError(f"{reply['error']} (this is rank {rank})")
    variables = {
        **reply["slots"][rank],
        "gloo_rendezvous_addr": reply["address"],
        "gloo_rendezvous_port": reply["port"],
        "controller": "gloo",
        "cpu_operations": "gloo",
        "elastic": 0,
    }
    if not environment.get("HOROVOD_GLOO_IFACE"):
        source = route.source_to(reply["address"])
        variables["gloo_iface"] = route.interface_with(source)
    return {f"HOROVOD_{name.upper()}": str(value) for name, value in variables.items()}


def set_for(context: LaunchContext, rendezvous: Rendezvous) -> None:
    """Set Horovod's variables in this process; a missing rank is an error on all that have started.

    Collective: every rank; blocks until all respond, for at most HOROVOD_START_TIMEOUT seconds.
    """
    way = route.find(context.address, timeout_seconds(os.environ))
    reply = rendezvous(RankInfo(context, socket.gethostname(), way), serve)
    os.environ.update(variables_of(reply, context.rank, os.environ))


@functools.cache
def over_http_store(context: LaunchContext) -> Rendezvous:
    """Return a rendezvous through an HTTP store that lives as long as rank 0's process."""
    if context.size == 1:
        return lambda mine, reply_to: reply_to([mine])
    store = HttpStore(context, timeout_seconds(os.environ))
    return functools.partial(through, store)


def before_init(
    mpi: str, rendezvous_of: Callable[[LaunchContext], Rendezvous] = over_http_store
) -> Expected | None:
    """Set Horovod's variables, if another launcher has started this process.

    Returns the number of ranks that Horovod must find, None if no launcher is seen.
    Collective: every rank; blocks until all respond.
    """
    context = context_to_start(os.environ, mpi)
    if context is not None:
        set_for(context, rendezvous_of(context))
    seen = launchers.innermost(os.environ)
    if seen is None or os.environ.get("HOROVOD_ELASTIC") == "1":
        return None  # an elastic job may have other ranks by now
    size = os.environ.get(seen.launcher.size)
    if size is None and seen.launcher is launchers.HOROVOD:
        return None
    source = f"the value of {seen.launcher.size} ({seen.launcher.name})"
    return Expected(source, int(size) if size and size.isdecimal() else None)


def check_size(
    size: int, expected: Expected | None, comm: Any = None, process_sets: Any = None
) -> None:
    """Raise LaunchError on every rank if Horovod has found other ranks than the launcher's."""
    if expected is None or comm is not None or size == expected.size:
        return
    if expected.size is None and size > 1:
        return
    count = "a number of" if expected.size is None else expected.size
    raise LaunchError(
        f"hvd.init(): expected {count} ranks, {expected.source}, but got hvd.size() {size}: the "
        "MPI of this Horovod does not work with this launcher; export HOROVOD_CONTROLLER=gloo"
    )
