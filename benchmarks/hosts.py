"""AdaSum over several hosts against average and Horovod's AdaSum: time, and bytes on the wire.

    python benchmarks/hosts.py                            # as root; 2 and 4 hosts, all backends
    python benchmarks/hosts.py --hosts 2 --ranks-per-host 2 --gigabits 1 --delay 1

The hosts are network namespaces of this machine (`namespaces.py`; needs root and iproute2):
links are as slow as real ones, processors are not more than this machine has. The ranks of one
job run all operations in turn, so the ratios are of one run. Times are taken with segmentation
offloads, as network cards have them. The bytes of one reduction that leave the busiest host are
counted in jobs without them, and printed divided by the reduced bytes:

    counter   what the link's own counter saw, headers and negotiation included
    payload   the same without 66 bytes of Ethernet, IP and TCP header per packet, and without
              what TCP sent again (a host that gets no processor acknowledges too late)
    limit     2 (1 - 1/H), what two levels send; a ring over H hosts of R ranks each
              sends 2 (1 - 1/(H R))

"flat" is the same AdaSum in one level (`ADASUM_HVD_RADICES=flat`). The backend "torch" is the
engine on torch.distributed, over Gloo, next to torch's average; "operations" is its AdaSum by
torch's operations (`ADASUM_HVD_CORE=off`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jobs
import torch
from namespaces import INTERFACE, Hosts, address, missing, sent

HEADER_BYTES = 14 + 20 + 32  # Ethernet, IP, TCP with timestamps
SEGMENT_BYTES = 1500 - 20 - 32  # of a full packet
OURS = "AdaSum", "flat", "operations"


# ---- one rank of one job ----


class Engine(NamedTuple):
    """Operations to measure, and what their job has for it."""

    rank: int
    operations: dict[str, Callable[[], object]]
    barrier: Callable[[], object]
    gather: Callable[[object], list]
    path: Callable[[], str]


def horovod(tensor: torch.Tensor) -> Engine:
    """Return the operations of Horovod and of the op, which replace a tensor."""
    import horovod.torch as horovod_torch

    import adasum_hvd.torch as hvd
    from adasum_hvd.horovod import binding
    from adasum_hvd.torch import ops

    off = os.environ["ADASUM_HVD_OP"] == "off"
    module, name = (horovod_torch, "Horovod AdaSum") if off else (hvd, "AdaSum")
    operations = {
        "Average": lambda: horovod_torch.allreduce_(
            tensor, op=horovod_torch.Average, name="average"
        ),
        name: lambda: module.allreduce_(tensor, op=module.Adasum, name="adasum"),
    }
    hvd.init()
    return Engine(
        hvd.rank(),
        operations,
        horovod_torch.barrier,
        hvd.allgather_object,
        lambda: binding.transport_description(ops.LIBRARY),
    )


def distributed(tensor: torch.Tensor) -> Engine:
    """Return the same of torch.distributed, whose ranks horovodrun has started."""
    import torch.distributed as dist

    from adasum_hvd.distributed import adasum_all_reduce, native
    from adasum_hvd.distributed.communicator import Communicator
    from adasum_hvd.distributed.rules import Rule

    rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address(1)}:29577", rank=rank, world_size=size
    )

    def average() -> None:
        dist.all_reduce(tensor)
        tensor.div_(size)

    def gather(thing: object) -> list:
        things = [None] * size
        dist.all_gather_object(things, thing)
        return things

    return Engine(
        rank,
        {"Average": average, "AdaSum": lambda: adasum_all_reduce(tensor)},
        dist.barrier,
        gather,
        lambda: native.described(Communicator(), Rule("adasum")),
    )


def rank_main(backend: str, elements: int, repetitions: int, output: Path) -> None:
    """Measure; rank 0 writes seconds and what `sent` counts per operation and repetition."""
    torch.set_num_threads(1)
    tensor = torch.empty(elements)
    engine = (distributed if backend == "torch" else horovod)(tensor)
    generator = torch.Generator().manual_seed(engine.rank)
    fresh = torch.randn(elements, generator=generator)
    mine = []
    for repetition in range(-2, repetitions):
        for name, operation in engine.operations.items():
            tensor.copy_(fresh)
            engine.barrier()
            before, started = sent(), time.perf_counter()
            operation()
            seconds = time.perf_counter() - started
            engine.barrier()
            wire = [after - b for after, b in zip(sent(), before, strict=True)]
            if repetition >= 0:
                mine.append((name, seconds, *wire))
    rows = [
        (same[0][0], max(seconds for _, seconds, *_ in same), *busiest(same))
        for same in zip(*engine.gather(mine), strict=True)
    ]
    if engine.rank == 0:
        output.write_text(json.dumps({"rows": rows, "path": engine.path()}))


def busiest(same: Sequence[Sequence]) -> Sequence[int]:
    """Return what left the host that most bytes left."""
    return max(wire for _, _, *wire in same)


# ---- the launcher ----


def payload(counter: float, packets: float, again: float) -> float:
    """Return the bytes of data among what `sent` counts without segmentation offloads."""
    return counter - HEADER_BYTES * packets - SEGMENT_BYTES * again


def run_case(
    backend: str, hosts: Hosts, ranks: int, elements: int, rounds: int, repetitions: int
) -> dict[str, dict]:
    """Return per operation its seconds, and the bytes of the busiest host, all and payload."""
    forms = {"AdaSum": {}, "flat": {"ADASUM_HVD_RADICES": "flat"}}
    if backend == "torch":
        forms = {"AdaSum": {}, "operations": {"ADASUM_HVD_CORE": "off"}}
    if backend == "mpi" and ranks & (ranks - 1) == 0:
        forms["Horovod AdaSum"] = {"ADASUM_HVD_OP": "off"}
    found: dict[str, dict] = {}
    for turn in range(rounds + 1):
        count = turn == rounds
        hosts.offload(not count)
        for form, variables in forms.items():
            result = jobs.run(
                "gloo" if backend == "torch" else backend,
                ranks,
                __file__,
                backend,
                elements,
                3 if count else repetitions,
                hosts=hosts,
                **{"ADASUM_HVD_OP": "on", **variables},
            )
            for name, seconds, *wire in result["rows"]:
                operation = found.setdefault(
                    form if name == "AdaSum" else name,
                    {"seconds": [], "wire": [], "path": result["path"]},
                )
                operation["wire" if count else "seconds"].append(
                    wire if count else seconds
                )
    for operation in found.values():
        wire = operation.pop("wire")
        operation["bytes"] = statistics.median(counter for counter, *_ in wire)
        operation["payload"] = statistics.median(itertools.starmap(payload, wire))
    return found


def show(row: dict) -> None:
    """Print one configuration: a line per operation."""
    total = 4 * row["elements"]
    ours = statistics.median(row["operations"]["AdaSum"]["seconds"])
    limit = 2 * (1 - 1 / row["hosts"])
    for name, operation in row["operations"].items():
        middle = statistics.median(operation["seconds"])
        counter = operation["bytes"] / total
        data = operation["payload"] / total
        ratio = "" if name == "AdaSum" else jobs.ratio(ours / middle)
        print(
            f"{row['backend']:5s}{row['hosts']:2d} x {row['ranks'] // row['hosts']} "
            f"{name:15s}{total:11d} |{min(operation['seconds']) * 1e3:9.1f}{middle * 1e3:9.1f}"
            f"{max(operation['seconds']) * 1e3:9.1f} |{counter:8.3f}{data:8.3f}{limit:7.2f}"
            f" | {ratio:9s} "
            f"{operation['path'] if name in OURS else ''}",
            flush=True,
        )


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--backends", nargs="+", default=["gloo", "mpi", "torch"])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[25])
    parser.add_argument("--gigabits", type=float, default=1.0, help="of a link")
    parser.add_argument("--delay", type=float, default=1.0, help="milliseconds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=10, help="per round")
    parser.add_argument("--output", type=Path, default=Path("build/hosts.json"))
    arguments = parser.parse_args()
    if why := missing():
        sys.exit(f"hosts: {why}")
    rows = []
    for count in arguments.hosts:
        with Hosts(count, arguments.gigabits, arguments.delay) as hosts:
            print(
                f"{count} hosts, links of {hosts.gigabits:g} Gbit/s, {hosts.delay:g} ms\n"
                "                                     bytes |   min ms   p50 ms   max ms |"
                " counter payload  limit | ours / it"
            )
            for backend in arguments.backends:
                for megabytes in arguments.megabytes:
                    ranks = count * arguments.ranks_per_host
                    elements = int(megabytes * 1e6) // 4
                    repeat = arguments.rounds, arguments.repetitions
                    rows.append(
                        {
                            "backend": backend,
                            "hosts": count,
                            "ranks": ranks,
                            "elements": elements,
                            "gigabits": hosts.gigabits,
                            "delay": hosts.delay,
                            "operations": run_case(
                                backend, hosts, ranks, elements, *repeat
                            ),
                        }
                    )
                    show(rows[-1])
    jobs.save(rows, arguments.output)


if __name__ == "__main__":
    main()
