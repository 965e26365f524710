"""`adasum-hvd advise`: what a monitor's records say about workers, rates and AdaSum."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from adasum_hvd.advice.learning_rate import FIGURES
from adasum_hvd.advice.run import advise


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "advise",
        help="whether AdaSum helps a run, and how many workers are useful, from its records",
    )
    parser.add_argument("file", type=Path, help="a .jsonl file", metavar="run.jsonl")
    parser.add_argument(
        "--optimizer",
        choices=list(FIGURES),
        required=True,
        help="of the run; momentum: SGD",
    )
    parser.set_defaults(run=run, errors=(OSError, ValueError))


def run(arguments: argparse.Namespace) -> None:
    """Print the advice."""
    print(advise(arguments.file, optimizer=arguments.optimizer))
