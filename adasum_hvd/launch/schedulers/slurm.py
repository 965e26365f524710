"""Variables that Slurm's srun gives to the tasks of a step."""

from __future__ import annotations

from collections.abc import Mapping

from adasum_hvd.launch import slurm_lists
from adasum_hvd.launch.launch_context import LaunchContext, LaunchError, Variables

_REQUIRED = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
)


def _lists(variables: Variables) -> tuple[list[int], str]:
    """Return the tasks of every node, and the first node's name."""
    try:
        tasks = slurm_lists.counts(variables.text("SLURM_STEP_TASKS_PER_NODE"))
        nodes = slurm_lists.items(variables.text("SLURM_STEP_NODELIST"))
        return tasks, next(slurm_lists.expand(nodes[0] if nodes else ""))
    except slurm_lists.ListError as error:
        raise LaunchError(
            f"Slurm: {error}; export the variables that srun set"
        ) from error


def read(environment: Mapping[str, str]) -> LaunchContext | None:
    """Return the context that SLURM_PROCID, ... describe, None outside of srun.

    A batch script has a SLURM_PROCID, too, and is one process. Rank 0's host is MASTER_ADDR if
    set, else the step's first node. The port is MASTER_PORT, else computed from the numbers of
    job and step.
    """
    if not {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
        return None
    variables = Variables("Slurm", environment, "start with srun")
    variables.require(_REQUIRED)
    tasks, first_node = _lists(variables)
    node, nodes = variables.number("SLURM_NODEID"), len(tasks)
    if nodes != variables.number("SLURM_STEP_NUM_NODES") or node >= nodes:
        raise LaunchError(
            f"Slurm: expected tasks of every node in SLURM_STEP_TASKS_PER_NODE, but got those of "
            f"{nodes}, SLURM_NODEID={node} and SLURM_STEP_NUM_NODES="
            f"{environment['SLURM_STEP_NUM_NODES']}; start with srun"
        )
    job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return LaunchContext(
        "Slurm",
        rank=variables.number("SLURM_PROCID"),
        size=variables.number("SLURM_STEP_NUM_TASKS"),
        address=environment.get("MASTER_ADDR") or first_node,
        port=variables.port(job),
        local_rank=variables.number("SLURM_LOCALID"),
        local_size=tasks[node],
        cross_rank=node,
        cross_size=nodes,
    )
