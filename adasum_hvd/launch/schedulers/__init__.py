"""The scheduler that has started this process, and the process's context."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from adasum_hvd.launch.launch_context import LaunchContext
from adasum_hvd.launch.schedulers import kubernetes, open_mpi, pmi, slurm, torchrun

# The innermost first: torchrun runs inside jobs of all the others, and MPI inside Slurm's.
READERS: tuple[Callable[[Mapping[str, str]], LaunchContext | None], ...] = (
    torchrun.read,
    open_mpi.read,
    slurm.read,
    pmi.read,
    kubernetes.read,
)


def read(environment: Mapping[str, str]) -> LaunchContext | None:
    """Return this process's context, None if no launcher has started several ranks.

    Args:
        environment: such as `os.environ`.

    Raises:
        LaunchError: a scheduler's variables are incomplete or contradictory.

    Example:
        >>> variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
        >>> read(variables | {"MASTER_PORT": "29500", "LOCAL_RANK": "1"}).rank
        1
        >>> read({"HOME": "/root"}) is None
        True
    """
    for reader in READERS:
        context = reader(environment)
        if context is not None:
            return context if context.size > 1 else None
    return None


def by_mpi(environment: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher has started this process, so that MPI knows all ranks.

    Slurm's PMI does not count: Open MPI 5 does not support it, and every rank would be alone.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return False
    if "OMPI_COMM_WORLD_RANK" in environment or "PMIX_RANK" in environment:
        return True
    return "PMI_RANK" in environment and "SLURM_PROCID" not in environment
