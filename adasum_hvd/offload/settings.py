"""The user's settings: param groups with their names and order.

`AdamOffload`'s groups are torch's, with the constructor's settings and these keys: "schedule"
(of "lr": None, a tuple of rates or a callable), "decay_schedule" (of "weight_decay": None or a
callable), "step" (calls of `step()`, the same in all groups, which schedules count), and,
parallel to "params" and only where needed, "no_decay" and "order".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from adasum_hvd.offload import adam

Group = dict[str, Any]
Named = tuple[str, torch.Tensor]  # an unknown name is empty

# By setting, the key of its schedule.
SCHEDULES = {"lr": "schedule", "weight_decay": "decay_schedule"}
_CHECKED = ("eps", "loss_scale", "use_nesterov", "torch_eps", "decoupled_weight_decay")
_KNOWN = {*("params", "no_decay", "order", "name", "param_names", "betas", "step"),
          *("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"),
          *_CHECKED, *SCHEDULES, *SCHEDULES.values(), *adam.FOREIGN}  # fmt: skip
# Settings of other optimizers that do not change the result.
_MEANINGLESS = ("foreach", "capturable", "fused", "grad_centralization")


def groups_of(
    params: Any, defaults: Group, named_parameters: Iterable[Named] | None
) -> list[Group]:
    """Return the param groups of the constructor's `params`, complete and checked."""
    pairs = list(named_parameters or ())
    if not all(_is_named(pair) for pair in pairs):
        raise ValueError(
            "AdamOffload: named_parameters: expected (name, parameter) tuples, as "
            "model.named_parameters() gives them"
        )
    names = {id(parameter): name for name, parameter in pairs}
    elements = _listed("params", params)
    grouped = all(isinstance(element, dict) for element in elements)
    elements = elements if grouped else [{"params": elements}]
    orders = [element for element in elements if "order_params" in element]
    if len(orders) > 1 or any(len(element) > 1 for element in orders):
        raise ValueError(
            "AdamOffload: order_params: expected one dict with no other key, but got "
            f"{len(orders)} with keys {sorted(orders[0])}"
        )
    written = [element for element in elements if "order_params" not in element]
    groups: list[Group] = []
    named: list[Named] = []
    for element in _listed("params", written):
        group, found = complete(element, defaults, names)
        groups.append(group)
        named += zip(found, group["params"], strict=True)
    _check_together(named)
    lengths = {len(g["schedule"]) for g in groups if isinstance(g["schedule"], tuple)}
    if len(lengths) > 1:
        raise ValueError(
            "AdamOffload: lr: expected vectors of one length in all groups, but got lengths "
            f"{sorted(lengths)}"
        )
    for element in orders:
        _set_order(groups, _listed("order_params", element["order_params"]))
    undecayed = [not adam.is_decayed(name) for name, _ in named]
    if not grouped and any(undecayed):
        groups[0]["no_decay"] = undecayed
    return groups


def _listed(key: str, params: Any) -> list[Any]:
    if params is None:
        params = ()
    if isinstance(params, torch.Tensor | set) or not isinstance(params, Iterable):
        raise TypeError(
            f"AdamOffload: {key}: expected an ordered iterable of parameters or dicts, but got "
            f"{type(params).__name__}"
        )
    elements = list(params)
    if not elements:
        raise ValueError(f"AdamOffload: {key}: empty parameter list")
    return elements


def complete(
    group: Group, defaults: Group, names: dict[int, str] | None = None
) -> tuple[Group, list[str]]:
    """Return one group, completed from the defaults, and its parameters' names."""
    unknown = sorted(set(group) - _KNOWN - {*_MEANINGLESS})
    if unknown or "params" not in group:
        raise KeyError(
            "AdamOffload: param group: expected params, and optionally "
            f"{', '.join(sorted(defaults))}; got "
            + (f"unknown {unknown}" if unknown else "no params")
        )
    # A group's own value takes precedence over the default schedule.
    own = {name: None for key, name in SCHEDULES.items() if key in group}
    group = {**defaults, **own, **group}
    params = group["params"]
    params = [params] if isinstance(params, torch.Tensor) else _listed("params", params)
    pairs = [_named(element, names or {}) for element in params]
    group["params"] = [_supported(tensor) for _, tensor in pairs]
    drop_foreign(group)
    return checked(group), [name for name, _ in pairs]


