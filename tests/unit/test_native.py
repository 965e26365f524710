"""The op's arithmetic, shared memory and CUDA in C++, ranks as threads, also under sanitizers."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adasum_hvd.horovod.build import nccl
from adasum_hvd.horovod.build.environment import scripts_path
from adasum_hvd.horovod.build.sources import INCLUDES, NATIVE
from tests.native.programs import COMBINATIONS, FORMS, TESTS, build, runs_here
from tests.native.rooms import X86
from tests.parallel.harness import simulated_horovod

THREADED_TREES = ("cancelling pairs", "levels walk the same tree")
CHOSEN = {
    # Where several threads share one reduction, and walk trees; the others would only show,
    # ten times slower than plain, that ranks share nothing.
    ("test_reduce", "tsan"): (
        "same bits in every form",
        "wide range in one float64 tensor",
        "changes of weights",
    ),
    ("test_trees", "tsan"): THREADED_TREES,
    ("test_trees", "asan-ubsan"): (*THREADED_TREES, "groups and placements"),
    ("test_parts", "tsan"): ("workers do every job once",),
    # Kernels could access memory out of bounds here.
    ("device_reduce", "asan-ubsan"): (
        "agrees with the float64 tree",
        "nothing waits for the device",
    ),
    ("device_trees", "asan-ubsan"): (
        "groups and placements",
        "cancelling pairs in levels",
    ),
    ("device_limits", "asan-ubsan"): (
        "memory goes in the order of its stream",
        "long tensors are folded in stretches",
    ),
}
# Of a process on several, every return of memory interrupts all others, and ranks that wake one
# another wait for it: a tenth to a third of its time.
ON_ONE_PROCESSOR = ("device_reduce", "device_trees", "test_reduce", "test_trees")
CASES = [
    pytest.param(
        name,
        form,
        marks=pytest.mark.skipif(
            not runs_here(name), reason="the simulated device is for x86-64"
        ),
    )
    for name, form in COMBINATIONS
]


def listed_by(command: list[str]) -> list[str]:
    """Return the names of a program's tests."""
    listed = subprocess.run(
        [*command, "--list"], capture_output=True, text=True, check=True
    )
    return listed.stdout.splitlines()


@pytest.mark.parametrize(("name", "form"), CASES)
def test_program(name: str, form: str) -> None:
    command = [str(build(name, form))]
    if (
        form == "tsan"
        and subprocess.run(["setarch", "-R", "true"], check=False).returncode == 0
    ):
        # Older runtimes cannot map the address-space layouts of newer kernels.
        command = ["setarch", "-R", *command]
    chosen = CHOSEN.get((name, form)) or listed_by(command)
    # Devices exchange over NCCL, which here is simulated; under sanitizers by copies.
    over = {"ADASUM_TEST_TRANSPORT": "copy" if FORMS[form] else "nccl"}
    # glibc would return large blocks to the kernel, which clears them each time.
    over |= {
        "MALLOC_MMAP_THRESHOLD_": "1000000000",
        "MALLOC_TRIM_THRESHOLD_": "1000000000",
    }

    processors = itertools.cycle(sorted(os.sched_getaffinity(0)))

    def run(test: str) -> str:
        on = (
            ["taskset", "-c", str(next(processors))] if name in ON_ONE_PROCESSOR else []
        )
        result = subprocess.run(
            [*on, *command, test], capture_output=True, text=True, timeout=900, check=False,
            env=os.environ | over,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    with ThreadPoolExecutor(8) as pool:  # many of them mostly wait
        output = "".join(pool.map(run, chosen))
    assert "FAILED" not in output
    ran = re.findall(r"^ok (.*) \(", output, re.MULTILINE)
    skipped = dict(re.findall(r"^skipped (.*?): (.*)", output, re.MULTILINE))
    for test, why in skipped.items():
        warnings.warn(f"{test}: skipped: {why}", stacklevel=1)
    assert chosen and sorted([*ran, *skipped]) == sorted(chosen)


def nvcc() -> str:
    """Return the compiler's path, or skip."""
    try:
        return str(nccl.cuda_home() / "bin" / "nvcc")
    except nccl.Missing as error:
        pytest.skip(str(error))


def test_nvcc_compiles_the_device_code(tmp_path: Path) -> None:
    """The real compiler accepts the code that runs on the simulated CUDA; kernels in make soak."""
    benchmark = TESTS.parents[1] / "benchmarks" / "device_kernels.cc"
    for source in (*sorted((NATIVE / "cuda").glob("*.cc")), benchmark):
        command = [nvcc(), "-std=c++17", "-arch=sm_90", "-c", *INCLUDES]
        target = str(tmp_path / f"{source.name}.o")
        subprocess.run(
            [*command, "-Werror", "all-warnings", str(source), "-o", target], check=True
        )


@pytest.mark.skipif(not X86, reason="the simulated device is for x86-64")
def test_what_horovod_uses_of_nccl_and_mpi_together_is_defined() -> None:
    """Its list of operations names the classes that are compiled elsewhere."""
    words = [shutil.which("mpicxx", path=scripts_path()) or "", "--showme:incdirs"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    used, defined = (
        subprocess.run(
            ["nm", "-C", option, str(made)], capture_output=True, text=True, check=True
        ).stdout
        for option, made in zip(
            ("--undefined-only", "--defined-only"),
            simulated_horovod.with_mpi([f"-I{folder}" for folder in found.split()]),
            strict=True,
        )
    )
    names = re.findall(r" U (.*AdasumGpuAllreduceOp::.*)", used)
    assert names and set(names) <= set(re.findall(r" [TWV] (.*)", defined))


@pytest.mark.skipif(not X86, reason="instruction sets of x86-64")
def test_portable_kernels_are_for_every_processor() -> None:
    """Horovod's own flags ask for AVX, whose instructions begin with a "v"."""
    folder = Path(importlib.util.find_spec("horovod").origin).parent  # type: ignore[union-attr,arg-type]
    library = next(folder.glob("*/mpi_lib*.so"))
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        counts = {True: 0, False: 0}  # of instructions, by whether they need AVX
        portable = False
        for line in process.stdout:
            if line.endswith(">:\n"):
                portable = "::portable::" in line
            elif portable and (words := line.split("\t")[1:]):
                counts[words[0].startswith("v")] += 1
    assert counts[False] > 1000
    assert counts[True] == 0
