"""The user's settings: param groups with their names and order.

`AdamOffload`'s groups are torch's, with these keys in addition to "params", "lr", "betas",
"eps" and "weight_decay": "schedule" (of "lr": None, a tuple of rates or a callable),
"decay_schedule" (of "weight_decay": None or a callable), "step" (calls of `step()`, the same in
all groups, which schedules count), "use_nesterov", "loss_scale", "torch_eps",
"decoupled_weight_decay", and, parallel to "params" and only where needed, "no_decay" and "order".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from adasum_hvd.offload import adam

Group = dict[str, Any]
Named = tuple[str, torch.Tensor]  # an unknown name is empty

_MINDSPORE_KEYS = {
    "params",
    "lr",
    "weight_decay",
    "order_params",
    "grad_centralization",
}
_OWN_KEYS = {"betas", "eps", "use_nesterov", "loss_scale", "torch_eps",
             "decoupled_weight_decay", "step", "schedule", "decay_schedule", "no_decay",
             "order", "name", "param_names"}  # fmt: skip
_SCHEDULER_KEYS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
_MEANINGLESS = ("foreach", "capturable", "fused", "grad_centralization")
_FIXED = ("eps", "use_nesterov", "torch_eps", "decoupled_weight_decay")
# By setting, the key of its schedule.
SCHEDULES = {"lr": "schedule", "weight_decay": "decay_schedule"}


@dataclass(frozen=True)
class Settings:
    """The formula's numbers in one step, for parameters that share them: see `offload/adam.py`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    loss_scale: float
    use_nesterov: bool
    torch_eps: bool
    decoupled_weight_decay: bool
    step: int  # of these parameters, counted from 1

    @classmethod
    def of(cls, group: Group, decayed: bool, grad_scale: float, step: int) -> Settings:
        """Return the settings of a group's parameters in a step.

        Args:
            group: one of the optimizer's.
            decayed: whether weight decay applies to these parameters.
            grad_scale: a gradient scaler's additional factor of the loss.
            step: of these parameters, counted from 1.
        """
        return cls(
            lr=float(group["lr"]),
            betas=group["betas"],
            weight_decay=group["weight_decay"] if decayed else 0.0,
            loss_scale=group["loss_scale"] * grad_scale,
            step=step,
            **{key: group[key] for key in _FIXED},
        )

    @property
    def l2_penalty(self) -> float:
        """The weight decay that is part of the gradient."""
        return 0.0 if self.decoupled_weight_decay else self.weight_decay

    @cached_property
    def kernel_eps(self) -> float:
        """The eps with which torch's kernel gives our result; see `host.py`."""
        if self.torch_eps:
            return self.eps
        return self.eps / adam.corrections(*self.betas, self.step)[1]

    @cached_property
    def kernel_step(self) -> torch.Tensor:
        """The step as the kernel's argument."""
        return torch.tensor(float(self.step), dtype=torch.float32, device="cpu")


def groups_of(
    params: Any, defaults: Group, named_parameters: Iterable[Named] | None
) -> list[Group]:
    """Return the param groups of `params`, complete and checked.

    Args:
        params: tensors, (name, tensor) pairs, or dicts, of which one may have only
            "order_params".
        defaults: of the optimizer.
        named_parameters: the constructor's argument.

    Raises:
        TypeError: `params` is not an ordered iterable, or has an element of a wrong type.
        ValueError: `params` is empty, a value is out of range, a setting asks for another
            algorithm, only some parameters have names, or "order_params" is wrong.
        KeyError: an unknown key in a group, or no "params".
        RuntimeError: a parameter, or its name, occurs twice.
    """
    if params is None:
        raise ValueError("AdamOffload: params: empty parameter list, but got None")
    elements = _listed(params, "parameters or dicts")
    grouped = all(isinstance(element, dict) for element in elements)
    listed, order = _take_order(elements) if grouped else ([{"params": elements}], None)
    names = _names_by_id(named_parameters)
    groups: list[Group] = []
    named: list[Named] = []
    for written in listed:
        group, found = complete(written, defaults, names)
        groups.append(group)
        named += zip(found, group["params"], strict=True)
    _check_together(named)
    adam.check_same_length([group["schedule"] for group in groups])
    if order is not None:
        _set_order(groups, order)
    decayed = [adam.is_decayed(name) for name, _ in named]
    if not grouped and not all(decayed):
        groups[0]["no_decay"] = [not one for one in decayed]
    return groups


