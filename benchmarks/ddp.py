"""What DDP's communication hook costs, beside DDP's own average and no reduction at all.

    python benchmarks/ddp.py            # 2 and 4 ranks, 25 M parameters and 400 small layers
    python benchmarks/ddp.py --ranks 2 --models small

A training step of plain DDP over Gloo, of DDP with `adasum_hook`, of `DistributedOptimizer`
(op=AdasumGrad), and of DDP with `keep_local_hook`, which reduces nothing: interleaved, after a
warm-up, in one run of ranks that `adasum-hvd exec` starts; the figures are medians over the
repetitions of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jobs

AVERAGE, HOOK = "DDP, Gloo's average", "DDP, adasum_hook"
OPTIMIZER, LOCAL = "DistributedOptimizer", "DDP, keep_local_hook"


def large_model():
    """Return a perceptron of 25 M parameters, and its input."""
    import torch

    layers = [torch.nn.Linear(2048, 2048) for _ in range(6)]
    return torch.nn.Sequential(*layers), torch.ones(8, 2048)


def small_model():
    """Return 400 layers of 1056 parameters, and their input."""
    import torch

    layers = [torch.nn.Linear(32, 32) for _ in range(400)]
    return torch.nn.Sequential(*layers), torch.ones(8, 32)


MODELS: dict[str, Callable] = {"25 M": large_model, "small": small_model}


def contenders(model_name: str):
    """Return (model, input, optimizer) by name, every one with a model of its own."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import adasum_hvd.torch as hvd
    from adasum_hvd.torch import ddp

    runs = {}
    for name in (AVERAGE, HOOK, OPTIMIZER, LOCAL):
        torch.manual_seed(0)
        model, inputs = MODELS[model_name]()
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        if name == OPTIMIZER:
            optimizer = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), op=hvd.AdasumGrad
            )
        else:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if name == HOOK:
            model.register_comm_hook(ddp.AdasumState(), ddp.adasum_hook)
        if name == LOCAL:
            model.register_comm_hook(None, ddp.keep_local_hook)
        runs[name] = model, inputs, optimizer
    return runs


def rank_main(model_name: str, repetitions: int, output: Path) -> None:
    """Measure on this rank; rank 0 writes the slowest rank's times."""
    import torch
    import torch.distributed as dist

    import adasum_hvd.torch as hvd

    hvd.init()
    # A file, for exec gives no MASTER_ADDR.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{output}.store",
        rank=hvd.rank(),
        world_size=hvd.size(),
    )
    torch.set_num_threads(1)
    runs = contenders(model_name)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(-3, repetitions):
        for name, (model, inputs, optimizer) in runs.items():
            optimizer.zero_grad()
            hvd.barrier()
            started = time.perf_counter()
            model(inputs).mean().backward()
            optimizer.step()
            if repetition >= 0:
                times[name].append(time.perf_counter() - started)
    everyone = hvd.allgather_object(times)
    if hvd.rank() == 0:
        output.write_text(json.dumps(jobs.slowest(everyone)))
    hvd.barrier()


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=list(MODELS)
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("build/ddp.json"))
    arguments = parser.parse_args()
    rows = []
    print(f"{'model':6s} ranks {'step of':22s} {'ms':>8s}  / {AVERAGE}")
    for model_name in arguments.models:
        for ranks in arguments.ranks:
            times = jobs.run("exec", ranks, __file__, model_name, arguments.repetitions)
            rows.append({"model": model_name, "ranks": ranks, "times": times})
            medians = {name: statistics.median(of) for name, of in times.items()}
            for name, median in medians.items():
                ratio = median / medians[AVERAGE]
                print(
                    f"{model_name:6s} {ranks:5d} {name:22s} {median * 1e3:8.2f} {ratio:7.2f}x",
                    flush=True,
                )
    jobs.save(rows, arguments.output)


if __name__ == "__main__":
    main()
