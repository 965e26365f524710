"""Forms of AdamOffload's arguments, and inputs, for MindSpore and for this project.

`mindspore_program.py` has these in MindSpore's environment, so nothing here imports a framework.
"""

from __future__ import annotations

from typing import Any

import numpy as np

STEPS = 50
RATE = 0.1
SHAPES = {"fc.weight": (3, 4), "fc.bias": (4,), "bn.gamma": (4,), "x.beta_y": (2, 2, 2)}
_VECTOR = [RATE / (1 + step) for step in range(STEPS)]
_TWO = [["fc.weight", "x.beta_y"], ["bn.gamma", "fc.bias"]]


def _groups(*options: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = [
        {"params": names, **one} for names, one in zip(_TWO, options, strict=True)
    ]
    return {"groups": groups, **more}


# By name the constructor's arguments. A rate or decay of the form (kind, numbers) is made by each
# side; "groups" has names for parameters, and "order" the names of order_params.
FORMS: dict[str, dict[str, Any]] = {
    "defaults": {"learning_rate": 1e-3},
    "rate": {},
    "rate of 0": {"learning_rate": 0},
    "int rate": {"learning_rate": 1},
    "list": {"learning_rate": _VECTOR},
    "tuple": {"learning_rate": tuple(_VECTOR)},
    "generator": {"learning_rate": ("generator", _VECTOR)},
    "0-d tensor": {"learning_rate": ("tensor", RATE)},
    "1-d tensor": {"learning_rate": ("tensor", _VECTOR)},
    "exponential": {"learning_rate": ("exponential", (RATE, 0.9, 10))},
    "cosine": {"learning_rate": ("cosine", (0.01, RATE, STEPS))},
    "polynomial": {"learning_rate": ("polynomial", (RATE, 0.01, STEPS, 2.0))},
    "beta1": {"beta1": 0.5},
    "small beta2": {"beta2": 0.9},
    "large beta2": {"beta2": 0.9999},
    "large eps": {"eps": 1e-3},
    "small eps": {"eps": 1e-12},
    "locking": {"use_locking": True},
    "nesterov": {"use_nesterov": True},
    "nesterov, beta1": {"use_nesterov": True, "beta1": 0.5},
    "decay": {"weight_decay": 0.01},
    "int decay": {"weight_decay": 1},
    "decay of the step": {"weight_decay": ("exponential", (RATE, 0.9, 10))},
    "scale": {"loss_scale": 1024.0},
    "int scale": {"loss_scale": 8},
    "decay, scale": {"weight_decay": 0.01, "loss_scale": 1024.0},
    "decay, scale, nesterov": {
        "weight_decay": 0.01,
        "loss_scale": 1024.0,
        "use_nesterov": True,
    },
    "groups": _groups({"lr": 0.05}, {}),
    "groups, decay": _groups({"weight_decay": 0.01}, {}, weight_decay=0.1),
    "groups, vectors": _groups({"lr": _VECTOR}, {"lr": _VECTOR[::-1]}),
    "groups, order": _groups({"lr": 0.05}, {}, order=[*SHAPES]),
    "groups, all": _groups(
        {"lr": 0.05, "weight_decay": 0.0},
        {"lr": 0.2},
        order=[*reversed(SHAPES)],
        weight_decay=0.01,
        loss_scale=128.0,
        use_nesterov=True,
    ),
}


def weights() -> dict[str, np.ndarray]:
    """Return the weights before training, by name."""
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def gradients(step: int) -> dict[str, np.ndarray]:
    """Return the gradients of a step, over seven decades, by name."""
    random = np.random.default_rng(1 + step)
    return {
        name: (
            random.standard_normal(shape) * 10 ** random.uniform(-6, 1, shape)
        ).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def order_of(form: dict[str, Any]) -> list[str]:
    """Return the names in the order in which MindSpore takes the gradients."""
    if "groups" not in form:
        return [*SHAPES]
    in_groups = [name for group in form["groups"] for name in group["params"]]
    return form.get("order", in_groups)
