"""`adasum-hvd mindspore-checkpoint`: list a checkpoint of MindSpore, or convert it."""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import sys
from typing import Any

from adasum_hvd.mindspore import checkpoint


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
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """List or convert, and return the exit status."""
    try:
        if given.target is None:
            for entry in checkpoint.read(given.source).values():
                print(entry.name, entry.dtype, list(entry.shape))
        else:
            _convert(given.source, given.target, given.model)
    except (ValueError, RuntimeError, OSError, pickle.UnpicklingError) as error:
        print(f"adasum-hvd mindspore-checkpoint: {error}", file=sys.stderr)
        return 1
    return 0


def _convert(source: str, target: str, model: str | None) -> None:
    if source.endswith(".ckpt") == target.endswith(".ckpt"):
        raise ValueError(
            f"expected one file that ends in .ckpt, but got {source} and {target}; the other one "
            "is torch's, such as adam.pt"
        )
    module, _, function = (model or "").partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--model: expected MODULE:FUNCTION, but got {model!r} ({error}); name a function that "
            "returns the torch model"
        ) from None
    from adasum_hvd.tools import torch_conversion  # needs torch

    torch_conversion.convert(source, target, make())
