"""The variables of Open MPI's mpirun, for a Horovod that was built without MPI."""

from __future__ import annotations

from collections.abc import Mapping

from adasum_hvd.launch.place import Place, Variables

_NUMBERS = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)


def read(environment: Mapping[str, str]) -> Place | None:
    """Return what OMPI_COMM_WORLD_RANK, ... say, None without them.

    Open MPI does not say where rank 0 is: on more than one host MASTER_ADDR must.
    """
    if not set(_NUMBERS) & environment.keys():
        return None
    variables = Variables(
        "Open MPI",
        environment,
        "start with mpirun; across hosts with -x MASTER_ADDR=...",
    )
    variables.require(_NUMBERS)
    rank, size, local_rank, local_size = map(variables.number, _NUMBERS)
    one_host = size == local_size
    return Place(
        "Open MPI",
        rank=rank,
        size=size,
        address=environment.get("MASTER_ADDR", "127.0.0.1")
        if one_host
        else variables.text("MASTER_ADDR"),
        port=variables.port(environment.get("PMIX_NAMESPACE", "")),
        local_rank=local_rank,
        local_size=local_size,
    )
