"""Time of a job's first training step, with all that starts for it.

    python benchmarks/first_step.py                 # 4 ranks, 9 rounds
    python benchmarks/first_step.py --ranks 2 --rounds 5

The model is that of examples/torch_ddp.py. The time begins after the imports: process group, DDP,
hook, one step. Every round has a job of torchrun for each contender: DDP's average, and
`adasum_hook` with the core and with torch's operations. Figures are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jobs

AVERAGE, CORE, OPERATIONS = "average", "hook, core", "hook, torch's operations"
SETTINGS = {AVERAGE: "auto", CORE: "auto", OPERATIONS: "off"}  # of ADASUM_HVD_CORE
PARTS = ("process group", "DDP and hook", "first step", "second step")


def rank_main(contender: str, output: str) -> None:
    """One rank: start, take two steps, and gather the seconds of every part."""
    import torch
    import torch._dynamo  # else the first optimizer imports it
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from adasum_hvd.distributed import AdasumState, adasum_hook
    from adasum_hvd.tools.torch_digits import LeNet5

    times = [time.perf_counter()]
    dist.init_process_group("gloo")
    times.append(time.perf_counter())
    torch.set_num_threads(1)
    model = DistributedDataParallel(LeNet5())
    if contender != AVERAGE:
        model.register_comm_hook(AdasumState(), adasum_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9)
    times.append(time.perf_counter())
    images, labels = torch.randn(32, 1, 32, 32), torch.arange(32) % 10
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        times.append(time.perf_counter())
    spent = [later - sooner for sooner, later in itertools.pairwise(times)]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, spent)
    if dist.get_rank() == 0:
        Path(output).write_text(
            json.dumps([max(of) for of in zip(*gathered, strict=True)])
        )
    del model  # DDP before its process group: docs/troubleshooting.md
    dist.destroy_process_group()


def measure(ranks: int, contender: str) -> list[float]:
    """Return the seconds of every part, of a job of its own."""
    core = {"ADASUM_HVD_CORE": SETTINGS[contender]}
    return jobs.run("torchrun", ranks, __file__, contender, **core)


def show(rounds: Sequence[dict[str, list[float]]]) -> None:
    """Print medians in milliseconds, and DDP and first step over those with torch's operations."""
    print(f"{'ms':26}" + "".join(f"{part:>15}" for part in PARTS) + f"{'ratio':>8}")
    totals = {c: [sum(of[c][1:3]) for of in rounds] for c in SETTINGS}
    for contender in SETTINGS:
        parts = zip(*(of[contender] for of in rounds), strict=True)
        row = "".join(f"{1e3 * statistics.median(of):15.1f}" for of in parts)
        pairs = zip(totals[contender], totals[OPERATIONS], strict=True)
        print(f"{contender:26}{row}{statistics.median(a / b for a, b in pairs):8.2f}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    show(
        [
            {c: measure(arguments.ranks, c) for c in SETTINGS}
            for _ in range(arguments.rounds)
        ]
    )


if __name__ == "__main__":
    rank_main(*sys.argv[2:]) if sys.argv[1:2] == ["--rank"] else main()
