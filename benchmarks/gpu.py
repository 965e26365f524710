"""AdaSum on CUDA devices: kernels and a copy, the op and Horovod's, AdamOffload and Adam.

    python benchmarks/gpu.py kernels       # needs nvcc and a device, no torch and no Horovod
    python benchmarks/gpu.py op --ranks 2  # needs a Horovod of `adasum-hvd build --gpu nccl`
    python benchmarks/gpu.py trace         # the same; which calls of CUDA wait for the device
    python benchmarks/gpu.py triton        # needs torch with CUDA; with torch's operations
    python benchmarks/gpu.py adam          # needs torch with CUDA; with DeepSpeed's, if installed
    python benchmarks/gpu.py               # all of it

With `--strict` it fails where kernels move less than 80 % of what a copy does, where AdaSum of
100 MB takes more than 1.3 times the average, or where a reduction waits for the device.

With fewer devices than ranks, ranks share them. That needs NCCL 2.32 or newer, with
NCCL_MULTI_RANK_GPU_ENABLE=1 (set here). In `op` Horovod's AdaSum is a second job with
ADASUM_HVD_OP=off, of a Horovod with MPI; without MPI its column is empty. Only ratios inside
one run are reliable.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs

MB = 1_000_000
SIZES = (1_000, *(megabytes * MB for megabytes in (1, 16, 64, 100, 256, 1000)))  # bytes
REPETITIONS = 20
LEAST_OF_COPY = 0.8  # of its bandwidth, for a kernel
MOST_OF_AVERAGE = 1.3  # of its time, for AdaSum of 100 MB
ANNOTATION, ROUND = "user_annotation", "eight reductions"  # in torch.profiler's trace
# Calls of CUDA that wait for the device. Horovod's finalizer threads wait for events.
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaFree")


# ---- kernels ----


def build_kernels(directory: Path, architecture: str = "native") -> Path:
    """Compile the kernels and `device_kernels.cc` with nvcc, or return what was compiled before."""
    if compiled := os.environ.get("ADASUM_TEST_PROGRAMS"):
        return Path(compiled, "device_kernels")
    sys.path.append(str(jobs.REPOSITORY))  # where the package is not installed
    from adasum_hvd.horovod.build import nccl, sources

    native = sources.NATIVE
    program = directory / "device_kernels"
    command = [str(nccl.cuda_home() / "bin" / "nvcc"), "-std=c++17", "-O3"]
    command += [
        "-fmad=false",
        f"-arch={architecture}",
        *sources.INCLUDES,
        "-o",
        str(program),
    ]
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


# ---- Triton's kernels ----


def device_seconds(operation: Callable[[], Any]) -> float:
    """Return the median time of an operation on the device."""
    import torch

    operation()
    times = []
    for _ in range(REPETITIONS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        operation()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times)


def measure_triton(sizes: list[int]) -> list[dict]:
    """Return seconds of both implementations of `adasum_hvd.distributed`, and of a copy."""
    import torch

    sys.path.append(str(jobs.REPOSITORY))  # where the package is not installed
    from adasum_hvd.distributed.blocks import Slice
    from adasum_hvd.distributed.coefficients import tree_of
    from adasum_hvd.distributed.device_slice import DeviceSlice, why_not
    from adasum_hvd.distributed.slices import layout_of

    if reason := why_not(torch.device("cuda", 0)):
        sys.exit(
            f"benchmarks/gpu.py: expected Triton's kernels, but got none: {reason}"
        )
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for ranks, megabytes in ((n, size) for n in (2, 4, 8) for size in sizes):
            elements = megabytes * MB // dtype.itemsize
            data = torch.randn(ranks, elements, device="cuda", dtype=dtype)
            other, runs = torch.empty_like(data), layout_of((elements,), 1).runs[0]
            tree = tree_of((0,) * ranks, "adasum", 0)
            ones = torch.ones(1, ranks, device="cuda", dtype=torch.float64)
            row: dict[str, Any] = {
                "type": str(dtype).removeprefix("torch."),
                "ranks": ranks,
                "megabytes": megabytes,
                "bytes": data.nbytes,
                "copy": device_seconds(lambda o=other, d=data: o.copy_(d)),
            }
            for name, kind in (("", DeviceSlice), ("torch_", Slice)):
                part = kind(list(data.unbind()), runs)
                row[f"{name}gram"] = device_seconds(lambda p=part: p.gram(None))
                row[f"{name}combine"] = device_seconds(
                    lambda p=part, t=tree, c=ones, o=other: p.combine(t, c, None, o[0])
                )
            found.append(row)
            del data, other, part
    return found


def print_triton(rows: list[dict]) -> None:
    """Print microseconds, and bytes read and written in a second over those of the copy."""
    print("\nTriton's kernels and torch's operations, µs; bandwidth over the copy's")
    print(f"{'type':9} {'ranks':>5} {'MB':>5} {'copy':>7} {'Gram':>16} {'torch':>8} "
          f"{'combine':>16} {'torch':>8}")  # fmt: skip
    for row in rows:
        moved = {"gram": 1.0, "combine": 1 + 1 / row["ranks"]}  # rows' bytes
        cells = [
            f"{1e6 * row[name]:9.0f} {moved[name] / 2 * row['copy'] / row[name]:5.2f}x "
            f"{1e6 * row[f'torch_{name}']:8.0f}"
            for name in moved
        ]
        print(f"{row['type']:9} {row['ranks']:5} {row['megabytes']:5} "
              f"{1e6 * row['copy']:7.0f} {' '.join(cells)}")  # fmt: skip


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
    for size in SIZES:
        source = torch.randn(size // 4, device="cuda")
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
        results.append({"bytes": size, **medians})
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
        horovod = jobs.run("mpi", ranks, __file__, "off", ADASUM_HVD_OP="off", **shared)
    except RuntimeError as error:
        print(f"Horovod's own AdaSum did not run: {str(error)[-300:]}")
        horovod = None
    return ours, horovod


def print_op(ranks: int, ours: dict, horovod: dict | None) -> None:
    """Print seconds and ratios."""
    print(
        f"\nop, {ranks} ranks, {ours['device']}, milliseconds (median of {REPETITIONS})"
    )
    print(f"{'MB':>8} {'copy':>8} {'average':>9} {'AdaSum':>18} {'Horovod AdaSum':>20}")
    for k, row in enumerate(ours["rows"]):
        average, adasum = row["average"], row["adasum"]
        line = (
            f"{row['bytes'] / MB:8.3f} {1e3 * row['copy']:8.2f} {1e3 * average:9.2f} "
        )
        line += f"{1e3 * adasum:8.2f} {jobs.ratio(adasum / average):>9s}"
        if horovod:
            other = horovod["rows"][k]["horovod_adasum"]
            line += (
                f" {1e3 * other:12.2f} {other / horovod['rows'][k]['average']:6.2f}x"
            )
        print(line)


def trace_main(arguments: list[str]) -> None:
    """One rank: what CUDA is asked while reductions are enqueued, by thread and call."""
    import horovod.torch as horovod_torch
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    import adasum_hvd.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    tensors = [torch.randn(MB, device="cuda") for _ in range(8)]

    def reduce_all() -> None:
        handles = [
            hvd.allreduce_async_(tensor, op=hvd.Adasum, name=f"traced.{k}")
            for k, tensor in enumerate(tensors)
        ]
        for handle in handles:
            horovod_torch.synchronize(handle)

    for _ in range(5):
        reduce_all()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled, record_function(ROUND):
        reduce_all()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "trace.json")
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    found = calls_of(events)
    if hvd.rank() == 0:
        Path(arguments[0]).write_text(json.dumps(found))
    hvd.shutdown()


def calls_of(events: list[dict]) -> dict[str, Any]:
    """Return how often other threads called what in the round, and what surrounds waiting calls.

    The profiler itself calls cudaDeviceSynchronize when it ends, in the trace but after the round.
    """
    (span,) = (e for e in events if (e.get("cat"), e["name"]) == (ANNOTATION, ROUND))
    end = float(span["ts"]) + float(span["dur"])
    threads: dict[str, list[dict]] = {}
    for event in sorted(events, key=lambda e: float(e.get("ts", 0))):
        is_call = event.get("cat") in ("cuda_runtime", "cuda_driver")
        if is_call and float(span["ts"]) <= float(event["ts"]) <= end:
            threads.setdefault(str(event["tid"]), []).append(event)
    threads.pop(str(span["tid"]), None)
    calls: Counter[str] = Counter()
    waiting = []
    for thread, made in threads.items():
        names = [event["name"] for event in made]
        calls.update(names)
        name = Path(f"/proc/self/task/{thread}/comm")  # NCCL names its threads
        for place in (k for k, call in enumerate(names) if call in WAITING):
            waiting.append(
                {
                    "call": names[place],
                    "thread": name.read_text().strip() if name.exists() else thread,
                    "before": names[max(place - 4, 0) : place],
                    "after": names[place + 1 : place + 4],
                }
            )
    return {"calls": calls, "waiting": waiting}


def print_trace(found: dict[str, Any]) -> None:
    """Print how often Horovod's threads called what, in one round of eight reductions."""
    print("\ncalls of CUDA outside the main thread, eight reductions of 4 MB")
    for name, times in sorted(found["calls"].items()):
        print(f"{name:32} {times:5}{'   waits for the device' * (name in WAITING)}")
    for one in found["waiting"]:
        before, after = ", ".join(one["before"]), ", ".join(one["after"])
        print(
            f"{one['call']} of thread {one['thread']}, after {before}; before {after}"
        )


