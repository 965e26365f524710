"""Variables of PMI (MPICH's and Intel MPI's mpiexec) and of PMIx, if no other reader applies."""

from __future__ import annotations

from collections.abc import Mapping

from adasum_hvd.launch.launch_context import LaunchContext, Variables

_NUMBERS = ("PMI_RANK", "PMI_SIZE")


def read(environment: Mapping[str, str]) -> LaunchContext | None:
    """Return the context that PMI_RANK or PMIX_RANK describes, None without them.

    PMIx does not tell the number of ranks, which WORLD_SIZE then must. Neither tells rank 0's
    address: jobs on several hosts need MASTER_ADDR.
    """
    if not {"PMI_RANK", "PMIX_RANK"} & environment.keys():
        return None
    rank = "PMI_RANK" if "PMI_RANK" in environment else "PMIX_RANK"
    size = "PMI_SIZE" if "PMI_SIZE" in environment else "WORLD_SIZE"
    variables = Variables(
        "PMI", environment, "export them in addition to those of mpiexec or prterun"
    )
    variables.require((rank, size))
    local_size = variables.number_if_any("MPI_LOCALNRANKS")
    one_host = local_size == variables.number(size)
    return LaunchContext(
        "PMI",
        rank=variables.number(rank),
        size=variables.number(size),
        address=environment.get("MASTER_ADDR", "127.0.0.1")
        if one_host
        else variables.text("MASTER_ADDR"),
        port=variables.port(environment.get("PMIX_NAMESPACE", "")),
        local_rank=variables.number_if_any("MPI_LOCALRANKID"),
        local_size=local_size,
    )
