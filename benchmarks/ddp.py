"""Time of a training step: DDP, its communication hooks, and optimizers that reduce.

    python benchmarks/ddp.py            # 2 and 4 ranks, every model
    python benchmarks/ddp.py --ranks 2 --models small --launcher mpi
    python benchmarks/ddp.py --alone    # a job for each contender
    python benchmarks/ddp.py --ranks 4 --hosts 2 --gigabits 10    # namespaces, as root: hosts.py
    python benchmarks/ddp.py plot build/ddp.json docs/pictures/step.png

Contenders: plain DDP over Gloo, DDP with either engine's `adasum_hook`, Horovod's own averaging
`DistributedOptimizer`, ours with both variants, and DDP with `keep_local_hook`, which reduces
nothing. Each rank has a batch of its own. By default the steps of all contenders are interleaved
in one process, whose memory is fragmented as a real program's is; with `--alone` each contender
has a job to itself. The figures are medians over the repetitions of the slowest rank, after a
warm-up. Below one of our optimizers is how rank 0 spends a step; the time in which the gradient
variant fills buckets during backward is not in that line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import jobs
from namespaces import INTERFACE, Hosts

AVERAGE = "DDP, Gloo's average"
DISTRIBUTED = "DDP, hook without Horovod"
HOROVOD = "Horovod's optimizer"
GRADIENT, DELTA = "optimizer, AdasumGrad", "optimizer, AdasumDelta"
LOCAL = "DDP, keep_local_hook"
CONTENDERS = (AVERAGE, DISTRIBUTED, HOROVOD, GRADIENT, DELTA, LOCAL)
PARTS = ("backward", "fill", "wait", "write back", "step")


def large_model():
    """Return a perceptron of 25 M parameters, and a batch for it."""
    import torch

    layers = [torch.nn.Linear(2048, 2048) for _ in range(6)]
    return torch.nn.Sequential(*layers), torch.randn(8, 2048)


def wide_model():
    """Return four layers of 2500 x 2500, and a batch for them."""
    import torch

    layers = [torch.nn.Linear(2500, 2500) for _ in range(4)]
    return torch.nn.Sequential(*layers), torch.randn(4, 2500)


def small_model():
    """Return 400 layers of 1056 parameters, and a batch for them."""
    import torch

    layers = [torch.nn.Linear(32, 32) for _ in range(400)]
    for layer in layers:  # the default shrinks gradients to zero over 400 layers
        torch.nn.init.orthogonal_(layer.weight)
    return torch.nn.Sequential(*layers), torch.randn(8, 32)


MODELS: dict[str, Callable] = {
    "25 M": large_model, "wide": wide_model, "small": small_model,
}  # fmt: skip


class Stopwatch:
    """Times an optimizer's methods from outside."""

    def __init__(self) -> None:
        from adasum_hvd.torch.optimizer.buckets import bucket, weight_change

        self.spent = dict.fromkeys(PARTS, 0.0)
        self._inside = False
        watched = {
            bucket.Bucket: {
                "copy_in": "fill", "fill": "fill", "start": "fill", "finish": "wait",
                "write_back": "write back",
            },
            weight_change.ChangeBucket: {"begin_window": "fill", "start": "fill"},
            weight_change.ChangeInOpBucket: {
                "start": "fill", "finish": "wait", "apply": "write back",
            },
        }  # fmt: skip
        for owner, methods in watched.items():
            for name, part in methods.items():
                setattr(owner, name, self._watch(getattr(owner, name), part))

    def _watch(self, method: Callable, part: str) -> Callable:
        @wraps(method)
        def watched(*arguments: Any) -> Any:
            if self._inside:  # of a method that another one calls
                return method(*arguments)
            self._inside, started = True, time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self._inside = False
                self.spent[part] += time.perf_counter() - started

        return watched

    def lap(self, backward: float, filled: float, step: float) -> dict[str, float]:
        """Return the seconds of every part of a step, and start anew.

        Args:
            backward: seconds of forward and backward.
            filled: seconds of "fill" in them; the others are of `step()`.
            step: seconds of `step()`.
        """
        found, self.spent = self.spent, dict.fromkeys(PARTS, 0.0)
        inside = found["fill"] - filled + found["wait"] + found["write back"]
        return found | {"backward": backward - filled, "step": step - inside}


def contender(name: str, model_name: str, rank: int):
    """Return (model, batch, optimizer) of one contender."""
    import horovod.torch as horovod
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import adasum_hvd.torch as hvd
    from adasum_hvd import distributed
    from adasum_hvd.torch import ddp

    torch.manual_seed(rank)
    model, batch = MODELS[model_name]()
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    reducing = {
        HOROVOD: (horovod.DistributedOptimizer, horovod.Average),
        GRADIENT: (hvd.DistributedOptimizer, hvd.AdasumGrad),
        DELTA: (hvd.DistributedOptimizer, hvd.AdasumDelta),
    }
    if name in reducing:
        wrap, op = reducing[name]
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        named = model.named_parameters(prefix=name)
        return model, batch, wrap(optimizer, named, op=op)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == DISTRIBUTED:
        model.register_comm_hook(distributed.AdasumState(), distributed.adasum_hook)
    if name == LOCAL:
        model.register_comm_hook(None, ddp.keep_local_hook)
    return model, batch, optimizer


