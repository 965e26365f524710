"""Variables of torchrun, Accelerate, Ray Train and the PyTorchJob operator."""

from __future__ import annotations

from collections.abc import Mapping

from adasum_hvd.launch.launch_context import LaunchContext, Variables

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read(environment: Mapping[str, str]) -> LaunchContext | None:
    """Return the context that RANK, WORLD_SIZE, ... describe, None without RANK.

    LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE may be missing.
    """
    if not {"RANK", "TORCHELASTIC_RUN_ID"} & environment.keys():
        return None
    variables = Variables(
        "torchrun", environment, "start with torchrun, or export all of them"
    )
    variables.require(_REQUIRED)
    return LaunchContext(
        "torchrun",
        rank=variables.number("RANK"),
        size=variables.number("WORLD_SIZE"),
        address=variables.text("MASTER_ADDR"),
        port=variables.number("MASTER_PORT"),
        local_rank=variables.number_if_any("LOCAL_RANK"),
        local_size=variables.number_if_any("LOCAL_WORLD_SIZE"),
        cross_rank=variables.number_if_any("GROUP_RANK"),
        cross_size=variables.number_if_any("GROUP_WORLD_SIZE"),
    )
