"""The steps on a machine with CUDA devices, the most valuable first, and the needs of each."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adasum_hvd.horovod.build import nccl

PROGRAMS = "ADASUM_TEST_PROGRAMS"  # the folder of compiled programs
LEAST = 1 / 3  # of a step's limit; with less time left it does not start
_TORCH = """
import ctypes, json, torch
code = ctypes.c_int()
if torch.cuda.is_available():
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": code.value,
                  "devices": torch.cuda.device_count()}))
"""
_HOROVOD = """
import importlib, importlib.util
name = "torch" if importlib.util.find_spec("torch") else "tensorflow"
built = importlib.import_module(f"horovod.{name}").nccl_built()
raise SystemExit(0 if built else "one without NCCL")
"""
PYTEST = "-m pytest -v -p no:cacheprovider"
KERNELS, THREADS = "tests/gpu/test_kernels.py", "tests/unit/test_thread_ranks.py"
BENCHMARK = "benchmarks/gpu.py"
DEVICES = len(list(Path("/dev").glob("nvidia[0-9]*")))
Reason = Callable[[], str | None]


def output_of(*words: str) -> tuple[int, str]:
    """Return a command's status and output; without the command, 127."""
    try:
        run = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return run.returncode, run.stdout or run.stderr


@functools.cache
def machine() -> dict[str, Any]:
    """Return what this machine is."""
    fields = "name,driver_version,compute_cap,memory.total"
    status, devices = output_of(
        "nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"
    )
    found = {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "devices": [] if status else devices.splitlines(),
    }
    status, torch = (1, "") if no_device() else output_of(sys.executable, "-c", _TORCH)
    return found | ({"torch": None} if status else {"torch": json.loads(torch)})


def no_device() -> str | None:
    """Return why there is no device."""
    return None if DEVICES else "expected a CUDA device, but got none on this machine"


def other_device(manifest: dict[str, Any]) -> str | None:
    """Return why a kit's programs do not run on the devices."""
    built = manifest["versions"]["architecture"]
    status, words = output_of(
        "nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"
    )
    found = words.replace(".", "").split()
    if status or set(found) == {built}:
        return None
    return (
        f"expected devices of sm_{built}, as the kit, but got sm_{', sm_'.join(found)}"
    )


def no_nvcc() -> str | None:
    """Return why there is no compiler."""
    try:
        nccl.cuda_home()
    except nccl.Missing as error:
        return str(error)
    return None


def no_place() -> str | None:
    """Return why nothing can be installed."""
    writable = os.access(sys.prefix, os.W_OK)
    return (
        None
        if writable
        else f"expected to write to {sys.prefix}, but got no permission"
    )


def no_programs() -> str | None:
    """Return why the native programs do not run; asked after they were compiled."""
    last = Path(os.environ[PROGRAMS], "device_kernels")
    return None if last.exists() else f"expected {last} and others, but got none"


def no_sanitizer() -> str | None:
    """Return why nothing can be sanitized."""
    found = shutil.which("compute-sanitizer")
    return None if found else "expected compute-sanitizer, but got none on PATH"


def no_torch() -> str | None:
    """Return why torch has no devices."""
    torch = machine()["torch"]
    if torch is None:
        return f"expected torch, but got none that {sys.executable} imports"
    if torch["devices"]:
        return None
    return f"expected torch with a device, but got none with {torch['torch']}"


def no_framework() -> str | None:
    """Return why there is nothing to load."""
    return no_module("torch") or no_module("horovod")


def no_module(name: str) -> str | None:
    """Return why a training run does not start."""
    return None if importlib.util.find_spec(name) else f"expected {name}, but got none"


@functools.cache
def no_horovod() -> str | None:
    """Return why Horovod reduces nothing on devices; asked after it was built."""
    status, words = output_of(sys.executable, "-c", _HOROVOD)
    last = (words.splitlines() or [f"status {status}"])[-1]
    return f"expected a Horovod with NCCL, but got {last}" if status else None


