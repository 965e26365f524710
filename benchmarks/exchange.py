"""Time of an exchange of short messages between the ranks of one host, without Horovod.

    python benchmarks/exchange.py

Every rank sends every other one so many bytes, through the rings (`docs/transports.md`); ranks
are processes of one session, as mpirun and `adasum-hvd exec` start them, or of one each, as
horovodrun does. Medians and 90th percentiles of rank 0. A plain allreduce takes two or three
such exchanges: what is beyond that in `allreduce.py` is Horovod's negotiation and its cycle.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compiled
import jobs

PARTS = ("host/*.cc",)
SESSIONS = ("one", "each")
# As exchange.cc prints them, in microseconds.
COLUMNS = ("ranks", "bytes", "median", "p90")


def measure(
    ranks: Sequence[int],
    sizes: Sequence[int],
    repetitions: int,
    parts: Sequence[str | Path] = PARTS,
) -> list[dict[str, Any]]:
    """Return a row for each number of ranks, size, and way to start the ranks."""
    cases = list(itertools.product(ranks, sizes, SESSIONS))
    printed = compiled.output_of(
        Path(__file__).with_suffix(".cc"),
        parts,
        [(*case, repetitions, int(sessions == "each")) for *case, sessions in cases],
    )
    return [
        dict(zip(COLUMNS, map(float, line.split()), strict=True))
        | {"sessions": sessions}
        for (*_, sessions), line in zip(cases, printed.splitlines(), strict=True)
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--bytes", type=int, nargs="+", default=[1, 1024, 65536])
    parser.add_argument("--repetitions", type=int, default=5000)
    parser.add_argument("--output", type=Path, default=Path("build/exchange.json"))
    arguments = parser.parse_args()
    rows = measure(arguments.ranks, arguments.bytes, arguments.repetitions)
    print(f"ranks   bytes sessions {'p50 us':>9s} {'p90 us':>9s}")
    for row in rows:
        print(
            f"{row['ranks']:5.0f}{row['bytes']:8.0f} {row['sessions']:8s}"
            f" {row['median']:9.2f} {row['p90']:9.2f}"
        )
    jobs.save(rows, arguments.output)


if __name__ == "__main__":
    main()
