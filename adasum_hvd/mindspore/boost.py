"""MindSpore's boost switch: the algorithms that a level and a dictionary turn on.

`adasum` and `grad_accumulation` have an effect. The other algorithms are outside this project.

References:
    MindSpore 1.7, `mindspore.boost`; docs/mindspore.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adasum_hvd.base import ops
from adasum_hvd.parallel.context import check_bool, check_count

__all__ = ["DEVICE_NUMBER", "ELSEWHERE", "FLAGS", "LEVELS", "MODES", "Boost", "switch"]

# In MindSpore's order: each excludes some of those after it.
FLAGS = ("dim_reduce", "grad_freeze", "less_bn", "adasum", "grad_accumulation")
ELSEWHERE = FLAGS[:3]
LEVELS = {
    "O0": frozenset[str](),
    "O1": frozenset({"less_bn", "grad_freeze"}),
    "O2": frozenset({"less_bn", "grad_freeze", "adasum"}),
}
MODES = ("auto", "manual", "enable_all", "disable_all")
DEVICE_NUMBER = 8
_KEYS = {  # by section of the dictionary
    "boost": {"mode", *FLAGS},
    "common": {"device_number"},
    "grad_accumulation": {"grad_accumulation_step"},
}


@dataclass(frozen=True)
class Boost:
    """The result of :func:`switch`.

    Fields: `adasum`; `accumulation_steps`, backward passes per step; `device_number`, ranks
    in a group, whose mean (or sum) AdaSum combines with the other groups'; `gradients_mean`.
    """

    adasum: bool = False
    accumulation_steps: int = 1
    device_number: int = DEVICE_NUMBER
    gradients_mean: bool = True

    def init_arguments(self) -> dict[str, Any]:
        """Return the arguments of `hvd.init`: the groups, if AdaSum is on."""
        if not self.adasum:
            return {}
        group_op = "average" if self.gradients_mean else "sum"
        return {"group_op": group_op, "group_size": self.device_number}

    def optimizer_arguments(self, hvd: Any) -> dict[str, Any]:
        """Return `op` and `backward_passes_per_step` for `hvd.DistributedOptimizer`.

        Gradients of several passes add up: divide the loss by `accumulation_steps`. Groups average
        (or sum) the changes of weights, not the gradients as in MindSpore: docs/mindspore.md.

        Args:
            hvd: `adasum_hvd.torch` or `adasum_hvd.tensorflow`, after `init`.

        Raises:
            RuntimeError: AdaSum is on, and `init` was called with other groups.
        """
        passes = {"backward_passes_per_step": self.accumulation_steps}
        if not self.adasum:
            return {"op": ops.Average if self.gradients_mean else ops.Sum, **passes}
        settings = hvd.settings()
        found = {name: settings[name] for name in ("group_op", "group_size")}
        if found != self.init_arguments():
            raise RuntimeError(
                f"boost adasum: expected {self.init_arguments()}, but got {found}; call "
                "hvd.init(**boost.init_arguments())"
            )
        return {"op": ops.AdasumDelta, **passes}


def switch(
    boost_level: str = "O0",
    boost_config_dict: Mapping[str, Any] | None = None,
    gradients_mean: bool | None = None,
    acc_level: str | None = None,
) -> Boost:
    """Return the effect of MindSpore's `Model(..., boost_level, boost_config_dict)`.

    Args:
        boost_level: "O0" nothing, "O1" less_bn and grad_freeze, "O2" those and adasum.
        boost_config_dict: `{"boost": {"mode": ..., FLAG: bool, ...}, "common": {"device_number":
            8}, "grad_accumulation": {"grad_accumulation_step": 1}}`, every part optional. Mode
            "auto" (default): the level decides; "manual": the flags override the level;
            "enable_all"; "disable_all". Level "O0" turns nothing on, whatever the dictionary has.
        gradients_mean: average, not sum, over the ranks of a group. Unset, it averages with a
            warning, because MindSpore's context sums by default.
        acc_level: deprecated name of `boost_level`.

    Raises:
        NotImplementedError: the dictionary turns on less_bn, grad_freeze or dim_reduce.
        ValueError: an unknown level or mode, or a number below 1.
        TypeError: a flag or `gradients_mean` is not a bool, a number not an int, or a part not a
            dict.

    Warns (MindSpore does not) about a dictionary, flags or keys without effect, algorithms of a
    level that this project lacks, unset `gradients_mean`, and accumulated gradients.

    Example:
        >>> manual = {"mode": "manual", "less_bn": False, "grad_freeze": False}
        >>> adasum_only = switch("O2", {"boost": manual}, gradients_mean=True)
        >>> adasum_only.init_arguments()
        {'group_op': 'average', 'group_size': 8}
    """
    if acc_level is not None:
        message = "acc_level has been replaced by boost_level"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        boost_level = acc_level
    if gradients_mean is not None:
        check_bool("gradients_mean", gradients_mean)
    if not isinstance(boost_level, str) or boost_level not in LEVELS:
        raise ValueError(
            f"boost_level: expected one of {', '.join(LEVELS)}, but got {boost_level!r}"
        )
    config = _mapping(
        {} if boost_config_dict is None else boost_config_dict, "boost_config_dict"
    )
    boost, common, accumulation = (
        _mapping(config.get(name, {}), f"boost_config_dict[{name!r}]") for name in _KEYS
    )
    asked = _asked(boost)
    on = {flag for flag in FLAGS if asked.get(flag, flag in LEVELS[boost_level])}
    adasum, accumulates = (boost_level != "O0" and flag in on for flag in FLAGS[3:])
    steps = accumulation.get("grad_accumulation_step", 1) if accumulates else 1
    check_count("boost grad_accumulation_step", steps)
    number = common.get("device_number", DEVICE_NUMBER)
    check_count("boost device_number", number)
    lacking = [flag for flag in ELSEWHERE if asked.get(flag)]
    if lacking and boost_level != "O0":
        excludes = "; dim_reduce would exclude all others"
        raise NotImplementedError(
            f"boost: expected adasum and grad_accumulation only, but got {', '.join(lacking)}, "
            f"which this project does not have{excludes if 'dim_reduce' in lacking else ''}"
        )
    read = dict(_KEYS)
    if boost.get("mode") != "manual":
        read["boost"] = {"mode"}
    if not accumulates:
        del read["grad_accumulation"]
    _warn(boost_level, on, _unread(config, read), gradients_mean, steps)
    return Boost(adasum, steps, number, gradients_mean is not False)


def _unread(config: Mapping[str, Any], read: Mapping[str, set[str]]) -> set[str]:
    keys = {
        f"{part}.{key}"
        for part in config.keys() & read.keys()
        for key in config[part].keys() - read[part]
    }
    return keys | (config.keys() - read.keys())


def _warn(
    level: str, on: set[str], unread: set[str], gradients_mean: bool | None, steps: int
) -> None:
    missing = on & set(ELSEWHERE)
    if level == "O0" and on:
        warnings.warn(
            f'boost: level "O0" turns nothing on, but the dictionary has {_listed(on)}; pass '
            'boost_level="O1" or "O2"',
            stacklevel=3,
        )
    elif missing:
        warnings.warn(
            f"boost: the level turns on {_listed(missing)}, which this project does not "
            "have; going on without",
            stacklevel=3,
        )
    if unread:
        warnings.warn(
            f"boost_config_dict: nothing reads {_listed(unread)}; remove them, or set the "
            'mode to "manual" to use flags',
            stacklevel=3,
        )
    if gradients_mean is None:
        warnings.warn(
            "boost: expected gradients_mean, but got none: the ranks of a group are averaged "
            "here, and summed by MindSpore's default; pass gradients_mean=True or False",
            stacklevel=3,
        )
    if steps > 1:
        warnings.warn(
            f"boost grad_accumulation: the gradients of {steps} passes add up here, and "
            f"MindSpore takes their mean; divide the loss by {steps}",
            stacklevel=3,
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names)))


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what}: expected a dict, but got {value!r}")
    return value


def _asked(section: Mapping[str, Any]) -> dict[str, bool]:
    """Return the flags that the dictionary sets, which override the level."""
    given = {flag: section[flag] for flag in FLAGS if flag in section}
    for flag, value in given.items():
        check_bool(f"boost {flag}", value)
    mode = section.get("mode", "auto")
    if mode not in MODES:
        raise ValueError(
            f"boost mode: expected one of {', '.join(MODES)}, but got {mode!r}"
        )
    if mode in ("auto", "manual"):
        return given if mode == "manual" else {}
    return dict.fromkeys(FLAGS, mode == "enable_all")
