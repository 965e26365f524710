"""PMI's variables, of MPICH's and Intel MPI's mpiexec, and PMIx's, where nothing says more."""

from __future__ import annotations

from collections.abc import Mapping

from adasum_hvd.launch.place import Place, Variables

_NUMBERS = ("PMI_RANK", "PMI_SIZE")


def read(environment: Mapping[str, str]) -> Place | None:
    """Return what PMI_RANK or PMIX_RANK say, None without them.

    PMIx's variables do not tell the number of ranks: PMI_SIZE or WORLD_SIZE must. Neither says
    where rank 0 is: on more than one host MASTER_ADDR must.
    """
    if not {"PMI_RANK", "PMIX_RANK"} & environment.keys():
        return None
    rank = "PMI_RANK" if "PMI_RANK" in environment else "PMIX_RANK"
    size = "PMI_SIZE" if "PMI_SIZE" in environment else "WORLD_SIZE"
    variables = Variables(
        "PMI", environment, "export them beside what mpiexec or prterun sets"
    )
    variables.require((rank, size))
    local_size = variables.number_if_any("MPI_LOCALNRANKS")
    one_host = local_size == variables.number(size)
    return Place(
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
