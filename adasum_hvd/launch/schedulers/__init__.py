"""Which scheduler has started this process, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from adasum_hvd.launch.place import Place
from adasum_hvd.launch.schedulers import kubernetes, open_mpi, pmi, slurm, torchrun

# The innermost first: torchrun runs inside of jobs of all the others, and MPI inside of Slurm's.
READERS: tuple[Callable[[Mapping[str, str]], Place | None], ...] = (
    torchrun.read,
    open_mpi.read,
    slurm.read,
    pmi.read,
    kubernetes.read,
)


def read(environment: Mapping[str, str]) -> Place | None:
    """Return where this process stands, None where nothing has started several ranks.

    Args:
        environment: such as `os.environ`.

    Raises:
        LaunchError: a scheduler's variables are there in part only, or make no sense.

    Example:
        >>> variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
        >>> read(variables | {"MASTER_PORT": "29500", "LOCAL_RANK": "1"}).rank
        1
        >>> read({"HOME": "/root"}) is None
        True
    """
    for reader in READERS:
        place = reader(environment)
        if place is not None:
            return place if place.size > 1 else None
    return None


def by_mpi(environment: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher has started this process, so that MPI knows all ranks.

    Slurm's PMI is not counted: Open MPI 5 does not speak it, and every rank would be alone.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return False
    if "OMPI_COMM_WORLD_RANK" in environment or "PMIX_RANK" in environment:
        return True
    return "PMI_RANK" in environment and "SLURM_PROCID" not in environment