def checked(group: Group) -> Group:
    """Return a group, or the defaults, with the formula's settings checked.

    "lr" and "weight_decay" become numbers; :data:`SCHEDULES` has the keys of their schedules.
    """
    group = {**dict.fromkeys(SCHEDULES.values()), **group}
    for key, name in SCHEDULES.items():
        value = adam.parse(key, group[key])
        if not isinstance(value, float):
            group[name], value = value, adam.value_at(key, value, 0)
        group[key] = value
    betas = group["betas"]
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise TypeError(
            f"AdamOffload: betas: expected two floats in (0, 1), but got {betas!r}"
        )
    group["betas"] = adam.check("beta1", betas[0]), adam.check("beta2", betas[1])
    return {**group, **{key: adam.check(key, group[key]) for key in _CHECKED}}


def drop_foreign(group: Group) -> None:
    """Drop the settings that only torch's Adam has, in place; raise as `adam.drop_foreign`."""
    adam.drop_foreign(group)
    for key in _MEANINGLESS:
        group.pop(key, None)


def _is_named(element: Any) -> bool:
    is_pair = isinstance(element, tuple) and len(element) == 2
    return is_pair and isinstance(element[0], str)


def _named(element: Any, names: dict[int, str]) -> tuple[str, Any]:
    name, tensor = element if _is_named(element) else ("", element)
    return name or names.get(id(tensor), ""), tensor


def _supported(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.is_complex():
        raise TypeError(
            "AdamOffload: params: expected real parameters only, or dicts only, but got "
            f"{getattr(tensor, 'dtype', type(tensor).__name__)}"
        )
    if hasattr(tensor, "device_mesh"):
        raise NotImplementedError(
            "AdamOffload: params: expected plain tensors, but got a DTensor of FSDP2 or tensor "
            "parallelism; use torch.optim.AdamW, and CPUOffloadPolicy to keep its state on the host"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            "AdamOffload: params: expected parameters on the CPU or a CUDA device, but got "
            f"{tensor.device}"
        )
    return tensor


def _check_together(named: list[Named]) -> None:
    """Check that no parameter or name occurs twice, and that all or none have names."""
    names = Counter(name for name, _ in named if name)
    ids = Counter(id(parameter) for _, parameter in named)
    twice = {n or "(unnamed)" for n, p in named if ids[id(p)] > 1 or names[n] > 1}
    if twice:
        raise RuntimeError(
            f"AdamOffload: params: expected each parameter once, but got twice: {sorted(twice)}"
        )
    if names and len(names) < len(named):
        raise ValueError(
            "AdamOffload: named_parameters: expected a name for every parameter, but got none for "
            f"{len(named) - len(names)} of {len(named)}"
        )


def _set_order(groups: list[Group], order: list[Any]) -> None:
    """Set every group's "order", the places of its parameters in `order`."""
    if not all(isinstance(parameter, torch.Tensor) for parameter in order):
        raise TypeError("AdamOffload: order_params: expected parameters only")
    place = {id(parameter): index for index, parameter in enumerate(order)}
    mine = {id(parameter) for group in groups for parameter in group["params"]}
    if place.keys() != mine or len(order) != len(mine):
        raise ValueError(
            f"AdamOffload: order_params: expected the {len(mine)} parameters of the groups, each "
            f"once, but got {len(order)} with {len(place.keys() & mine)} of them"
        )
    for group in groups:
        group["order"] = [place[id(parameter)] for parameter in group["params"]]
