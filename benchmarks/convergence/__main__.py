"""Run studies of how AdaSum trains, and write their tables and pictures.

    python benchmarks/convergence adamw              # one study, some hours on one core
    python benchmarks/convergence                    # all of them, one after the other
    python benchmarks/convergence --report           # tables and pictures of what is there
    python benchmarks/convergence --scale tiny       # all, in minutes, into build/convergence
    python benchmarks/convergence adamw --scale full # the full size, some days: see its time

One process plays all workers; tests/parallel compares it with real jobs. What is in the raw
files is not run again, so a study that was interrupted goes on. Two may run at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY)]

from convergence.report import write  # noqa: E402
from convergence.runs import Runs  # noqa: E402
from convergence.studies import SCALES, STUDIES  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []], metavar="STUDY")
    parser.add_argument("--scale", choices=list(SCALES), default="small")
    parser.add_argument("--seeds", type=int, help="fewer than the scale has")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--output", type=Path)
    return parser


def main() -> None:
    """Run the command line."""
    arguments = make_parser().parse_args()
    torch.set_num_threads(1)
    scale = SCALES[arguments.scale]
    if arguments.seeds:
        scale = scale._replace(seeds=min(arguments.seeds, scale.seeds))
    places = {"small": "docs/convergence", "full": "docs/convergence/full"}
    output = arguments.output or Path(places.get(arguments.scale, "build/convergence"))
    for name in arguments.studies or STUDIES:
        if not arguments.report:
            STUDIES[name](scale).run(Runs(output / "raw", name))
    write(scale, output)


if __name__ == "__main__":
    main()
