"""Conversion between MindSpore's checkpoints and files of `torch.save`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adasum_hvd.mindspore.checkpoint import read
from adasum_hvd.mindspore.torch_checkpoint import load, save
from adasum_hvd.torch.adam_offload import AdamOffload


def convert(source: str, target: str, model: nn.Module) -> None:
    """Convert a file that ends in .ckpt to one of torch, or back.

    Torch's file has the state dicts "model" and, if the source has one, "optimizer": of
    `AdamOffload(model.parameters())`, without settings, so that loading it changes none.

    Args:
        source: the file to read.
        target: the file to write.
        model: of any weights, which are replaced.

    Raises:
        ValueError, NotImplementedError: as `load` and `save`; or torch's file has no "model", or
            several param groups.
    """
    optimizer = AdamOffload(model.parameters(), verbose=False)
    if source.endswith(".ckpt"):
        with_adam = any(name.startswith("moment1.") for name in read(source))
        load(source, model, optimizer if with_adam else None)
        state: dict[str, Any] = {"model": model.state_dict()}
        if with_adam:
            places = [*range(len(optimizer.param_groups[0]["params"]))]
            state["optimizer"] = {
                "state": optimizer.state_dict()["state"],
                "param_groups": [{"params": places}],
            }
        torch.save(state, target)
        return
    saved = torch.load(source, map_location="cpu", weights_only=True)
    if "model" not in saved:
        raise ValueError(
            f'{source}: expected a dict with "model", but got {", ".join(map(str, saved))}; save '
            'model.state_dict() as "model"'
        )
    model.load_state_dict(saved["model"])
    if "optimizer" in saved:
        optimizer.load_state_dict(saved["optimizer"])
    save(target, model, optimizer if "optimizer" in saved else None)
