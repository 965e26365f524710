"""AdaSum against Horovod's own reductions, on this machine, in one run.

    python benchmarks/allreduce.py                        # all of it
    python benchmarks/allreduce.py --ranks 2 --cases "100 MB" --backends mpi
    HOROVOD_CYCLE_TIME=0.01 python benchmarks/allreduce.py --cases "1 KB" --repetitions 500
    python benchmarks/allreduce.py compare old.json new.json
    python benchmarks/allreduce.py plot allreduce.json docs/allreduce.png

Horovod's AdaSum and ours cannot both answer to `op=Adasum` in one job, so each
configuration is two jobs, `ADASUM_HVD_OP=on` and `off`, started in turn `--rounds` times;
inside a job the operations are interleaved. The figures to trust are ratios of medians
between operations that ran in the same rounds.

Columns: `algbw` is bytes reduced per second, `busbw` is `algbw * 2 (N - 1) / N`, what each
rank sends (nccl-tests' definition); `#wrong` counts tensors further from the float64 reference
than one rounding. Below AdaSum's row: what its phases took on rank 0 (p50), and the
reduced bytes per second of each, to compare with memcpy's. "AdaSum, bucket" reduces the same
parameters in one flat tensor, as `DistributedOptimizer` lays them: in memory that the ranks of a
host share. "over copy" is the time over that of a plain copy of the same bytes by every rank at
the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jobs

MB = 1_000_000


def resnet50() -> list[int]:
    """Return the sizes of ResNet-50's 161 parameters, 25.6 M elements (1000 classes)."""
    sizes = [3 * 64 * 49, 64, 64]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(inputs, width), (9 * width, width), (width, 4 * width)]
            if block == 0:
                convolutions.append((inputs, 4 * width))
            for fan_in, outputs in convolutions:
                sizes += [fan_in * outputs, outputs, outputs]
            inputs = 4 * width
    return [*sizes, inputs * 1000, 1000]


def bert_base() -> list[int]:
    """Return the sizes of BERT-base's 199 parameters, 109 M elements (uncased, with pooler)."""
    width, inner = 768, 3072
    embeddings = [30522 * width, 512 * width, 2 * width, width, width]
    attention = [width * width, width] * 4 + [width, width]
    feed_forward = [width * inner, inner, inner * width, width, width, width]
    return embeddings + (attention + feed_forward) * 12 + [width * width, width]