def _listed(params: Any, what: str, where: str = "") -> list[Any]:
    if isinstance(params, torch.Tensor | set) or not isinstance(params, Iterable):
        raise TypeError(
            f"AdamOffload: params: expected an ordered iterable of {what}, but got "
            f"{type(params).__name__}"
        )
    elements = list(params)
    if not elements:
        raise ValueError(f"AdamOffload: params: empty parameter list{where}")
    return elements


def _take_order(
    elements: list[Group],
) -> tuple[list[Group], list[torch.Tensor] | None]:
    """Return the groups, and the value of "order_params" or None."""
    orders = [element for element in elements if "order_params" in element]
    for element in orders:
        if len(element) > 1 or len(orders) > 1:
            raise ValueError(
                "AdamOffload: order_params: expected one dict with no other key, but got "
                f"{len(orders)} with keys {sorted(element)}"
            )
    groups = [element for element in elements if "order_params" not in element]
    if not groups:
        raise ValueError("AdamOffload: params: empty parameter list")
    if not orders:
        return groups, None
    order = orders[0]["order_params"]
    if isinstance(order, torch.Tensor) or not isinstance(order, Iterable):
        raise TypeError(
            "AdamOffload: order_params: expected an iterable of parameters, but got "
            f"{type(order).__name__}"
        )
    return groups, list(order)


def complete(
    group: Group, defaults: Group, names: dict[int, str] | None = None
) -> tuple[Group, list[str]]:
    """Return one group, checked and completed from the defaults, and its parameters' names.

    Args:
        group: the caller's, or a complete one.
        defaults: of the optimizer.
        names: of the parameters, by id.

    Raises:
        TypeError: as :func:`groups_of`.
        ValueError: as :func:`groups_of`.
        KeyError: as :func:`groups_of`.
    """
    known = (
        _MINDSPORE_KEYS | _OWN_KEYS | _SCHEDULER_KEYS | {*adam.FOREIGN, *_MEANINGLESS}
    )
    unknown = sorted(set(group) - known)
    if unknown or "params" not in group:
        raise KeyError(
            "AdamOffload: param group: expected params, and optionally lr, weight_decay or "
            f"{', '.join(sorted(_OWN_KEYS))}; got "
            + (f"unknown {unknown}" if unknown else "no params")
        )
    # A group's own value takes precedence over the default schedule.
    own = {name: None for key, name in SCHEDULES.items() if key in group}
    group = {**defaults, **own, **group}
    group["params"], group_names = _tensors(group["params"], names or {})
    drop_foreign(group)
    return checked(group), group_names


def checked(group: Group) -> Group:
    """Return a group, or the defaults, with the formula's settings checked.

    "lr" and "weight_decay" become numbers; :data:`SCHEDULES` names what keeps a schedule.

    Raises:
        TypeError: a setting has a wrong type.
        ValueError: a setting is out of range.
    """
    group = {**dict.fromkeys(SCHEDULES.values()), **group}
    betas = group["betas"]
    if isinstance(group["lr"], torch.Tensor):
        group["lr"] = group["lr"].detach().cpu().double().numpy()
    for key, name in SCHEDULES.items():
        value = adam.parse(key, group[key])
        if not isinstance(value, float):
            group[name], value = value, adam.value_at(key, value, 0)
        group[key] = value
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise TypeError(
            f"AdamOffload: betas: expected two floats in (0, 1), but got {betas!r}"
        )
    group["betas"] = adam.check("beta1", betas[0]), adam.check("beta2", betas[1])
    return {
        **group,
        **{key: adam.check(key, group[key]) for key in (*_FIXED, "loss_scale")},
    }


