"""Run studies of how AdaSum trains, and write their tables and pictures.

    python benchmarks/convergence adamw              # one study, some hours on one core
    python benchmarks/convergence                    # all of them, one after the other
    python benchmarks/convergence --report           # tables and pictures of the runs that exist
    python benchmarks/convergence --scale tiny       # all, in minutes, into build/convergence
    python benchmarks/convergence adamw --scale full # the full size, some days

One process computes all workers' steps; tests/parallel compares it with real jobs. A run in the
raw files is not run again, so an interrupted study continues. Two may run at once.

    python benchmarks/convergence steps_to_target --estimate      # of its core-hours
    nice -n 19 python benchmarks/convergence steps_to_target --max-hours 8 --jobs 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY)]

from convergence import plan, program  # noqa: E402
from convergence.report import write  # noqa: E402
from convergence.runs import Runs  # noqa: E402
from convergence.studies import SCALES, STUDIES  # noqa: E402
from convergence.target import version  # noqa: E402

NAMES = [*STUDIES, plan.NAME]


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", choices=[*NAMES, []], metavar="STUDY")
    parser.add_argument("--scale", choices=list(SCALES), default="small")
    parser.add_argument("--seeds", type=int, help="fewer than the scale has")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--output", type=Path)
    target = parser.add_argument_group(plan.NAME)
    target.add_argument(
        "--max-hours", type=float, default=1e9, help="start no run after"
    )
    target.add_argument("--jobs", type=int, default=1, help="runs side by side")
    target.add_argument("--estimate", action="store_true", help="print core-hours")
    target.add_argument(
        "--part",
        action="append",
        help=f"only this of {', '.join(program.parts('small'))}",
    )
    return parser


def steps_to_target(arguments: argparse.Namespace, output: Path) -> None:
    """Run studies 7 to 9, or print the cost of study 7."""
    if arguments.estimate:
        seeds = plan.SEEDS[arguments.scale]
        found = [
            e for t in plan.TASKS[arguments.scale] for e in plan.estimates(t, seeds)
        ]
        for each in found:
            print(f"{each.work} N={each.workers}: {each.runs} runs, {each.hours:.2f} h")
        print(f"all: {sum(each.hours for each in found):.1f} core-hours")
        return
    if version().endswith("+") and arguments.scale != "tiny":
        raise SystemExit(
            "steps_to_target: expected committed code, because each record names it, but "
            "benchmarks/convergence has changes; commit them, or use --scale tiny"
        )
    runs = Runs(output / "raw", plan.NAME)
    program.run(
        arguments.scale, arguments.part, runs, arguments.max_hours, arguments.jobs
    )


def main() -> None:
    """Run the command line."""
    arguments = make_parser().parse_args()
    torch.set_num_threads(1)
    scale = SCALES[arguments.scale]
    if arguments.seeds:
        scale = scale._replace(seeds=min(arguments.seeds, scale.seeds))
    places = {"small": "docs/convergence", "full": "docs/convergence/full"}
    output = arguments.output or Path(places.get(arguments.scale, "build/convergence"))
    for name in [] if arguments.report else arguments.studies or NAMES:
        if name == plan.NAME:
            steps_to_target(arguments, output)
        else:
            STUDIES[name](scale).run(Runs(output / "raw", name))
    if not arguments.estimate:
        write(scale, output, arguments.scale)


if __name__ == "__main__":
    main()
