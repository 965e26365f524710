"""Processor time of the reduction of one DDP bucket and its parts, next to Gloo's all-reduce.

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py
    torchrun --standalone --nproc-per-node 4 benchmarks/distributed.py --tensors 100

Processor time of rank 0, medians in ms: it changes less than time on the clock when other programs
share the cores. The parts are those of the calling thread. "transport" is the time of all other
threads of the process, in which Gloo sends and receives. The two reductions alternate.

Then the time on the clock, in us, in which all ranks gather a row of ten numbers, as they do
before a reduction: over Gloo, and as these ranks do it after their first reduction. Median and
least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from adasum_hvd.distributed.blocks import Slice
from adasum_hvd.distributed.communicator import Communicator
from adasum_hvd.distributed.exchange import Exchange
from adasum_hvd.distributed.reduction import reduce_buffer
from adasum_hvd.distributed.rules import Rule

WATCHED = {
    "exchange of slices": (Communicator, "scatter"),
    "Gram matrices": (Slice, "gram"),
    "sums over the ranks": (Exchange, "total"),
    "combination": (Slice, "combine"),
    "gathering": (Communicator, "gather"),
}


def watch(spent: dict[str, float]) -> None:
    """Add the calling thread's time in each part to `spent`, from now on."""

    def timed(part: str, method: Callable) -> Callable:
        @wraps(method)
        def timed_method(*arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return method(*arguments)
            finally:
                spent[part] += time.thread_time() - started

        return timed_method

    for part, (owner, name) in WATCHED.items():
        setattr(owner, name, timed(part, getattr(owner, name)))


def check(flat: torch.Tensor, adasum: Callable[[], Any]) -> None:
    """Raise RuntimeError unless identical inputs come out as they went in."""
    before = flat.clone()
    adasum()
    if not torch.equal(flat, before):
        raise RuntimeError("reduce_buffer: expected identical inputs unchanged")


def gathering(communicator: Communicator) -> tuple[float, float]:
    """Return the median and the least time of a gathering of ten numbers, in us."""
    row, times = torch.arange(10), []
    for _ in range(1000):
        started = time.perf_counter()
        communicator.all_gather(row)
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times), min(times)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=6_553_600)  # 25 MiB, a bucket
    parser.add_argument("--tensors", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(arguments.elements, generator=generator)
    sizes = [len(part) for part in flat.chunk(arguments.tensors)]
    communicator, rule = Communicator(), Rule("adasum")
    check(flat, lambda: reduce_buffer(flat, sizes, communicator, rule))
    spent = dict.fromkeys(WATCHED, 0.0)
    watch(spent)
    rows: list[dict[str, float]] = []
    for repetition in range(-3, arguments.repetitions):
        dist.barrier()
        started = time.process_time()
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        plain = time.process_time() - started
        dist.barrier()
        spent.update(dict.fromkeys(spent, 0.0))
        started, own = time.process_time(), time.thread_time()
        reduce_buffer(flat, sizes, communicator, rule)
        whole, own = time.process_time() - started, time.thread_time() - own
        if repetition >= 0:
            others = {
                "other steps": own - sum(spent.values()),
                "transport": whole - own,
            }
            rows.append({"all-reduce": plain, "AdaSum": whole} | spent | others)
    connections = {"over Gloo": Communicator(apart=True), "as chosen": communicator}
    gathered = {name: gathering(one) for name, one in connections.items()}
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {arguments.elements} elements of float32 in "
              f"{len(sizes)} tensors")  # fmt: skip
        for part in rows[0]:
            print(
                f"{part:20s} {statistics.median(row[part] for row in rows) * 1e3:7.2f}"
            )
        for name, (median, least) in gathered.items():
            print(f"ten numbers, {name}: {median:.0f} us, at least {least:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
