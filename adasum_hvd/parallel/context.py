"""A job's parallel mode, and checks 1 to 5 of MindSpore's AdaSum cells on it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

MODES = (
    *("stand_alone", "data_parallel", "hybrid_parallel"),
    *("semi_auto_parallel", "auto_parallel"),
)
MINDSPORE_MIN_DEVICES = 16  # two groups of eight


def check_count(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless the setting `name` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, but got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, but got {value}")


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless the setting `name` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, but got {value!r}")


@dataclass(frozen=True)
class ParallelContext:
    """A job's parallel mode, with MindSpore's names.

    Args:
        mode: one of `MODES`.
        device_num: ranks in the job, in all pipeline stages.
        pipeline_stages: number of the model's stages; 1 means no pipeline.
        enable_parallel_optimizer: optimizer states are sharded over the ranks.
        gradients_mean: gradients inside a group are averaged, not summed. Unset, they are
            averaged, and the wrap cells warn, because MindSpore's context sums by default.

    Raises:
        TypeError: a number is not an int, or a switch not a bool.
        ValueError: an unknown mode, a number below 1, or more stages than devices.
    """

    mode: str = "data_parallel"
    device_num: int = 1
    pipeline_stages: int = 1
    enable_parallel_optimizer: bool = False
    gradients_mean: bool | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(
                f"parallel mode: expected one of {', '.join(MODES)}, but got {self.mode!r}"
            )
        check_count("device_num", self.device_num)
        check_count("pipeline_stages", self.pipeline_stages)
        check_bool("enable_parallel_optimizer", self.enable_parallel_optimizer)
        if self.gradients_mean is not None:
            check_bool("gradients_mean", self.gradients_mean)
        if self.pipeline_stages > self.device_num:
            raise ValueError(
                f"pipeline_stages: expected at most device_num={self.device_num}, but got "
                f"{self.pipeline_stages}"
            )

    @property
    def averages(self) -> bool:
        """Whether gradients inside a group are averaged; also if `gradients_mean` is unset."""
        return self.gradients_mean is not False

    @property
    def stage_device_num(self) -> int:
        """Ranks in one pipeline stage."""
        return self.device_num // self.pipeline_stages


def check(
    context: ParallelContext,
    min_devices: int = 2,
    power_of_two: bool = False,
    strict: bool = False,
) -> None:
    """Check, in MindSpore's order, that AdaSum can run in this context: docs/mindspore.md.

    Args:
        context: the job.
        min_devices: fewest ranks in a stage.
        power_of_two: require a power of two ranks in a stage; our op does not need it.
        strict: MindSpore's rule: at least 16 ranks and a power of two.

    Raises:
        RuntimeError: AdaSum cannot run in this context.

    Example:
        >>> check(ParallelContext("auto_parallel", 16), strict=True)
        >>> check(ParallelContext("auto_parallel", 12), strict=True)
        Traceback (most recent call last):
            ...
        RuntimeError: AdaSum: expected at least 16 devices and a power of two, but got 12; ...

    References:
        MindSpore 1.7, `_parallel_check` of its AdaSum cells.
    """
    if strict:
        min_devices, power_of_two = max(min_devices, MINDSPORE_MIN_DEVICES), True
    if context.mode == "stand_alone":
        raise RuntimeError(
            "AdaSum: expected a distributed job, but got parallel mode stand_alone; start several "
            "ranks, as with horovodrun -np 4"
        )
    if context.mode in ("data_parallel", "hybrid_parallel"):
        warnings.warn(
            f"AdaSum: in parallel mode {context.mode} the boost switch (adasum_hvd.boost) is "
            "the recommended way to enable AdaSum",
            stacklevel=2,
        )
    if context.enable_parallel_optimizer:
        raise RuntimeError(
            "AdaSum: expected whole optimizer states on every rank, but got optimizer sharding "
            "(enable_parallel_optimizer); switch the sharding off"
        )
    if context.pipeline_stages > 1:
        raise RuntimeError(
            "AdaSum: expected the whole model on every rank, but got "
            f"pipeline_stages={context.pipeline_stages}; use one stage"
        )
    found = context.stage_device_num
    is_power = found & (found - 1) == 0
    if found < min_devices or (power_of_two and not is_power):
        rule = " and a power of two" if power_of_two else ""
        relax = ", or pass relaxed=True to a wrap cell" if power_of_two else ""
        raise RuntimeError(
            f"AdaSum: expected at least {min_devices} devices{rule}, but got {found}; start "
            f"another number of ranks{relax}"
        )