def drop_foreign(group: Group) -> None:
    """Drop the settings that only torch's Adam has, in place.

    Raises:
        ValueError: a setting asks for another algorithm.
    """
    adam.drop_foreign(group)
    for key in _MEANINGLESS:
        group.pop(key, None)


def _tensors(
    params: Any, names: dict[int, str]
) -> tuple[list[torch.Tensor], list[str]]:
    if isinstance(params, torch.Tensor):
        params = [params]
    tensors, found = [], []
    for element in _listed(params, "parameters", " in a group"):
        name, tensor = element if _is_named(element) else ("", element)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                "AdamOffload: params: expected parameters only, or dicts only, but got "
                f"{type(tensor).__name__}"
            )
        if tensor.is_complex():
            raise TypeError(
                f"AdamOffload: params: expected real parameters, but got {tensor.dtype}"
            )
        if hasattr(tensor, "device_mesh"):
            raise NotImplementedError(
                "AdamOffload: params: expected plain tensors, but got a DTensor of FSDP2 or tensor "
                "parallelism; use torch.optim.AdamW, and CPUOffloadPolicy to keep its state on the "
                "host"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                "AdamOffload: params: expected parameters on the CPU or a CUDA device, but got "
                f"{tensor.device}"
            )
        tensors.append(tensor)
        found.append(name or names.get(id(tensor), ""))
    return tensors, found


def _is_named(element: Any) -> bool:
    return (
        isinstance(element, tuple) and len(element) == 2 and isinstance(element[0], str)
    )


def _names_by_id(named_parameters: Iterable[tuple[str, Any]] | None) -> dict[int, str]:
    named = list(named_parameters or ())
    if not all(_is_named(item) for item in named):
        raise ValueError(
            "AdamOffload: named_parameters: expected (name, parameter) tuples, as "
            "model.named_parameters() gives them"
        )
    twice = [name for name, n in Counter(name for name, _ in named).items() if n > 1]
    if twice:
        raise ValueError(
            f"AdamOffload: named_parameters: expected unique names, but got twice: {twice}"
        )
    return {id(parameter): name for name, parameter in named}


def _check_together(named: list[Named]) -> None:
    """Check that no parameter or name occurs twice, and that all or none have names."""
    ids = Counter(id(parameter) for _, parameter in named)
    names = Counter(name for name, _ in named if name)
    if len(ids) < len(named) or any(count > 1 for count in names.values()):
        twice = sorted(
            {n or "(unnamed)" for n, p in named if ids[id(p)] > 1 or names[n] > 1}
        )
        raise RuntimeError(
            f"AdamOffload: params: expected each parameter once, but got twice: {twice}"
        )
    if names and len(names) < len(named):
        raise ValueError(
            "AdamOffload: named_parameters: expected a name for every parameter, but got none for "
            f"{len(named) - len(names)} of {len(named)}"
        )


def _set_order(groups: list[Group], order: list[torch.Tensor]) -> None:
    """Set every group's "order", the places of its parameters in `order`."""
    place = {id(parameter): index for index, parameter in enumerate(order)}
    total = sum(len(group["params"]) for group in groups)
    if any(not isinstance(parameter, torch.Tensor) for parameter in order):
        raise TypeError("AdamOffload: order_params: expected parameters only")
    if len(order) != total or len(place) != total:
        raise ValueError(
            f"AdamOffload: order_params: expected the {total} parameters of the groups, each "
            f"once, but got {len(order)} of which {len(place)} differ"
        )
    for group in groups:
        if any(id(parameter) not in place for parameter in group["params"]):
            raise ValueError(
                "AdamOffload: order_params: expected every parameter of the groups, but got an "
                "order without one of them"
            )
        group["order"] = [place[id(parameter)] for parameter in group["params"]]
