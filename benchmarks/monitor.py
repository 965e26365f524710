"""The cost of monitoring: the op with and without a record, and a training step with a monitor.

    python benchmarks/monitor.py              # 2 and 4 ranks
    python benchmarks/monitor.py --ranks 2 --repetitions 400

The op: AdaSum of a flat bucket of many tensors; every other call is recorded, as with `every=1`.
A step: the same model three times: without a monitor, and with one that records every 50th or
every step. Printed for each: the shortest and the median time of the slowest rank, the shortest
time over that without a monitor, and the median and interquartile range of the differences
between consecutive calls. Also the arithmetic alone, per tensor: `observation.cc`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import compiled
import ddp
import jobs

BUCKETS = {"161 of 0.6 MB": (161, 150_000), "1600 of 4 KB": (1600, 1000)}
EVERY = (0, 50, 1)
STEP_MODEL = "25 M"


def ops(name: str) -> Mapping[str, Callable[[], None]]:
    """Return the op's calls by name, without a record first."""
    import torch

    import adasum_hvd.torch as hvd
    from adasum_hvd.horovod import binding
    from adasum_hvd.torch import wire

    count, elements = BUCKETS[name]
    torch.manual_seed(hvd.rank())
    flat = torch.randn(count * elements)
    # Training reduces new gradients in each step; repeated AdaSum would make the ranks equal.
    mine, label = flat.clone(), binding.segmented(f"bench.{count}", [elements] * count)

    def reduce() -> None:
        hvd.allreduce_(flat, op=hvd.AdasumGrad, name=label)
        flat.copy_(mine)

    def recorded() -> None:
        binding.request_record(wire.LIBRARY, f"allreduce.{label}")
        reduce()

    return {"off": reduce, "recorded": recorded}


def steps(name: str) -> Mapping[str, Callable[[], None]]:
    """Return training steps by name, without a monitor first."""
    import torch

    import adasum_hvd.torch as hvd

    found: dict[str, Callable[[], None]] = {}
    for every in EVERY:
        torch.manual_seed(0)
        model, inputs = ddp.MODELS[name]()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 1e-4),
            model.named_parameters(),
            op=hvd.AdasumGrad,
        )
        if every:
            hvd.AdasumMonitor(optimizer, every, lambda record: None)

        def step(model=model, inputs=inputs, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            model(inputs).mean().backward()
            optimizer.step()

        found[f"every={every}" if every else "off"] = step
    return found


def rank_main(name: str, repetitions: int, output: Path) -> None:
    """Measure on this rank; rank 0 writes the slowest rank's times."""
    import torch

    import adasum_hvd.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    runs = ops(name) if name in BUCKETS else steps(name)
    times: dict[str, list[float]] = {what: [] for what in runs}
    for repetition in range(-5, repetitions):
        # In turns, so that none always comes after the same one.
        order = list(runs) if repetition % 2 else list(runs)[::-1]
        for what in order:
            hvd.barrier()
            started = time.perf_counter()
            runs[what]()
            if repetition >= 0:
                times[what].append(time.perf_counter() - started)
    everyone = hvd.allgather_object(times)
    if hvd.rank() == 0:
        output.write_text(json.dumps(jobs.slowest(everyone)))
    hvd.barrier()


def arithmetic() -> str:
    """Return the output of `observation.cc`."""
    source = Path(__file__).with_name("observation.cc")
    return compiled.output_of(source, ["reduce/observation.cc", "reduce/tree.cc"])


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("build/monitor.json"))
    arguments = parser.parse_args()
    rows = []
    print(arithmetic())
    print(
        f"{'what':14s} ranks {'':10s} {'shortest, ms':>12s} {'%':>6s} {'median':>8s}"
        "  difference, % (middle half)"
    )
    for name in (*BUCKETS, STEP_MODEL):
        for ranks in arguments.ranks:
            times = jobs.run("exec", ranks, __file__, name, arguments.repetitions)
            rows.append({"what": name, "ranks": ranks, "times": times})
            for what, of in times.items():
                pairs = zip(of, times["off"], strict=True)
                differences = [100 * (mine / off - 1) for mine, off in pairs]
                low, middle, high = statistics.quantiles(differences, n=4)
                print(
                    f"{name:14s} {ranks:5d} {what:10s} {min(of) * 1e3:12.2f}"
                    f" {100 * (min(of) / min(times['off']) - 1):+6.2f}"
                    f" {statistics.median(of) * 1e3:8.2f}"
                    f"  {middle:+.2f} ({low:+.2f} to {high:+.2f})",
                    flush=True,
                )
    jobs.save(rows, arguments.output)


if __name__ == "__main__":
    main()
