"""`adasum-hvd advise`: what AdaSum would bring, by a run's records or by a trial of a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from adasum_hvd.advice.learning_rate import FIGURES
from adasum_hvd.advice.run import advise
from adasum_hvd.tools import jobs, plot

_FEW = 50  # steps of one worker
_OF_DEMO = {"lr": None, "batch": 8, "seconds": 120, "seed": 1, "output": None}


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "advise",
        help="whether AdaSum helps, and how many workers are useful: from a run's records, or "
        "tried on your model",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "file", type=Path, nargs="?", help="a .jsonl file", metavar="run.jsonl"
    )
    source.add_argument(
        "--demo",
        type=Path,
        help="try it on a model: a file with make()",
        metavar="MODEL.py",
    )
    parser.add_argument(
        "--optimizer",
        choices=list(FIGURES),
        help="required with records: of the run; momentum: SGD, the default of --demo",
    )
    demo = parser.add_argument_group("with --demo")
    demo.add_argument("--lr", type=float, help="one worker's (default: the best of 8)")
    demo.add_argument("--batch", type=jobs.count, help="of one worker")
    demo.add_argument("--seconds", type=jobs.count, help="for everything")
    demo.add_argument("--seed", type=int)
    demo.add_argument(
        "-o",
        "--output",
        type=Path,
        help="picture (default: advice.png, next to the file)",
    )
    parser.set_defaults(run=run, errors=(OSError, ValueError, ImportError), **_OF_DEMO)


def run(arguments: argparse.Namespace) -> None:
    """Print the advice."""
    if arguments.demo is not None:
        _demo(arguments)
    elif arguments.optimizer is None:
        raise ValueError(
            f"expected --optimizer {', '.join(FIGURES)}, but got none; pass the run's"
        )
    elif ignored := [k for k, v in _OF_DEMO.items() if getattr(arguments, k) != v]:
        raise ValueError(
            f"expected --{', --'.join(ignored)} with --demo only, but got records; remove it"
        )
    else:
        print(advise(arguments.file, optimizer=arguments.optimizer))


def _demo(arguments: argparse.Namespace) -> None:
    """Print each training when it ends; Ctrl-C leaves those that have ended."""
    file, rate = arguments.demo, arguments.lr
    if not file.is_file() or not (rate is None or 0 < rate < float("inf")):
        raise ValueError(
            f"expected a file with make(), and --lr above 0, but got {file} and {rate}; "
            "write one as in docs/choose.md"
        )
    target = arguments.output or file.with_name("advice.png")
    if not target.parent.is_dir():
        raise ValueError(
            f"expected a picture in a folder that exists, but got {target}"
        )
    from adasum_hvd.tools import torch_trial

    optimizer = arguments.optimizer or "momentum"
    trial = torch_trial.Trial(file, optimizer, arguments.batch, arguments.seed)
    found: list[torch_trial.Run] = []
    try:
        for best, one in torch_trial.measure(trial, rate, arguments.seconds):
            found.append(one)
            if len(found) == 1:
                print(
                    f"Steps to a loss of {one.loss:.4g} on held-out examples, which one worker "
                    f"reached with {optimizer}\nat a rate of {best:.3g}, the rate of all rows:\n"
                    "workers rule      steps  times fewer"
                )
            print(_row(one, found[0].steps), flush=True)
    finally:
        if found[1:]:
            print(_verdict(found))
            _draw(found, target)


def _row(one: Any, alone: int) -> str:
    """Return a line with a bar, whose full length is that of one worker's steps."""
    start = f"{one.workers:7} {one.rule if one.workers > 1 else 'any':8}"
    if one.steps:
        bar = "#" * max(1, min(50, 40 * one.steps // alone))
        return f"{start} {one.steps:6} {alone / one.steps:12.1f}  {bar}"
    return f"{start} {f'>{one.taken}':>6}  a loss of {one.loss:.4g} so far"


def _verdict(found: list[Any]) -> str:
    most = found[-1].workers
    steps = {one.rule: one.steps for one in found if one.workers == most and one.steps}
    near = [rule for rule in steps if steps[rule] <= min(steps.values()) * 4 / 3]
    few = (
        "" if found[0].steps >= _FEW else "\nThese are few steps: pass more --seconds."
    )
    return (
        f"Fewest steps with {most} workers: {', '.join(near) or 'none got there'} (a third more "
        "counts as equal in\none run of each). With its rate tuned Average may do as well: "
        f"docs/choose.md{few}"
    )


def _draw(found: list[Any], target: Path) -> None:
    if (figure := plot.new_figure(layout="constrained")) is None:
        return
    axes = figure.subplots()
    alone, counts = found[0].steps, sorted({one.workers for one in found})
    axes.plot(counts, [alone / n for n in counts], "k:", label="perfect scaling")
    for rule in dict.fromkeys(one.rule for one in found[1:]):
        steps = {n.workers: n.steps for n in found[1:] if n.rule == rule and n.steps}
        axes.plot([1, *steps], [alone, *steps.values()], "o-", label=rule)
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="steps to equal loss")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.legend()
    figure.savefig(target, dpi=120)
    print(f"picture: {target}")
