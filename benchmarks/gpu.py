"""AdaSum on CUDA devices: kernels beside a copy, the op beside Horovod's, AdamOffload beside Adam.

    python benchmarks/gpu.py kernels       # needs nvcc and a device, no torch and no Horovod
    python benchmarks/gpu.py op --ranks 2  # needs a Horovod of `adasum-hvd build --gpu nccl`
    python benchmarks/gpu.py adam          # needs torch with CUDA
    python benchmarks/gpu.py               # all of it

Where there are fewer devices than ranks, ranks share them: that needs NCCL 2.32 or newer,
which is told so by NCCL_MULTI_RANK_GPU_ENABLE=1 (set here). In `op` Horovod's AdaSum is a
second job with ADASUM_HVD_OP=off, of a Horovod with MPI; without MPI its column is empty.
Figures to trust are ratios inside one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jobs

MB = 1_000_000
SIZES = (1, 16, 64, 100, 256, 1000)  # megabytes
REPETITIONS = 20


# ---- kernels ----


def build_kernels(directory: Path) -> Path:
    """Compile the kernels and `device_kernels.cc` with nvcc for the device at hand."""
    sys.path.append(str(jobs.REPOSITORY))  # where the package is not installed
    from adasum_hvd.install import nccl, sources

    native = sources.NATIVE
    program = directory / "device_kernels"
    command = [str(nccl.cuda_home() / "bin" / "nvcc"), "-std=c++17", "-O3"]
    command += ["-fmad=false", "-arch=native", f"-I{native}", "-o", str(program)]
    command += [str(native / "cuda" / "device_memory.cc")]
    command += map(str, sorted((native / "cuda").glob("*.cu")))
    command.append(str(Path(__file__).with_name("device_kernels.cc")))
    subprocess.run(command, check=True)
    return program


def measure_kernels(sizes: list[int]) -> list[dict]:
    """Return what `device_kernels.cc` prints, with slices of so many megabytes."""
    with tempfile.TemporaryDirectory() as directory:
        program = build_kernels(Path(directory))
        shown = subprocess.run(
            [str(program), *map(str, sizes)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in shown.stdout.splitlines()]


def print_kernels(rows: list[dict]) -> None:
    """Print a table; GB/s count what is read and written."""
    print("\nkernels, GB/s read and written, and over the copy of the same run")
    print(f"{'type':8} {'ranks':>5} {'MB':>6} {'copy':>8} {'Gram':>14} {'combine':>14}")
    for row in rows:
        cells = [
            f"{row[kernel]:8.0f} {row[kernel] / row['copy']:4.2f}x"
            for kernel in ("gram", "combine")
        ]
        print(
            f"{row['type']:8} {row['ranks']:5} {row['megabytes']:6.0f} {row['copy']:8.0f} "
            + " ".join(cells)
        )


# ---- the op ----


def rank_main(arguments: list[str]) -> None:
    """One rank: times every size, and writes medians on rank 0."""
    off, output = arguments[0] == "off", Path(arguments[1])
    import horovod.torch as horovod_torch
    import torch

    import adasum_hvd.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    results = []
    for megabytes in SIZES:
        source = torch.randn(megabytes * MB // 4, device="cuda")
        tensor = source.clone()
        operations = {
            "average": lambda t=tensor: horovod_torch.allreduce_(
                t, op=horovod_torch.Average, name="average"
            ),
            "copy": lambda t=tensor, s=source: t.copy_(s),
        }
        if off:
            operations["horovod_adasum"] = lambda t=tensor: horovod_torch.allreduce_(
                t, op=horovod_torch.Adasum, name="adasum"
            )
        else:
            operations["adasum"] = lambda t=tensor: hvd.allreduce_(
                t, op=hvd.Adasum, name="adasum"
            )
        times: dict[str, list[float]] = {name: [] for name in operations}
        for repetition in range(-3, REPETITIONS):
            for name, operation in operations.items():
                tensor.copy_(source)
                torch.cuda.synchronize()
                horovod_torch.barrier()
                started = time.perf_counter()
                operation()
                torch.cuda.synchronize()
                if repetition >= 0:
                    times[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(values) for name, values in times.items()}
        results.append({"megabytes": megabytes, **medians})
    if hvd.rank() == 0:
        output.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "rows": results})
        )
    hvd.shutdown()


def measure_op(ranks: int) -> tuple[dict, dict | None]:
    """Return both jobs' rows: with our op and with Horovod's own."""
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    ours = jobs.run("gloo", ranks, __file__, "on", **shared)
    try:
        theirs = jobs.run("mpi", ranks, __file__, "off", ADASUM_HVD_OP="off", **shared)
    except RuntimeError as error:
        print(f"Horovod's own AdaSum did not run: {str(error)[-300:]}")
        theirs = None
    return ours, theirs


def print_op(ranks: int, ours: dict, theirs: dict | None) -> None:
    """Print seconds and ratios."""
    print(
        f"\nop, {ranks} ranks, {ours['device']}, milliseconds (median of {REPETITIONS})"
    )
    print(f"{'MB':>6} {'copy':>8} {'average':>9} {'AdaSum':>16} {'Horovod AdaSum':>20}")
    for k, row in enumerate(ours["rows"]):
        average, adasum = row["average"], row["adasum"]
        line = f"{row['megabytes']:6} {1e3 * row['copy']:8.2f} {1e3 * average:9.2f} "
        line += f"{1e3 * adasum:8.2f} {adasum / average:6.2f}x"
        if theirs:
            other = theirs["rows"][k]["horovod_adasum"]
            line += f" {1e3 * other:12.2f} {other / theirs['rows'][k]['average']:6.2f}x"
        print(line)


# ---- AdamOffload ----


def measure_adam() -> list[dict]:
    """Return step seconds and peak device bytes of torch's fused Adam and of AdamOffload."""
    import torch

    from adasum_hvd.torch import AdamOffload

    makers = {
        "torch.optim.Adam(fused)": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
        "AdamOffload": lambda p: AdamOffload(p, 1e-3),
    }
    rows = []
    for elements in (25_000_000, 100_000_000):
        for name, make in makers.items():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            shapes = [elements // 50] * 50
            params = [torch.nn.Parameter(torch.randn(n, device="cuda")) for n in shapes]
            optimizer, times = make(params), []
            for step in range(-3, 10):
                optimizer.zero_grad(set_to_none=False)
                sum(p.square().sum() for p in params).backward()
                torch.cuda.synchronize()
                started = time.perf_counter()
                optimizer.step()
                torch.cuda.synchronize()
                if step >= 0:
                    times.append(time.perf_counter() - started)
            rows.append(
                {
                    "name": name,
                    "elements": elements,
                    "seconds": statistics.median(times),
                    "peak": torch.cuda.max_memory_allocated(),
                }
            )
            del params, optimizer
    return rows


def print_adam(rows: list[dict]) -> None:
    """Print step times and peaks."""
    print(
        "\nAdam, step in ms and peak device memory in MB (parameters and gradients too)"
    )
    for row in rows:
        print(
            f"{row['name']:24} {row['elements'] / 1e6:4.0f} M {1e3 * row['seconds']:9.2f} ms "
            f"{row['peak'] / 1e6:8.0f} MB"
        )


def main() -> None:
    """Measure what was asked for."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["kernels", "op", "adam"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--json", type=Path, help="write everything there")
    options = parser.parse_args()
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        sys.exit("benchmarks/gpu.py: required a CUDA device, got none on this machine")
    wanted = [options.what] if options.what else ["kernels", "op", "adam"]
    found: dict[str, object] = {"machine": jobs.machine()}
    if "kernels" in wanted:
        found["kernels"] = rows = measure_kernels(options.sizes)
        print_kernels(rows)
    if "op" in wanted:
        found["op"] = ours, theirs = measure_op(options.ranks)
        print_op(options.ranks, ours, theirs)
    if "adam" in wanted:
        found["adam"] = rows = measure_adam()
        print_adam(rows)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
