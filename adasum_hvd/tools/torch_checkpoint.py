"""`adasum-hvd mindspore-checkpoint`: list a checkpoint of MindSpore, or convert it."""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import sys
from typing import Any

from adasum_hvd import mindspore_checkpoint


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "mindspore-checkpoint",
        help="list a checkpoint of MindSpore, or convert it to torch and back",
    )
    parser.add_argument("source", help="a .ckpt of MindSpore, or a file of torch.save")
    parser.add_argument("target", nargs="?", help="the other one, which is written")
    parser.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="returns the torch model"
    )
    errors = ValueError, RuntimeError, OSError, pickle.UnpicklingError
    parser.set_defaults(run=run, errors=errors)


def run(given: argparse.Namespace) -> None:
    """List or convert."""
    if given.target is None:
        for entry in mindspore_checkpoint.read(given.source).values():
            print(entry.name, entry.dtype, list(entry.shape))
    else:
        convert(given.source, given.target, given.model)


def convert(source: str, target: str, model: str | None) -> None:
    """Convert between a file that ends in .ckpt and one of `torch.save`."""
    if source.endswith(".ckpt") == target.endswith(".ckpt"):
        raise ValueError(
            f"expected one file that ends in .ckpt, but got {source} and {target}; the other one "
            "is torch's, such as adam.pt"
        )
    module, _, function = (model or "").partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make_model = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--model: expected MODULE:FUNCTION, but got {model!r} ({error}); name a function that "
            "returns the torch model"
        ) from None
    import torch  # the other commands do without

    from adasum_hvd.offload.optimizer import AdamOffload

    net = make_model()
    optimizer = AdamOffload(net.parameters(), verbose=False)
    if target.endswith(".ckpt"):
        saved = torch.load(source, map_location="cpu", weights_only=True)
        if "model" not in saved:
            raise ValueError(
                f'{source}: expected a dict with "model", but got {", ".join(map(str, saved))}; '
                'save model.state_dict() as "model"'
            )
        net.load_state_dict(saved["model"])
        if "optimizer" in saved:
            optimizer.load_state_dict(saved["optimizer"])
        with_state = "optimizer" in saved
        mindspore_checkpoint.save(target, net, optimizer if with_state else None)
        return
    with_state = "global_step" in mindspore_checkpoint.read(source)
    mindspore_checkpoint.load(source, net, optimizer if with_state else None)
    state = {"model": net.state_dict()}
    if with_state:  # without settings, so that loading it changes none
        places = [*range(len(optimizer.param_groups[0]["params"]))]
        groups = [{"params": places}]
        state["optimizer"] = {**optimizer.state_dict(), "param_groups": groups}
    torch.save(state, target)