# ---- AdamOffload ----


class OnHost:
    """An optimizer of copies of the parameters in pinned host memory, as ZeRO-Offload has them."""

    def __init__(self, parameters: list, optimizer: Callable):
        import torch

        self.parameters = parameters
        self.masters = [
            torch.nn.Parameter(p.detach().cpu().pin_memory()) for p in parameters
        ]
        for master in self.masters:
            master.grad = torch.empty_like(master, pin_memory=True)
        self.optimizer = optimizer(self.masters, lr=1e-3)

    def zero_grad(self, set_to_none: bool) -> None:
        """Zero the gradients on the device."""
        for p in self.parameters:
            if p.grad is not None:
                p.grad.zero_()

    def step(self) -> None:
        """Copy gradients down, take the step, copy parameters up."""
        import torch

        for p, master in zip(self.parameters, self.masters, strict=True):
            master.grad.copy_(p.grad, non_blocking=True)
        torch.cuda.synchronize()
        self.optimizer.step()
        for p, master in zip(self.parameters, self.masters, strict=True):
            p.data.copy_(master.detach(), non_blocking=True)


def measure_adam() -> list[dict]:
    """Return step seconds and peak device bytes of torch's fused Adam and of AdamOffload."""
    import torch

    from adasum_hvd.torch import AdamOffload

    makers = {
        "torch.optim.Adam(fused)": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
        "AdamOffload": lambda p: AdamOffload(p, 1e-3),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        makers["DeepSpeedCPUAdam"] = lambda p: OnHost(p, DeepSpeedCPUAdam)
    except ImportError:
        print("skipped: DeepSpeed's Adam on the host: deepspeed is not installed")
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


def shortfalls(found: dict) -> list[str]:
    """Return what `--strict` fails for."""
    slow = [
        f"{kernel} kernel, {row['type']}, {row['ranks']} ranks, {row['megabytes']:.0f} MB: "
        f"{row[kernel] / row['copy']:.2f} of a copy, required {LEAST_OF_COPY}"
        for row in found.get("kernels", [])
        for kernel in ("gram", "combine")
        if row["ranks"] <= 8 and row[kernel] < LEAST_OF_COPY * row["copy"]
    ]
    slow += [
        f"AdaSum of 100 MB: {row['adasum'] / row['average']:.2f} of the average's time, "
        f"required {MOST_OF_AVERAGE}"
        for row in (found["op"][0]["rows"] if "op" in found else [])
        if row["bytes"] == 100 * MB and row["adasum"] > MOST_OF_AVERAGE * row["average"]
    ]
    calls = found.get("trace", {}).get("calls", {})
    return slow + [
        f"{name} is called {calls[name]} times" for name in WAITING if name in calls
    ]


def main() -> None:
    """Measure what was asked for."""
    if sys.argv[1:3] == ["--rank", "trace"]:
        trace_main(sys.argv[3:])
        return
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    everything = ["kernels", "triton", "op", "trace", "adam"]
    parser.add_argument("what", nargs="?", choices=everything)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--strict", action="store_true", help="fail where it is slow")
    options = parser.parse_args()
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        sys.exit(
            "benchmarks/gpu.py: expected a CUDA device, but got none on this machine"
        )
    chosen = [options.what] if options.what else everything
    found: dict[str, Any] = {"machine": jobs.machine()}
    if "kernels" in chosen:
        found["kernels"] = rows = measure_kernels(options.sizes)
        print_kernels(rows)
    if "triton" in chosen:
        found["triton"] = rows = measure_triton(options.sizes)
        print_triton(rows)
    if "op" in chosen:
        found["op"] = ours, horovod = measure_op(options.ranks)
        print_op(options.ranks, ours, horovod)
    if "trace" in chosen:
        shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        found["trace"] = jobs.run("gloo", options.ranks, __file__, "trace", **shared)
        print_trace(found["trace"])
    if "adam" in chosen:
        found["adam"] = rows = measure_adam()
        print_adam(rows)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.strict and (missed := shortfalls(found)):
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
