"""`adasum-hvd bench`: AdaSum against Horovod, torch DDP and a plain copy, in a minute.

All reductions take turns in one job, and the slowest rank's time counts. Trust the ratios of
medians between operations of one job. `#wrong` counts tensors whose result differs from
`adasum_hvd.reference` by more than one rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from adasum_hvd import __version__
from adasum_hvd.horovod.build import environment
from adasum_hvd.horovod.preflight import has_mpi
from adasum_hvd.tools import jobs, machine, plot

CASES: dict[str, list[int]] = {  # element counts of float32 tensors, reduced together
    "4 KB": [1000],
    "1 MB": [250_000],
    "25 MB": [6_250_000],
    "100 x 0.25 MB": [62_500] * 100,
}
OURS = "AdaSum"


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "bench", help="measure reductions on this machine, or compare two measurements"
    )
    parser.add_argument(
        "compare",
        nargs="*",
        metavar="compare A.json B.json",
        help="print how B differs",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=60, help="for all measurements, without starts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="also write JSON, and a picture with the suffix .png",
    )
    parser.set_defaults(run=run, errors=(jobs.JobError, OSError, ValueError))


def run(arguments: argparse.Namespace) -> int:
    """Measure or compare, print, and return the exit status."""
    if arguments.compare:
        print(compare(arguments.compare))
        return 0
    if arguments.ranks < 1 or not 0 < arguments.seconds < math.inf:
        raise ValueError("expected --ranks and --seconds above 0, and finite")
    if arguments.output:
        _check_output(arguments.output)
    measured = measure(arguments.ranks, arguments.seconds)
    text = json.dumps(measured, indent=1)
    print(text if arguments.json else table(measured))
    if arguments.output:
        arguments.output.write_text(text)
        if picture := draw(measured, arguments.output.with_suffix(".png")):
            print(f"picture: {picture}", file=sys.stderr)
    return 3 if any(row["wrong"] for row in measured["rows"]) else 0


def _check_output(file: Path) -> None:
    """Raise ValueError if the measurement could not be written there."""
    if file.suffix == ".png":
        raise ValueError(
            f"expected a file for JSON as --output, but got {file}; the picture is written next "
            "to it, with the suffix .png"
        )
    if not file.parent.is_dir() or file.is_dir():
        raise ValueError(f"expected a file in a folder that exists, but got {file}")


def measure(ranks: int, seconds: float) -> dict[str, Any]:
    """Return the times of all operations over Gloo and, if it is built, MPI.

    Horovod's own AdaSum has the same name as ours, so a separate job with `ADASUM_HVD_OP=off`
    measures it. It needs MPI and a power of two ranks.
    """
    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            "expected torch, but got none; pip install torch, adasum-hvd build"
        )
    module = "adasum_hvd.tools.torch_bench"
    plans = [("gloo", "on")]
    if environment.detect_mpi() and has_mpi("torch"):
        plans.append(("mpi", "on"))
        if ranks & (ranks - 1) == 0:
            plans.append(("mpi", "off"))
    each = seconds / len(plans) / len(CASES)
    rows: list[dict[str, Any]] = []
    for backend, ours in plans:
        given = [json.dumps(CASES), each, ours]
        variables = {"ADASUM_HVD_OP": ours, "HOROVOD_CONTROLLER": backend}
        rows += jobs.run(backend, ranks, module, given, seconds + 300, variables)
    return {
        "version": __version__,
        "machine": machine.description(),
        "packages": environment.installed_frameworks(),
        "ranks": ranks,
        "rows": rows,
    }


def medians(measured: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """Return median seconds by case, backend and operation."""
    rows = measured["rows"]
    keys = [(row["case"], row["backend"], row["operation"]) for row in rows]
    middle = [statistics.median(row["seconds"]) for row in rows]
    return dict(zip(keys, middle, strict=True))


def _medians_of_file(path: str) -> dict[tuple[str, str, str], float]:
    try:
        return medians(json.loads(Path(path).read_text()))
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"expected files of adasum-hvd bench --output, but got {path}"
        ) from None


def table(measured: dict[str, Any]) -> str:
    """Return a table of times and rates; AdaSum's ratio to an operation is bold if it loses."""
    middle = medians(measured)
    lines = [
        f"{measured['ranks']} ranks on {measured['machine']}",
        f"{'float32':14s} {'':5s} {'operation':18s} {'min ms':>9s} {'p50 ms':>9s} {'max ms':>9s} "
        f"{'GB/s':>7s} {'#wrong':>7s}  AdaSum / it",
    ]
    order = list(CASES).index
    for row in sorted(measured["rows"], key=lambda r: (order(r["case"]), r["backend"])):
        times = row["seconds"]
        p50, total = statistics.median(times), 4 * sum(CASES[row["case"]])
        ours = middle.get((row["case"], row["backend"], OURS))
        compared = ratio(ours / p50) if ours and row["operation"] != OURS else ""
        wrong = str(row["wrong"]) if row["operation"] == OURS else ""
        lines.append(
            f"{row['case']:14s} {row['backend']:5s} {row['operation']:18s} "
            f"{min(times) * 1e3:9.3f} {p50 * 1e3:9.3f} {max(times) * 1e3:9.3f} "
            f"{total / p50 / 1e9:7.2f} {wrong:>7s}  {compared}"
        )
    return "\n".join(lines)


def ratio(value: float) -> str:
    """Return a time over a peer's, as in "0.95x", or in bold if it loses."""
    shown = f"{value:.2f}x"
    return f"**{shown}**" if round(value, 2) > 1 else shown


def compare(words: list[str]) -> str:
    """Return a line per operation that both files have: medians, and new over old."""
    if len(words) != 3 or words[0] != "compare":
        raise ValueError(f"expected compare A.json B.json, but got {' '.join(words)}")
    old, new = map(_medians_of_file, words[1:])
    if not (both := [key for key in old if key in new]):
        raise ValueError(
            "expected measurements of the same operations, but got no operation in both files"
        )
    return "\n".join(
        f"{case:14s} {backend:5s} {operation:18s} {old[key] * 1e3:9.3f} -> {new[key] * 1e3:9.3f} ms"
        f"  {new[key] / old[key]:5.2f}x"
        for key in both
        for case, backend, operation in [key]
    )


def draw(measured: dict[str, Any], target: Path) -> Path | None:
    """Draw the medians, a bar for each operation; return None without matplotlib."""
    if (figure := plot.new_figure(figsize=(9, 4), layout="tight")) is None:
        return None
    middle = medians(measured)
    series = list(dict.fromkeys((backend, name) for _, backend, name in middle))
    width = 0.8 / len(series)
    axes = figure.subplots()
    for index, (backend, name) in enumerate(series):
        heights = [1e3 * middle.get((case, backend, name), 0) for case in CASES]
        left = (index - (len(series) - 1) / 2) * width
        places = [place + left for place in range(len(CASES))]
        axes.bar(places, heights, width, label=f"{name} {backend}")
    axes.set_xticks(range(len(CASES)), list(CASES))
    axes.set(ylabel="ms (median)", yscale="log")
    axes.legend(fontsize=7)
    figure.savefig(target, dpi=110)
    return target
