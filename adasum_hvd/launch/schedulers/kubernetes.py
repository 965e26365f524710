"""Variables of an Indexed Job of Kubernetes: one rank per pod, named by a headless service."""

from __future__ import annotations

from collections.abc import Mapping

from adasum_hvd.launch.launch_context import LaunchContext, Variables

_REQUIRED = ("JOB_COMPLETION_INDEX", "WORLD_SIZE", "MASTER_ADDR")
PORT = 29400  # a pod has all ports to itself


def read(environment: Mapping[str, str]) -> LaunchContext | None:
    """Return the context that JOB_COMPLETION_INDEX describes, None without it.

    Kubernetes sets nothing else: the manifest gives WORLD_SIZE, the number of pods, and
    MASTER_ADDR, the first one's name, `<job>-0.<service>`.
    """
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    variables = Variables(
        "Kubernetes",
        environment,
        "put WORLD_SIZE (the Job's completions) and MASTER_ADDR (<job>-0.<service>) into the "
        "manifest as in examples/kubernetes; WORLD_SIZE=1 for pods that train alone",
    )
    if environment.get("WORLD_SIZE") != "1":
        variables.require(_REQUIRED)
    rank, size = (variables.number(name) for name in _REQUIRED[:2])
    port = variables.number_if_any("MASTER_PORT")
    return LaunchContext(
        "Kubernetes",
        rank=0 if size == 1 else rank,
        size=size,
        address=environment.get("MASTER_ADDR", ""),
        port=PORT if port is None else port,
        local_rank=0,
        local_size=1,
    )
