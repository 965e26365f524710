"""The variables that Slurm's srun gives the tasks of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping

from adasum_hvd.launch.place import LaunchError, Place, Variables

_REQUIRED = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
)


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of every node.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise LaunchError(
                f"Slurm: required counts such as 2(x3),1 in SLURM_STEP_TASKS_PER_NODE, got "
                f"{text!r}; export what srun has set"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_node(nodes: str) -> str:
    """Return the first name of a node list.

    Example:
        >>> first_node("rack[1-2]n[007-010,12],login")
        'rack1n007'
    """
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name[0] if name else "")


def read(environment: Mapping[str, str]) -> Place | None:
    """Return what SLURM_PROCID, ... say, None outside of srun.

    A batch script itself has a SLURM_PROCID, too, and is one process. Rank 0's host is
    MASTER_ADDR where that is set, else the step's first node, and the port MASTER_PORT, or one
    made of the job's and the step's numbers.
    """
    if not {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
        return None
    variables = Variables("Slurm", environment, "start with srun")
    variables.require(_REQUIRED)
    tasks = tasks_per_node(variables.text("SLURM_STEP_TASKS_PER_NODE"))
    node, nodes = variables.number("SLURM_NODEID"), len(tasks)
    if nodes != variables.number("SLURM_STEP_NUM_NODES") or node >= nodes:
        raise LaunchError(
            f"Slurm: required tasks of every node in SLURM_STEP_TASKS_PER_NODE, got those of "
            f"{nodes}, SLURM_NODEID={node} and SLURM_STEP_NUM_NODES="
            f"{environment['SLURM_STEP_NUM_NODES']}; start with srun"
        )
    job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return Place(
        "Slurm",
        rank=variables.number("SLURM_PROCID"),
        size=variables.number("SLURM_STEP_NUM_TASKS"),
        address=environment.get("MASTER_ADDR")
        or first_node(variables.text("SLURM_STEP_NODELIST")),
        port=variables.port(job),
        local_rank=variables.number("SLURM_LOCALID"),
        local_size=tasks[node],
        cross_rank=node,
        cross_size=nodes,
    )