def rank_main(names: list[str], model_name: str, repetitions: int, output: Path):
    """Measure the contenders on this rank; rank 0 writes the slowest rank's times."""
    import torch
    import torch.distributed as dist

    import adasum_hvd.torch as hvd

    hvd.init()
    # A file, for not every launcher gives MASTER_ADDR.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{output}.store",
        rank=hvd.rank(),
        world_size=hvd.size(),
    )
    torch.set_num_threads(1)
    watch = Stopwatch()
    runs = {name: contender(name, model_name, hvd.rank()) for name in names}
    times: dict[str, list[float]] = {name: [] for name in runs}
    parts: dict[str, list[dict[str, float]]] = {
        name: [] for name in (GRADIENT, DELTA) if name in runs
    }
    for repetition in range(-3, repetitions):
        for name, (model, batch, optimizer) in runs.items():
            optimizer.zero_grad()
            hvd.barrier()
            started = time.perf_counter()
            model(batch).mean().backward()
            stepping, filled = time.perf_counter(), watch.spent["fill"]
            optimizer.step()
            ended = time.perf_counter()
            lap = watch.lap(stepping - started, filled, ended - stepping)
            if repetition >= 0:
                times[name].append(ended - started)
                if name in parts:
                    parts[name].append(lap)
    everyone = hvd.allgather_object(times)
    if hvd.rank() == 0:
        output.write_text(json.dumps({"times": jobs.slowest(everyone), "parts": parts}))
    hvd.barrier()


def middle(parts: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of every part."""
    return {part: statistics.median(lap[part] for lap in parts) for part in PARTS}


def show(row: dict[str, Any]) -> None:
    """Print a line for every contender, and one for the parts of an optimizer's step."""
    medians = {name: statistics.median(of) for name, of in row["times"].items()}
    for name, median in medians.items():
        print(
            f"{row['model']:6s} {row['ranks']:5d} {name:24s} {median * 1e3:8.2f}"
            f" {jobs.ratio(median / medians[AVERAGE]):>9s}",
            flush=True,
        )
        if name in row["parts"]:
            split = middle(row["parts"][name]).items()
            parts = ", ".join(f"{part} {spent * 1e3:.1f}" for part, spent in split)
            print(" " * 13 + parts)


def plot(source: Path, target: Path) -> None:
    """Draw every contender's step, an optimizer's in its parts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = json.loads(source.read_text())["rows"]
    size = (3.2 * len(rows), 4)
    figure, [panels] = pyplot.subplots(1, len(rows), figsize=size, squeeze=False)
    for axes, row in zip(panels, rows, strict=True):
        for place, (name, of) in enumerate(row["times"].items()):
            whole = statistics.median(of) * 1e3
            if name not in row["parts"]:
                axes.bar(place, whole, color="lightgrey", edgecolor="black")
                continue
            split, below = middle(row["parts"][name]), 0.0
            for number, part in enumerate(PARTS):
                label = part if name == GRADIENT else None
                height = split[part] * 1e3
                axes.bar(place, height, bottom=below, color=f"C{number}", label=label)
                below += height
        axes.set_xticks(
            range(len(row["times"])), list(row["times"]), rotation=60, ha="right"
        )
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(f"{row['model']}, {row['ranks']} ranks", fontsize=9)
    panels[0].set_ylabel("a training step, ms")
    bars, names = panels[0].get_legend_handles_labels()
    figure.legend(bars, names, loc="upper center", ncols=len(PARTS), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(target, dpi=110)


def measure(arguments: argparse.Namespace, hosts: Hosts | None) -> list[dict]:
    """Measure every model with every number of ranks, and print it."""
    rows = []
    launcher = "gloo" if hosts else arguments.launcher
    variables = {"GLOO_SOCKET_IFNAME": INTERFACE} if hosts else {}
    print(f"{'model':6s} ranks {'step of':24s} {'ms':>8s}  / {AVERAGE}")
    for model_name in arguments.models:
        for ranks in arguments.ranks:
            row = {"model": model_name, "ranks": ranks, "times": {}, "parts": {}}
            groups = [[n] for n in CONTENDERS] if arguments.alone else [CONTENDERS]
            for names in groups:
                found = jobs.run(
                    launcher, ranks, __file__, json.dumps(names), model_name,
                    arguments.repetitions, hosts=hosts, **variables,
                )  # fmt: skip
                row["times"] |= found["times"]
                row["parts"] |= found["parts"]
            rows.append(row)
            show(row)
    return rows


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--rank"]:
        _, _, names, model_name, repetitions, output = sys.argv
        rank_main(json.loads(names), model_name, int(repetitions), Path(output))
        return
    if sys.argv[1:2] == ["plot"]:
        plot(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=list(MODELS)
    )
    parser.add_argument("--launcher", default="exec", choices=["exec", "gloo", "mpi"])
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--gigabits", type=float, default=1.0, help="of a host's link")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("build/ddp.json"))
    arguments = parser.parse_args()
    several = arguments.hosts > 1
    link = arguments.hosts, arguments.gigabits
    with Hosts(*link) if several else nullcontext() as hosts:
        rows = measure(arguments, hosts)
    jobs.save(rows, arguments.output)


if __name__ == "__main__":
    main()
