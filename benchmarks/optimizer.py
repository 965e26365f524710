"""Time of a step with the torch optimizer wrapper, the plain optimizer and Horovod's.

    python benchmarks/optimizer.py                 # np 1 and 2, 1600 small and 25 M parameters
    python benchmarks/optimizer.py --backend mpi --ranks 2

Each operation of a round runs once per repetition, interleaved, after a warm-up; the figures
are medians over repetitions of the slowest rank. "plain" is the unwrapped optimizer; "delta in
Python" is adasum-delta with the change of the weights formed by torch instead of by the op.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jobs


def small_model():
    """Return 1600 parameters of 256 elements, used one after the other."""
    import torch
    from torch import nn

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(
                [nn.Parameter(torch.ones(256)) for _ in range(1600)]
            )

        def forward(self, x):
            for scale in self.scales:
                x = x * scale
            return x.mean()

    return Many(), torch.ones(256)


def large_model():
    """Return a perceptron of 25 M parameters."""
    import torch
    from torch import nn

    layers = [nn.Linear(2048, 2048) for _ in range(6)]
    return nn.Sequential(*layers), torch.ones(8, 2048)


MODELS: dict[str, Callable] = {"1600 x 256": small_model, "25 M": large_model}


def contenders(model_name: str):
    """Return (model, input, optimizer) by name, every one with a model of its own."""
    import horovod.torch as horovod_torch
    import torch

    import adasum_hvd.torch as hvd
    from adasum_hvd.torch.optimizer.buckets import weight_change

    def one(wrap: Callable):
        torch.manual_seed(0)  # the same weights on all ranks
        model, inputs = MODELS[model_name]()
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        return model, inputs, wrap(optimizer, model)

    def delta_in_python(optimizer, model):
        with mock.patch.object(weight_change, "op_takes", return_value=False):
            return hvd.DistributedOptimizer(
                optimizer, model.named_parameters(prefix="python"), op=hvd.AdasumDelta
            )

    named = {
        "plain": lambda opt, model: opt,
        "Horovod Average": lambda opt, model: horovod_torch.DistributedOptimizer(
            opt, model.named_parameters(), op=horovod_torch.Average
        ),
    }
    for op in ("average", "adasum-grad", "adasum-delta"):
        named[op] = lambda opt, model, op=op: hvd.DistributedOptimizer(
            opt, model.named_parameters(prefix=op), op=op
        )
    named["delta in Python"] = delta_in_python
    return {name: one(wrap) for name, wrap in named.items()}


def rank_main(model_name: str, repetitions: int, output: Path) -> None:
    """Measure on this rank; rank 0 writes the slowest rank's times."""
    import torch

    import adasum_hvd.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    runs = contenders(model_name)
    times: dict[str, dict[str, list[float]]] = {
        name: {"total": [], "step": []} for name in runs
    }
    for repetition in range(-3, repetitions):
        for name, (model, inputs, optimizer) in runs.items():
            optimizer.zero_grad()
            hvd.barrier()
            started = time.perf_counter()
            model(inputs).mean().backward()
            before_step = time.perf_counter()
            optimizer.step()
            ended = time.perf_counter()
            if repetition >= 0:
                times[name]["total"].append(ended - started)
                times[name]["step"].append(ended - before_step)
    everyone = hvd.allgather_object(times)
    if hvd.rank() == 0:
        slowest = {name: jobs.slowest([r[name] for r in everyone]) for name in runs}
        output.write_text(json.dumps(slowest))


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="gloo", choices=["gloo", "mpi"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=list(MODELS)
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("build/optimizer.json"))
    arguments = parser.parse_args()
    rows = []
    print(
        f"{'model':12s} ranks {'optimizer':16s}  total ms  / plain  / Horovod   step ms  / plain"
    )
    for model_name in arguments.models:
        for ranks in arguments.ranks:
            times = jobs.run(
                arguments.backend, ranks, __file__, model_name, arguments.repetitions
            )
            rows.append({"model": model_name, "ranks": ranks, "times": times})
            medians = {
                name: {kind: statistics.median(values) for kind, values in of.items()}
                for name, of in times.items()
            }
            plain, horovod = medians["plain"], medians["Horovod Average"]
            for name, of in medians.items():
                print(
                    f"{model_name:12s} {ranks:5d} {name:16s} {of['total'] * 1e3:9.2f}"
                    f" {of['total'] / plain['total']:7.2f}x"
                    f" {jobs.ratio(of['total'] / horovod['total']):>9s}"
                    f" {of['step'] * 1e3:9.2f} {of['step'] / plain['step']:7.2f}x",
                    flush=True,
                )
    jobs.save(rows, arguments.output)


if __name__ == "__main__":
    main()