@dataclass(frozen=True)
class Step:
    """A command, how long it may take, and what it needs."""

    name: str
    seconds: int
    needs: Sequence[Reason]
    line: str  # of words for Python; PYTHON is its path

    def command(self, figures: Path) -> list[str]:
        """Return the words; a benchmark writes its figures into that file."""
        words = [sys.executable if w == "PYTHON" else w for w in self.line.split()]
        more = ["--json", str(figures)] if BENCHMARK in self.line else []
        return [sys.executable, *words, *more]

    def missing(self, ends: float) -> str | None:
        """Return the first reason why it cannot run."""
        if why := next((why for need in self.needs if (why := need())), None):
            return why
        left, least = max(ends - time.monotonic(), 0), LEAST * self.seconds
        return (
            f"expected {least:.0f} s for it, but got {left:.0f}"
            if left < least
            else None
        )


def op_time(ranks: int) -> str:
    """Return the words of a benchmark; ranks that share devices are not held to its goal."""
    return f"{BENCHMARK} op --ranks {ranks}" + " --strict" * (ranks <= DEVICES)


def steps(manifest: dict[str, Any] | None) -> list[Step]:
    """Return what is done, in this order; a kit has a manifest, and brings along what is compiled.

    The one step that needs no device loads its Horovod: all symbols are there.
    """
    device: tuple[Reason, ...] = (no_device,)
    if manifest:
        device += (functools.partial(other_device, manifest),)
    programs, torch, op = ((*device, n) for n in (no_programs, no_torch, no_horovod))
    compiles, ranks = (*device, no_nvcc), (*torch, no_horovod)
    trained = (*ranks, functools.partial(no_module, "sklearn"))
    ours = "-m adasum_hvd"
    digits = (
        f"{ours} exec --nprocs 4 -- PYTHON examples/torch_digits.py --device cuda --op"
    )
    resnet = f"{ours} exec --nprocs 4 -- PYTHON examples/resnet50_imagenet.py --data synthetic"
    resnet += " --max-steps 20 --boost-level"
    brought = [
        ("Horovod loads", 60, [no_framework], "-c __import__('horovod.torch')"),
    ]
    compiled = [
        ("native programs, compiled", 600, compiles, "-m tests.gpu.programs"),
        (
            "Horovod, compiled",
            900,
            (*compiles, no_torch, no_place),
            f"{ours} build --gpu nccl",
        ),
    ]
    rows = [
        *(brought if manifest else compiled),
        ("kernels", 60, programs, f"{PYTEST} {KERNELS} -k reductions"),
        (
            "Triton's kernels, ranks as threads",
            100,
            torch,
            f"{PYTEST} {THREADS} -k cuda",
        ),
        ("Triton's bandwidth", 75, torch, f"{BENCHMARK} triton --sizes 25 256"),
        (
            "the op",
            150,
            op,
            f"{PYTEST} tests/gpu/test_nccl_build.py tests/gpu/test_op.py",
        ),
        ("torch.distributed", 90, torch, f"{PYTEST} tests/gpu/test_distributed.py"),
        ("AdamOffload", 75, torch, f"{PYTEST} tests/gpu/test_adam_offload.py"),
        ("kernels' bandwidth", 40, programs, f"{BENCHMARK} kernels --strict"),
        ("no call waits for the device", 45, ranks, f"{BENCHMARK} trace --strict"),
        *((f"the op's time, {n} ranks", 60, ranks, op_time(n)) for n in (2, 4)),
        ("AdamOffload's time", 40, torch, f"{BENCHMARK} adam"),
        ("digits, adasum-grad", 60, trained, f"{digits} adasum-grad"),
        ("digits, average", 60, trained, f"{digits} average"),
        ("ResNet-50, adasum-grad", 90, ranks, f"{resnet} O2"),
        ("ResNet-50, average", 90, ranks, f"{resnet} O0"),
        (
            "compute-sanitizer",
            120,
            (*programs, no_sanitizer),
            f"{PYTEST} {KERNELS} -k sanitizer",
        ),
    ]
    return [Step(*row) for row in rows]
