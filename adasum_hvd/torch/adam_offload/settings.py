"""What may be passed as `params`, and how a state dict of torch's Adam reads as ours.

A group as `AdamOffload` keeps it is torch's, with these keys beside "params", "lr", "betas",
"eps" and "weight_decay": "schedule" (None, a tuple of rates or a callable), "step" (steps
taken, the same in all groups), "use_nesterov", "loss_scale", "torch_eps", and, parallel to
"params" and only where needed, "no_decay" and "order".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from adasum_hvd import adam

Group = dict[str, Any]

_SEED_KEYS = {"params", "lr", "weight_decay", "order_params", "grad_centralization"}
_OWN_KEYS = {"betas", "eps", "use_nesterov", "loss_scale", "torch_eps", "step", "schedule",
             "no_decay", "order", "name", "param_names"}  # fmt: skip
_SCHEDULER_KEYS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "decoupled_weight_decay")
_MEANINGLESS = ("foreach", "capturable", "fused", "grad_centralization")


def split(params: Any) -> tuple[list[Group], list[torch.Tensor] | None]:
    """Return param groups, still as the caller wrote them, and the order asked for.

    Args:
        params: tensors, (name, tensor) pairs, or dicts, one of which may hold nothing but
            "order_params".

    Returns:
        A list of dicts (one without other keys than "params" and "ungrouped" where no dict
        was given) and the parameters in order, or None.

    Raises:
        TypeError: not an ordered iterable, or of mixed or wrong elements.
        ValueError: None, empty, or "order_params" is not in a dict of its own.
    """
    if params is None:
        raise ValueError("AdamOffload: params: empty parameter list, got None")
    if isinstance(params, torch.Tensor | set) or not isinstance(params, Iterable):
        raise TypeError(
            "AdamOffload: params: required an ordered iterable of parameters or dicts, got "
            f"{type(params).__name__}"
        )
    elements = list(params)
    if not elements:
        raise ValueError("AdamOffload: params: empty parameter list")
    if not all(isinstance(element, dict) for element in elements):
        return [{"params": elements, "ungrouped": True}], None
    orders = [element for element in elements if "order_params" in element]
    for element in orders:
        if len(element) > 1 or len(orders) > 1:
            raise ValueError(
                "AdamOffload: order_params: required one dict with no other key, got "
                f"{len(orders)} with keys {sorted(element)}"
            )
    groups = [dict(element) for element in elements if "order_params" not in element]
    if not groups:
        raise ValueError("AdamOffload: params: empty parameter list")
    if not orders:
        return groups, None
    order = orders[0]["order_params"]
    if isinstance(order, torch.Tensor) or not isinstance(order, Iterable):
        raise TypeError(
            "AdamOffload: order_params: required an iterable of parameters, got "
            f"{type(order).__name__}"
        )
    return groups, list(order)


def complete(
    group: Group, defaults: Group, names: dict[int, str] | None = None
) -> tuple[Group, list[str]]:
    """Return one group with everything in it checked, and its parameters' names.

    What the group lacks is inherited. An unknown name is empty.

    Args:
        group: as the caller wrote it, or one that :func:`split` returned.
        defaults: the optimizer's.
        names: of the parameters, by id.

    Raises:
        KeyError: an unknown key, or no "params".
        TypeError: a value of a wrong type.
        ValueError: a value out of range, or a setting of torch's Adam that we lack.
    """
    group = dict(group)
    ungrouped = group.pop("ungrouped", False)
    known = _SEED_KEYS | _OWN_KEYS | _SCHEDULER_KEYS | {*_UNSUPPORTED, *_MEANINGLESS}
    unknown = sorted(set(group) - known)
    if unknown or "params" not in group:
        raise KeyError(
            "AdamOffload: param group: required params, and optionally lr, weight_decay or "
            f"{', '.join(sorted(_OWN_KEYS))}; got "
            + (f"unknown {unknown}" if unknown else "no params")
        )
    group["params"], group_names = _tensors(group["params"], names or {})
    adopt(group)
    if "lr" in group:
        set_lr(group, group["lr"])
    decay = group.get("weight_decay", defaults["weight_decay"])
    group["weight_decay"] = adam.check_weight_decay(decay)
    group["betas"] = check_betas({**defaults, **group}["betas"])
    adam.check_positive("eps", group.get("eps", defaults["eps"]))
    scale = group.get("loss_scale", defaults["loss_scale"])
    group["loss_scale"] = adam.check_positive("loss_scale", scale, integers=True)
    for key in ("use_nesterov", "torch_eps"):
        adam.check_bool(key, group.get(key, defaults[key]))
    if ungrouped and not all(adam.is_decayed(name) for name in group_names):
        group["no_decay"] = [not adam.is_decayed(name) for name in group_names]
    return group, group_names


def _tensors(
    params: Any, names: dict[int, str]
) -> tuple[list[torch.Tensor], list[str]]:
    if isinstance(params, torch.Tensor):
        params = [params]
    if isinstance(params, set) or not isinstance(params, Iterable):
        raise TypeError(
            "AdamOffload: params: required an ordered iterable of parameters, got "
            f"{type(params).__name__}"
        )
    tensors, found = [], []
    for element in params:
        name, tensor = "", element
        if _is_named(element):
            name, tensor = element
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                "AdamOffload: params: required parameters only, or dicts only, got "
                f"{type(tensor).__name__}"
            )
        if tensor.is_complex():
            raise TypeError(
                f"AdamOffload: params: required real parameters, got {tensor.dtype}"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                "AdamOffload: params: required parameters on the CPU or a CUDA device, got "
                f"{tensor.device}"
            )
        tensors.append(tensor)
        found.append(name or names.get(id(tensor), ""))
    if not tensors:
        raise ValueError("AdamOffload: params: empty parameter list in a group")
    return tensors, found


def _is_named(element: Any) -> bool:
    return (
        isinstance(element, tuple) and len(element) == 2 and isinstance(element[0], str)
    )


def check_betas(betas: Any) -> tuple[float, float]:
    """Return beta1 and beta2.

    Raises:
        TypeError: not two numbers.
        ValueError: one of them is out of range.
    """
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise TypeError(
            f"AdamOffload: betas: required two floats in (0, 1), got {betas!r}"
        )
    return adam.check_beta("beta1", betas[0]), adam.check_beta("beta2", betas[1])


def set_lr(group: Group, lr: Any) -> None:
    """Set "lr" to a number, and "schedule" to what gives it from step to step.

    Raises:
        TypeError: see :func:`adasum_hvd.adam.parse_lr`.
        ValueError: likewise.
    """
    if isinstance(lr, torch.Tensor):
        lr = lr.detach().cpu().double().numpy()
    parsed = adam.parse_lr(lr)
    if isinstance(parsed, float):
        group["lr"] = parsed
        group.setdefault("schedule", None)
    else:
        group["lr"], group["schedule"] = adam.rate_at(parsed, 0), parsed


def adopt(group: Group) -> None:
    """Drop what only torch's Adam knows, in place.

    Raises:
        ValueError: it is a setting that changes results and that we lack.
    """
    for key in _UNSUPPORTED:
        if group.pop(key, False):
            raise ValueError(
                f"AdamOffload: {key}: required False, got True; this is another algorithm"
            )
    for key in _MEANINGLESS:
        group.pop(key, None)


def names_by_id(named_parameters: Iterable[tuple[str, Any]] | None) -> dict[int, str]:
    """Return the names of parameters by id.

    Raises:
        ValueError: not (name, parameter) tuples, or a name occurs twice.
    """
    named = list(named_parameters or ())
    if not all(_is_named(item) for item in named):
        raise ValueError(
            "AdamOffload: named_parameters: required (name, parameter) tuples, as "
            "model.named_parameters() gives them"
        )
    twice = [name for name, n in Counter(name for name, _ in named).items() if n > 1]
    if twice:
        raise ValueError(
            f"AdamOffload: named_parameters: required unique names, got twice: {twice}"
        )
    return {id(parameter): name for name, parameter in named}


def check_together(named: list[tuple[str, torch.Tensor]]) -> None:
    """Check what no group shows alone.

    Args:
        named: all parameters with their names, which are empty where they are unknown.

    Raises:
        RuntimeError: a parameter, or its name, occurs twice.
        ValueError: some have names and some have not.
    """
    ids = Counter(id(parameter) for _, parameter in named)
    names = Counter(name for name, _ in named if name)
    if len(ids) < len(named) or any(count > 1 for count in names.values()):
        twice = sorted(
            {n or "(unnamed)" for n, p in named if ids[id(p)] > 1 or names[n] > 1}
        )
        raise RuntimeError(
            f"AdamOffload: params: required each parameter once, got twice: {twice}"
        )
    if names and len(names) < len(named):
        raise ValueError(
            "AdamOffload: named_parameters: required a name for every parameter, got none for "
            f"{len(named) - len(names)} of {len(named)}"
        )


def set_order(groups: list[Group], order: list[torch.Tensor]) -> None:
    """Give every group the places of its parameters in `order`.

    Raises:
        TypeError: an element is no parameter.
        ValueError: `order` does not hold exactly the groups' parameters.
    """
    place = {id(parameter): index for index, parameter in enumerate(order)}
    total = sum(len(group["params"]) for group in groups)
    if any(not isinstance(parameter, torch.Tensor) for parameter in order):
        raise TypeError("AdamOffload: order_params: required parameters only")
    if len(order) != total or len(place) != total:
        raise ValueError(
            f"AdamOffload: order_params: required the {total} parameters of the groups, each "
            f"once, got {len(order)} of which {len(place)} differ"
        )
    for group in groups:
        if any(id(parameter) not in place for parameter in group["params"]):
            raise ValueError(
                "AdamOffload: order_params: required every parameter of the groups, got an "
                "order without one of them"
            )
        group["order"] = [place[id(parameter)] for parameter in group["params"]]
