"""Train a small network on real digits with four reductions, on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from adasum_hvd.horovod.build import findings
from adasum_hvd.horovod.launch import supervisor
from adasum_hvd.tools import jobs

_NEEDED = {"torch": "torch", "sklearn": "scikit-learn"}


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "demo",
        help="train LeNet-5 on digits with Sum, Average and both AdaSum variants",
    )
    parser.add_argument("--ranks", type=jobs.count, default=4)
    parser.add_argument(
        "--engine",
        choices=["horovod", "torch"],
        help="Horovod's op, or torch.distributed alone (default: horovod if installed)",
    )
    parser.add_argument("--epochs", type=jobs.count, default=12)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(),
        help="folder of demo.json, demo.png, demo-monitor.jsonl and demo-monitor.png; those of "
        "an earlier demo are replaced",
    )
    parser.set_defaults(run=run, errors=ValueError)


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks, which print as they go, and return the exit status."""
    for module, package in _NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"expected {package}, but got none; pip install {package}")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"expected a folder for the results, but got {error}; pass one as --output"
        ) from None
    engine = arguments.engine or ("horovod" if findings.with_op() else "torch")
    backend = "gloo" if engine == "horovod" else "torchrun"
    program = [sys.executable, "-m", "adasum_hvd.tools.torch_digits", engine]
    given = str(arguments.epochs), str(arguments.output)
    words = [*jobs.launcher(backend, arguments.ranks), *program, *given]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with supervisor.running(words, env=environment) as job:
        return job.wait()
