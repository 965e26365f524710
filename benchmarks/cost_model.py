"""Model of a reduction's time on other machines: latency, bandwidth, arithmetic.

    python benchmarks/cost_model.py                     # 2 to 4096 ranks, 8 on a host
    python benchmarks/cost_model.py --gigabits 100 --latency-us 10 --megabytes 100

A reduction is a list of levels (see `docs/cost_model.md`): in a level of radix r every rank
exchanges with r - 1 others, r numbers whose slices it then holds are multiplied pairwise, and
the next level works on 1/r of the data. The model adds, per level, the latency of its messages,
its bytes over the slowest link that they use, and the multiply-adds of its Gram matrix.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

PLANNED_BYTES = 16e6
DEARER_PER_LEVEL = 0.1


@dataclass(frozen=True)
class Machine:
    """Seconds and bytes per second of a cluster of equal hosts.

    Attributes:
        ranks_per_host: processes of a host; they share its link.
        local_latency: seconds per message inside a host.
        local_bandwidth: bytes per second that one rank moves inside a host.
        latency: seconds per message between hosts.
        bandwidth: bytes per second out of a host, all its ranks together.
        multiply_adds: pairs of float32 elements that one rank multiplies and adds per second.
    """

    ranks_per_host: int
    local_latency: float
    local_bandwidth: float
    latency: float
    bandwidth: float
    multiply_adds: float


@dataclass(frozen=True)
class Level:
    """One step of a reduction: `radix` ranks exchange, inside a host or between hosts."""

    radix: int
    local: bool


def level_seconds(
    machine: Machine, level: Level, n: float, speed: float, ranks: int
) -> float:
    """Return the time of one level.

    Args:
        machine: what the ranks run on.
        level: the step.
        n: bytes of which every rank of the level holds a version.
        speed: bytes per second that a rank sends.
        ranks: those that hold a slice of the same sum, in this level and those before it.
    """
    r = level.radix
    latency = machine.local_latency if level.local else machine.latency
    # There and back, and the sums of tensors that many ranks hold a slice of.
    messages = 2 * (r - 1) + math.log2(ranks)
    pairs = n / 4 / r * (r * (r + 1) / 2 + r)  # Gram matrix, then the combination
    return (
        messages * latency + 2 * n * (r - 1) / r / speed + pairs / machine.multiply_adds
    )


def levels_seconds(machine: Machine, levels: Sequence[Level], n: float) -> float:
    """Return the time of a reduction of `n` bytes in `levels`."""
    total, ranks = 0.0, 1
    for level in levels:
        ranks *= level.radix
        speed = machine.bandwidth / machine.ranks_per_host
        if level.local:
            speed = machine.local_bandwidth
        total += level_seconds(machine, level, n, speed, ranks)
        n /= level.radix
    return total


def flat_seconds(machine: Machine, ranks: int, n: float) -> float:
    """Return the time of one level over all ranks, as the op reduces over uneven hosts.

    All of a host's ranks send to all ranks of the other hosts at once.
    """
    local = min(ranks, machine.ranks_per_host)
    if ranks == local:
        return levels_seconds(machine, [Level(ranks, local=True)], n)
    away = (ranks - local) / (ranks - 1)  # the share of a rank's peers on other hosts
    speed = machine.bandwidth / local / away
    return level_seconds(machine, Level(ranks, local=False), n, speed, ranks)


def ring_seconds(machine: Machine, ranks: int, n: float) -> float:
    """Return the time of a ring average over all ranks, one link out of every host."""
    local = ranks <= machine.ranks_per_host
    latency = machine.local_latency if local else machine.latency
    speed = machine.local_bandwidth if local else machine.bandwidth
    return 2 * (ranks - 1) * latency + 2 * n * (ranks - 1) / ranks / speed


def planned_levels(machine: Machine, ranks: int) -> list[Level]:
    """Return what the op chooses: a level inside the host, then powers of two between hosts.

    The same whatever is reduced: `PLANNED_BYTES` decide, and a further level has to save
    `DEARER_PER_LEVEL` of the time, since it rounds once more (`core/reduce/plan.cc`, which also
    splits hosts of more than 8 ranks).

    Raises:
        ValueError: the ranks do not fill the hosts, or the number of hosts is not a power of two.
    """

    def cost(levels: list[Level]) -> float:
        dearer = 1 + DEARER_PER_LEVEL * (len(levels) - 1)
        return levels_seconds(machine, levels, PLANNED_BYTES) * dearer

    return min(all_levels(machine, ranks), key=cost)


def cheapest_levels(machine: Machine, ranks: int, n: float) -> list[Level]:
    """Return the levels that cost least for `n` bytes; ValueError as `planned_levels`."""
    return min(all_levels(machine, ranks), key=lambda x: levels_seconds(machine, x, n))


def all_levels(machine: Machine, ranks: int) -> list[list[Level]]:
    """Return every split into one level inside the host and powers of two between hosts."""
    local = min(ranks, machine.ranks_per_host)
    hosts = ranks // local
    if hosts * local != ranks or hosts & (hosts - 1):
        raise ValueError(
            f"all_levels: expected full hosts, a power of two of them, but got {ranks} ranks "
            f"with {machine.ranks_per_host} on a host"
        )
    first = [Level(local, local=True)] if local > 1 else []

    def splits(left: int) -> list[list[Level]]:
        if left == 1:
            return [[]]
        radices = [2**k for k in range(1, left.bit_length())]
        return [
            [Level(radix, local=False), *rest]
            for radix in radices
            for rest in splits(left // radix)
        ]

    return [first + split for split in splits(hosts)]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; its defaults are those of `core/reduce/plan.cc`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--gigabits", type=float, default=25.0, help="out of a host")
    parser.add_argument("--latency-us", type=float, default=20.0, help="between hosts")
    parser.add_argument("--local-gigabytes", type=float, default=10.0, help="of a rank")
    parser.add_argument("--local-latency-us", type=float, default=2.0)
    parser.add_argument("--giga-multiply-adds", type=float, default=6.0)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 100.0])
    return parser


def machine_of(a: argparse.Namespace) -> Machine:
    """Return the cluster that the command line describes."""
    return Machine(
        a.ranks_per_host,
        a.local_latency_us * 1e-6,
        a.local_gigabytes * 1e9,
        a.latency_us * 1e-6,
        a.gigabits / 8 * 1e9,
        a.giga_multiply_adds * 1e9,
    )


def main() -> None:
    """Print the table of `docs/cost_model.md`."""
    a = make_parser().parse_args()
    machine = machine_of(a)
    print(
        "| MB | ranks | flat, ms | levels, ms | radices | cheapest, ms | ring average, ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for megabytes in a.megabytes:
        n = megabytes * 1e6
        for power in range(1, int(math.log2(4096)) + 1):
            ranks = 2**power
            levels = planned_levels(machine, ranks)
            cheapest = cheapest_levels(machine, ranks, n)
            radices = " x ".join(str(level.radix) for level in levels)
            print(
                f"| {megabytes:g} | {ranks} | {flat_seconds(machine, ranks, n) * 1e3:.1f} "
                f"| {levels_seconds(machine, levels, n) * 1e3:.1f} | {radices} "
                f"| {levels_seconds(machine, cheapest, n) * 1e3:.1f} "
                f"| {ring_seconds(machine, ranks, n) * 1e3:.1f} |"
            )


if __name__ == "__main__":
    main()
