"""MindSpore's checkpoints of a model and its Adam, to and from torch.

MindSpore's `AdamOffload` and `Adam` have `moment1.NAME` and `moment2.NAME` for each parameter,
`global_step`, and `beta1_power` and `beta2_power`, which are beta ** global_step.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from adasum_hvd.mindspore.checkpoint import DTYPES, Entry, read, write

Names = Mapping[str, str]

_MOMENTS = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
_NORM = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
# MindSpore's names of what torch's layers call "weight", ...; other layers have torch's names.
_OF_LAYERS: tuple[tuple[tuple[type, ...], Names], ...] = (
    ((nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm), _NORM),
    ((nn.Embedding,), {"weight": "embedding_table"}),
    ((nn.PReLU,), {"weight": "w"}),
)
_DTYPES = {name: getattr(torch, name.lower()) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    names: Names | None = None,
) -> dict[str, Entry]:
    """Load a checkpoint of MindSpore into a model, and into its Adam.

    Args:
        path: a file of MindSpore's `save_checkpoint`.
        model: its parameters and buffers get the values; they keep their dtypes and devices.
        optimizer: an `AdamOffload` or `torch.optim.Adam`, also a distributed one or a wrap cell
            around one. It gets the moments and the number of steps; its settings stay.
        names: by a name in `model.state_dict()`, the name in the file. Without one it is
            the same name, or for normalization, embedding and PReLU also MindSpore's (`gamma`).

    Returns:
        The file's other entries, such as `learning_rate` and `epoch_num`.

    Raises:
        ValueError: the file is damaged, lacks a tensor or has another shape, or `names` has a
            name that the model lacks; nothing has changed.
        TypeError: `optimizer` is of another kind, or has a parameter that is not the model's.
        NotImplementedError: a parameter is a DTensor.

    Warns if the file's `beta1_power` does not fit the optimizer's beta1.
    """
    entries = read(path)
    values = {}
    named = {}  # MindSpore's name by tensor: tied tensors have one of several
    for candidates, tensor in _tensors(model, names):
        found = [name for name in candidates if name in entries]
        if not found and tensor.numel():  # MindSpore saves no empty tensor
            raise ValueError(
                f"MindSpore checkpoint {path}: expected {' or '.join(candidates)}, but got "
                f"{', '.join(entries):.500}; pass names={{{candidates[0]!r}: NAME_IN_THE_FILE}}"
            )
        named[tensor] = (found or candidates)[0]
        if found:
            values[tensor] = _value(path, entries[found[0]], tensor)
    state = None
    if (optimizer := _inside(optimizer)) is not None:
        state = _state_of(path, entries, named, values, optimizer)
    with torch.no_grad():
        for tensor, value in values.items():
            tensor.copy_(value)
    used = set(named.values())
    if state is not None:
        optimizer.load_state_dict(state)
        used |= {f"{kind}.{name}" for kind in _MOMENTS.values() for name in used}
        used |= {"global_step", "beta1_power", "beta2_power"}
    return {name: entry for name, entry in entries.items() if name not in used}


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    names: Names | None = None,
) -> None:
    """Save a model, and its Adam, as a checkpoint for MindSpore's `load_checkpoint`.

    MindSpore's `load_param_into_net` then takes the result for a network and for an optimizer.
    Learning rates are not in the file.

    Args:
        path: of the file; an old one is replaced when the new one is complete.
        model: its parameters and buffers are saved, tied ones once.
        optimizer: as :func:`load`'s.
        names: as :func:`load`'s; by default MindSpore's.

    Raises:
        ValueError, TypeError: as :func:`load`.
        NotImplementedError: a parameter is a DTensor, or has a dtype that MindSpore lacks.

    Warns if parameters took different numbers of steps, because MindSpore has one count.
    """
    named = {tensor: found[-1] for found, tensor in _tensors(model, names)}
    weights = {name: tensor for tensor, name in named.items()}
    state: list[Entry] = []
    if (optimizer := _inside(optimizer)) is not None:
        parameters = _parameters(optimizer, named)
        # AdamOffload's masters have the precision that half-precision weights lack.
        master_of = getattr(optimizer, "master", lambda param: param)
        weights |= {
            named[param]: master_of(param)
            for param in parameters
            if "master" in optimizer.state.get(param, {})
        }
        state = list(_adam_entries(optimizer, parameters, named))
    entries = [*itertools.starmap(_entry, weights.items()), *state]
    write(path, [entry for entry in entries if len(entry.data)])


def _tensors(
    model: nn.Module, names: Names | None
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield each tensor of a model's state once, with its names, MindSpore's last."""
    found: dict[torch.Tensor, list[str]] = {}
    modules = dict(model.named_modules())
    tensors = model.state_dict(keep_vars=True)
    if unknown := sorted(set(names or ()) - set(tensors)):
        raise ValueError(
            f"MindSpore checkpoint: names: expected names in model.state_dict(), but got {unknown}"
        )
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        if not isinstance(tensor, torch.Tensor) or own == "num_batches_tracked":
            continue
        if hasattr(tensor, "full_tensor"):
            raise NotImplementedError(
                f"MindSpore checkpoint: {name}: expected a whole tensor, but got a DTensor; load "
                "before fully_shard, or save a model that is not sharded"
            )
        layer = modules.get(path)
        tables = (table for types, table in _OF_LAYERS if isinstance(layer, types))
        renamed = next(tables, {}).get(own, own)
        candidates = [name, f"{path}.{renamed}" if path else renamed]
        found.setdefault(tensor, []).extend(candidates)
    given = {tensors[name]: [new] for name, new in (names or {}).items()}
    for tensor, candidates in found.items():
        yield given.get(tensor, [*dict.fromkeys(candidates)]), tensor


