"""Time and bytes of a training step of a sharded model: native HSDP's average and AdaSum.

    torchrun --nproc-per-node 4 benchmarks/sharded.py
    torchrun --nproc-per-node 4 benchmarks/sharded.py --width 1024 --repetitions 5

Contenders are interleaved in one job, on one mesh of replicas x shards: HSDP on the mesh of two
dimensions, `adasum_replicate` on the replicas of FSDP2 with AdaSum and with its plain mean,
`LocalSGD` with 8 steps in a window, and FSDP2 whose replicas never meet. Times are medians of the
slowest rank, after a warm-up. Processor time is that of all ranks together, and changes less when
other programs share the cores; its ratio is a median of pairs in one repetition. Bytes are those
that a rank sends: counted in messages, and `2 n (N - 1) / N` for a collective of Gloo's that
reduces and gathers `n` bytes on `N` ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jobs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from adasum_hvd.distributed import LocalSGD, adasum_replicate

HSDP, ADASUM, MEAN = "HSDP, average", "adasum_replicate", "adasum_replicate, mean"
LOCAL, ALONE = "LocalSGD, 8 steps", "FSDP2, no replicas"
CONTENDERS = (HSDP, ADASUM, MEAN, LOCAL, ALONE)
WINDOW = 8
# FSDP's collectives, and how often the bytes of their largest tensor travel.
COLLECTIVES = {"all_gather_single": 1, "reduce_scatter_single": 1, "all_reduce": 2}


def contender(name: str, mesh: DeviceMesh, width: int, layers: int) -> tuple[Any, Any]:
    """Return the model and the optimizer of one contender."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh if name == HSDP else mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    if name in (ADASUM, MEAN):
        rule = "adasum" if name == ADASUM else "mean"
        adasum_replicate(model, mesh["replica"], rule=rule)
    if name == LOCAL:
        LocalSGD(optimizer, model, mesh["replica"], WINDOW)
    return model, optimizer


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


@contextmanager
def counting(sent: dict[tuple[int, ...], float]) -> Iterator[None]:
    """Count the bytes that this rank sends, by the ranks of the group."""

    def add(group: Any, count: float) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        sent[ranks] = sent.get(ranks, 0) + count

    def collective(name: str, travels: int) -> Callable:
        original = getattr(dist, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            values = (*arguments, *named.values())
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            size = dist.get_world_size(named["group"])
            whole = max(map(bytes_of, tensors))
            add(named["group"], travels * whole * (size - 1) / size)
            return original(*arguments, **named)

        return counted

    send = dist.batch_isend_irecv

    def messages(operations: list[dist.P2POp]) -> Any:
        for one in operations:
            if one.op is dist.isend:
                add(one.group, bytes_of(one.tensor))
        return send(operations)

    replaced = {name: getattr(dist, name) for name in COLLECTIVES}
    dist.batch_isend_irecv = messages
    for name, travels in COLLECTIVES.items():
        setattr(dist, name, collective(name, travels))
    try:
        yield
    finally:
        dist.batch_isend_irecv = send
        for name, original in replaced.items():
            setattr(dist, name, original)


def step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    """Take a training step."""
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def count(runs: dict[str, Any], mesh: DeviceMesh, batch: torch.Tensor) -> dict:
    """Return by contender the bytes of a step between replicas and between shards."""
    groups = {
        part: tuple(dist.get_process_group_ranks(mesh[part].get_group()))
        for part in ("replica", "shard")
    }
    found = {}
    for name, (model, optimizer) in runs.items():
        sent: dict[tuple[int, ...], float] = {}
        with counting(sent):
            for _ in range(WINDOW):
                step(model, optimizer, batch)
        found[name] = {
            part: sent.get(ranks, 0) / WINDOW for part, ranks in groups.items()
        }
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the slowest rank's times and this rank's bytes, by contender. Collective."""
    shape = dist.get_world_size() // arguments.shards, arguments.shards
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    batch = torch.randn(arguments.batch, arguments.width)
    runs = {
        name: contender(name, mesh, arguments.width, arguments.layers)
        for name in CONTENDERS
    }
    for model, optimizer in runs.values():
        for _ in range(WINDOW):
            step(model, optimizer, batch)
    sent = count(runs, mesh, batch)
    times: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.repetitions):
        for name, (model, optimizer) in runs.items():
            dist.barrier()
            steps = WINDOW if name == LOCAL else 1
            started, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step(model, optimizer, batch)
            times[name].append((time.perf_counter() - started) / steps)
            processor[name].append((time.process_time() - used) / steps)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (times, processor))
    of_times, of_processor = zip(*everyone, strict=True)
    total = {
        name: [*map(sum, zip(*(one[name] for one in of_processor), strict=True))]
        for name in runs
    }
    slowest = jobs.slowest([*of_times])
    return {"mesh": shape, "times": slowest, "processor": total, "bytes": sent}


def show(row: dict[str, Any]) -> None:
    """Print a line for each contender."""
    medians = {name: statistics.median(of) for name, of in row["times"].items()}
    print(
        f"{'{} x {}'.format(*row['mesh']):22s}       ms    / HSDP  processor / HSDP"
        "  MB replicas    shards"
    )
    for name, median in medians.items():
        replicas, shards = (
            row["bytes"][name][part] / 1e6 for part in ("replica", "shard")
        )
        ratio = jobs.ratio(median / medians[HSDP])
        used = row["processor"]
        pairs = zip(used[name], used[HSDP], strict=True)
        share = statistics.median(own / others for own, others in pairs)
        print(
            f"{name:22s} {median * 1e3:8.1f} {ratio:>9s} {share:17.2f}x"
            f" {replicas:11.3f} {shards:9.3f}"
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=2, help="ranks in a replica")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("build/sharded.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    row = measure(arguments)
    if dist.get_rank() == 0:
        show(row)
        jobs.save([row], arguments.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
