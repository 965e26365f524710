"""The program of a rank in `adasum-hvd bench`: all reductions in turn, for a given time.

python -m adasum_hvd.tools.torch_bench CASES SECONDS on|off OUTPUT
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as horovod_ops
import torch
import torch.distributed as dist

import adasum_hvd.torch as hvd
from adasum_hvd.tools import selfcheck
from adasum_hvd.tools.bench import OURS

FEWEST, MOST = 5, 1000
_CHECKED = 50_000  # elements of a tensor that are compared with the reference
Operation = Callable[[], object]


def reduce_all(module: Any, op: Any, name: str, tensors: list[torch.Tensor]) -> None:
    """Reduce tensors in place, all at once. Collective; blocks."""
    handles = [
        module.allreduce_async_(tensor, op=op, name=f"{name}.{index}")
        for index, tensor in enumerate(tensors)
    ]
    for handle in handles:
        module.synchronize(handle)


def _ddp_all(tensors: list[torch.Tensor]) -> None:
    """Average as DistributedDataParallel does: one flat bucket, divided, then summed."""
    flat = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    dist.all_reduce(flat.div_(dist.get_world_size()))


def operations(
    case: str, tensors: list[torch.Tensor], ours: bool
) -> dict[str, Operation]:
    """Return the operations to measure, by name; each reduces `tensors` in place."""

    def reduction(module: Any, op: Any, name: str) -> Operation:
        return partial(reduce_all, module, op, f"{case}.{name}", tensors)

    if not ours:
        of_horovod = reduction(horovod_ops, horovod_ops.Adasum, "horovod_ops")
        return {"Horovod AdaSum": of_horovod}
    source = torch.randn(sum(tensor.numel() for tensor in tensors))
    found: dict[str, Operation] = {
        OURS: reduction(hvd, hvd.Adasum, "adasum"),
        "Horovod Average": reduction(horovod_ops, horovod_ops.Average, "average"),
        "copy": partial(torch.empty_like(source).copy_, source),
    }
    if dist.is_initialized():
        found["torch DDP, Gloo"] = partial(_ddp_all, tensors)
    return found


def wrong(case: str, sizes: list[int]) -> int:
    """Return how many of the first tensors differ from the reference by more than a rounding."""
    count = 0
    for index, size in enumerate(sizes[:5]):
        inputs = [
            values_of(rank, index, min(size, _CHECKED)) for rank in range(hvd.size())
        ]
        name = f"{case}.wrong.{index}"
        actual = hvd.allreduce(inputs[hvd.rank()], op=hvd.Adasum, name=name).numpy()
        count += not selfcheck.is_right(actual, [tensor.numpy() for tensor in inputs])
    return count


def values_of(rank: int, index: int, size: int) -> torch.Tensor:
    """Return a rank's values of a tensor, by the tensor's number."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randn(size, generator=generator)


def timed(
    todo: dict[str, Operation], reset: Callable[[], object], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of all operations, which take turns. Collective; blocks."""
    times: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(rounds):
        for name, operation in todo.items():
            reset()
            horovod_ops.barrier()
            started = time.perf_counter()
            operation()
            times[name].append(time.perf_counter() - started)
    return times


def measure(
    case: str, sizes: list[int], seconds: float, ours: bool
) -> dict[str, list[float]]:
    """Return the seconds of every operation on this rank, the same number on all ranks."""
    fresh = [values_of(hvd.rank(), index, size) for index, size in enumerate(sizes)]
    tensors = [tensor.clone() for tensor in fresh]
    todo = operations(case, tensors, ours)
    reset = partial(torch._foreach_copy_, tensors, fresh)
    began = time.perf_counter()
    timed(todo, reset, 1)  # the warm-up, whose time gives the number of rounds
    fit = int(seconds / (time.perf_counter() - began))
    return timed(todo, reset, hvd.broadcast_object(min(MOST, max(FEWEST, fit)), 0))


def _join_process_group() -> None:
    """Start torch's own Gloo next to Horovod, on a free port of rank 0."""
    store = None
    if hvd.rank() == 0:
        store = dist.TCPStore("127.0.0.1", 0, hvd.size(), True, wait_for_workers=False)
    port = hvd.broadcast_object(store.port if store else None, 0)
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, hvd.size(), False)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def main() -> None:
    """Measure all cases; rank 0 writes the slowest rank's times."""
    cases, seconds = json.loads(sys.argv[1]), float(sys.argv[2])
    ours, output = sys.argv[3] == "on", sys.argv[4]
    hvd.init()
    torch.set_num_threads(1)
    backend = "mpi" if horovod_ops.mpi_enabled() else "gloo"
    if backend == "gloo" and dist.is_gloo_available():
        _join_process_group()
    rows = []
    for case, sizes in cases.items():
        off = wrong(case, sizes) if ours else 0
        everyone = hvd.allgather_object(measure(case, sizes, seconds, ours))
        for name in everyone[0]:
            slowest = map(max, zip(*(times[name] for times in everyone), strict=True))
            row = {"case": case, "backend": backend, "operation": name}
            rows.append({**row, "seconds": list(slowest), "wrong": off})
    if hvd.rank() == 0:
        selfcheck.write(rows, output)


if __name__ == "__main__":
    main()
