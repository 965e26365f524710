"""The optimizers of the trial, by package, and how each one is made."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import nn

# The names that people install, and the modules that have the optimizers.
MODULES = {
    "torch": "torch.optim",
    "pytorch_optimizer": "pytorch_optimizer",
    "timm": "timm.optim",
    "schedulefree": "schedulefree",
    "heavyball": "heavyball",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
    "lion-pytorch": "lion_pytorch",
}
_BASES = ("Optimizer", "BaseOptimizer", "PSGDBase", "SOAPBase")
_WRAPPERS = (
    *("Lookahead", "Magma", "OrthoGrad", "PCGrad", "SafeFP16Optimizer", "TRAC"),
    *("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"),
)
_OF_A_MODEL = ("AdaLOMO", "AdamMini", "LOMO")
_WITH_A_BASE = {"base_optimizer": torch.optim.SGD, "lr": 0.1}
# Arguments in addition to the parameters, of classes that need some.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "bitsandbytes.PytorchLARS": {"momentum": 0.9},
    # With the defaults, eight steps diverge, take long, and amplify roundings.
    "pytorch_optimizer.LBFGS": {"lr": 0.1, "max_iter": 4},
    "torch.LBFGS": {"lr": 0.1, "max_iter": 4},
    "pytorch_optimizer.AdaShift": {"keep_num": 2},
    "pytorch_optimizer.BSAM": {"num_data": 16},
    "pytorch_optimizer.FriendlySAM": _WITH_A_BASE,
    "pytorch_optimizer.LookSAM": _WITH_A_BASE,
    "pytorch_optimizer.Ranger21": {"num_iterations": 16},
    "pytorch_optimizer.SAM": _WITH_A_BASE,
    # It trains weights below the threshold only, and by a rate that falls with it.
    "pytorch_optimizer.SaRA": {"lr": 0.01, "threshold": 0.2},
    **{
        f"bitsandbytes.{name}{bits}": {"lr": 0.01, "momentum": 0.9}
        for name in ("LARS", "SGD")
        for bits in ("", "8bit", "32bit")
    },
}


def module_of(package: str) -> ModuleType:
    """Import a package's optimizers; timm's without its models, which need torchvision."""
    if package == "timm" and "timm" not in sys.modules:
        spec = PathFinder.find_spec("timm")
        if spec is None:
            raise ModuleNotFoundError("timm")
        timm, models = ModuleType("timm"), ModuleType("timm.models")
        timm.__path__ = list(spec.submodule_search_locations or ())
        vars(models)["group_parameters"] = None
        sys.modules |= {"timm": timm, "timm.models": models}
    return importlib.import_module(MODULES[package])


def names_of(package: str) -> list[str]:
    """Return the optimizers of a package: its classes, or timm's registered names."""
    module = module_of(package)
    if package == "timm":
        return [*module.list_optimizers(), "Lookahead"]
    return sorted(
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and name not in _BASES
        if issubclass(value, torch.optim.Optimizer) or name in _WRAPPERS
    )


def make(package: str, name: str, model: nn.Module, groups: Any) -> Any:
    """Return an optimizer with its defaults.

    Args:
        package: a key of `MODULES`.
        name: one of `names_of`.
        model: that it trains.
        groups: the model's parameters, as a list or in param groups.
    """
    module = module_of(package)
    if package == "timm" and name != "Lookahead":
        return module.create_optimizer_v2(groups, opt=name, lr=0.01)
    kind: Callable[..., Any] = getattr(module, name)
    if name in _WRAPPERS:
        return kind(torch.optim.SGD(groups, lr=0.1))
    if name in _OF_A_MODEL:
        return kind(model)
    if name == "WSAM":
        return kind(model, groups, **_WITH_A_BASE)
    if name == "SplitOpt":
        several = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim == 1]
        return kind([
            {"params": several, "optimizer": module.Muon},
            {"params": rest, "optimizer": module.AdamW},
        ])  # fmt: skip
    return kind(groups, **_ARGUMENTS.get(f"{package}.{name}", {}))
