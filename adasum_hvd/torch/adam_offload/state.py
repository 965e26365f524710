"""State dicts of `AdamOffload`: torch's Adam's, plus float32 masters where there are any.

On the way out every parameter gets a "step" of its own, for torch's Adam reads it there and
adds to it in place. On the way in tensors are shielded from `Optimizer.load_state_dict`, which
would move them to the parameter's device and dtype.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from adasum_hvd.torch.adam_offload import settings
from adasum_hvd.torch.adam_offload.plan import is_own_master, master_dtype

MOMENTS = ("exp_avg", "exp_avg_sq")


class Shield:
    """A tensor that `Optimizer.load_state_dict` passes on as it is."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy where its memory is part of a larger piece."""
    return (
        tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    )


def exported(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return torch's state dict of an `AdamOffload` as one that torch's Adam can load.

    Schedules that are functions are part of the program, not of its state, and stay behind.
    """
    step = float(optimizer.param_groups[0]["step"])
    state = {
        place: {
            "step": torch.tensor(step, dtype=torch.float32, device="cpu"),
            **{key: alone(value) for key, value in values.items()},
        }
        for place, values in state_dict["state"].items()
    }
    param_groups = [
        {k: v for k, v in group.items() if k != "schedule" or not callable(v)}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": param_groups}


def imported(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict, ours or torch's Adam's, ready for `Optimizer.load_state_dict`.

    Raises:
        ValueError: a setting that we lack, the state of another algorithm, or a moment of
            another shape than its parameter.
    """
    saved = [dict(group) for group in state_dict["param_groups"]]
    state = state_dict["state"]
    ours = optimizer.param_groups
    steps = {float(values["step"]) for values in state.values() if "step" in values}
    if len(steps) > 1:
        warnings.warn(
            f"AdamOffload: the saved state counts steps per parameter ({sorted(steps)}); there "
            f"is one count for all here, which is set to {max(steps):g}",
            stacklevel=4,
        )
    for group, own in zip(saved, ours, strict=False):
        settings.adopt(group)
        # torch's Adam carries our groups' "step" along and does not count in it.
        group["step"] = int(max(steps, default=group.get("step", 0)))
        for key, value in own.items():
            if key != "params":
                group.setdefault(key, value)
    places = [place for group in saved for place in group["params"]]
    params = [param for group in ours for param in group["params"]]
    for place, param in zip(places, params, strict=False):
        found = state.get(place)
        if found and not set(MOMENTS) <= set(found):
            raise ValueError(
                f"AdamOffload.load_state_dict: parameter {place}: required {MOMENTS}, got "
                f"{sorted(found)}; was this saved from an Adam?"
            )
        for key in (*MOMENTS, "master"):
            value = state.get(place, {}).get(key)
            if value is not None and value.shape != param.shape:
                raise ValueError(
                    f"AdamOffload.load_state_dict: {key} of parameter {place}: required shape "
                    f"{tuple(param.shape)}, got {tuple(value.shape)}; was this saved from "
                    "another model?"
                )
    shielded = {
        place: {
            key: Shield(value) if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
        for place, values in state.items()
    }
    return {**state_dict, "state": shielded, "param_groups": saved}


def settled(
    param: torch.Tensor, old: dict[str, torch.Tensor], values: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return one parameter's state on the host, in the tensors that it had before.

    A master must stay where it is, for others may hold views of it.

    Args:
        param: the parameter.
        old: its state until now, may be empty.
        values: its new state, shielded or not; what is missing starts anew.
    """
    new: dict[str, torch.Tensor] = {}
    needs_master = "master" in old or not is_own_master(param)
    for key in (*MOMENTS, "master") if needs_master else MOMENTS:
        value = values.get(key)
        source = value.tensor if isinstance(value, Shield) else value
        if source is None:
            source = (
                param.detach() if key == "master" else torch.zeros((), device="cpu")
            )
        elif not isinstance(value, Shield) and key not in old:
            new[key] = source  # unpickled or copied with us: ours already
            continue
        if key not in old:
            dtype = master_dtype(param)
            old = {**old, key: torch.empty(param.shape, dtype=dtype, device="cpu")}
        new[key] = old[key].copy_(source)
    return new