CASES: dict[str, list[int]] = {  # element counts of float32 tensors, reduced together
    "1 KB": [256],
    "64 KB": [16_384],
    "1 MB": [MB // 4],
    "16 MB": [16 * MB // 4],
    "100 MB": [100 * MB // 4],
    "256 MB": [256 * MB // 4],
    "161 x 1 KB": [256] * 161,
    "1600 x 1 KB": [256] * 1600,
    "ResNet-50": resnet50(),
    "BERT-base": bert_base(),
}


# ---- one rank of one job ----


PHASES = ("reduce_scatter", "coefficients", "allgather")
BUCKET, COPY = "AdaSum, bucket", "memcpy"
OURS = ("AdaSum", BUCKET)


def bucket_of(sizes: list[int]):
    """Return a flat tensor as `DistributedOptimizer` makes them: in memory that ranks share."""
    import torch

    from adasum_hvd.torch import wire

    return wire.zeros(sum(sizes), torch.float32, torch.device("cpu"))


def measure(case: str, off: bool, repetitions: int) -> dict[str, list[float]]:
    """Return seconds per repetition of every operation and phase, on this rank."""
    import horovod.torch as horovod_torch
    import torch

    import adasum_hvd.torch as hvd
    from adasum_hvd.horovod import binding
    from adasum_hvd.tools.torch_bench import reduce_all, timed, values_of

    sizes = CASES[case]
    fresh = [values_of(hvd.rank(), index, size) for index, size in enumerate(sizes)]
    flat = torch.cat(fresh)
    tensors, bucket, target = [t.clone() for t in fresh], bucket_of(sizes), flat.clone()

    reset = partial(torch._foreach_copy_, [*tensors, bucket], [*fresh, flat])

    def reduce(module: object, op: str) -> Callable[[], None]:
        reduced = getattr(module, op)
        return lambda: reduce_all(module, reduced, f"{case}.{op}", tensors)

    todo = {"Average": reduce(horovod_torch, "Average")}
    if off:
        todo["Horovod AdaSum"] = reduce(horovod_torch, "Adasum")
    else:
        todo["AdaSum"] = reduce(hvd, "Adasum")
        segments = binding.segmented(f"{case}.bucket", sizes)
        todo[BUCKET] = lambda: hvd.allreduce_(bucket, op=hvd.Adasum, name=segments)
    todo[COPY] = lambda: target.copy_(flat)
    timed(todo, reset, 3)
    times = timed(todo, reset, repetitions)
    for _ in range(0 if off else repetitions):
        reset()
        horovod_torch.barrier()
        before = hvd.counters()
        todo["AdaSum"]()
        after = hvd.counters()
        for phase in PHASES:
            name = f"{phase}_nanoseconds"
            spent = getattr(after, name) - getattr(before, name)
            times.setdefault(phase, []).append(spent / 1e9)
    return times


def rank_main(case: str, off: bool, repetitions: int, output: Path) -> None:
    """Measure on this rank; rank 0 writes the slowest rank's time of every repetition."""
    import torch

    import adasum_hvd.torch as hvd
    from adasum_hvd.tools import torch_bench

    hvd.init()
    torch.set_num_threads(1)
    wrong = 0 if off else torch_bench.wrong(case, CASES[case])
    everyone = hvd.allgather_object(measure(case, off, repetitions))
    if hvd.rank() == 0:
        times = jobs.slowest(everyone)
        phases = {name: everyone[0].get(name, []) for name in PHASES}
        times = {name: of for name, of in times.items() if name not in PHASES}
        output.write_text(
            json.dumps({"times": times, "phases": phases, "wrong": wrong})
        )


# ---- the launcher ----


def run_case(
    backend: str, ranks: int, case: str, rounds: int, repetitions: int
) -> dict:
    """Return times of all operations for one configuration, on and off in turn."""
    times: dict[str, list[float]] = {}
    phases: dict[str, list[float]] = {}
    wrong = 0
    for _ in range(rounds):
        for off in (
            (False, True) if backend == "mpi" and ranks & (ranks - 1) == 0 else (False,)
        ):
            result = jobs.run(
                backend,
                ranks,
                __file__,
                case,
                repetitions,
                ADASUM_HVD_OP="off" if off else "on",
            )
            wrong += result["wrong"]
            for found, kept in ((result["times"], times), (result["phases"], phases)):
                for name, values in found.items():
                    kept.setdefault(name, []).extend(values)
    return {
        "backend": backend,
        "ranks": ranks,
        "case": case,
        "times": times,
        "phases": phases,
        "wrong": wrong,
    }


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def show(row: dict) -> None:
    """Print one configuration: a line per operation, and the ratios."""
    ranks, case = row["ranks"], row["case"]
    total = 4 * sum(CASES[case])
    ours = statistics.median(row["times"]["AdaSum"])
    for name, values in row["times"].items():
        middle = statistics.median(values)
        algbw = total / middle / 1e9
        ratio = "" if name in (*OURS, COPY) else jobs.ratio(ours / middle)
        over_copy = middle / statistics.median(row["times"][COPY])
        wrong = str(row["wrong"]) if name == "AdaSum" else ""
        print(
            f"{row['backend']:5s}{name:15s} float32 {total:11d} {total // 4:10d} {ranks:3d} |"
            f"{min(values) * 1e3:9.3f}{middle * 1e3:9.3f}{percentile(values, 99) * 1e3:9.3f}"
            f"{max(values) * 1e3:9.3f} |{algbw:7.2f}{algbw * 2 * (ranks - 1) / ranks:7.2f} |"
            f"{wrong:>6s}  {ratio:>9s} {over_copy:9.2f}x",
            flush=True,
        )
    middles = {name: statistics.median(row["phases"][name]) for name in PHASES}
    print(
        "     phases: "
        + ", ".join(
            f"{name} {seconds * 1e3:.3f} ms ({total / max(seconds, 1e-9) / 1e9:.1f} GB/s)"
            for name, seconds in middles.items()
        ),
        flush=True,
    )


def ratios(path: Path) -> dict[tuple[str, int, str, str], float]:
    """Return AdaSum's median over another operation's, by backend, ranks, case and operation."""
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        ours = statistics.median(row["times"]["AdaSum"])
        for name, values in row["times"].items():
            if name not in (*OURS, COPY):
                key = (row["backend"], row["ranks"], row["case"], name)
                found[key] = ours / statistics.median(values)
    return found


def compare(old: Path, new: Path) -> None:
    """Print, per configuration, how AdaSum's ratio to each operation changed."""
    before, after = ratios(old), ratios(new)
    for key in sorted(before.keys() & after.keys()):
        print(
            f"{' '.join(map(str, key)):40s} {before[key]:6.2f}x -> {after[key]:6.2f}x"
        )


def plot(source: Path, target: Path) -> None:
    """Draw AdaSum's time over the other operations', a bar for each configuration."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = ratios(source)
    places = list(dict.fromkeys((case, ranks) for _, ranks, case, _ in found))
    series = list(dict.fromkeys((backend, name) for backend, _, _, name in found))
    figure, axes = pyplot.subplots(figsize=(10, 4))
    width = 0.8 / len(series)
    for k, (backend, name) in enumerate(series):
        heights = [found.get((backend, ranks, case, name), 0) for case, ranks in places]
        label = f"over {name.replace('Average', 'average')}, {backend}"
        middles = [
            place + (k - (len(series) - 1) / 2) * width for place in range(len(places))
        ]
        axes.bar(middles, heights, width, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(
        range(len(places)), [f"{case}\n{ranks} ranks" for case, ranks in places]
    )
    axes.tick_params(axis="x", labelsize=7)
    axes.set(ylabel="time of AdaSum / time of the other")
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--rank"]:
        off = os.environ["ADASUM_HVD_OP"] == "off"
        rank_main(sys.argv[2], off, int(sys.argv[3]), Path(sys.argv[4]))
        return
    if sys.argv[1:2] == ["compare"]:
        compare(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    if sys.argv[1:2] == ["plot"]:
        plot(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--backends", nargs="+", default=["gloo", "mpi"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=10, help="per round")
    parser.add_argument("--output", type=Path, default=Path("build/allreduce.json"))
    arguments = parser.parse_args()
    print(
        f"{'operation':20s} dtype         bytes   elements ranks |   min ms   p50 ms   p99 ms"
        "   max ms | algbw  busbw |#wrong  ours / it  over copy"
    )
    rows = []
    for backend in arguments.backends:
        for ranks in arguments.ranks:
            for case in arguments.cases:
                rows.append(
                    run_case(
                        backend, ranks, case, arguments.rounds, arguments.repetitions
                    )
                )
                show(rows[-1])
    jobs.save(rows, arguments.output)


if __name__ == "__main__":
    main()
