"""Setting Horovod's variables in ranks that another launcher has started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from horovod.runner.http.http_server import RendezvousServer

from adasum_hvd.launch import route, schedulers
from adasum_hvd.launch.assignment import RankInfo, assign, server_address
from adasum_hvd.launch.launch_context import LaunchContext, LaunchError
from adasum_hvd.launch.rendezvous import HttpStore, Rendezvous, Reply, StoreRendezvous

START_TIMEOUT_SECONDS = 300.0
# If one of them is set, a launcher or an earlier start of ours has chosen already.
_HOROVOD_VARIABLES = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
)


def timeout_seconds(environment: Mapping[str, str]) -> float:
    """Return how long ranks wait for one another to start: HOROVOD_START_TIMEOUT.

    Raises:
        LaunchError: its value is not a number.
    """
    text = environment.get("HOROVOD_START_TIMEOUT") or str(START_TIMEOUT_SECONDS)
    try:
        return float(text)
    except ValueError as error:
        raise LaunchError(
            f"HOROVOD_START_TIMEOUT: expected seconds, but got {text!r}; unset it"
        ) from error


def starts_by_itself(environment: Mapping[str, str], mpi_built: bool) -> bool:
    """Return whether Horovod can start without the variables of a scheduler.

    It can if its own variables are set, in elastic jobs, and if MPI knows the ranks.

    Args:
        environment: such as `os.environ`. HOROVOD_CONTROLLER, `gloo` or `mpi`, decides if an
            MPI launcher has started the ranks.
        mpi_built: whether Horovod was built with MPI.
    """
    controller = environment.get("HOROVOD_CONTROLLER", "").lower()
    asks_mpi = mpi_built and not controller and schedulers.by_mpi(environment)
    return (
        environment.get("HOROVOD_ELASTIC") == "1"
        or any(environment.get(name) for name in _HOROVOD_VARIABLES)
        or controller == "mpi"
        or asks_mpi
    )


def context_to_start(
    environment: Mapping[str, str], mpi_built: bool
) -> LaunchContext | None:
    """Return this process's context if Horovod needs our variables, else None.

    Args:
        environment: see :func:`starts_by_itself`.
        mpi_built: see :func:`starts_by_itself`.

    Raises:
        LaunchError: a scheduler's variables are incomplete or contradictory.
    """
    if starts_by_itself(environment, mpi_built):
        return None
    return schedulers.read(environment)


def serve(infos: Sequence[RankInfo]) -> Reply:
    """Start Horovod's rendezvous server; return its address and every rank's slot.

    The server runs as long as the process: later process sets and starts use it, too.

    Args:
        infos: of all ranks.
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
    return {
        "address": server_address(infos),
        "port": port,
        "slots": [asdict(slot) for slot in slots],
    }


def variables_of(
    reply: Reply, rank: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return Horovod's variables for a rank; keep an interface that was chosen before.

    Raises:
        LaunchError: the ranks contradict one another, or no network interface leads to rank 0.
    """
    if "error" in reply:
        raise LaunchError(f"{reply['error']} (this is rank {rank})")
    variables = {
        **reply["slots"][rank],
        "gloo_rendezvous_addr": reply["address"],
        "gloo_rendezvous_port": reply["port"],
        "controller": "gloo",
        "cpu_operations": "gloo",
    }
    if not environment.get("HOROVOD_GLOO_IFACE"):
        source = route.source_to(reply["address"])
        variables["gloo_iface"] = route.interface_with(source)
    return {f"HOROVOD_{name.upper()}": str(value) for name, value in variables.items()}


def start(context: LaunchContext, rendezvous: Rendezvous) -> None:
    """Set Horovod's variables in this process, on all ranks.

    Args:
        context: this process's.
        rendezvous: exchanges the infos of all ranks.

    Raises:
        LaunchError: a rank is missing or the ranks contradict one another (on every rank that
            has started), or no network interface leads to rank 0.

    Collective: every rank; blocks until all respond, for at most HOROVOD_START_TIMEOUT seconds.
    """
    way = route.find(context.address, timeout_seconds(os.environ))
    reply = rendezvous(RankInfo(context, socket.gethostname(), way), serve)
    os.environ.update(variables_of(reply, context.rank, os.environ))


def over_http_store(context: LaunchContext) -> Rendezvous:
    """Return a rendezvous through an HTTP store that lives as long as rank 0's process."""
    return StoreRendezvous(HttpStore(context, timeout_seconds(os.environ)))


def before_init(
    mpi_built: bool,
    rendezvous_of: Callable[[LaunchContext], Rendezvous] = over_http_store,
) -> None:
    """Set Horovod's variables, if another launcher has started this process.

    Args:
        mpi_built: whether Horovod was built with MPI.
        rendezvous_of: returns the rendezvous of a rank with this context.

    Raises:
        LaunchError: see :func:`context_to_start` and :func:`start`.

    Collective: every rank; blocks until all respond.
    """
    context = context_to_start(os.environ, mpi_built)
    if context is not None:
        start(context, rendezvous_of(context))


def after_init(size: int) -> None:
    """Check that MPI, if Horovod uses it, has found all ranks.

    Args:
        size: number of ranks that Horovod has found.

    Raises:
        LaunchError: it found one rank, and the launcher has started more.
    """
    if size > 1 or os.environ.get("HOROVOD_CONTROLLER") == "gloo":
        return
    for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        count = os.environ.get(name, "1")
        if schedulers.by_mpi(os.environ) and count != "1":
            raise LaunchError(
                f"MPI: expected {count} ranks, the value of {name}, but got 1: the MPI of this "
                "Horovod does not work with this launcher; export HOROVOD_CONTROLLER=gloo"
            )
