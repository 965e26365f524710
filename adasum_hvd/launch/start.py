"""Giving Horovod its variables where another launcher has started the ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from horovod.runner.http.http_server import RendezvousServer

from adasum_hvd.launch import route, schedulers
from adasum_hvd.launch.assignment import Hello, assign, server_address
from adasum_hvd.launch.meeting import Answer, InStore, Meeting, SmallStore
from adasum_hvd.launch.place import LaunchError, Place

START_TIMEOUT_SECONDS = 300.0
# Any of them means that somebody has chosen already, if only a former start of ours.
_HOROVODS = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
)


def timeout_seconds(environment: Mapping[str, str]) -> float:
    """Return how long ranks wait for one another to start: HOROVOD_START_TIMEOUT.

    Raises:
        LaunchError: it is no number.
    """
    text = environment.get("HOROVOD_START_TIMEOUT") or str(START_TIMEOUT_SECONDS)
    try:
        return float(text)
    except ValueError as error:
        raise LaunchError(
            f"HOROVOD_START_TIMEOUT: required seconds, got {text!r}; unset it"
        ) from error


def is_horovods(environment: Mapping[str, str], mpi_built: bool) -> bool:
    """Return whether Horovod can start by itself, without looking at schedulers.

    It can where its own variables say so, in elastic jobs, and where MPI knows the ranks.

    Args:
        environment: such as `os.environ`. HOROVOD_CONTROLLER, `gloo` or `mpi`, decides where an
            MPI launcher has started the ranks.
        mpi_built: whether Horovod could ask MPI.
    """
    controller = environment.get("HOROVOD_CONTROLLER", "").lower()
    asks_mpi = mpi_built and not controller and schedulers.by_mpi(environment)
    return (
        environment.get("HOROVOD_ELASTIC") == "1"
        or any(environment.get(name) for name in _HOROVODS)
        or controller == "mpi"
        or asks_mpi
    )


def place_to_start(environment: Mapping[str, str], mpi_built: bool) -> Place | None:
    """Return where this process stands if it is for us to start Horovod, else None.

    Args:
        environment: see :func:`is_horovods`.
        mpi_built: see :func:`is_horovods`.

    Raises:
        LaunchError: a scheduler's variables are there in part only, or make no sense.
    """
    if is_horovods(environment, mpi_built):
        return None
    return schedulers.read(environment)


def serve(hellos: Sequence[Hello]) -> Answer:
    """Start Horovod's rendezvous server and return what all ranks need to know.

    The server goes on as long as the process: process sets to come and later starts use it, too.

    Args:
        hellos: every rank's.
    """
    try:
        slots = assign(hellos)
    except LaunchError as error:
        return {"error": str(error)}
    server = RendezvousServer()
    port = server.start()
    # Told of the slots, it would empty a scope when it has counted them, and sometimes counts
    # wrong, so that a later start finds former addresses; else every rank takes away its own.
    server.init([])
    return {
        "address": server_address(hellos),
        "port": port,
        "slots": [asdict(slot) for slot in slots],
    }


def variables_of(
    answer: Answer, rank: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return Horovod's variables for a rank; an interface that was chosen before stays.

    Raises:
        LaunchError: the ranks contradict one another, or no network interface leads to rank 0.
    """
    if "error" in answer:
        raise LaunchError(f"{answer['error']} (this is rank {rank})")
    variables = {
        **answer["slots"][rank],
        "gloo_rendezvous_addr": answer["address"],
        "gloo_rendezvous_port": answer["port"],
        "controller": "gloo",
        "cpu_operations": "gloo",
    }
    if not environment.get("HOROVOD_GLOO_IFACE"):
        source = route.source_to(answer["address"])
        variables["gloo_iface"] = route.interface_with(source)
    return {f"HOROVOD_{name.upper()}": str(value) for name, value in variables.items()}


def start(place: Place, meet: Meeting) -> None:
    """Set Horovod's variables in this process, on all ranks.

    Args:
        place: where this process stands.
        meet: how it tells the others.

    Raises:
        LaunchError: the ranks do not come together, or contradict one another; on all that
            came. Or no network interface leads to rank 0.

    Collective: every rank; blocks until all are here, for HOROVOD_START_TIMEOUT seconds.
    """
    way = route.find(place.address, timeout_seconds(os.environ))
    answer = meet(Hello(place, socket.gethostname(), way), serve)
    os.environ.update(variables_of(answer, place.rank, os.environ))


def over_small_store(place: Place) -> Meeting:
    """Return a meeting in a small store on rank 0, which goes on as long as the process."""
    return InStore(SmallStore(place, timeout_seconds(os.environ)))


def before_init(
    mpi_built: bool, meeting_of: Callable[[Place], Meeting] = over_small_store
) -> None:
    """Give Horovod its variables, if the environment is another launcher's.

    Args:
        mpi_built: whether Horovod could ask MPI.
        meeting_of: how ranks meet whose places are known.

    Raises:
        LaunchError: see :func:`place_to_start` and :func:`start`.

    Collective: every rank; blocks until all are here.
    """
    place = place_to_start(os.environ, mpi_built)
    if place is not None:
        start(place, meeting_of(place))


def after_init(size: int) -> None:
    """Check that MPI, if it was asked, has found the others.

    Args:
        size: how many ranks Horovod has found.

    Raises:
        LaunchError: this one alone, where there are more.
    """
    if size > 1 or os.environ.get("HOROVOD_CONTROLLER") == "gloo":
        return
    for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        count = os.environ.get(name, "1")
        if schedulers.by_mpi(os.environ) and count != "1":
            raise LaunchError(
                f"MPI: required {count} ranks as {name} says, got 1: the MPI that Horovod was "
                "built with does not speak with this launcher; export HOROVOD_CONTROLLER=gloo"
            )