def _inside(optimizer: Any) -> Any:
    """Return the optimizer inside a wrap cell, or the optimizer itself."""
    return getattr(optimizer, "optimizer", optimizer)


def _parameters(optimizer: Any, named: dict[torch.Tensor, str]) -> list[torch.Tensor]:
    """Return the optimizer's parameters in the order of its state dict."""
    groups = getattr(optimizer, "param_groups", [])
    offloaded = groups and all("torch_eps" in group for group in groups)
    is_adam = offloaded or isinstance(optimizer, torch.optim.Adam)
    if not is_adam or any(group.get("amsgrad") for group in groups):
        raise TypeError(
            "MindSpore checkpoint: expected an AdamOffload or torch.optim.Adam without amsgrad, "
            f"but got {type(optimizer).__name__}; pass one, or a wrap cell around one"
        )
    parameters = [param for group in groups for param in group["params"]]
    if any(param not in named for param in parameters):
        raise TypeError(
            "MindSpore checkpoint: expected an optimizer of the model's parameters, but got one "
            "with others; pass the model that has all of them"
        )
    return parameters


def _state_of(
    path: Any,
    entries: dict[str, Entry],
    named: dict[torch.Tensor, str],
    values: dict[torch.Tensor, torch.Tensor],
    optimizer: Any,
) -> dict[str, Any]:
    """Return the optimizer's state dict, with the file's moments and steps."""
    parameters = _parameters(optimizer, named)
    if "global_step" not in entries:
        raise ValueError(
            f"MindSpore checkpoint {path}: expected global_step and moments of Adam, but got "
            "none; save the optimizer or the TrainOneStepCell too, or load without optimizer"
        )
    step = int(entries["global_step"].array().item())
    _check_beta1(entries, step, optimizer.param_groups[0]["betas"][0])
    state = {}
    for place, param in enumerate(parameters):
        moments = {key: f"{kind}.{named[param]}" for key, kind in _MOMENTS.items()}
        lacking = [name for name in moments.values() if name not in entries]
        if not lacking:
            of_file = {k: _value(path, entries[n], param) for k, n in moments.items()}
            state[place] = {"step": torch.tensor(float(step)), **of_file}
            # The master of a half-precision parameter keeps the precision of the file.
            if not isinstance(optimizer, torch.optim.Adam):
                state[place]["master"] = values[param]
        elif param.requires_grad and param.numel():
            raise ValueError(
                f"MindSpore checkpoint {path}: expected {lacking[0]}, but got none; was this saved "
                "with Adam, for the same parameters?"
            )
    groups = [
        {**group, "step": step} if "step" in group else group
        for group in optimizer.state_dict()["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _check_beta1(entries: dict[str, Entry], step: int, beta1: Any) -> None:
    expected = float(beta1) ** step
    power = entries.get("beta1_power")
    actual = expected if power is None else float(power.array().item())
    if not math.isclose(actual, expected, rel_tol=1e-3, abs_tol=1e-30):
        warnings.warn(
            f"MindSpore checkpoint: expected beta1_power={expected:g} after {step} steps with "
            f"beta1={beta1:g}, but got {actual:g}; create the optimizer with the beta1 of the "
            "saved run",
            stacklevel=4,
        )


def _adam_entries(
    optimizer: Any, parameters: list[torch.Tensor], named: dict[torch.Tensor, str]
) -> Iterator[Entry]:
    state = optimizer.state_dict()["state"]
    steps = sorted({int(values["step"]) for values in state.values()}) or [0]
    if len(steps) > 1:
        warnings.warn(
            f"MindSpore checkpoint: expected as many steps for all parameters, but got {steps}; "
            f"MindSpore has one count, which is set to {steps[-1]}",
            stacklevel=3,
        )
    yield _entry("global_step", torch.tensor(steps[-1:], dtype=torch.int32))
    betas = optimizer.param_groups[0]["betas"]
    for name, beta in zip(("beta1_power", "beta2_power"), betas, strict=True):
        yield _entry(name, torch.tensor([float(beta) ** steps[-1]]))
    for key, kind in _MOMENTS.items():
        for place, param in enumerate(parameters):
            moment = state.get(place, {}).get(key)
            if moment is None:
                moment = torch.zeros(param.shape)
            yield _entry(f"{kind}.{named[param]}", moment)


def _value(path: Any, entry: Entry, like: torch.Tensor) -> torch.Tensor:
    """Return an entry as a tensor for one of this shape and kind of numbers."""
    entry.known_dtype()
    dtype, shape = _DTYPES[entry.dtype], tuple(like.shape)
    if entry.shape != shape or dtype.is_floating_point != like.is_floating_point():
        raise ValueError(
            f"MindSpore checkpoint {path}: {entry.name}: expected shape {shape} and a dtype for "
            f"{like.dtype}, but got {entry.shape} of {entry.dtype}; was this saved from another "
            "model?"
        )
    return torch.frombuffer(bytearray(entry.data), dtype=dtype).reshape(shape)


def _entry(name: str, tensor: torch.Tensor) -> Entry:
    if tensor.dtype not in _NAMES:
        raise NotImplementedError(
            f"MindSpore checkpoint: {name}: expected one of {', '.join(map(str, _NAMES))}, but "
            f"got {tensor.dtype}; convert it first"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return Entry(name, _NAMES[tensor.dtype], tuple(tensor.shape), data)
