"""Variables of Open MPI's mpirun, for a Horovod that was built without MPI."""

from __future__ import annotations

from collections.abc import Mapping

from adasum_hvd.launch.launch_context import LaunchContext, Variables

_NUMBERS = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)


def read(environment: Mapping[str, str]) -> LaunchContext | None:
    """Return the context that OMPI_COMM_WORLD_RANK, ... describe, None without them.

    Open MPI does not tell rank 0's address: jobs on several hosts need MASTER_ADDR.
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
    return LaunchContext(
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
